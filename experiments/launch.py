"""Command line of the training loops: group RL, or what the config's `program` says: distillation, FFN fusion.

    python -m experiments.launch --config=configs/quickstart.py --workdir=runs/quickstart
    python -m experiments.launch --config=configs/x.py:argument --config.replay.prefix_grad=stop --workdir=… --resume
    python -m experiments.launch --config=configs/quickstart.py --dry_run
    python -m experiments.launch --config=configs/fuse_smollm2.py --workdir=… --config.stages="('analyse','plan')"
    python -m experiments.launch --config=… --workdir=runs/lr --sweep=rl.temperature=0.7,1.0 --sweep=seed=0,1

A sweep runs every combination in turn, each in a directory of its own inside --workdir; with --resume those that are
finished are passed over.

What a user can mend ends in one line on stderr and exit code 1 (2 for the command line itself); --traceback shows where
it was raised. Anything else is a bug and keeps its trace.
"""

import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

from absl import app, flags
from ml_collections import config_flags

from lsfuse import train
from lsfuse.train.workdir import saved_config

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file; `:argument` is passed to its get_config.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run: empty or not there, unless --resume.")
_RESUME = flags.DEFINE_bool("resume", False, "Continue the run in --workdir from its last checkpoint.")
_SWEEP = flags.DEFINE_multi_string("sweep", [], "field=a,b,c; several are crossed. Run in turn.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print memory, FLOPs, positions and the resolved config; run nothing.")
_PROFILE = flags.DEFINE_bool("profile", False, "Trace two RL steps into WORKDIR/profile; print the costliest ops.")
_TENSORBOARD = flags.DEFINE_bool("tensorboard", False, "Write TensorBoard events into WORKDIR/tensorboard.")
_TRACEBACK = flags.DEFINE_bool("traceback", False, "Show where a user's error was raised.")

_SET_UP: dict[Any, Callable[..., object]] = {"distil": train.set_up_distillation, "fuse": train.set_up_fusion}
_ROOT = pathlib.Path(__file__).resolve().parent.parent


def parse(argv: list[str]) -> None:
    """Sets the flags. Every mistake in them, fields of the config included, is a ValueError of one line."""
    for file in (a.removeprefix("--config=").partition(":")[0] for a in argv if a.startswith("--config=")):
        if not pathlib.Path(file).is_file():
            raise ValueError(f"--config: there is no file {file}")
    named = (a.removeprefix("--config.").split("=")[0] for a in argv if a.startswith("--config."))
    train.check_fields(named, _schema(argv))
    try:
        rest = flags.FLAGS(argv)[1:]
    except (flags.Error, AttributeError, KeyError, TypeError, OSError, SyntaxError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}: flags start with --")
    if not flags.FLAGS["config"].present:
        raise ValueError("--config is missing, for example --config=configs/quickstart.py")
    try:
        _CONFIG.value.keys()  # a file that could not be loaded raises only when it is used
    except Exception as error:
        raise ValueError(f"the config file cannot be loaded: {' '.join(str(error).split()[-40:])}") from error
    if _WORKDIR.value is None and not _DRY_RUN.value:
        raise ValueError("--workdir is missing, for example --workdir=runs/first")


def _schema(argv: list[str]):
    """The fields of the config file's program, looked up before the flags are parsed; whatever is wrong with the file
    itself is reported then."""
    try:
        file = next(a.removeprefix("--config=") for a in argv if a.startswith("--config="))
        return train.schema_of(train.load_config(file))
    except Exception:
        return train.SCHEMA


def main() -> None:
    if not _SWEEP.value:
        one(_CONFIG.value, _WORKDIR.value)
        return
    runs = list(train.sweep(_CONFIG.value, train.parse_sweep(_SWEEP.value, train.schema_of(_CONFIG.value))))
    for name, config in runs:  # a combination that cannot run is found before the first one starts
        try:
            _SET_UP.get(config.get("program"), train.set_up)(config)
        except ValueError as error:
            raise ValueError(f"--sweep, {name}: {error}") from None
    for i, (name, config) in enumerate(runs):
        workdir = None if _WORKDIR.value is None else pathlib.Path(_WORKDIR.value) / name
        print(f"run {i + 1} of {len(runs)}: {name}", flush=True)
        if workdir is not None and _RESUME.value and train.is_finished(workdir):
            print("finished before")
            continue
        one(config, workdir)


def one(config, workdir) -> None:
    program = config.get("program")
    for flag in (_PROFILE, _TENSORBOARD):
        if program and flag.value:
            raise ValueError(f'--{flag.name} is of group RL; program "{program}" does without')
    if _DRY_RUN.value:
        describe = {"distil": train.describe_distillation, "fuse": train.describe_fusion}.get(program, train.dry_run)
        print(describe(config))
        return
    if _RESUME.value and saved_config(pathlib.Path(workdir)) is None:
        print(f"there is no run in {workdir} to resume: this starts one", flush=True)
    if program:
        run_program = train.distil if program == "distil" else train.fuse
        run_program(config, str(workdir), resume=_RESUME.value)
    else:
        profile, tensorboard = _PROFILE.value, _TENSORBOARD.value
        train.run(config, str(workdir), resume=_RESUME.value, profile=profile, tensorboard=tensorboard)


def is_users(error: Exception) -> bool:
    """Whether a check of this repository, or the machine, says so: the innermost frame is not a library's. An
    ImportError with a name comes from an import statement; a check's has none."""
    last = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    ours = last.is_relative_to(_ROOT) and "site-packages" not in last.parts  # the environment may lie in the root
    said = isinstance(error, ValueError | ArithmeticError) or (isinstance(error, ImportError) and error.name is None)
    return isinstance(error, OSError) or (said and ours)


if __name__ == "__main__":
    app.define_help_flags()
    code = 2
    try:
        parse(sys.argv)
        code = 1
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; --resume continues from the last checkpoint")
    except Exception as error:
        if not is_users(error):
            raise
        if "--traceback" in sys.argv:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(code)
