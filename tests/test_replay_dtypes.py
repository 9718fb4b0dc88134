"""Dtypes of activations, prefix state and its cotangents: what each rounds, and that it rounds alike everywhere."""

import helpers
import jax
import numpy as np
import pytest

from lsfuse import replay

MODEL = helpers.TINY


def step(params, batch, **options):
    options = {"chunk_size": 4, "prefix_activations": "recompute", **options}
    return jax.jit(replay.value_and_grad(helpers.PLAIN_GRPO, MODEL, **options))(params, batch)


def error(grads, want) -> float:
    """Of the worst leaf, relative."""
    norms = jax.tree.map(lambda a, b: np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b), grads, want)
    return max(jax.tree.leaves(norms))


def test_a_rounded_state_is_the_same_for_capture_recomputation_and_tails(x64):
    """Keys and values are rounded where they are made: how the prompt is cut into chunks then changes nothing."""
    params, batch = helpers.random_params(MODEL), helpers.make_batch(MODEL)
    exact, whole = step(params, batch)[1], step(params, batch, state_dtype="float32", chunk_size=64)[1]
    for options in ({"chunk_size": 3}, {"chunk_size": 4, "prefix_activations": "keep"}):
        assert error(step(params, batch, state_dtype="float32", **options)[1], whole) < 1e-12
    assert 1e-10 < error(whole, exact) < 1e-6


@pytest.mark.parametrize(
    "options, bound",
    [
        ({"cotangent_dtype": "bfloat16"}, 2**-8),
        ({"state_dtype": "bfloat16"}, 2**-6),
        ({"compute_dtype": "bfloat16"}, 2**-4),
    ],
    ids=["cotangent", "state", "compute"],
)
def test_what_bfloat16_costs(x64, options, bound):
    params, batch = helpers.random_params(MODEL), helpers.make_batch(MODEL)
    want = step(params, batch)[1]
    narrow = jax.tree.map(lambda x: x.astype(np.float32), params)
    (loss, _), grads = step(narrow, batch, **options)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(np.float32)} and np.isfinite(loss)
    assert 2**-12 < error(grads, want) < bound


@pytest.mark.parametrize("name", ["compute_dtype", "state_dtype", "cotangent_dtype"])
def test_an_unknown_dtype_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be one of bfloat16, .*got 'int8'"):
        replay.value_and_grad(helpers.PLAIN_GRPO, MODEL, **{name: "int8"})
