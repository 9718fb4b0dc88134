"""Advantages, objectives, rewards and the sampler."""

from lsfuse.rl.advantages import BASELINES, SCALES, check_rewards, group_advantages, overlong_penalty
from lsfuse.rl.importance import LEVELS as IMPORTANCE_LEVELS
from lsfuse.rl.importance import correct_importance
from lsfuse.rl.objectives import (
    KL_KINDS,
    LOSS_AGG_MODES,
    cispo,
    dapo,
    dpo,
    dr_grpo,
    grpo,
    gspo,
    gspo_token,
    kl_estimate,
    log_ratio,
    nll,
    reinforce,
    rloo,
    token_weights,
)
from lsfuse.rl.objectives.dpo import LOSS_TYPES as DPO_LOSS_TYPES
from lsfuse.rl.rewards import (
    Reward,
    closeness_reward,
    exact_match,
    extract_number,
    format_reward,
    graded_numeric_reward,
    numeric_reward,
    token_match,
    weighted,
)
from lsfuse.rl.sampler import Samples, make_sampler, sample

__all__ = [
    "BASELINES",
    "DPO_LOSS_TYPES",
    "IMPORTANCE_LEVELS",
    "KL_KINDS",
    "LOSS_AGG_MODES",
    "Reward",
    "SCALES",
    "Samples",
    "check_rewards",
    "cispo",
    "closeness_reward",
    "correct_importance",
    "dapo",
    "dpo",
    "dr_grpo",
    "exact_match",
    "extract_number",
    "format_reward",
    "graded_numeric_reward",
    "group_advantages",
    "grpo",
    "gspo",
    "gspo_token",
    "kl_estimate",
    "log_ratio",
    "make_sampler",
    "nll",
    "numeric_reward",
    "overlong_penalty",
    "reinforce",
    "rloo",
    "sample",
    "token_match",
    "token_weights",
    "weighted",
]
