"""The engine's gradients over the cross product of its options: every pair of values occurs, and many triples."""

import helpers
import jax
import numpy as np
import oracle
import pytest

from lsfuse.model.config import BlockConfig

pytestmark = pytest.mark.slow

TINY, PARAMS = helpers.TINY, helpers.random_params(helpers.TINY, 1)
BATCHES = {i: helpers.ragged_batch(TINY, i) for i in range(3)}
UNLIKE = {"mixed": helpers.MIXED, "hollow": helpers.HOLLOW}

FACTORS = {
    "prefix_grad": ("exact", "stop", 2, 5, 64),
    "name": ("coupled", "plain_grpo", "plain_gspo", "plain_dpo"),
    "prefix_activations": ("recompute", "keep", "auto"),
    "chunk_size": (1, 4, 7, 64),
    "branch_batch": (1, 2, 4, None),
    "remat_policy": (
        "everything_saveable",
        "nothing_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
    ),
}


@pytest.mark.parametrize("row", helpers.all_pairs(FACTORS), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_options(x64, row):
    options = dict(row)
    name = options.pop("name")
    for key, batch in BATCHES.items():
        helpers.check_step(name, TINY, PARAMS, batch, ("tiny", key), **options)


UNLIKE_FACTORS = {
    "model": tuple(UNLIKE),
    "prefix_grad": ("exact", "stop", 4),
    "name": ("coupled", "plain_grpo"),
    "prefix_activations": ("recompute", "keep"),
    "remat_policy": ("everything_saveable", "nothing_saveable", "dots_with_no_batch_dims_saveable"),
}


@pytest.mark.parametrize("row", helpers.all_pairs(UNLIKE_FACTORS), ids=lambda row: "-".join(map(str, row.values())))
def test_unlike_blocks(x64, row):
    options = {"chunk_size": 3, "branch_batch": 3, **row}
    name, config = options.pop("name"), UNLIKE[options.pop("model")]
    params, batch = helpers.random_params(config, 2), helpers.make_batch(config)
    helpers.check_step(name, config, params, batch, "unlike", **options)


def test_n_beyond_the_prompt_is_exact_and_stop_is_one(x64):
    step = {
        n: helpers.engine("coupled", TINY, prefix_grad=n, chunk_size=4, branch_batch=2)(PARAMS, BATCHES[0])
        for n in ("exact", "stop", 1, 11, 64)
    }
    for n, same in ((1, "stop"), (11, "exact"), (64, "exact")):
        oracle.assert_grads_close(step[n][1], jax.tree.map(np.asarray, step[same][1]), 1e-15)


@pytest.mark.parametrize("name", ["coupled", "plain_grpo"])
def test_temperature(x64, name):
    for prefix_grad in ("exact", "stop"):
        options = {"prefix_grad": prefix_grad, "temperature": 0.6, "chunk_size": 4, "branch_batch": 2}
        helpers.check_step(name, TINY, PARAMS, BATCHES[0], ("tiny", 0), **options)


def test_the_user_s_extras_are_sliced_along(x64):
    rng = np.random.default_rng(0)
    extras = {"token": rng.standard_normal((4, 4, 6)), "branch": rng.standard_normal((4, 4))}
    batch = helpers.make_batch(TINY).replace(extras=extras, advantages=rng.standard_normal((4, 4, 6)))
    helpers.check_step("weighted", TINY, PARAMS, batch, ("tiny", "extras"), chunk_size=4, branch_batch=3)


@pytest.mark.parametrize(
    ("prompts", "responses", "options"),
    [
        ((1,), ((1,),), {"prefix_grad": "stop"}),
        ((1, 1), ((4, 2, 1), (1, 0, 4)), {"prefix_grad": "stop", "branch_batch": 1}),
        ((1, 1), ((4, 2, 1), (1, 0, 4)), {"prefix_grad": 3, "branch_batch": 2}),
        ((9,), ((1,),), {"prefix_grad": "exact", "chunk_size": 4}),
        ((9,), ((1,),), {"prefix_grad": "stop"}),
        ((2,), ((1, 1, 1),), {"prefix_grad": 2, "chunk_size": 1}),
        ((3,), ((3, 3, 3),), {"prefix_grad": "exact", "chunk_size": 3, "branch_batch": 3}),
        ((3,), ((3, 3, 3),), {"prefix_grad": 2, "chunk_size": 1, "branch_batch": 3}),
        ((6, 2), ((3,), (5, 1, 2, 5, 5)), {"prefix_grad": "stop", "chunk_size": 2, "branch_batch": 2}),
    ],
)
def test_small_and_square_shapes(x64, prompts, responses, options):
    """Also shapes that broadcast by accident: G = R, G = P, chunk = R."""
    batch = helpers.make_batch(TINY, prompts, responses, None, silent=(), tool_tokens=False)
    key = ("tiny", "shape", prompts, responses)
    helpers.check_step("coupled", TINY, PARAMS, batch, key, **{"chunk_size": 8, **options})


@pytest.mark.parametrize("seed", range(4))
def test_any_lengths(x64, seed):
    """Lengths that the fast tests leave out, all row lengths from 2 to 17."""
    batch = helpers.ragged_batch(TINY, 100 + seed, rows=None)
    for prefix_grad in ("exact", "stop", 5):
        options = {"prefix_grad": prefix_grad, "chunk_size": 4, "branch_batch": 2}
        helpers.check_step("coupled", TINY, PARAMS, batch, ("tiny", "any", seed), **options)


def test_dense_baseline(x64):
    for name, policy in (("coupled", "nothing_saveable"), ("plain_grpo", "dots_with_no_batch_dims_saveable")):
        params, batch = helpers.random_params(helpers.MIXED, 2), helpers.make_batch(helpers.MIXED)
        helpers.check_step(name, helpers.MIXED, params, batch, "unlike", dense=True, remat_policy=policy)
    for key, batch in BATCHES.items():
        helpers.check_step("plain_dpo", TINY, PARAMS, batch, ("tiny", key), dense=True, branch_batch=5)


@pytest.mark.parametrize("name", ["coupled", "plain_gspo"])
@pytest.mark.parametrize("prefix_grad", ["exact", "stop", 4])
def test_float32_of_unlike_blocks(name, prefix_grad):
    params = helpers.random_params(helpers.MIXED, 2, np.float32)
    batch = helpers.make_batch(helpers.MIXED, dtype=np.float32)
    options = {"prefix_grad": prefix_grad, "chunk_size": 4, "branch_batch": 3}
    helpers.check_step(name, helpers.MIXED, params, batch, "float32 unlike", tol=1e-5, **options)


def test_bfloat16_parameters():
    """Gradients in the parameters' dtype, a few roundings from the oracle at the same values."""
    config = helpers.tiny(blocks=(*TINY.blocks, BlockConfig("full", 1, 12)))
    params = jax.tree.map(lambda x: jax.numpy.asarray(x, jax.numpy.bfloat16), helpers.random_params(config, 1))
    batch = helpers.make_batch(config, dtype=np.float32)
    step = helpers.engine("coupled", config, chunk_size=4, branch_batch=2)
    _, grads = step(params, batch)
    _, want = oracle.value_and_grad(helpers.coupled, config, params, batch, "exact")
    assert all(g.dtype == jax.numpy.bfloat16 for g in jax.tree.leaves(grads))
    assert max(oracle.grad_errors(grads, want).values()) < 0.1
