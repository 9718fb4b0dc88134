"""Hand-computed values of the objectives that vary GRPO, GSPO, REINFORCE and DPO, and of what goes with them."""

import jax.numpy as jnp
import numpy as np
import pytest

from lsfuse.rl import (
    cispo,
    correct_importance,
    dapo,
    dpo,
    dr_grpo,
    group_advantages,
    grpo,
    gspo,
    gspo_token,
    kl_estimate,
    nll,
    overlong_penalty,
    reinforce,
    rloo,
)
from tests.test_objectives import make_batch, run, single


def test_k2(x64):
    """p = .5, reference .25: (ln 2)² / 2 = .240227; its slope in log p is ln 2."""
    value = kl_estimate(jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.25])), jnp.array([True]), "k2")
    np.testing.assert_allclose(value, [0.240227], atol=1e-6)
    loss, metrics, grad = run(grpo(beta=2.0, kl="k2"), *single(np.log([0.5]), ref=np.log([0.25]), advantages=0.0))
    np.testing.assert_allclose([loss, metrics["kl"].compute(), grad.item()], [0.480453, 0.240227, 1.386294], atol=1e-6)


def test_dr_grpo(x64):
    """Responses of 1 and 3 tokens of loss -A = -1 and 1, room for 6: (-1 + 3) / (2 · 6) = 1/6, whatever the lengths."""
    logps, entropies, batch = make_batch(dtype=np.float64, lengths=((1, 3),), group_sizes=(2,), old=False)
    batch = batch.replace(completion_mask=np.ones((1, 2, 6)), advantages=jnp.array([[1.0, -1.0]]))
    loss, _, grad = run(dr_grpo(), logps, entropies, batch)
    np.testing.assert_allclose(loss, 1 / 6, rtol=1e-12)
    np.testing.assert_allclose(grad[0, :, :3], [[-1 / 12, 0, 0], [1 / 12] * 3], rtol=1e-12)


def test_dapo(x64):
    """The same responses over 4 tokens: (-1 + 3) / 4 = .5. Ratio e^.3 = 1.34986 is clipped at 1.28."""
    logps, entropies, batch = make_batch(dtype=np.float64, lengths=((1, 3),), group_sizes=(2,), old=False)
    batch = batch.replace(completion_mask=np.ones((1, 2, 6)), advantages=jnp.array([[1.0, -1.0]]))
    np.testing.assert_allclose(run(dapo(), logps, entropies, batch)[0], 0.5, rtol=1e-12)
    loss, _, grad = run(dapo(), *single([-1.0], old=[-1.3]))
    np.testing.assert_allclose([loss, grad.item()], [-1.28, 0.0], atol=1e-12)


def test_dapo_s_mean_is_over_the_batch(x64):
    """Two groups of one response each, 1 token of advantage 1 and 3 of -1, on-policy: (-1 + 3) / 4 = .5; a mean of
    each prompt's own mean would be (-1 + 1) / 2 = 0."""
    logps, entropies, batch = make_batch(dtype=np.float64, lengths=((1,), (3,)), group_sizes=(1, 1), old=False)
    batch = batch.replace(completion_mask=np.ones_like(batch.completion_mask), advantages=jnp.array([[1.0], [-1.0]]))
    np.testing.assert_allclose(run(dapo(), logps, entropies, batch)[0], 0.5, rtol=1e-12)


@pytest.mark.parametrize("log_ratio, advantage, loss, grad", [
    (1.5, -1.0, 3.0, 0.0),  # e^1.5 = 4.4817 is cut at 3
    (1.0, -2.0, 5.436564, 5.436564),  # e = 2.71828, below 3
    (1.5, 1.0, -1.2, 0.0),  # a good token: the ordinary clip
])  # fmt: skip
def test_dual_clip(x64, log_ratio, advantage, loss, grad):
    got, _, slope = run(grpo(dual_clip=3.0), *single([-1.0], old=[-1.0 - log_ratio], advantages=advantage))
    np.testing.assert_allclose([got, slope.item()], [loss, grad], atol=1e-6)


def test_gspo_token(x64):
    """With one advantage a response, loss and gradient are GSPO's; else every token has its own: A = (1, -2), s = e^.1:
    loss (-1.105171 + 2.210342) / 2 = .552585, gradient (-.552585, 1.105171)."""
    rows = make_batch(dtype=np.float64)
    for options in ({"epsilon": 0.05, "epsilon_high": 0.05}, {"beta": 0.3}):
        (loss, _, grad), (want, _, want_grad) = (run(f(**options), *rows) for f in (gspo_token, gspo))
        np.testing.assert_allclose(loss, want, rtol=1e-12)
        np.testing.assert_allclose(grad, want_grad, rtol=1e-12, atol=1e-15)
    logps, entropies, batch = single([-1.0, -2.0], old=[-1.2, -2.0])
    batch = batch.replace(advantages=np.array([[[1.0, -2.0]]]))
    loss, _, grad = run(gspo_token(0.5, 0.5), logps, entropies, batch)
    np.testing.assert_allclose(loss, 0.552585, atol=1e-6)
    np.testing.assert_allclose(grad, [[[-0.552585, 1.105171]]], atol=1e-6)


