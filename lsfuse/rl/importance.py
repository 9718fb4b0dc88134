"""Correction for responses whose log-probs come from another engine than the one that trains."""

import jax.numpy as jnp

from lsfuse.replay.batch import Batch
from lsfuse.rl.objectives import common

LEVELS = ("token", "sequence")


def correct_importance(batch: Batch, sampling_per_token_logps, level: str = "token", cap: float = 2.0) -> Batch:
    """The batch with advantages weighted by min(π_old / π_sampling, cap), truncated importance sampling.

    π_sampling is the policy as the rollout engine computed it (another precision, other kernels), π_old the same
    parameters as this package scores them. A clipped surrogate is linear in a non-negative factor of the advantage, so
    that weighting the advantages weights the loss. level "token": one ratio a token, advantages [B, G, R]; "sequence":
    the product over a response's loss tokens, advantages [B, G].

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025), cap 2; TRL:
    `vllm_importance_sampling_correction`, cap 3, mode "sequence_mask" unless set to "token_truncate" or
    "sequence_truncate", which are these; Tunix: `sampler_is="token"`, cap 2.

    Args: batch: with advantages and old_per_token_logps. sampling_per_token_logps: [B, G, R]; masked entries may hold
    anything.

    Raises: ValueError for an unknown level, a cap that is not positive, missing or misshapen fields.
    """
    common.check_choice("level", level, LEVELS)
    if not cap > 0:
        raise ValueError(f"correct_importance: cap must be positive, got {cap}")
    common.require(batch, "correct_importance", ("advantages", "old_per_token_logps"))
    shape = tuple(batch.completion_ids.shape)
    if tuple(jnp.shape(sampling_per_token_logps)) != shape:
        raise ValueError(
            f"correct_importance: sampling_per_token_logps has shape {tuple(jnp.shape(sampling_per_token_logps))}, but"
            f" completion_ids {shape}"
        )
    mask = batch.loss_mask
    log_ratio = common.log_ratio(jnp.asarray(batch.old_per_token_logps), sampling_per_token_logps, mask)
    advantages = jnp.asarray(batch.advantages)
    if level == "token":
        weights = jnp.minimum(jnp.exp(log_ratio), cap)
        advantages = advantages[..., None] if advantages.ndim == 2 else advantages
        return batch.replace(advantages=jnp.where(mask, weights * advantages, 0.0))
    weights = jnp.minimum(jnp.exp(jnp.sum(log_ratio, -1)), cap)
    return batch.replace(advantages=advantages * (weights if advantages.ndim == 2 else weights[..., None]))
