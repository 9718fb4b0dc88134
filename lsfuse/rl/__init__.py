"""Advantages, objectives, rewards and the sampler."""

from lsfuse.rl.advantages import check_rewards, group_advantages
from lsfuse.rl.objectives import (
    LOSS_AGG_MODES,
    dpo,
    grpo,
    gspo,
    kl_estimate,
    log_ratio,
    nll,
    reinforce,
    token_weights,
)
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
    "LOSS_AGG_MODES",
    "Reward",
    "Samples",
    "check_rewards",
    "closeness_reward",
    "dpo",
    "exact_match",
    "extract_number",
    "format_reward",
    "graded_numeric_reward",
    "group_advantages",
    "grpo",
    "gspo",
    "kl_estimate",
    "log_ratio",
    "make_sampler",
    "nll",
    "numeric_reward",
    "reinforce",
    "sample",
    "token_match",
    "token_weights",
    "weighted",
]
