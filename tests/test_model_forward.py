"""The everyday forward pass, its gradient, and parameter trees, against the oracle."""

import dataclasses
import functools

import families
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from lsfuse import model
from lsfuse.model import BlockConfig, ModelConfig, RopeScaling
from lsfuse.model.rope import inverse_frequencies, rope_tables

MODELS = {"tiny": helpers.TINY, "mixed": helpers.MIXED, "hollow": helpers.HOLLOW, **families.FAMILIES}
LENGTHS = (9, 4, 1)


def rows(config, seed=0):
    """(ids [3, 9], lengths), ids out of range behind the lengths."""
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, (3, 9)).astype(np.int32)
    for row, length in zip(ids, LENGTHS, strict=True):
        row[length:] = (-5, 10**6)[length % 2]
    return ids, np.asarray(LENGTHS, np.int32)


@functools.cache
def forward_of(config):
    def forward(params, ids, lengths):
        return model.forward(params, config, ids, lengths)

    return jax.jit(forward)


@pytest.mark.parametrize(
    "name", [n if n in ("mixed", "gemma3") else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_hidden_states_and_logits(x64, name):
    config, params = MODELS[name], helpers.random_params(MODELS[name])
    ids, lengths = rows(config)
    hidden = forward_of(config)(params, ids, lengths)
    assert hidden.shape == (3, 9, config.hidden_size) and np.isfinite(hidden).all()
    logits = model.logits(params, config, hidden)
    for i, length in enumerate(LENGTHS):
        row = ids[i, :length]
        np.testing.assert_allclose(hidden[i, :length], oracle.hidden(config, params, row), rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(logits[i, :length], oracle.logits(config, params, row), rtol=1e-11, atol=1e-12)


def test_float32_and_bfloat16():
    for dtype, tol in ((np.float32, 1e-5), (jnp.bfloat16, 5e-2)):
        params = jax.tree.map(lambda x, dtype=dtype: jnp.asarray(x, dtype), helpers.random_params(helpers.TINY))
        ids, lengths = rows(helpers.TINY)
        hidden = forward_of(helpers.TINY)(params, ids, lengths)
        assert hidden.dtype == dtype and model.logits(params, helpers.TINY, hidden).dtype == jnp.float32
        want = oracle.hidden(helpers.TINY, params, ids[0])
        error = np.linalg.norm(np.asarray(hidden[0], np.float64) - want) / np.linalg.norm(want)
        assert error < tol


def token_loss(config, params, ids, lengths, forward):
    """Mean of a nonlinear function of logits and of hidden states at valid positions."""
    valid = np.arange(ids.shape[1]) < lengths[:, None]
    hidden = forward(params, ids)
    logits = model.logits(params, config, hidden)
    per_token = jnp.sum(jnp.tanh(logits), -1) + jnp.sum(hidden**2, -1)
    return jnp.sum(jnp.where(valid, per_token, 0.0))


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("tiny", "everything_saveable"),
        ("gemma2", "dots_with_no_batch_dims_saveable"),
        pytest.param("mixed", "nothing_saveable", marks=pytest.mark.slow),
        pytest.param("hollow", "dots_with_no_batch_dims_saveable", marks=pytest.mark.slow),
        pytest.param("gemma3", "nothing_saveable", marks=pytest.mark.slow),
        pytest.param("plain", "everything_saveable", marks=pytest.mark.slow),
    ],
)
def test_gradient_by_jax_grad(x64, name, policy):
    config, params = MODELS[name], helpers.random_params(MODELS[name])
    ids, lengths = rows(config)

    def ours(p):
        return token_loss(config, p, ids, lengths, lambda p, ids: model.forward(p, config, ids, lengths, policy))

    def plain(p, ids):
        return oracle._hidden(config, p, ids[0], np.zeros(ids.shape[1], bool))[None]

    def theirs(p):
        total = 0.0
        for i, length in enumerate(LENGTHS):
            row = ids[i : i + 1, :length]
            total += token_loss(config, p, row, lengths[i : i + 1], plain)
        return total

    grads = jax.jit(jax.grad(ours))(params)
    want = jax.jit(jax.grad(theirs))(params)
    oracle.assert_grads_close(grads, jax.tree.map(np.asarray, want), 1e-12)


def test_a_row_alone_and_in_a_padded_batch(x64):
    """Other rows, other lengths and other padding change no bit at equal shapes."""
    params = helpers.random_params(helpers.MIXED)
    ids, lengths = rows(helpers.MIXED)
    forward = forward_of(helpers.MIXED)
    base = np.asarray(forward(params, ids, lengths))
    other = np.array(ids)
    other[1:] = 3
    other[0, 9:] = 7
    moved = np.asarray(forward(params, other, np.asarray([9, 9, 2], np.int32)))
    np.testing.assert_array_equal(base[0], moved[0])


def test_a_later_token_changes_nothing_before_it(x64):
    params = helpers.random_params(helpers.TINY)
    ids, lengths = rows(helpers.TINY)
    forward = forward_of(helpers.TINY)
    base = np.asarray(forward(params, ids, lengths))
    for at in range(9):
        other = np.array(ids)
        other[0, at] = (other[0, at] + 1) % 23
        moved = np.asarray(forward(params, other, lengths))
        np.testing.assert_array_equal(base[0, :at], moved[0, :at])
        assert (base[0, at:] != moved[0, at:]).any(-1).all()


# --- rotary ---------------------------------------------------------------------------------------------------------


SCALINGS = {
    "none": None,
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
    "llama3-short": RopeScaling("llama3", 2.0, 2.0, 8.0, 99),
    "yarn": RopeScaling("yarn", 4.0, original_max_position=4096),
    "yarn-exact": RopeScaling("yarn", 40.0, original_max_position=99, beta_fast=9.0, beta_slow=0.5, truncate=False),
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_rotary_frequencies(scaling):
    config = helpers.tiny(head_dim=64, rope_theta=500000.0, rope_scaling=scaling)
    want = oracle.rotary_frequencies(64, 500000.0, scaling)
    np.testing.assert_allclose(inverse_frequencies(config), want, rtol=1e-14)
    local = helpers.tiny(head_dim=64, local_rope_theta=500000.0, local_rope_scaling=scaling)
    np.testing.assert_allclose(inverse_frequencies(local, local=True), want, rtol=1e-14)
    tables = rope_tables(config, jnp.arange(9), jnp.float32)
    both = rope_tables(local, jnp.arange(9), jnp.float32)
    for table, pair, f in zip(tables, both, (np.cos, np.sin), strict=True):
        values = oracle.rotary_length(scaling) * f(np.arange(9)[:, None] * want)
        np.testing.assert_allclose(table, values, atol=1e-6)
        np.testing.assert_array_equal(pair[1], table)


def test_rotary_tables_at_two_million_positions():
    """In float32: within a few roundings of float64, where position × frequency in float32 is off by 0.1."""
    config = helpers.tiny(head_dim=128, rope_theta=500000.0)
    positions = np.asarray([0, 1, 255, 256, 65535, 65536, 2**20 + 77, 2**21 - 1], np.int32)
    angles = positions[:, None].astype(np.float64) * oracle.rotary_frequencies(128, 500000.0, None)
    cos, sin = rope_tables(config, jnp.asarray(positions), jnp.float32)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-6)


# --- parameter trees ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_trees_have_the_declared_shapes(name):
    config = MODELS[name]
    params = jax.eval_shape(lambda: model.init_params(config, jax.random.key(0)))
    model.check_params(config, params)
    assert jax.tree.map(lambda x: tuple(x.shape), params) == model.param_shapes(config)
    assert model.count_params(config) == sum(x.size for x in jax.tree.leaves(params))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))


