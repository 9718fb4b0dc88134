"""Branch replay: the gradient of a group that shares a prompt, without running the prompt once per branch."""

from lsfuse.replay import cost
from lsfuse.replay.batch import Batch
from lsfuse.replay.check import check_batch
from lsfuse.replay.dense import dense_value_and_grad
from lsfuse.replay.geometry import DTYPES, PREFIXES, Geometry, Options, make_geometry
from lsfuse.replay.memory import choose_prefix_activations, kept_bytes, state_bytes_per_token
from lsfuse.replay.mesh import param_shardings
from lsfuse.replay.objective import Mean, Objective, as_objective, masked_mean
from lsfuse.replay.value_and_grad import per_token_logps, value_and_grad

__all__ = [
    "DTYPES",
    "PREFIXES",
    "Batch",
    "Geometry",
    "Mean",
    "Objective",
    "Options",
    "as_objective",
    "check_batch",
    "choose_prefix_activations",
    "cost",
    "dense_value_and_grad",
    "kept_bytes",
    "make_geometry",
    "masked_mean",
    "param_shardings",
    "per_token_logps",
    "state_bytes_per_token",
    "value_and_grad",
]
