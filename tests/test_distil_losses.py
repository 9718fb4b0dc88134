"""Losses of distillation against dense ones written out by hand on the oracle's forward pass; matching; sharing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import TINY, random_params, tiny

from lsfuse import fusion
from lsfuse.fusion import distil
from lsfuse.fusion.describe import on_shapes
from lsfuse.model import BlockConfig, block_param_shapes, forward
from lsfuse.model.layers import rms_norm

FREE = BlockConfig("none", 1, 24)
CONFIG = tiny(
    blocks=(TINY.blocks[0], TINY.blocks[0], FREE, dataclasses.replace(FREE, ffn_width=12), TINY.blocks[0]),
    final_logit_softcapping=3.0,
)
IDS = jnp.asarray(np.random.default_rng(0).integers(0, 23, (2, 9)))
LENGTHS = jnp.array([9, 6])


def pair():
    parent = CONFIG, jax.tree.map(jnp.asarray, random_params(CONFIG))
    config, params = fusion.fuse_ffn([(2, 3)])(*parent)
    rng = np.random.default_rng(3)
    moved = jax.tree.map(lambda x: x + 0.1 * jnp.asarray(rng.standard_normal(x.shape)), params)
    return parent, (config, params), (config, moved)


def block(config, i, p, x):
    """Block i on one row [T, D] by plain jax: attention under an explicit mask, then the FFN."""
    b = config.blocks[i]
    h = lambda gain: oracle.normed(x, gain, config)  # noqa: E731
    if b.has_attention:
        t, n, k, d = len(x), config.num_heads, b.num_kv_heads, config.head_dim
        freqs = oracle.rotary_frequencies(d, config.rope_theta, None)
        a = h(p["input_layernorm"])
        q = oracle.rotate((a @ p["q_proj"]).reshape(t, n, d), freqs)
        key = jnp.repeat(oracle.rotate((a @ p["k_proj"]).reshape(t, k, d), freqs), n // k, 1)
        v = jnp.repeat((a @ p["v_proj"]).reshape(t, k, d), n // k, 1)
        s = jnp.einsum("tnd,snd->nts", q, key) / np.sqrt(d)
        w = jax.nn.softmax(jnp.where(np.tril(np.ones((t, t), bool)), s, -jnp.inf))
        x = x + jnp.einsum("nts,snd->tnd", w, v).reshape(t, -1) @ p["o_proj"]
    a = oracle.normed(x, p["post_attention_layernorm"], config)
    return x + (jax.nn.silu(a @ p["gate_proj"]) * (a @ p["up_proj"])) @ p["down_proj"]


def stream(model, ids):
    config, params = model
    outputs = [params["embed_tokens"][ids]]
    for i, p in enumerate(oracle.split_blocks(config, params)):
        outputs.append(block(config, i, p, outputs[-1]))
    h = oracle.normed(outputs[-1], params["norm"], config)
    z = h @ (params["lm_head"] if "lm_head" in params else params["embed_tokens"].T)
    return outputs, jax.nn.log_softmax(config.final_logit_softcapping * jnp.tanh(z / config.final_logit_softcapping))


ROWS = [IDS[0], IDS[1, :6]]
ENDS = ((1, 1), (2, 2), (3, 4), (4, 5))  # outputs of the child and of the parent: block 2 ends where 3 does


def dense_distil(params, config, parent):
    total = 0.0
    for ids in ROWS:
        (mine, logq), (theirs, logp) = stream((config, params), ids), stream(parent, ids)
        for i, j in ENDS:
            a, b = mine[i], theirs[j]
            norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
            total += jnp.sum(1 - jnp.sum(a * b, -1) / norms)
        total += jnp.sum(jnp.exp(logp) * (logp - logq))
    return total / 15


def dense_blockwise(params, config, parent):
    missed = size = 0.0
    for ids in ROWS:
        outputs, _ = stream(parent, ids)
        out = block(config, 2, oracle.split_blocks(config, params)[2], outputs[2])
        missed, size = missed + jnp.sum((out - outputs[4]) ** 2), size + jnp.sum(outputs[4] ** 2)
    return missed / size


def dense_lm(params, config, parent):
    total = 0.0
    for ids in ROWS:
        _, logq = stream((config, params), ids)
        total -= jnp.sum(jnp.take_along_axis(logq[:-1], ids[1:, None], 1))
    return total / 13


@pytest.mark.parametrize(
    "name", [pytest.param("distil", marks=pytest.mark.slow), "blockwise", pytest.param("lm", marks=pytest.mark.slow)]
)
def test_losses_and_gradients_are_the_dense_ones(x64, name):
    parent, _, (config, params) = pair()
    teacher = distil.make_teacher(parent, (config, params))
    mine = {
        "distil": lambda p: distil.distil_loss(p, config, teacher, IDS, LENGTHS)[0],
        "blockwise": lambda p: distil.blockwise_loss(p, config, teacher, IDS, LENGTHS, policy="nothing_saveable")[0],
        "lm": lambda p: distil.lm_loss(p, config, IDS, LENGTHS)[0],
    }[name]
    dense = {"distil": dense_distil, "blockwise": dense_blockwise, "lm": dense_lm}[name]
    got, grads = jax.jit(jax.value_and_grad(mine))(params)
    want, want_grads = jax.jit(jax.value_and_grad(lambda p: dense(p, config, parent)))(params)
    assert float(got) == pytest.approx(float(want), rel=1e-12) and got > 1e-3
    oracle.assert_grads_close(grads, want_grads, 1e-12)


@pytest.mark.slow
def test_skipping_what_is_shared_changes_nothing(x64):
    parent, child, _ = pair()
    teacher = distil.make_teacher(parent, child)
    assert teacher.leading == 1
    loss = jax.jit(
        lambda n: distil.distil_loss(child[1], child[0], teacher, IDS, LENGTHS, first_run=n)[0], static_argnums=0
    )
    values = [float(loss(n)) for n in (0, 1)]
    assert values[0] == pytest.approx(values[1], rel=1e-14) and values[0] > 1e-3
    with pytest.raises(ValueError, match="first_run is 2, but only 1 runs"):
        distil.distil_loss(child[1], child[0], teacher, IDS, LENGTHS, first_run=2)


@pytest.mark.slow
def test_an_unchanged_child_has_no_loss(x64):
    parent, _, _ = pair()
    teacher = distil.make_teacher(parent, parent)
    spans = distil.match_blocks(CONFIG, CONFIG)
    assert not any(s.replaced for s in spans) and len(spans) == 5
    blockwise = jax.jit(lambda p: distil.blockwise_loss(p, CONFIG, teacher, IDS, LENGTHS, spans)[0])
    assert blockwise(parent[1]) < 1e-30
    assert abs(jax.jit(lambda p: distil.distil_loss(p, CONFIG, teacher, IDS, LENGTHS)[0])(parent[1])) < 1e-28


def test_which_blocks_correspond(x64):
    parent = CONFIG, jax.tree.map(jnp.asarray, random_params(CONFIG))

    def spans(*transforms):
        child = fusion.chain(*transforms)(*parent)[0]
        return [(s.child, s.parent) for s in distil.match_blocks(child, CONFIG) if s.replaced]

    assert spans(fusion.fuse_ffn([(2, 3)])) == [((2, 2), (2, 3))]
    assert spans(fusion.remove_attention([1]), fusion.fuse_ffn([(1, 3)])) == [((1, 1), (1, 3))]
    assert spans(fusion.remove_blocks([1])) == [((1, 1), (1, 2))]  # the one behind takes over
    assert spans(fusion.remove_blocks([4])) == [((3, 3), (3, 4))]
    assert spans(fusion.reverse([(2, 3)])) == [((2, 3), (2, 3))]
    with pytest.raises(ValueError, match=r"block 4 of the child is made of blocks \[4\].*not made of this parent"):
        named = dataclasses.replace(CONFIG, sources=tuple((i,) for i in range(5)))
        distil.match_blocks(named, dataclasses.replace(CONFIG, blocks=CONFIG.blocks[:4]))
    with pytest.raises(ValueError, match="the parent's vocab_size is 24, the child's 23"):
        distil.match_blocks(CONFIG, dataclasses.replace(CONFIG, vocab_size=24))


def test_a_child_that_does_not_say_what_it_is_made_of():
    """With as many blocks it is the parent's blocks in turn; with others it cannot be told."""
    child = on_shapes(fusion.remove_blocks([1]), CONFIG)[0]
    assert [s.parent for s in distil.match_blocks(child, CONFIG)] == [(0, 0), (1, 2), (3, 3), (4, 4)]
    nameless = dataclasses.replace(child, sources=(), transforms=())
    with pytest.raises(ValueError, match="the child has 4 blocks, the parent 5, and the child's config does not say"):
        distil.match_blocks(nameless, CONFIG)
    assert not any(s.replaced for s in distil.match_blocks(nameless, child))


