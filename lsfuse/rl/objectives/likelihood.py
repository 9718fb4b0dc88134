"""Objectives that are linear in the log-probs: REINFORCE and maximum likelihood."""

import jax.numpy as jnp

from lsfuse.replay.batch import Batch
from lsfuse.replay.objective import Objective, masked_mean
from lsfuse.rl.objectives import common
from lsfuse.types import Array


def reinforce(loss_agg_mode: str = "seq-mean-token-mean") -> Objective:
    """Σ weight · (-A · log π(token)): Williams (1992), with the advantage as the return minus its baseline.

    Its gradient is that of on-policy `grpo` without KL. Needs batch.advantages. Metrics: "entropy".
    """

    def loss_fn(per_token_logps: Array, entropies: Array, batch: Batch) -> tuple[Array, dict]:
        logps = jnp.where(batch.loss_mask, per_token_logps, 0.0)
        losses = -common.per_token_advantages(batch, logps.dtype) * logps
        return common.weighted_sum(batch, losses), {"entropy": masked_mean(entropies, batch.loss_mask)}

    prepare = common.prepare_weights(loss_agg_mode, "reinforce", ("advantages",))
    return Objective(loss_fn, "branch", prepare, "reinforce")


def nll(loss_agg_mode: str = "token-mean") -> Objective:
    """Σ weight · (-log π(token)): supervised training on the batch's responses; completion_mask selects the targets.

    Metrics: "nll" (mean over target tokens, in nats), "entropy".
    """

    def loss_fn(per_token_logps: Array, entropies: Array, batch: Batch) -> tuple[Array, dict]:
        mask = batch.loss_mask
        losses = -jnp.where(mask, per_token_logps, 0.0)
        metrics = {"nll": masked_mean(losses, mask), "entropy": masked_mean(entropies, mask)}
        return common.weighted_sum(batch, losses), metrics

    return Objective(loss_fn, "branch", common.prepare_weights(loss_agg_mode, "nll"), "nll")
