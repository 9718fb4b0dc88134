"""GSPO: one clipped ratio per response, with the gradient of the response or of each token."""

import jax
import jax.numpy as jnp

from lsfuse.replay.batch import Batch
from lsfuse.replay.objective import Objective, masked_mean
from lsfuse.rl.objectives import common
from lsfuse.types import Array


def sequence_log_ratio(log_ratios: Array, mask: Array) -> Array:
    """The *mean* log-ratio over a response's loss tokens, [B, G, 1]: log s of GSPO eq. 7; 0 if it has none."""
    count = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1).astype(log_ratios.dtype)
    return jnp.sum(jnp.where(mask, log_ratios, 0.0), axis=-1, keepdims=True) / count


def gspo(
    epsilon: float = 3e-4,
    epsilon_high: float | None = 4e-4,
    beta: float = 0.0,
    kl: str = "k3",
    loss_agg_mode: str = "seq-mean-token-mean",
) -> Objective:
    """Mean over responses of -min(s A, clip(s, 1 - epsilon, 1 + epsilon_high) A), s = exp(mean log-ratio of tokens).

    Source: GSPO (arXiv 2507.18071) eq. 5 and 7; the clip ranges are those of its experiments (TRL with
    `importance_sampling_level="sequence"` keeps its 0.2; Tunix's `loss_algo="gspo-token"` 0.2). beta 0 (TRL 0; Tunix
    0.04); kl "k3" (TRL the same; Tunix "kl", which is k1), per token as in GRPO; loss_agg_mode as in `grpo`.
    With "seq-mean-token-mean" every response weighs the same (the paper's); the other modes weigh it by its number of
    loss tokens.

    Needs batch.advantages [B, G] (one per response); ref_per_token_logps if beta > 0; without old_per_token_logps the
    batch is on-policy. Metrics as in `grpo`; "ratio" and the clip ratios are means over responses with loss tokens.
    """
    return _gspo("gspo", False, epsilon, epsilon_high, beta, kl, loss_agg_mode)


def gspo_token(
    epsilon: float = 3e-4,
    epsilon_high: float | None = 4e-4,
    beta: float = 0.0,
    kl: str = "k3",
    loss_agg_mode: str = "seq-mean-token-mean",
) -> Objective:
    """GSPO with a ratio per token of the same value, sg(s) · π(token) / sg(π(token)), so that advantages may differ
    from token to token; with one advantage per response its loss and gradient are those of `gspo`.

    Source: GSPO (arXiv 2507.18071) eq. 13 to 15. Tunix: `loss_algo="gspo-token"`, epsilon 0.2; TRL's is
    `trl.experimental.gspo_token`, with its GRPO's 0.2. Other defaults as `gspo`.

    Needs batch.advantages [B, G] or [B, G, R]; otherwise as `gspo`, but "ratio" and the clip ratios are means over
    tokens.
    """
    return _gspo("gspo_token", True, epsilon, epsilon_high, beta, kl, loss_agg_mode)


def _gspo(name, per_token, epsilon, epsilon_high, beta, kl, loss_agg_mode) -> Objective:
    epsilon_high = common.check_epsilon(name, epsilon, epsilon_high)
    common.check_beta(name, beta)
    common.check_kl(kl)
    needs = ("advantages", "ref_per_token_logps") if beta > 0 else ("advantages",)
    prepare_weights = common.prepare_weights(loss_agg_mode, name, needs)

    def prepare(batch: Batch) -> Batch:
        batch = prepare_weights(batch)
        advantages = common.field_of(batch, "advantages")
        if advantages.ndim != 2 and not per_token:
            raise ValueError(f"gspo needs one advantage per response, [B, G]; got shape {advantages.shape}")
        return batch

    def loss_fn(per_token_logps: Array, entropies: Array, batch: Batch) -> tuple[Array, dict]:
        mask = batch.loss_mask
        log_ratios = sequence_log_ratio(common.log_ratio(per_token_logps, batch.old_per_token_logps, mask), mask)
        ratio: Array = common.ratio_of(log_ratios)
        counted: Array = jnp.any(mask, axis=-1, keepdims=True)
        if per_token:
            ratio = jax.lax.stop_gradient(ratio) * common.ratio_of(common.log_ratio(per_token_logps, None, mask))
            log_ratios, counted = jnp.broadcast_to(log_ratios, mask.shape), mask
        advantages = common.per_token_advantages(batch, ratio.dtype)
        losses = common.clipped_surrogate(ratio, advantages, epsilon, epsilon_high)
        metrics = common.ratio_metrics(log_ratios, advantages, counted, epsilon, epsilon_high)
        if batch.ref_per_token_logps is not None:
            kl_tokens = common.kl_estimate(per_token_logps, batch.ref_per_token_logps, mask, kl)
            losses = losses + beta * kl_tokens if beta > 0 else losses
            metrics["kl"] = masked_mean(kl_tokens, mask)
        metrics["entropy"] = masked_mean(entropies, mask)
        return common.weighted_sum(batch, losses), metrics

    return Objective(loss_fn, "branch", prepare, name)