def test_teacher_and_child_hold_unchanged_weights_once():
    parent = CONFIG, jax.tree.map(jnp.asarray, random_params(CONFIG, dtype=np.float32))
    child = fusion.chain(fusion.remove_attention([1]), fusion.fuse_ffn([(2, 3)]))(*parent)
    teacher = distil.make_teacher(parent, child)
    where = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(child[1])}
    own = [x for x in jax.tree.leaves((teacher.runs, teacher.rest)) if x.unsafe_buffer_pointer() not in where]
    # The attention of block 1 with its norm and the FFNs of 2 and 3 with theirs; all else is the child's.
    attention = sum(np.prod(s) for n, s in _shapes(0).items() if n not in _shapes(2))
    assert sum(x.size for x in own) == attention + sum(np.prod(s) for i in (2, 3) for s in _shapes(i).values())
    x = jax.jit(distil.teacher_outputs)(teacher, IDS, LENGTHS)[-1]
    wanted = jax.jit(forward, static_argnums=1)(parent[1], CONFIG, IDS, LENGTHS)
    np.testing.assert_allclose(rms_norm(CONFIG, x, parent[1]["norm"])[0], wanted[0], rtol=1e-5, atol=1e-5)


def _shapes(i):
    return block_param_shapes(CONFIG, CONFIG.blocks[i])


def test_parallel_blocks_are_refused():
    """The losses run blocks in turn: on blocks that stand beside each other they would be those of another model."""
    config, params = fusion.parallel_blocks([(2, 3)])(CONFIG, random_params(CONFIG))
    with pytest.raises(ValueError, match="block 3 stands beside block 2 .*distil first, or fuse"):
        distil.match_blocks(config, CONFIG)
    with pytest.raises(ValueError, match="block 3 stands beside block 2"):
        distil.lm_loss(params, config, IDS, LENGTHS)
