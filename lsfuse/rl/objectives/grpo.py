"""GRPO: clipped token ratios with group-relative advantages."""

import jax.numpy as jnp

from lsfuse.replay.batch import Batch
from lsfuse.replay.objective import Objective, masked_mean
from lsfuse.rl.objectives import common
from lsfuse.types import Array


def grpo(
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    kl: str = "k3",
    loss_agg_mode: str = "seq-mean-token-mean",
) -> Objective:
    """Σ weight · (-min(ρ A, clip(ρ, 1 - epsilon, 1 + epsilon_high) A) + beta · KL), ρ = π(token) / π_old(token).

    Source: DeepSeekMath (arXiv 2402.03300) eq. 3 and 4; epsilon_high apart from epsilon is DAPO's clip-higher
    (arXiv 2503.14476, eq. 10), which suggests 0.28.

    Args, with the defaults of TRL and Tunix beside them:
        epsilon: 0.2 (both the same).
        epsilon_high: None, equal to epsilon (TRL the same).
        beta: 0, no reference needed (TRL 0; Tunix 0.04).
        kl: "k3" (TRL the same) or "k1".
        loss_agg_mode: "seq-mean-token-mean", the paper's (TRL's `loss_type="grpo"`; TRL's default "dapo" is
            "token-mean" here, and so is Tunix's GRPO). See `token_weights`.

    Needs batch.advantages ([B, G], or per token [B, G, R]); ref_per_token_logps if beta > 0. Without
    old_per_token_logps the batch is on-policy: ratio 1.

    Metrics, means over loss tokens: "ratio", "approx_kl" (to the old policy), "clip_ratio/low", "clip_ratio/high",
    "entropy", and "kl" if there is a reference.
    """
    epsilon_high = common.check_epsilon("grpo", epsilon, epsilon_high)
    common.check_beta("grpo", beta)
    common.check_kl(kl)
    needs = ("advantages", "ref_per_token_logps") if beta > 0 else ("advantages",)

    def loss_fn(per_token_logps: Array, entropies: Array, batch: Batch) -> tuple[Array, dict]:
        mask = batch.loss_mask
        ratio = jnp.exp(common.log_ratio(per_token_logps, batch.old_per_token_logps, mask))
        advantages = common.per_token_advantages(batch, ratio.dtype)
        losses = common.clipped_surrogate(ratio, advantages, epsilon, epsilon_high)
        metrics = common.ratio_metrics(ratio, advantages, mask, epsilon, epsilon_high)
        if batch.ref_per_token_logps is not None:
            kl_tokens = common.kl_estimate(per_token_logps, batch.ref_per_token_logps, mask, kl)
            losses = losses + beta * kl_tokens if beta > 0 else losses
            metrics["kl"] = masked_mean(kl_tokens, mask)
        metrics["entropy"] = masked_mean(entropies, mask)
        return common.weighted_sum(batch, losses), metrics

    return Objective(loss_fn, "branch", common.prepare_weights(loss_agg_mode, "grpo", needs), "grpo")
