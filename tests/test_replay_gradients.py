"""The engine's gradients against the dense float64 oracle, leaf by leaf.

One jitted function per static configuration (tests/helpers.py keeps them); lengths, masks and poisoned padding are
data. The large cross products are in test_replay_gradients_cross.py.
"""

import helpers
import jax
import numpy as np
import oracle
import pytest

from lsfuse import fusion, replay
from lsfuse.model.config import BlockConfig, uniform_blocks

TINY, PARAMS = helpers.TINY, helpers.random_params(helpers.TINY, 1)
BATCHES = {"default": helpers.make_batch(TINY), **{i: helpers.ragged_batch(TINY, i) for i in range(3)}}


def check(name, key="default", batch=None, **static):
    batch = BATCHES[key] if batch is None else batch
    return helpers.check_step(name, TINY, PARAMS, batch, ("tiny", key), **static)


# n = 2 is the shortest differentiable stretch, 5 one that ends inside prompts and exceeds others, 64 is exact.
@pytest.mark.parametrize(
    "prefix_grad", ["exact", "stop", 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 64))]
)
def test_every_mode_of_a_coupled_objective(x64, prefix_grad):
    for key in BATCHES:
        check("coupled", key, prefix_grad=prefix_grad, chunk_size=4, branch_batch=2)


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_activations": "keep", "chunk_size": 7, "branch_batch": 4, "remat_policy": "nothing_saveable"},
        pytest.param(
            {"prefix_activations": "recompute", "chunk_size": 64, "branch_batch": 3, "remat_policy": "dots_saveable"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"prefix_activations": "keep", "prefix_grad": 5, "chunk_size": 3, "branch_batch": 99},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_options_do_not_change_the_gradient(x64, options):
    for key in ("default", 0):
        check("coupled", key, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain_grpo", {"prefix_grad": "exact", "chunk_size": 4, "branch_batch": 2}),
        ("plain_grpo", {"prefix_grad": "stop", "chunk_size": 4, "branch_batch": 2}),
        ("plain_gspo", {"prefix_grad": "exact", "chunk_size": 7, "branch_batch": 1, "prefix_activations": "keep"}),
        ("plain_dpo", {"prefix_grad": "exact", "chunk_size": 4, "branch_batch": 3}),
        pytest.param("grpo", {"prefix_grad": "exact", "chunk_size": 4, "branch_batch": 3}, marks=pytest.mark.slow),
    ],
)
def test_one_pass_objectives(x64, name, options):
    for key in BATCHES:
        check(name, key, **options)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        pytest.param(
            helpers.MIXED,
            {"prefix_activations": "recompute", "remat_policy": "nothing_saveable"},
            marks=pytest.mark.slow,  # in the fast tier, gemma2 and gemma3 have unlike blocks
        ),
        pytest.param(helpers.MIXED, {"prefix_grad": 4, "branch_batch": 1}, marks=pytest.mark.slow),
        pytest.param(helpers.HOLLOW, {"prefix_activations": "keep"}, marks=pytest.mark.slow),
    ],
    ids=["mixed-recompute", "mixed-n", "hollow-keep"],
)
def test_unlike_blocks(x64, config, options):
    options = {"chunk_size": 3, "branch_batch": 2, **options}
    params, batch = helpers.random_params(config, 2), helpers.make_batch(config)
    helpers.check_step("coupled", config, params, batch, "unlike", **options)