def test_cispo(x64):
    """Ratio e^.3 clipped at 1.2 still has a gradient: loss 1.2 · 1 · 1 = 1.2, slope -1.2; without clip -1.349859."""
    loss, metrics, grad = run(cispo(0.2, 0.2), *single([-1.0], old=[-1.3]))
    np.testing.assert_allclose([loss, grad.item()], [1.2, -1.2], atol=1e-12)
    assert metrics["clip_ratio/high"].compute() == 1.0
    np.testing.assert_allclose(run(cispo(), *single([-1.0], old=[-1.3]))[2].item(), -1.349859, atol=1e-6)
    logps, entropies, batch = make_batch(old=False, dtype=np.float64)
    want = run(reinforce("token-mean"), logps, entropies, batch)[2]
    np.testing.assert_allclose(run(cispo(), logps, entropies, batch)[2], want, rtol=1e-12)


def test_rloo_and_reinforce_with_baselines(x64):
    """Rewards 1, 0, 0: against the others' mean 1, -.5, -.5. Batch baseline of [1, 0, 0 | 3]: mean 1. A · Σ log π."""
    got = group_advantages([[1.0, 0.0, 0.0]], [3], scale="none", baseline="leave_one_out")
    np.testing.assert_allclose(got, [[1.0, -0.5, -0.5]], rtol=1e-7)
    rewards = [[1.0, 0.0, 0.0], [3.0, np.nan, np.nan]]
    got = group_advantages(rewards, [3, 1], scale="none", baseline="batch")
    np.testing.assert_allclose(got, [[0.0, -1.0, -1.0], [2.0, 0.0, 0.0]], atol=1e-7)
    got = group_advantages(rewards, [3, 1], baseline="batch", eps=0.0)
    np.testing.assert_allclose(got * np.sqrt(2), [[0.0, -1.0, -1.0], [2.0, 0.0, 0.0]], atol=1e-6)
    np.testing.assert_array_equal(group_advantages([[2.0, 5.0]], [2], "none", baseline="none"), [[2.0, 5.0]])
    with pytest.raises(ValueError, match="group 1 has one response"):
        group_advantages(rewards, [3, 1], baseline="leave_one_out")
    with pytest.raises(ValueError, match="group, leave_one_out, batch, none"):
        group_advantages(rewards, [3, 1], baseline="mean")
    loss, _, grad = run(reinforce(), *single([-1.0, -2.0], advantages=0.5))  # 0.5 · 3 / 2
    np.testing.assert_allclose(loss, 0.75, rtol=1e-12)
    np.testing.assert_allclose(grad, [[[-0.25, -0.25]]], rtol=1e-12)
    loss, _, grad = run(rloo(), *single([-1.0, -2.0], advantages=0.5))
    np.testing.assert_allclose(loss, 1.5, rtol=1e-12)
    np.testing.assert_allclose(grad, [[[-0.5, -0.5]]], rtol=1e-12)


def test_overlong_penalty():
    """Room for 10, buffer of 4: no penalty up to 6, then -1/4 a token."""
    np.testing.assert_allclose(overlong_penalty(np.array([[0, 6, 7, 9, 10]]), 10, 4), [[0, 0, -0.25, -0.75, -1.0]])
    for buffer in (0, 11):
        with pytest.raises(ValueError, match="between 1 and max_length 10"):
            overlong_penalty(np.array([1]), 10, buffer)


def test_importance_correction(x64):
    """log π_old - log π_sampling = (.1, .5, 1): weights e^.1, e^.5, capped at 2; as a product e^1.6 = 4.95, capped."""
    logps, entropies, batch = single([-1.0, -1.0, -1.0, np.nan], old=[-1.0, -1.0, -1.0, np.nan], mask=[1, 1, 1, 0])
    theirs = np.array([[[-1.1, -1.5, -2.0, np.nan]]])
    got = correct_importance(batch, theirs)
    np.testing.assert_allclose(got.advantages, [[[1.105171, 1.648721, 2.0, 0.0]]], atol=1e-6)
    loss, _, _ = run(grpo(), logps, entropies, got)
    np.testing.assert_allclose(loss, -(1.105171 + 1.648721 + 2.0) / 3, atol=1e-6)
    np.testing.assert_allclose(correct_importance(batch, theirs, "sequence").advantages, [[2.0]], rtol=1e-12)
    got = correct_importance(batch, theirs, "sequence", cap=10.0)
    np.testing.assert_allclose(got.advantages, [[4.953032]], atol=1e-6)
    run(gspo(), logps, entropies, got)
    for arguments, message in (
        ((batch, theirs, "response"), "token, sequence"),
        ((batch, theirs, "token", 0.0), "cap must be positive"),
        ((batch, theirs[..., :2]), r"\(1, 1, 2\)"),
        ((batch.replace(old_per_token_logps=None), theirs), "old_per_token_logps"),
    ):
        with pytest.raises(ValueError, match=message):
            correct_importance(*arguments)


