"""CISPO: the clipped ratio as a constant weight of REINFORCE, so that no token loses its gradient."""

import jax
import jax.numpy as jnp

from lsfuse.replay.batch import Batch
from lsfuse.replay.objective import Objective, masked_mean
from lsfuse.rl.objectives import common
from lsfuse.types import Array


def cispo(epsilon: float = 1.0, epsilon_high: float | None = 4.0, loss_agg_mode: str = "token-mean") -> Objective:
    """Σ weight · (-sg(clip(ρ, 1 - epsilon, 1 + epsilon_high)) · A · log π(token)), ρ = π(token) / π_old(token).

    Source: MiniMax-M1 (arXiv 2506.13585) eq. 4 and 5, which sets no lower bound (epsilon 1) and tunes the upper one; a
    ratio of at most 5 is ScaleRL's (arXiv 2510.13786). TRL: `loss_type="cispo"` with epsilon_high the bound itself
    (5, which it recommends, is 4 here; unset it is epsilon, 0.2); Tunix has none. loss_agg_mode "token-mean" is
    the paper's; TRL weighs tokens so, too.

    Needs batch.advantages; without old_per_token_logps the batch is on-policy and this is `reinforce` of
    the same loss_agg_mode. Metrics as in
    `grpo`; the clip ratios count clipped weights, whatever the sign of A.
    """
    epsilon_high = common.check_epsilon("cispo", epsilon, epsilon_high)

    def loss_fn(per_token_logps: Array, entropies: Array, batch: Batch) -> tuple[Array, dict]:
        mask = batch.loss_mask
        log_ratios = common.log_ratio(per_token_logps, batch.old_per_token_logps, mask)
        ratio = jax.lax.stop_gradient(common.ratio_of(log_ratios))
        weight = jnp.clip(ratio, 1 - epsilon, 1 + epsilon_high)
        advantages = common.per_token_advantages(batch, ratio.dtype)
        losses = -weight * advantages * jnp.where(mask, per_token_logps, 0.0)
        metrics = common.ratio_metrics(log_ratios, advantages, mask, epsilon, epsilon_high)
        metrics["clip_ratio/low"] = masked_mean((ratio < 1 - epsilon).astype(ratio.dtype), mask)
        metrics["clip_ratio/high"] = masked_mean((ratio > 1 + epsilon_high).astype(ratio.dtype), mask)
        metrics["entropy"] = masked_mean(entropies, mask)
        return common.weighted_sum(batch, losses), metrics

    return Objective(loss_fn, "branch", common.prepare_weights(loss_agg_mode, "cispo", ("advantages",)), "cispo")
