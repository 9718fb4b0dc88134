"""The families' own features through the engine: windows that reach into the shared prefix, q/k norms, yarn, soft-caps,
post-norms, two rotary bases, scaled embeddings, plain FFNs. Every leaf against the dense float64 oracle.

Windows are shorter than prompts, responses and chunks; of `FAMILIES` all but "qwen3" have some.
"""

import dataclasses
import itertools

import families
import helpers
import jax
import numpy as np
import oracle
import pytest

from lsfuse import replay
from lsfuse.kernels.tail_attention import reference
from lsfuse.model.config import BlockConfig
from lsfuse.rl import decode

FAMILIES = families.FAMILIES
EVERY = {**families.LLAMAS, **FAMILIES}
DPO_LENGTHS = ((6, 3, 0, 1), (5, 5), (), (6, 4, 4, 6))


def check(family, name, prefix_grad, quick=False, **options):
    """quick: unlike prompts and responses, but rows of one length, since the oracle compiles once per length."""
    config = EVERY[family]
    params, options = helpers.random_params(config, 5), {"chunk_size": 4, "branch_batch": 2, **options}
    batches = {"default": helpers.make_batch(config), "ragged": helpers.ragged_batch(config, 3)}
    if quick:
        batches = {"quick": helpers.make_batch(config, (11, 8), ((3, 3), (6, 0)), (12, 3, 6), silent=())}
    elif name == "dpo":
        batches = {"pairs": helpers.make_batch(config, (11, 1, 0, 8), DPO_LENGTHS, (11, 4, 6))}
    for key, batch in batches.items():
        helpers.check_step(name, config, params, batch, (family, key), prefix_grad=prefix_grad, **options)


@pytest.mark.parametrize(
    ("family", "name", "prefix_grad", "options"),
    [
        ("mistral", "grpo", "exact", {}),
        pytest.param("mistral", "grpo", 5, {"prefix_activations": "keep"}, marks=pytest.mark.slow),
        ("gemma2", "grpo", "exact", {"remat_policy": "nothing_saveable", "prefix_activations": "recompute"}),
        ("gemma3", "dpo", "exact", {"prefix_activations": "keep"}),
    ],
)
def test_gradients(x64, family, name, prefix_grad, options):
    check(family, name, prefix_grad, quick=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "gspo", "dpo"])
@pytest.mark.parametrize("prefix_grad", ["exact", "stop", 5])
@pytest.mark.parametrize("family", EVERY)
def test_every_family_mode_and_objective(x64, family, prefix_grad, name):
    check(family, name, prefix_grad)


REMAT = {
    "family": ("gemma2", "gemma3", "plain"),
    "remat_policy": ("dots_with_no_batch_dims_saveable", "nothing_saveable", "dots_saveable"),
    "prefix_activations": ("keep", "recompute"),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", helpers.all_pairs(REMAT), ids=lambda row: "-".join(row.values()))
def test_remat_policies(x64, row):
    options = {"chunk_size": 7, "branch_batch": 4, **row}
    check(options.pop("family"), "coupled", "exact", **options)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("gemma3", "exact"),
        *(
            pytest.param(family, mode, marks=pytest.mark.slow)
            for family, mode in itertools.product(("mistral", "gemma2", "gemma3"), ("exact", 6, "dense"))
            if (family, mode) != ("gemma3", "exact")
        ),
    ],
)
def test_several_tiles(x64, monkeypatch, family, mode):
    """Tiles before the window are skipped: of the prefix, of its differentiable part, of the own tokens."""
    for name, size in (("TILE", 2), ("ROWS", 8), ("OWN_TILE", 2)):
        monkeypatch.setattr(reference, name, size)
    config = FAMILIES[family]
    params = helpers.random_params(config, 5)
    batch = helpers.make_batch(config, (11, 8), ((3, 3), (6, 0)), (12, 3, 6), silent=())
    factory, options = replay.value_and_grad, {"prefix_grad": mode, "chunk_size": 5, "branch_batch": 3}
    if mode == "dense":
        factory, options = replay.dense_value_and_grad, {"branch_batch": 3}
    (loss, _), grads = jax.jit(factory(helpers.coupled, config, **options))(params, batch)
    exact = "exact" if mode == "dense" else mode
    want, want_grads = helpers.oracle_value_and_grad((family, "quick"), "coupled", config, params, batch, exact)
    np.testing.assert_allclose(loss, want[0], rtol=1e-12)
    oracle.assert_grads_close(grads, want_grads, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "mode", "chunk"), [(100, 700, 512), (512, "exact", 600), (700, 700, 512)])
def test_real_tile_sizes(x64, window, mode, chunk):
    """Prompts beyond two key tiles, responses beyond two own tiles, windows within a tile, of one, and of several."""
    blocks = (BlockConfig("sliding", 2, 24, window=window), BlockConfig("full", 2, 24))
    config = helpers.tiny(num_heads=2, head_dim=2, blocks=blocks, max_position_embeddings=2048)
    params = helpers.random_params(config)
    batch = helpers.make_batch(config, (1100,), ((520, 520, 300),), None, silent=(), tool_tokens=False)
    step = jax.jit(replay.value_and_grad(helpers.coupled, config, prefix_grad=mode, chunk_size=chunk))
    _, grads = step(params, batch)
    want = oracle.value_and_grad(helpers.coupled, config, params, batch, mode)[1]
    oracle.assert_grads_close(grads, want, 1e-12)