@pytest.mark.parametrize("name", ["plain_grpo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_a_fused_model(x64, name):
    """The first member keeps its attention, the wide FFN stands between blocks that have theirs."""
    parent = helpers.tiny(blocks=uniform_blocks(5, 2, 12))
    surgery = fusion.chain(fusion.remove_attention([2, 3]), fusion.fuse_ffn([(1, 2)]))
    config, params = surgery(parent, helpers.random_params(parent))
    assert [b.ffn_width for b in config.blocks] == [12, 24, 12, 12] and not config.blocks[2].has_attention
    batch = helpers.make_batch(config)
    helpers.check_step(name, config, params, batch, "fused", chunk_size=4, branch_batch=2)


def test_a_model_without_attention(x64):
    config = helpers.tiny(blocks=(BlockConfig("none", 1, 12),) * 2)
    params, batch = helpers.random_params(config), helpers.make_batch(config)
    helpers.check_step("plain_grpo", config, params, batch, "no attention", chunk_size=4, branch_batch=2)


# P = 1, G = 1 and R = 1; groups of 1 and 5 together. More shapes are in the slow tier.
@pytest.mark.parametrize(
    ("prompts", "responses", "options"),
    [
        ((1,), ((1,),), {"prefix_grad": "exact"}),
        pytest.param((1, 1), ((4, 2, 1), (1, 0, 4)), {"branch_batch": 3}, marks=pytest.mark.slow),
        pytest.param(
            (6, 2),
            ((3,), (5, 1, 2, 5, 5)),
            {"prefix_grad": "exact", "chunk_size": 2, "branch_batch": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_small_shapes(x64, prompts, responses, options):
    batch = helpers.make_batch(TINY, prompts, responses, None, silent=(), tool_tokens=False)
    check("coupled", ("shape", prompts, responses), batch, **{"chunk_size": 8, **options})


def test_a_query_and_key_projection_is_zero_by_cancellation_for_a_single_token(x64):
    """P = 1, R = 1: one key, so the softmax is constant; the metric demands ≤ 1e-14 of the whole gradient."""
    batch = helpers.make_batch(TINY, (1,), ((1,),), None, silent=())
    (_, _), grads = helpers.oracle_value_and_grad(("tiny", ("shape", (1,), ((1,),))), "coupled", TINY, PARAMS, batch)
    assert not grads["runs"]["0"]["q_proj"].any() and grads["runs"]["0"]["v_proj"].any()


@pytest.mark.parametrize("name", ["coupled", "plain_grpo"])
@pytest.mark.parametrize("kind", ["masked", "empty", "padding"])
def test_nothing_carries_loss(x64, name, kind):
    """All responses masked, all empty, or nothing but padding: a finite loss and gradients of exactly zero."""
    options = {"prefix_grad": "exact", "temperature": 1.0, "chunk_size": 4, "branch_batch": 2}
    if kind == "masked":
        silent = tuple((b, g) for b in range(4) for g in range(4))
        batch = helpers.make_batch(TINY, silent=silent)
    elif kind == "empty":
        batch = helpers.make_batch(TINY, (11, 3, 1, 2), ((0, 0), (0,), (0, 0, 0, 0), (0,)), (11, 4, 6))
    else:
        batch = helpers.make_batch(TINY, (0, 0, 0, 0), ((), (), (), ()), (11, 4, 6))
    (loss, metrics), grads = helpers.engine(name, TINY, **options)(PARAMS, batch)
    assert np.isfinite(loss) and all(np.isfinite(m) for m in metrics.values())
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert not np.asarray(leaf).any(), path


def test_float32():
    """The oracle is evaluated at the same float32-valued parameters."""
    params = helpers.random_params(TINY, 1, np.float32)
    for seed in range(2):
        batch = helpers.ragged_batch(TINY, seed, dtype=np.float32)
        helpers.check_step(
            "coupled",
            TINY,
            params,
            batch,
            ("float32", seed),
            tol=1e-5,
            chunk_size=4,
            branch_batch=2,
        )


def test_dense_baseline(x64):
    for key in BATCHES:
        check("coupled", key, dense=True, branch_batch=3)


def test_without_jit_on_numpy_arrays(x64):
    """As `jax.value_and_grad` would: jit is the caller's choice, and parameters may be numpy arrays."""
    config = helpers.tiny(blocks=TINY.blocks[:1])
    params = helpers.random_params(config)
    batch = helpers.make_batch(config, (6,), ((2, 2),), None, silent=())
    _, grads = replay.value_and_grad(helpers.PLAIN_GRPO, config, chunk_size=4)(params, batch)
    _, want = oracle.value_and_grad(helpers.PLAIN_GRPO, config, params, batch)
    oracle.assert_grads_close(grads, want, 1e-12)


@pytest.mark.parametrize("branch_batch", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_objective_of_whole_groups_sees_g_without_padding(x64, branch_batch):
    """A plain mean over [B, G, R] of one full group of three: whatever the branch batch pads G to."""

    def mean(logps, entropies, batch):
        assert logps.shape == (1, 3, 2)
        return -logps.mean(), {"nested": {"x": logps.sum()}}

    batch = helpers.make_batch(TINY, (4,), ((2, 2, 2),), None, silent=())
    step = jax.jit(replay.value_and_grad(mean, TINY, chunk_size=4, branch_batch=branch_batch))
    (loss, metrics), grads = step(PARAMS, batch)
    (want, _), want_grads = oracle.value_and_grad(lambda *a: (mean(*a)[0], {}), TINY, PARAMS, batch)
    np.testing.assert_allclose(loss, want, rtol=1e-12)
    np.testing.assert_allclose(metrics["nested"]["x"], -6 * want, rtol=1e-12)
    oracle.assert_grads_close(grads, want_grads, 1e-12)
