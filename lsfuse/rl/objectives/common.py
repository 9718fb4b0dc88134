"""Parts that objectives share: weights, ratios, KL estimates, metrics, checks.

Rule of this file: select before computing. A masked position may hold NaN or -inf, and `where(mask, f(x), 0)` would
still give it the gradient 0 · f'(NaN) = NaN; `f(where(mask, x, 0))` does not.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from lsfuse.checks import check_same_shape
from lsfuse.replay.batch import Batch
from lsfuse.replay.check import check_shapes
from lsfuse.replay.objective import masked_mean
from lsfuse.types import Array

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_KINDS = ("k1", "k2", "k3")


def token_weights(batch: Batch, loss_agg_mode: str) -> Array:
    """Weights [B, G, R] in the default float dtype, global over the batch: loss = Σ weight · per-token loss.

    "token-mean": every loss token of the batch weighs the same, as in TRL and Tunix. DAPO (arXiv 2503.14476, eq. 8)
        divides by the tokens of each prompt's group and takes the mean over prompts, so that prompts with short
        responses weigh more a token; with one group a batch the two are equal.
    "seq-mean-token-mean": mean over responses of the mean over a response's loss tokens (DeepSeekMath eq. 3).
    "seq-mean-token-sum": mean over responses of the sum over a response's loss tokens.
    "seq-mean-token-sum-norm": the same divided by R, the longest response allowed: a constant, so that no response
        weighs more for being short (Dr. GRPO, arXiv 2503.20783, sec. 3.2).

    A response without loss tokens counts as a response (its share is 0), padding branches do not count. All weights
    are 0 if nothing carries loss.
    """
    check_choice("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)
    check_shapes(batch, "token_weights")
    dtype = jnp.result_type(float)
    mask = batch.loss_mask.astype(dtype)
    if loss_agg_mode == "token-mean":
        return mask / jnp.maximum(jnp.sum(mask), 1)
    responses = jnp.maximum(jnp.sum(batch.branch_mask.astype(dtype)), 1)
    if loss_agg_mode == "seq-mean-token-sum":
        return mask / responses
    if loss_agg_mode == "seq-mean-token-sum-norm":
        return mask / (responses * mask.shape[-1])
    return mask / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1) / responses


def prepare_weights(loss_agg_mode: str, name: str, needs: tuple[str, ...] = ()):
    """A `prepare`: batch -> batch with `loss_weights`, after checking that the fields in `needs` are there.

    Weights that are already set stay as they are: whoever splits a batch by hand prepares it first, as a whole.
    """
    check_choice("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)

    def prepare(batch: Batch) -> Batch:
        require(batch, name, needs)
        if batch.loss_weights is not None:
            return batch
        return dataclasses.replace(batch, loss_weights=token_weights(batch, loss_agg_mode))

    return prepare


_HINTS = {
    "advantages": "compute them from the rewards with `group_advantages` and set batch.advantages",
    "old_per_token_logps": "score the responses with `replay.per_token_logps` before the first update",
    "ref_per_token_logps": "score the responses under the reference parameters with `replay.per_token_logps`"
    " (or set beta=0 if no reference is wanted)",
}


def require(batch: Batch, name: str, needs: tuple[str, ...]) -> None:
    """Raises ValueError naming the first field in `needs` that is None or whose shape disagrees with the batch."""
    shape = tuple(batch.completion_ids.shape)
    for field in needs:
        if getattr(batch, field) is None:
            raise ValueError(f"{name} needs batch.{field}, which is None: {_HINTS[field]}")
    for field in ("advantages", "old_per_token_logps", "ref_per_token_logps", "loss_weights"):
        value = getattr(batch, field)
        allowed = (shape[:2], shape) if field == "advantages" else (shape,)
        if value is not None and tuple(value.shape) not in allowed:
            raise ValueError(
                f"{name}: batch.{field} has shape {tuple(value.shape)}, but completion_ids {shape} asks for"
                f" {' or '.join(map(str, allowed))}"
            )


def field_of(batch: Batch, field: str) -> Array:
    """The field, which `prepare` has checked or set; ValueError if it is None because nobody called `prepare`."""
    value = getattr(batch, field)
    if value is None:
        raise ValueError(f"batch.{field} is None: call the objective's `prepare` on the whole batch first")
    return value


def log_ratio(per_token_logps: Array, old_per_token_logps: Array | None, mask: Array) -> Array:
    """log π(token) - log π_old(token), [B, G, R], exactly 0 where masked.

    Without old log-probs the policy is the old policy: the ratio is exactly 1 and its gradient is ∇ log π, as in TRL
    and Tunix.
    """
    given = {"per_token_logps": per_token_logps, "old_per_token_logps": old_per_token_logps, "mask": mask}
    check_same_shape("log_ratio", {k: v for k, v in given.items() if v is not None})
    logps = jnp.where(mask, per_token_logps, 0.0)
    if old_per_token_logps is None:
        return logps - jax.lax.stop_gradient(logps)
    return logps - jnp.where(mask, old_per_token_logps, 0.0).astype(logps.dtype)


# Beyond 88.7 the exponential is infinite in float32.
MAX_LOG_RATIO = 60.0
# Where k3 becomes a straight line: the squares of gradients, too, must stay finite.
K3_TANGENT = 20.0


def ratio_of(log_ratios: Array) -> Array:
    """exp of log-ratios, bounded at e^60: the gradient of a clipped ratio, or one whose advantage is 0, would be 0 · ∞
    beyond 88.7. No clip bound is anywhere near; where A < 0 and nothing clips, the gradient ends there, too."""
    return jnp.exp(jnp.minimum(log_ratios, MAX_LOG_RATIO))


def kl_estimate(per_token_logps: Array, ref_per_token_logps: Array, mask: Array, kind: str = "k3") -> Array:
    """Per-token estimate of KL(π ‖ π_ref) from the sampled token, [B, G, R], 0 where masked.

    Source: J. Schulman, "Approximating KL divergence" (2020). "k1": log π - log π_ref, unbiased, of either sign; as a
    loss term its on-policy gradient has mean 0, so that it only adds noise unless it enters through the reward.
    "k2": (log π - log π_ref)² / 2, biased, but its on-policy gradient is that of the KL.
    "k3": π_ref/π - 1 - log(π_ref/π), never negative (DeepSeekMath eq. 4); the one TRL uses. Beyond a
    log-ratio of 20 (a ratio of 5e8) it goes on along its tangent: finite in float32, and still pulling back.
    """
    check_choice("kl", kind, KL_KINDS)
    given = {"per_token_logps": per_token_logps, "ref_per_token_logps": ref_per_token_logps, "mask": mask}
    check_same_shape("kl_estimate", given)
    logps = jnp.where(mask, per_token_logps, 0.0)
    delta = jnp.where(mask, ref_per_token_logps, 0.0).astype(logps.dtype) - logps
    if kind == "k1":
        return -delta
    if kind == "k2":
        return 0.5 * delta * delta
    bounded = jnp.minimum(delta, K3_TANGENT)
    return jnp.expm1(bounded) - bounded + math.expm1(K3_TANGENT) * (delta - bounded)


def weighted_sum(batch: Batch, losses: Array) -> Array:
    """Σ weight · loss in the dtype of `losses` ([B, G, R] or [B, G, 1])."""
    return jnp.sum(field_of(batch, "loss_weights").astype(losses.dtype) * losses)


def per_token_advantages(batch: Batch, dtype) -> Array:
    """Advantages [B, G, R] or [B, G, 1]; those of padding branches become 0, whatever they hold."""
    advantages = field_of(batch, "advantages").astype(dtype)
    if advantages.ndim == 2:
        return jnp.where(batch.branch_mask, advantages, 0.0)[..., None]
    return jnp.where(batch.loss_mask, advantages, 0.0)


def clipped_surrogate(
    ratio: Array, advantages: Array, epsilon: float, epsilon_high: float, dual_clip: float | None = None
) -> Array:
    """-min(ratio · A, clip(ratio, 1 - epsilon, 1 + epsilon_high) · A): PPO (arXiv 1707.06347) eq. 7, as a loss.

    dual_clip: bound c > 1 on the loss of a bad token that became much likelier, c · |A| for A < 0 (arXiv 1912.09729,
    eq. 5).
    """
    clipped = jnp.clip(ratio, 1 - epsilon, 1 + epsilon_high)
    surrogate = jnp.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is not None:
        surrogate = jnp.where(advantages < 0, jnp.maximum(surrogate, dual_clip * advantages), surrogate)
    return -surrogate


def ratio_metrics(log_ratios: Array, advantages: Array, mask: Array, epsilon: float, epsilon_high: float) -> dict:
    """Means over `mask`: the ratio, an estimate of KL(π_old ‖ π), and how often each clip bound cut the gradient."""
    ratio = ratio_of(log_ratios)
    low = (ratio < 1 - epsilon) & (advantages < 0)
    high = (ratio > 1 + epsilon_high) & (advantages > 0)
    return {
        "ratio": masked_mean(ratio, mask),
        "approx_kl": masked_mean(ratio - 1 - log_ratios, mask),
        "clip_ratio/low": masked_mean(low.astype(ratio.dtype), mask),
        "clip_ratio/high": masked_mean(high.astype(ratio.dtype), mask),
    }


def check_epsilon(name: str, epsilon: float, epsilon_high: float | None) -> float:
    """The upper bound (epsilon if None); raises ValueError where a bound is no range around 1."""
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    for field, value in (("epsilon", epsilon), ("epsilon_high", epsilon_high)):
        if not value > 0:
            raise ValueError(f"{name}: {field} must be positive, got {value} (at 0 a ratio of 1 has no gradient)")
    if epsilon > 1:
        raise ValueError(f"{name}: epsilon must be at most 1 (ratios are positive), got {epsilon}")
    return epsilon_high


def check_dual_clip(name: str, dual_clip: float | None) -> None:
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"{name}: dual_clip must be above 1 (verl: 3), or None for none; got {dual_clip}")


def check_beta(name: str, beta: float) -> None:
    if not 0 <= beta < float("inf"):
        raise ValueError(f"{name}: beta must be finite and not negative, got {beta}")


def check_choice(field: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{field} {value!r} is unknown; valid: {', '.join(valid)}")


def check_kl(kind: str) -> None:
    check_choice("kl", kind, KL_KINDS)