def test_a_token_beyond_the_window_changes_nothing(x64):
    """Two blocks with a window of 3: a token reaches the four after it, and no further, also out of the prefix."""
    config = FAMILIES["mistral"]
    params = helpers.random_params(config, 5)
    batch = helpers.make_batch(config, (9,), ((6, 6),), None, silent=(), tool_tokens=False)
    score = helpers.scorer(config, chunk_size=4)
    base = np.asarray(score(params, batch)[0])
    for at in range(9):
        ids = np.array(batch.prompt_ids)
        ids[0, at] = (ids[0, at] + 1) % config.vocab_size
        moved = np.asarray(score(params, batch.replace(prompt_ids=ids))[0])
        reach = max(at + 4 - 8 + 1, 0)  # log-prob r is made at position 8 + r
        np.testing.assert_array_equal(moved[..., reach:], base[..., reach:])
        assert (moved[..., :reach] != base[..., :reach]).all()


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.slow] * (f in ("mistral", "qwen3", "gemma2"))) for f in FAMILIES]
)
def test_decoding_steps_equal_the_oracle(x64, monkeypatch, family):
    """Logits of every step, one shared prefix and own tiles of three tokens."""
    monkeypatch.setattr(decode, "OWN_TILE", 3)
    config = FAMILIES[family]
    params = helpers.random_params(config, 5)
    rng = np.random.default_rng(0)
    prompt, steps = rng.integers(0, config.vocab_size, (2, 7)).astype(np.int32), 8
    ids = rng.integers(0, config.vocab_size, (2, 2, steps)).astype(np.int32)
    lengths = np.asarray([7, 4], np.int32)

    @jax.jit
    def run(params):
        prefilled = decode.prefill(params, config, jax.numpy.asarray(prompt), jax.numpy.asarray(lengths), 3)
        attend = decode.shared_attention(prefilled)
        caches = decode.shared_caches(config, 2, 2, steps, np.float64)
        first = np.repeat(lengths - 1, 2)
        last = jax.numpy.repeat(prefilled.last, 2)
        inputs = jax.numpy.concatenate([last[None], ids.reshape(4, steps).T[:-1]])
        every, busy = jax.numpy.ones(4, bool), jax.numpy.ones(2, bool)

        def step(caches, xs):
            t, tokens = xs
            row = decode.Row(t, busy)
            out, caches = decode.decode_step(params, config, tokens, every, first + t, attend, caches, row)
            return caches, out

        return jax.lax.scan(step, caches, (jax.numpy.arange(steps, dtype=np.int32), inputs))[1]

    out = np.asarray(run(params)).swapaxes(0, 1).reshape(2, 2, steps, -1)
    for b, g in np.ndindex(2, 2):
        row = np.concatenate([prompt[b, : lengths[b]], ids[b, g, :-1]])
        want = oracle.logits(config, params, row)[lengths[b] - 1 :]
        np.testing.assert_allclose(out[b, g], want, rtol=1e-11, atol=1e-12)


def test_norms_store_the_offset():
    """A model that adds one to its gains starts with gains of zero: the same function as one that does not."""
    from lsfuse.model import init_params

    config = FAMILIES["gemma3"]
    params = init_params(config, jax.random.key(0))
    assert not np.asarray(params["norm"]).any() and not np.asarray(params["runs"]["0"]["q_norm"]).any()
    ids = np.arange(9)
    other = jax.tree_util.tree_map_with_path(
        lambda path, x: np.asarray(x) + 1 if path[-1].key.endswith("norm") else np.asarray(x), params
    )
    plain = dataclasses.replace(config, norm_offset=0.0)
    np.testing.assert_array_equal(oracle.logits(config, params, ids), oracle.logits(plain, other, ids))


def _lowered(blocks):
    config = helpers.tiny(**{**families.GEMMA, "blocks": blocks, "local_rope_theta": 20.0, "qk_norm": True})
    params, batch = helpers.random_params(config), helpers.make_batch(config)
    return jax.jit(replay.value_and_grad(helpers.PLAIN_GRPO, config, chunk_size=4)).lower(params, batch)


SLIDING, FULL = BlockConfig("sliding", 2, 24, window=4, local_rope=True), BlockConfig("full", 2, 24)


def test_alternating_blocks_are_one_loop(x64):
    """The program of an alternating model does not grow with its depth, and hardly over that of a uniform one."""
    short, long = _lowered((SLIDING, FULL) * 2).as_text(), _lowered((SLIDING, FULL) * 6).as_text()
    five_to_one = _lowered((*(*(SLIDING,) * 5, FULL) * 2, SLIDING, SLIDING)).as_text()  # Gemma 3's, with a rest
    uniform = _lowered((FULL,) * 12).as_text()
    for text in (long, five_to_one):
        assert abs(len(text) - len(short)) < 0.02 * len(short)
        assert text.count("stablehlo.while") == uniform.count("stablehlo.while")
        assert len(text) < 1.25 * len(uniform)
