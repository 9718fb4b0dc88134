"""Objectives: hand-computed values, numerical gradients, masked poison, and the same result in any split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsfuse.replay.batch import Batch
from lsfuse.rl import (
    cispo,
    dapo,
    dpo,
    dr_grpo,
    grpo,
    gspo,
    gspo_token,
    kl_estimate,
    log_ratio,
    nll,
    reinforce,
    rloo,
    token_weights,
)
from lsfuse.rl.objectives.gspo import sequence_log_ratio
from tests import helpers

OBJECTIVES = {
    "grpo": grpo(beta=0.3),
    "grpo clip-higher k1": grpo(epsilon_high=0.28, beta=0.3, kl="k1", loss_agg_mode="token-mean"),
    "gspo": gspo(epsilon=0.02, epsilon_high=0.05, beta=0.2, loss_agg_mode="seq-mean-token-sum"),
    "reinforce": reinforce(),
    "nll": nll(),
    "dpo": dpo(),
    "dpo smoothed": dpo(label_smoothing=0.2),
    "dpo ipo": dpo(loss_type="ipo"),
    "dpo reference-free": dpo(reference_free=True),
    "dr_grpo": dr_grpo(beta=0.1, kl="k2"),
    "dapo": dapo(dual_clip=2.0),
    "gspo_token": gspo_token(epsilon=0.02, epsilon_high=0.05),
    "cispo": cispo(0.2, 0.2),
    "rloo": rloo(),
}


def make_batch(seed=0, lengths=((5, 3, 1, 4), (2, 6, 0, 0)), group_sizes=(4, 2), dtype=np.float32, old=True):
    """A ragged batch of log-probs near each other: (per_token_logps, entropies, batch), with some masked tokens."""
    rng = np.random.default_rng(seed)
    lengths = np.array(lengths)
    shape = (*lengths.shape, 6)
    mask = rng.random(shape) < 0.8
    mask[..., 0] = True
    logps = -rng.exponential(size=shape).astype(dtype) - 0.1
    near = lambda scale: (logps + scale * rng.normal(size=shape)).astype(dtype)  # noqa: E731
    batch = Batch(
        prompt_ids=np.ones((shape[0], 3), np.int32),
        prompt_lengths=np.full(shape[0], 3, np.int32),
        completion_ids=np.ones(shape, np.int32),
        completion_lengths=lengths.astype(np.int32),
        completion_mask=mask.astype(np.int32),
        group_sizes=np.array(group_sizes, np.int32),
        advantages=rng.normal(size=shape[:2]).astype(dtype),
        old_per_token_logps=near(0.3) if old else None,
        ref_per_token_logps=near(0.5),
    )
    return jnp.asarray(logps), jnp.asarray(rng.random(shape), dtype), jax.tree.map(jnp.asarray, batch)


def single(logps, old=None, ref=None, mask=None, advantages=1.0):
    """One group of one response."""
    logps = np.atleast_1d(np.asarray(logps, np.float64))
    row = lambda values: None if values is None else np.asarray(values, np.float64)[None, None]  # noqa: E731
    batch = Batch(
        prompt_ids=np.ones((1, 1), np.int32),
        prompt_lengths=np.ones(1, np.int32),
        completion_ids=np.ones((1, 1, len(logps)), np.int32),
        completion_lengths=np.full((1, 1), len(logps), np.int32),
        completion_mask=np.ones((1, 1, len(logps)), np.int32) if mask is None else np.asarray(mask)[None, None],
        group_sizes=np.ones(1, np.int32),
        advantages=np.full((1, 1), advantages),
        old_per_token_logps=row(old),
        ref_per_token_logps=row(ref),
    )
    return row(logps), np.zeros_like(row(logps)), batch


def run(objective, logps, entropies, batch):
    """(loss, metrics, gradient of the log-probs), prepared."""
    (loss, metrics), grad = jitted(objective)(jnp.asarray(logps), entropies, objective.prepare(batch))
    return loss, metrics, grad


@functools.lru_cache
def jitted(objective):
    return jax.jit(jax.value_and_grad(objective, has_aux=True))


# --- hand-computed ----------------------------------------------------------------------------------------------------


def test_token_and_sequence_ratios(x64):
    """Log-ratios [.1, .1]: 1.10517 per token and per sequence, not exp(.2); [.3, -.3] masked [1, 0]: exp(.3)."""
    ratios = log_ratio(jnp.array([[[0.1, 0.1]]]), jnp.zeros((1, 1, 2)), jnp.ones((1, 1, 2), bool))
    np.testing.assert_allclose(jnp.exp(ratios), np.full((1, 1, 2), 1.10517), atol=1e-5)
    np.testing.assert_allclose(jnp.exp(sequence_log_ratio(ratios, jnp.ones((1, 1, 2), bool))), [[[1.10517]]], atol=1e-5)
    mask = jnp.array([[[True, False]]])
    np.testing.assert_allclose(sequence_log_ratio(jnp.array([[[0.3, -0.3]]]), mask), [[[0.3]]], atol=1e-12)
    for factory in (grpo, gspo):
        loss, metrics, _ = run(factory(0.9, 0.9), *single([-1.0, -2.0], old=[-1.1, -2.1]))
        np.testing.assert_allclose(loss, -1.10517, atol=1e-5)
        np.testing.assert_allclose(metrics["ratio"].compute(), 1.10517, atol=1e-5)
        loss, _, _ = run(factory(0.9, 0.9), *single([-1.0, -2.0], old=[-1.3, -1.7], mask=[1, 0]))
        np.testing.assert_allclose(loss, -1.34986, atol=1e-5)


def test_kl_estimates(x64):
    """p = .5, reference .25: K1 = ln 2 = .693147; K3 = .5 + .693147 - 1 = .193147."""
    args = jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.25])), jnp.array([True])
    np.testing.assert_allclose(kl_estimate(*args, "k1"), [0.693147], atol=1e-6)
    np.testing.assert_allclose(kl_estimate(*args, "k3"), [0.193147], atol=1e-6)
    rows = single(np.log([0.5]), ref=np.log([0.25]), advantages=0.0)
    for kind, value in (("k1", 0.693147), ("k3", 0.193147)):
        loss, metrics, _ = run(grpo(beta=2.0, kl=kind), *rows)
        np.testing.assert_allclose([loss, metrics["kl"].compute()], [2 * value, value], atol=3e-6)
        loss, metrics, _ = run(grpo(beta=0.0, kl=kind), *rows)
        np.testing.assert_allclose([loss, metrics["kl"].compute()], [0.0, value], atol=3e-6)


def test_loss_aggregation(x64):
    """Rows of length 1 (per-token loss 1) and 3 (loss 0): 0.25 over tokens, 0.5 over rows; sums: (1 + 0) / 2."""
    logps = np.array([[[-1.0, 0, 0], [0.0, 0, 0]]])
    _, entropies, batch = make_batch(dtype=np.float64, lengths=((1, 3),), group_sizes=(2,))
    batch = batch.replace(completion_mask=np.ones((1, 2, 3)), completion_ids=np.ones((1, 2, 3), np.int32))
    batch = batch.replace(advantages=None, old_per_token_logps=None, ref_per_token_logps=None)
    for mode, value in (("token-mean", 0.25), ("seq-mean-token-mean", 0.5), ("seq-mean-token-sum", 0.5)):
        loss, _, _ = run(nll(mode), logps, entropies[..., :3], batch)
        np.testing.assert_allclose(loss, value, rtol=1e-15)
    logps[0, 1] = -1.0
    for mode, value in (("token-mean", 1.0), ("seq-mean-token-mean", 1.0), ("seq-mean-token-sum", 2.0)):
        np.testing.assert_allclose(run(nll(mode), logps, entropies[..., :3], batch)[0], value, rtol=1e-15)


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "loss", "grad"),
    [
        (0.1, 1.0, -1.105171, -1.105171),
        (0.3, 1.0, -1.28, 0.0),  # clipped high
        (0.3, -1.0, 1.349859, 1.349859),  # not clipped: a bad token that became likelier
        (-0.3, 1.0, -0.740818, -0.740818),
        (-0.3, -1.0, 0.8, 0.0),  # clipped low
    ],
)
@pytest.mark.parametrize("factory", [grpo, gspo])
def test_clipping(x64, factory, log_ratios, advantage, loss, grad):
    got, metrics, got_grad = run(factory(0.2, 0.28), *single([-1.0], old=[-1.0 - log_ratios], advantages=advantage))
    np.testing.assert_allclose([got, got_grad.item()], [loss, grad], atol=1e-6)
    assert metrics["clip_ratio/high"].compute() == (loss == -1.28)
    assert metrics["clip_ratio/low"].compute() == (loss == 0.8)


def test_dpo_by_hand(x64):
    """beta .5; log-ratios to the reference: chosen .4 + .2, rejected -.1: margin .35, loss -ln σ(.35) = .533382."""
    logps, entropies, batch = make_batch(dtype=np.float64, lengths=((2, 1),), group_sizes=(2,))
    delta = np.array([[[0.4, 0.2, 9, 9, 9, 9], [-0.1, 9, 9, 9, 9, 9]]])
    batch = batch.replace(ref_per_token_logps=logps - delta, completion_mask=np.ones((1, 2, 6)))
    loss, metrics, grad = run(dpo(0.5), logps, entropies, batch)
    np.testing.assert_allclose(loss, 0.533382, atol=1e-6)
    np.testing.assert_allclose(metrics["margin"].compute(), 0.35, atol=1e-12)
    np.testing.assert_allclose(metrics["reward/chosen"].compute(), 0.3, atol=1e-12)
    np.testing.assert_allclose(metrics["reward/rejected"].compute(), -0.05, atol=1e-12)
    assert metrics["accuracy"].compute() == 1.0
    slope = 0.5 / (1 + np.exp(0.35))  # β σ(-margin)
    np.testing.assert_allclose(grad[0, :, :3], [[-slope, -slope, 0], [slope, 0, 0]], atol=1e-12)


def test_on_policy_ratio_is_exactly_one():
    logps, entropies, batch = make_batch(old=False)
    for factory in (grpo, gspo):
        loss, metrics, grad = run(factory(), logps, entropies, batch)
        assert metrics["ratio"].compute() == 1.0 and metrics["approx_kl"].compute() == 0.0
        want, _, want_grad = run(reinforce(), logps, entropies, batch)
        np.testing.assert_allclose(grad, want_grad, rtol=1e-5, atol=1e-8)
        given = batch.replace(old_per_token_logps=logps)
        np.testing.assert_allclose(grad, run(factory(), logps, entropies, given)[2], rtol=1e-6, atol=1e-9)


# --- properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n not in ("gspo_token", "cispo")])
def test_numerical_gradient(x64, name):
    objective = OBJECTIVES[name]
    logps, entropies, batch = make_batch(dtype=np.float64)
    _, _, grad = run(objective, logps, entropies, batch)
    batch = objective.prepare(batch)
    loss = jax.jit(lambda x: objective(x, entropies, batch)[0])
    step = 1e-6
    want = np.zeros(logps.shape)
    for index in np.ndindex(*logps.shape):
        want[index] = (loss(logps.at[index].add(step)) - loss(logps.at[index].add(-step))) / (2 * step)
    assert np.count_nonzero(want) > 5
    np.testing.assert_allclose(grad, want, atol=1e-8)


@pytest.mark.parametrize("poison", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_masked_positions_may_hold_anything(name, poison):
    objective = OBJECTIVES[name]
    logps, entropies, batch = make_batch()
    want = run(objective, logps, entropies, batch)
    spoil = lambda values: jnp.where(batch.loss_mask, values, poison)  # noqa: E731
    batch = batch.replace(
        old_per_token_logps=spoil(batch.old_per_token_logps),
        ref_per_token_logps=spoil(batch.ref_per_token_logps),
        advantages=jnp.where(batch.branch_mask, batch.advantages, poison),
    )
    got = run(objective, spoil(logps), spoil(entropies), batch)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert np.all(np.asarray(got[2])[~np.asarray(batch.loss_mask)] == 0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_to_learn_from(name):
    """Entirely masked, all responses empty, or only padding groups: loss 0 and gradient 0, no NaN."""
    objective = OBJECTIVES[name]
    logps, entropies, batch = make_batch()
    nan = jnp.full_like(logps, jnp.nan)
    for changes in (
        {"completion_mask": jnp.zeros_like(batch.completion_mask)},
        {"completion_lengths": jnp.zeros_like(batch.completion_lengths)},
        {"group_sizes": jnp.zeros_like(batch.group_sizes)},
    ):
        loss, metrics, grad = run(objective, nan, nan, batch.replace(**changes))
        assert loss == 0.0
        np.testing.assert_array_equal(grad, np.zeros_like(grad))
        assert all(m.weight == 0 and m.compute() == 0 for m in metrics.values()), metrics


@pytest.mark.parametrize("name", ["grpo", "gspo", "reinforce", "cispo"])
def test_an_all_masked_response_contributes_nothing(x64, name):
    objective = OBJECTIVES[name]
    logps, entropies, batch = make_batch(dtype=np.float64)
    batch = batch.replace(completion_mask=batch.completion_mask.at[0, 1].set(0))
    loss, _, grad = run(objective, logps.at[0, 1].set(jnp.nan), entropies, batch)
    assert np.isfinite(loss) and np.all(np.asarray(grad[0, 1]) == 0)
    # It still counts as one of the six responses: the others weigh 1/6.
    weights = objective.prepare(batch).loss_weights
    if name in ("grpo", "reinforce"):
        np.testing.assert_allclose(weights.sum(), 5 / 6, rtol=1e-12)


def parts_of(batch, kind):
    """Slices of a batch as the engine makes them: groups, or single branches."""
    for b in range(batch.completion_ids.shape[0]):
        one = {
            f: getattr(batch, f)[b : b + 1]
            for f in ("prompt_ids", "prompt_lengths", "completion_ids", "completion_lengths", "completion_mask")
            + ("advantages", "old_per_token_logps", "ref_per_token_logps", "loss_weights")
        }
        if kind == "group":
            yield (b, slice(None)), batch.replace(group_sizes=batch.group_sizes[b : b + 1], **one)
            continue
        for g in range(batch.completion_ids.shape[1]):
            cut = {f: v[:, g : g + 1] if f[:6] != "prompt" else v for f, v in one.items()}
            yield (b, slice(g, g + 1)), batch.replace(group_sizes=(batch.group_sizes[b : b + 1] > g).astype(int), **cut)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_parts_of_a_batch_add_up(x64, name):
    objective = OBJECTIVES[name]
    logps, entropies, batch = make_batch(dtype=np.float64)
    loss, metrics, grad = run(objective, logps, entropies, batch)
    batch = objective.prepare(batch)
    total, sums = 0.0, None
    for (b, g), part in parts_of(batch, objective.coupling):
        part_loss, part_metrics, part_grad = run(objective, logps[b : b + 1, g], entropies[b : b + 1, g], part)
        np.testing.assert_allclose(part_grad[0], grad[b, g], atol=1e-15)
        total += part_loss
        sums = part_metrics if sums is None else {k: sums[k] + v for k, v in part_metrics.items()}
    np.testing.assert_allclose(total, loss, rtol=1e-12)
    for key, value in metrics.items():
        np.testing.assert_allclose(sums[key].compute(), value.compute(), rtol=1e-12, err_msg=key)


def test_advantages_per_token(x64):
    logps, entropies, batch = make_batch(dtype=np.float64)
    spread = jnp.broadcast_to(batch.advantages[..., None], logps.shape)
    want = run(grpo(), logps, entropies, batch)
    got = run(grpo(), logps, entropies, batch.replace(advantages=jnp.where(batch.loss_mask, spread, jnp.nan)))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    with pytest.raises(ValueError, match="per response"):
        gspo().prepare(batch.replace(advantages=spread))


def test_weights_keep_to_float32_outside_x64_and_work_in_jit():
    logps, entropies, batch = make_batch()
    for name, objective in OBJECTIVES.items():
        step = jax.jit(jax.value_and_grad(lambda x, b, o=objective: o(x, entropies, o.prepare(b)), has_aux=True))
        (loss, _), grad = step(logps, batch)
        assert loss.dtype == grad.dtype == np.float32, name
        np.testing.assert_allclose(loss, run(objective, logps, entropies, batch)[0], rtol=1e-6)
    assert token_weights(batch, "token-mean").dtype == np.float32


# --- errors -----------------------------------------------------------------------------------------------------------


def test_missing_and_misshapen_fields_raise_before_any_work():
    _, _, batch = make_batch()
    for objective, field in (
        (grpo(), "advantages"),
        (grpo(beta=0.1), "ref_per_token_logps"),
        (gspo(beta=0.1), "ref_per_token_logps"),
        (reinforce(), "advantages"),
        (dpo(), "ref_per_token_logps"),
    ):
        with pytest.raises(ValueError, match=f"{objective.name} needs batch.{field}"):
            objective.prepare(batch.replace(**{field: None}))
    grpo().prepare(batch.replace(ref_per_token_logps=None, old_per_token_logps=None))
    with pytest.raises(ValueError, match=r"old_per_token_logps has shape \(2, 4, 5\).*\(2, 4, 6\)"):
        grpo().prepare(batch.replace(old_per_token_logps=jnp.zeros((2, 4, 5))))
    with pytest.raises(ValueError, match="group 1 has 3 branches"):
        dpo().prepare(batch.replace(group_sizes=jnp.array([4, 3])))


def test_an_unpaired_branch_is_left_out_in_jit(x64):
    logps, entropies, batch = make_batch(dtype=np.float64, lengths=((5, 3, 2, 0),), group_sizes=(2,))
    want = run(dpo(), logps, entropies, batch)
    odd = batch.replace(group_sizes=jnp.array([3]))
    fn = jax.value_and_grad(lambda x, b: dpo()(x, entropies, dpo().prepare(b)), has_aux=True)
    (loss, _), grad = jax.jit(fn)(logps, odd)
    np.testing.assert_allclose(loss, want[0], rtol=1e-12)
    np.testing.assert_allclose(grad, want[2], rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: grpo(epsilon=0.0), "epsilon must be positive"),
        (lambda: grpo(epsilon_high=-0.1), "epsilon_high must be positive"),
        (lambda: grpo(epsilon=1.5), "at most 1"),
        (lambda: grpo(beta=-1), "beta"),
        (lambda: grpo(beta=float("nan")), "beta"),
        (lambda: grpo(kl="k4"), "k1, k2, k3"),
        (lambda: gspo(kl="K3"), "k1, k2, k3"),
        (lambda: grpo(dual_clip=1.0), "dual_clip must be above 1"),
        (lambda: dpo(label_smoothing=0.5), "label_smoothing"),
        (lambda: dpo(loss_type="hinge"), "sigmoid, ipo"),
        (lambda: dpo(loss_type="ipo", label_smoothing=0.1), "sigmoid"),
        (lambda: cispo(epsilon=0), "epsilon must be positive"),
        (lambda: grpo(loss_agg_mode="mean"), "token-mean, seq-mean-token-mean, seq-mean-token-sum"),
        (lambda: nll("sum"), "token-mean"),
        (lambda: dpo(beta=0), "positive"),
    ],
)
def test_bad_settings_raise_when_the_objective_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- through the engine -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "gspo", "dpo"])
def test_the_engine_agrees_with_the_dense_oracle(x64, name):
    """One pass for grpo and gspo, two for dpo; groups of unlike size, one empty and one all-masked response."""
    params = helpers.random_params(helpers.TINY)
    batch = helpers.make_batch(helpers.TINY, (7, 2), ((4, 5, 1, 2), (3, 0)), shape=(8, 4, 5), seed=3, silent=((0, 2),))
    helpers.check_step(name, helpers.TINY, params, batch, "objectives", chunk_size=4, branch_batch=2)
