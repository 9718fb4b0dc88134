"""Objectives: what a gradient step minimises, as functions of per-token log-probs.

Each factory returns a `replay.Objective`. Temperature is applied before, by the engine, alike to the policy, the old
policy and the reference. Every normaliser is global, fixed by `prepare` in `batch.loss_weights` before any branch is
run, so that loss = Σ weight · per-token loss in any split of the batch.

The defaults beside ours are those of TRL 1.16 and Tunix 0.1.7, read from their code.
"""

from lsfuse.rl.objectives.cispo import cispo
from lsfuse.rl.objectives.common import KL_KINDS, LOSS_AGG_MODES, kl_estimate, log_ratio, token_weights
from lsfuse.rl.objectives.dpo import dpo
from lsfuse.rl.objectives.grpo import dapo, dr_grpo, grpo
from lsfuse.rl.objectives.gspo import gspo, gspo_token
from lsfuse.rl.objectives.likelihood import nll, reinforce, rloo

__all__ = [
    "KL_KINDS",
    "LOSS_AGG_MODES",
    "cispo",
    "dapo",
    "dpo",
    "dr_grpo",
    "grpo",
    "gspo",
    "gspo_token",
    "kl_estimate",
    "log_ratio",
    "nll",
    "reinforce",
    "rloo",
    "token_weights",
]