def test_initial_parameters():
    """A function of the key alone; gains one, the rest random."""
    init = jax.jit(lambda key: model.init_params(helpers.TINY, key))
    params, again, other = init(jax.random.key(0)), init(jax.random.key(0)), init(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key.endswith("norm"):
            assert (leaf == 1).all()
        else:
            assert 0 < np.std(leaf) < 1 and np.unique(leaf).size == leaf.size, path
    assert (params["embed_tokens"] != other["embed_tokens"]).all()


def test_runs_are_of_equal_blocks():
    full, none = BlockConfig("full", 2, 8), BlockConfig("none", 1, 8)
    config = helpers.tiny(blocks=(full, full, none, full))
    assert [n for _, n in config.runs] == [2, 1, 1]
    assert [model.locate_block(config, i) for i in range(4)] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert config.last_attention_block == 3 and config.num_blocks == 4
    windows = (BlockConfig("sliding", 2, 8, window=5), full, BlockConfig("sliding", 2, 8, window=7, local_rope=True))
    alternating = helpers.tiny(blocks=(none, *windows), local_rope_theta=100.0)
    assert [n for _, n in alternating.runs] == [1, 3]
    assert alternating.members(1) == windows and alternating.members(0) == (none,)
    for bad in (-1, 4):
        with pytest.raises(IndexError, match=f"block {bad} is out of range.*0 to 3"):
            model.locate_block(config, bad)


@pytest.mark.parametrize("name", MODELS)
def test_stack_and_unstack(name):
    config, params = MODELS[name], helpers.random_params(MODELS[name], dtype=np.float32)
    blocks = model.unstack_blocks(config, params)
    for mine, theirs in zip(blocks, oracle.split_blocks(config, params), strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    jax.tree.map(np.testing.assert_array_equal, model.stack_blocks(config, blocks), params["runs"])


def test_misfits_are_named():
    config, params = helpers.TINY, helpers.random_params(helpers.TINY)
    runs = params["runs"]["0"]
    with pytest.raises(ValueError, match=r"runs/0/q_proj.*\(2, 16, 8\).*\(2, 16, 16\)"):
        model.check_params(config, {**params, "runs": {"0": {**runs, "q_proj": np.zeros((2, 16, 8))}}})
    with pytest.raises(ValueError, match="lack lm_head"):
        model.check_params(config, {k: v for k, v in params.items() if k != "lm_head"})
    with pytest.raises(ValueError, match="runs/0/q_proj_bias"):
        model.check_params(config, {**params, "runs": {"0": {**runs, "q_proj_bias": np.zeros((2, 16))}}})
    blocks = model.unstack_blocks(config, params)
    with pytest.raises(ValueError, match="1 blocks of parameters for a config of 2"):
        model.stack_blocks(config, blocks[:1])
    with pytest.raises(ValueError, match=r"block 1 does not fit.*up_proj"):
        model.stack_blocks(config, [blocks[0], {**blocks[1], "up_proj": np.zeros((16, 8))}])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"head_dim": 5}, "head_dim must be even.*5"),
        ({"hidden_act": "swish"}, "'swish'.*silu"),
        ({"blocks": ()}, "at least one block"),
        ({"blocks": (BlockConfig("full", 3, 8),)}, "block 0: num_kv_heads 3 must divide the 4"),
        ({"blocks": (BlockConfig("local", 2, 8),)}, "block 0: attention 'local'.*full, sliding"),
        ({"blocks": (BlockConfig("sliding", 2, 8),)}, "block 0: window None.*'sliding'"),
        ({"blocks": (BlockConfig("full", 2, 8, window=3),)}, "block 0: window 3.*'full'"),
        ({"blocks": (BlockConfig("sliding", 2, 8, window=0),)}, "block 0: window must be at least 1.*0"),
        ({"blocks": (BlockConfig("full", 2, 8, local_rope=True),)}, "block 0: local_rope.*local_rope_theta"),
        ({"blocks": (BlockConfig("full", 2, 8, ffn="moe"),)}, "block 0: ffn 'moe'.*gated, plain"),
        ({"attn_logit_softcapping": 0.0}, "attn_logit_softcapping must be positive or None, got 0.0"),
        ({"embed_scale": 0.0}, "embed_scale must be positive, got 0.0"),
        ({"blocks": (BlockConfig("full", 2, -1),)}, "block 0: ffn_width.*-1"),
    ],
)
def test_bad_configs(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(helpers.TINY, **changes)


def test_bad_rope_scaling():
    for args, message in (
        (("dynamic", 2.0), "'dynamic' is not supported.*llama3, linear, yarn"),
        (("yarn", 2.0, 1.0, 4.0, 8192, 1.0, 1.0), "beta_slow < beta_fast, got 1.0 and 1.0"),
        (("linear", 0.0), "factor must be positive, got 0.0"),
        (("llama3", 8.0, 4.0, 4.0), "low_freq_factor < high_freq_factor"),
    ):
        with pytest.raises(ValueError, match=message):
            RopeScaling(*args)


def test_configs_are_hashable():
    assert hash(helpers.MIXED) == hash(dataclasses.replace(helpers.MIXED))
    assert isinstance(helpers.MIXED, ModelConfig) and helpers.MIXED != helpers.TINY


def test_blocks_without_anything():
    """Fresh parameters have a place for a run without leaves, and such a block changes no bit."""
    block = helpers.TINY.blocks[0]
    empty = dataclasses.replace(helpers.TINY, blocks=(block, BlockConfig("none", 1, 0), block))
    params = model.init_params(empty, jax.random.key(0))
    assert params["runs"]["1"] == {}
    runs = {"0": jax.tree.map(lambda a, b: jnp.concatenate([a, b]), params["runs"]["0"], params["runs"]["2"])}
    ids = jnp.arange(6)[None]
    want = model.forward({**params, "runs": runs}, helpers.TINY, ids)
    np.testing.assert_array_equal(model.forward(params, empty, ids), want)
