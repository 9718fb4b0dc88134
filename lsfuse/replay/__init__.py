"""Branch replay: the gradient of a group that shares a prompt, without running the prompt once per branch."""

from lsfuse.replay.batch import Batch
from lsfuse.replay.dense import dense_value_and_grad
from lsfuse.replay.geometry import Options
from lsfuse.replay.objective import Mean, Objective, as_objective, masked_mean
from lsfuse.replay.value_and_grad import per_token_logps, value_and_grad

__all__ = [
    "Batch",
    "Mean",
    "Objective",
    "Options",
    "as_objective",
    "dense_value_and_grad",
    "masked_mean",
    "per_token_logps",
    "value_and_grad",
]
