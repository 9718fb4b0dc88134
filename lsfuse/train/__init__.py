"""Training: the group-RL loop and its supervised warm start, configs, metrics, checkpoints and resume.

In a notebook: `train.run({"rl": {"steps": 20}}, "runs/first")`, with a task, reward or objective of your own if you
like; `train.distil` recovers what surgery cost, in stages; `train.fuse` is FFN fusion from analysis to report. From the
command line: `python -m experiments.launch`.
"""

from lsfuse.train.config import check_fields, load_config, resolve_config, schema_of, set_field
from lsfuse.train.distil import describe_distillation, distil, set_up_distillation
from lsfuse.train.distil_schema import DISTIL_SCHEMA
from lsfuse.train.dry_run import dry_run
from lsfuse.train.fuse import fuse
from lsfuse.train.fuse_schema import FUSE_SCHEMA
from lsfuse.train.fuse_setup import describe_fusion, set_up_fusion
from lsfuse.train.loop import Result, run, set_up
from lsfuse.train.optimizer import make_optimizer, make_schedule
from lsfuse.train.rollout import evaluate, roll_out
from lsfuse.train.schema import SCHEMA, default_config
from lsfuse.train.step import make_update
from lsfuse.train.sweep import is_finished, parse_sweep, sweep

__all__ = [
    "DISTIL_SCHEMA",
    "FUSE_SCHEMA",
    "SCHEMA",
    "Result",
    "check_fields",
    "default_config",
    "describe_distillation",
    "describe_fusion",
    "distil",
    "dry_run",
    "evaluate",
    "fuse",
    "is_finished",
    "load_config",
    "make_optimizer",
    "make_schedule",
    "make_update",
    "parse_sweep",
    "resolve_config",
    "roll_out",
    "run",
    "schema_of",
    "set_field",
    "set_up",
    "set_up_distillation",
    "set_up_fusion",
    "sweep",
]