def test_several_answers_to_one_prompt(x64):
    """Targets of 1 and 2 tokens with log-probs -1 | -2, -3: 6 nats over 3 tokens."""
    logps, entropies, batch = make_batch(dtype=np.float64, lengths=((1, 2),), group_sizes=(2,))
    logps = logps.at[0, :, :2].set(jnp.array([[-1.0, 9.0], [-2.0, -3.0]]))
    loss, metrics, _ = run(nll(), logps, entropies, batch.replace(completion_mask=np.ones((1, 2, 6))))
    np.testing.assert_allclose([loss, metrics["nll"].compute()], [2.0, 2.0], rtol=1e-12)


def test_dpo_variants(x64):
    """beta .5, log-ratios chosen .4 + .2, rejected -.1: margin .35. Smoothing .1: .533382 + .1 · .35 = .568382.
    IPO: means .3 and -.1, h = .4, (.4 - 1)² = .36. Reference-free: log-probs -.3 - .1 and -.6: margin .1: .644397."""
    logps, entropies, batch = make_batch(dtype=np.float64, lengths=((2, 1),), group_sizes=(2,))
    delta = np.array([[[0.4, 0.2, 9, 9, 9, 9], [-0.1, 9, 9, 9, 9, 9]]])
    batch = batch.replace(ref_per_token_logps=logps - delta, completion_mask=np.ones((1, 2, 6)))
    loss = run(dpo(0.5, label_smoothing=0.1), logps, entropies, batch)[0]
    np.testing.assert_allclose(loss, 0.568382, atol=1e-6)
    loss, metrics, _ = run(dpo(0.5, loss_type="ipo"), logps, entropies, batch)
    np.testing.assert_allclose([loss, metrics["margin"].compute()], [0.36, 0.2], atol=1e-12)
    logps = logps.at[0, :, :2].set(jnp.array([[-0.3, -0.1], [-0.6, 9.0]]))
    batch = batch.replace(ref_per_token_logps=None)
    loss = run(dpo(0.5, reference_free=True), logps, entropies, batch)[0]
    np.testing.assert_allclose(loss, 0.644397, atol=1e-6)
    with pytest.raises(ValueError, match="dpo needs batch.ref_per_token_logps"):
        dpo().prepare(batch)


def in_float32(logps, entropies, batch):
    """Also under x64, as the engine would hand them over."""
    cast = lambda x: x.astype(np.float32) if getattr(x, "dtype", None) == np.float64 else x  # noqa: E731
    fields = ("old_per_token_logps", "ref_per_token_logps", "advantages")
    return cast(logps), cast(entropies), batch.replace(**{name: cast(getattr(batch, name)) for name in fields})


@pytest.mark.parametrize("advantage", [1.0, 0.0])
@pytest.mark.parametrize("objective", [grpo(), gspo(), dapo(), gspo_token(), cispo(), grpo(dual_clip=3.0)])
def test_ratios_beyond_float32_are_clipped_and_finite(objective, advantage):
    """Log-ratio 99, whose exponential float32 cannot hold."""
    loss, _, grad = run(objective, *in_float32(*single([-1.0, -1.0], old=[-100.0, -100.0], advantages=advantage)))
    assert np.isfinite(loss) and np.isfinite(grad).all()
    if objective.name != "cispo":
        assert not np.asarray(grad).any()


@pytest.mark.parametrize("objective", [grpo(beta=0.04), gspo(beta=0.04), gspo_token(beta=0.04), cispo()])
def test_tokens_that_became_impossible_leave_everything_finite(objective):
    """Log-prob -300 where old policy and reference have -1: a ratio of 0, and k3's of more than float32 holds."""
    rows = in_float32(*single([-300.0, -1.0], old=[-1.0, -1.0], ref=[-1.0, -1.0], advantages=1.0))
    loss, metrics, grad = run(objective, *rows)
    assert np.isfinite(loss) and np.isfinite(grad).all()
    assert {name: value for name, value in metrics.items() if not np.isfinite(value.compute())} == {}
    if objective.name != "cispo":
        assert np.asarray(grad).min() < 0  # the KL pulls the log-prob up


def test_equal_rewards_without_eps():
    got = group_advantages([[1.0, 1.0], [2.0, np.nan]], [2, 1], eps=0.0)
    np.testing.assert_array_equal(got, np.zeros((2, 2)))
    for arguments, message in (({"eps": -1.0}, "not be negative"), ({"baseline": "none"}, 'take scale "none"')):
        with pytest.raises(ValueError, match=message):
            group_advantages([[1.0, 1.0]], [2], **arguments)
