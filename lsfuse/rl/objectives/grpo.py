"""GRPO and what differs from it in constants: clipped token ratios with group-relative advantages."""

import dataclasses

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
    dual_clip: float | None = None,
) -> Objective:
    """Σ weight · (-min(ρ A, clip(ρ, 1 - epsilon, 1 + epsilon_high) A) + beta · KL), ρ = π(token) / π_old(token).

    Source: DeepSeekMath (arXiv 2402.03300) eq. 3 and 4; epsilon_high apart from epsilon is DAPO's clip-higher
    (arXiv 2503.14476, eq. 10), which suggests 0.28.

    Args, with the defaults of TRL and Tunix beside them:
        epsilon: 0.2 (both the same).
        epsilon_high: None, equal to epsilon (both the same).
        beta: 0, no reference needed (TRL 0; Tunix 0.04).
        kl: "k3" (TRL the same; Tunix "kl", which is k1), "k1" or "k2".
        loss_agg_mode: "seq-mean-token-mean", the paper's (Tunix the same; TRL's `loss_type="grpo"`, while its default
            "dapo" is "token-mean" here). See `token_weights`.
        dual_clip: None (both the same: TRL's `delta`, Tunix's `epsilon_c`). See `common.clipped_surrogate`.

    Needs batch.advantages ([B, G], or per token [B, G, R]); ref_per_token_logps if beta > 0. Without
    old_per_token_logps the batch is on-policy: ratio 1.

    Metrics, means over loss tokens: "ratio", "approx_kl" (to the old policy), "clip_ratio/low", "clip_ratio/high",
    "entropy", and "kl" if there is a reference.
    """
    epsilon_high = common.check_epsilon("grpo", epsilon, epsilon_high)
    common.check_beta("grpo", beta)
    common.check_kl(kl)
    common.check_dual_clip("grpo", dual_clip)
    needs = ("advantages", "ref_per_token_logps") if beta > 0 else ("advantages",)

    def loss_fn(per_token_logps: Array, entropies: Array, batch: Batch) -> tuple[Array, dict]:
        mask = batch.loss_mask
        log_ratios = common.log_ratio(per_token_logps, batch.old_per_token_logps, mask)
        ratio = common.ratio_of(log_ratios)
        advantages = common.per_token_advantages(batch, ratio.dtype)
        losses = common.clipped_surrogate(ratio, advantages, epsilon, epsilon_high, dual_clip)
        metrics = common.ratio_metrics(log_ratios, advantages, mask, epsilon, epsilon_high)
        if batch.ref_per_token_logps is not None:
            kl_tokens = common.kl_estimate(per_token_logps, batch.ref_per_token_logps, mask, kl)
            losses = losses + beta * kl_tokens if beta > 0 else losses
            metrics["kl"] = masked_mean(kl_tokens, mask)
        metrics["entropy"] = masked_mean(entropies, mask)
        return common.weighted_sum(batch, losses), metrics

    return Objective(loss_fn, "branch", common.prepare_weights(loss_agg_mode, "grpo", needs), "grpo")


def dr_grpo(
    epsilon: float = 0.2, epsilon_high: float | None = None, beta: float = 0.0, kl: str = "k3"
) -> Objective:
    """GRPO without its two biases: token losses are divided by the longest response allowed, not by each one's length,
    and advantages are not divided by the group's std (`group_advantages(scale="none")`).

    Source: Dr. GRPO (arXiv 2503.20783) sec. 3.2. TRL: `loss_type="dr_grpo"`, `scale_rewards="none"`; Tunix:
    `DrGRPOConfig`. Their other defaults are those of GRPO, as ours are.
    """
    objective = grpo(epsilon, epsilon_high, beta, kl, "seq-mean-token-sum-norm")
    return dataclasses.replace(objective, name="dr_grpo")


def dapo(epsilon: float = 0.2, epsilon_high: float | None = 0.28, dual_clip: float | None = None) -> Objective:
    """GRPO with clip-higher, a mean over all tokens and no KL.

    Source: DAPO (arXiv 2503.14476) eq. 8 and 10, its constants, but the mean is over the loss tokens of the whole
    batch, as in TRL and Tunix, not of one prompt's group at a time (see `token_weights`).

    Defaults: epsilon 0.2 (both the same); epsilon_high 0.28 (Tunix's `DAPOConfig` the same; TRL's `loss_type="dapo"` as
    epsilon unless set); dual_clip None (both the same). Its overlong penalty is `overlong_penalty`, added to the
    rewards, and dynamic sampling the training loop's (`config.rl.dynamic_sampling`): both off unless asked for, while
    Tunix's `DAPOConfig` has both on (buffer 4096 of 20480 tokens) and TRL has neither on. Where dynamic sampling fills
    a batch in part only, groups of equal rewards stay in the mean's denominator.
    """
    return dataclasses.replace(grpo(epsilon, epsilon_high, 0.0, "k3", "token-mean", dual_clip), name="dapo")
