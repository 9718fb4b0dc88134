"""Shapes that need several tiles: of keys, of rows, of a branch's own tokens, and slabs of the vocabulary.

The tile sizes are module constants far above what tests can afford, so they are made small here; the jitted functions
are this file's own.
"""

import helpers
import jax
import numpy as np
import oracle
import pytest

from lsfuse import model, replay
from lsfuse.kernels.tail_attention import reference
from lsfuse.model import logprobs

# Slabs of at most 512 columns: three, of which the last overlaps the one before.
WIDE = helpers.tiny(vocab_size=1100)


@pytest.fixture
def small_tiles(monkeypatch):
    """Keys of a prefix tile 4, rows of one 8, queries and keys of an own tile 3: none divides what it tiles."""
    monkeypatch.setattr(reference, "TILE", 4)
    monkeypatch.setattr(reference, "ROWS", 8)
    monkeypatch.setattr(reference, "OWN_TILE", 3)
    monkeypatch.setattr(logprobs, "_ELEMENTS", 1)


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_grad": "exact", "chunk_size": 7, "branch_batch": 2},
        pytest.param(
            {"prefix_grad": 6, "chunk_size": 3, "branch_batch": 4, "prefix_activations": "keep"}, marks=pytest.mark.slow
        ),
        pytest.param({"dense": True}, marks=pytest.mark.slow),
    ],
    ids=["exact", "n", "dense"],
)
def test_gradient(x64, small_tiles, options):
    options = dict(options)
    factory = replay.dense_value_and_grad if options.pop("dense", False) else replay.value_and_grad
    params, batch = helpers.random_params(WIDE, 4), helpers.make_batch(WIDE)
    (loss, _), grads = jax.jit(factory(helpers.coupled, WIDE, **options))(params, batch)
    mode = options.get("prefix_grad", "exact")
    (want, _), want_grads = helpers.oracle_value_and_grad("wide", "coupled", WIDE, params, batch, mode)
    np.testing.assert_allclose(loss, want, rtol=1e-12)
    oracle.assert_grads_close(grads, want_grads, 1e-12)


@pytest.mark.slow
def test_tied_head_in_slabs(x64, small_tiles):
    config = helpers.tiny(vocab_size=1100, tie_word_embeddings=True, blocks=helpers.TINY.blocks[:1])
    params = helpers.random_params(config, 4)
    batch = helpers.make_batch(config, (8,), ((4, 4),), None, silent=())
    step = replay.value_and_grad(helpers.coupled, config, temperature=0.7)
    _, grads = jax.jit(step)(params, batch)
    want = oracle.value_and_grad(helpers.coupled, config, params, batch, temperature=0.7)[1]
    oracle.assert_grads_close(grads, want, 1e-12)


def test_forward(x64, small_tiles):
    config, params = helpers.MIXED, helpers.random_params(helpers.MIXED)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 11)).astype(np.int32)
    hidden = jax.jit(lambda p, ids: model.forward(p, config, ids))(params, ids)
    for row, got in zip(ids, hidden, strict=True):
        np.testing.assert_allclose(got, oracle.hidden(config, params, row), rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_real_tile_sizes(x64):
    """Prompts beyond two key tiles, responses beyond two own tiles, two row tiles, nothing made small."""
    config = helpers.tiny(num_heads=2, head_dim=2, blocks=helpers.TINY.blocks[:1], max_position_embeddings=2048)
    params = helpers.random_params(config)
    batch = helpers.make_batch(config, (1100,), ((520, 520, 300),), None, silent=(), tool_tokens=False)
    for mode, chunk in (("exact", 600), ("stop", 512), (700, 512)):
        step = jax.jit(replay.value_and_grad(helpers.coupled, config, prefix_grad=mode, chunk_size=chunk))
        _, grads = step(params, batch)
        want = oracle.value_and_grad(helpers.coupled, config, params, batch, mode)[1]
        oracle.assert_grads_close(grads, want, 1e-12)
