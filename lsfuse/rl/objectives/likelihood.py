"""Objectives that are linear in the log-probs: REINFORCE and maximum likelihood."""

import dataclasses

import jax.numpy as jnp

from lsfuse.replay.batch import Batch
from lsfuse.replay.objective import Objective, masked_mean
from lsfuse.rl.objectives import common
from lsfuse.types import Array


def reinforce(loss_agg_mode: str = "seq-mean-token-mean") -> Objective:
    """Σ weight · (-A · log π(token)): REINFORCE (Williams, Machine Learning 8, 1992, sec. 4, theorem 1), with the
    advantage as the return minus its baseline (the mean of the batch, `group_advantages(baseline="batch",
    scale="none")`, unless the caller sets others).

    loss_agg_mode: the mean over responses of the mean over their tokens, so that its gradient is that of on-policy
    `grpo` without KL. TRL and Tunix have no loss of this name: there it is GRPO with one iteration, beta 0 and no
    scaling of rewards. Needs batch.advantages. Metrics: "entropy".
    """

    def loss_fn(per_token_logps: Array, entropies: Array, batch: Batch) -> tuple[Array, dict]:
        logps = jnp.where(batch.loss_mask, per_token_logps, 0.0)
        losses = -common.per_token_advantages(batch, logps.dtype) * logps
        return common.weighted_sum(batch, losses), {"entropy": masked_mean(entropies, batch.loss_mask)}

    prepare = common.prepare_weights(loss_agg_mode, "reinforce", ("advantages",))
    return Objective(loss_fn, "branch", prepare, "reinforce")


def rloo() -> Objective:
    """REINFORCE on whole responses, -A · log π(response), each against the mean reward of its group's others
    (`group_advantages(baseline="leave_one_out", scale="none")`).

    Source: RLOO (arXiv 2402.14740) eq. 6 and 7. TRL's RLOOTrainer adds PPO's clip (epsilon 0.2) and a KL of weight
    0.05 in the reward, which are off here; Tunix: `advantage_estimator="rloo"` of its GRPO, with that one's defaults.
    """
    return dataclasses.replace(reinforce("seq-mean-token-sum"), name="rloo")


def nll(loss_agg_mode: str = "token-mean") -> Objective:
    """Σ weight · (-log π(token)): supervised training on the batch's responses; completion_mask selects the targets.

    Several answers to one prompt are a group, and the prompt is run once for all of them. Source: maximum likelihood,
    as InstructGPT's first step (arXiv 2203.02155, sec. 3.5). Default: "token-mean" (TRL's SFTTrainer and Tunix's
    PeftTrainer the same).

    Metrics: "nll" (mean over target tokens, in nats), "entropy".
    """

    def loss_fn(per_token_logps: Array, entropies: Array, batch: Batch) -> tuple[Array, dict]:
        mask = batch.loss_mask
        losses = -jnp.where(mask, per_token_logps, 0.0)
        metrics = {"nll": masked_mean(losses, mask), "entropy": masked_mean(entropies, mask)}
        return common.weighted_sum(batch, losses), metrics

    return Objective(loss_fn, "branch", common.prepare_weights(loss_agg_mode, "nll"), "nll")
