"""The work directory of one run: who may write it, and files that survive a kill at any moment.

config.json      the resolved config          run.json       versions, devices, git state of every session
metrics.jsonl    one line a step or evaluation samples.jsonl  logged responses
checkpoints/     the last few                 start/         parameters RL started from, where they are needed
model/           the trained model            summary.json, summary.txt, plots.png
tensorboard/     events, if asked for         profile/       a trace, if asked for
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from lsfuse.data.jsonl import read_jsonl
from lsfuse.files import write_atomic  # noqa: F401  (with what else a work directory needs)
from lsfuse.io.checkpoint_manifest import ConfigMismatch, check_config
from lsfuse.train.config import today_s_fields

CONFIG = "config.json"
LOCK = ".lock"


def check_workdir(workdir: pathlib.Path, config: Mapping[str, Any] | None, resume: bool) -> None:
    """Whether a run may start (or go on) in `workdir`; reads only. `config`: the resolved one, or None if it is not
    known yet.

    Raises:
        FileExistsError: it holds something and `resume` is false, or something that is no run.
        ConfigMismatch: it holds a run of another config. Fields that came after the run count as their defaults.
    """
    if workdir.exists() and not workdir.is_dir():
        raise FileExistsError(f"{workdir} is a file, not a work directory")
    held = sorted(p.name for p in workdir.iterdir() if not _mine_but_empty(p.name)) if workdir.is_dir() else []
    if not held:
        return
    if not resume:
        raise FileExistsError(
            f"work directory {workdir} is not empty (it holds {', '.join(held[:3])}); continue the run in it with"
            " --resume, or take another directory"
        )
    saved = saved_config(workdir)
    if saved is None:
        raise FileExistsError(f"{workdir} holds {', '.join(held[:3])}, but no {CONFIG}: no run was started in it")
    if config is not None:
        theirs, mine = (c.get("program", "group RL") for c in (saved, config))
        if theirs != mine:  # all other fields differ too, which says nothing
            raise ConfigMismatch(f"work directory {workdir} holds a run of {theirs}, not of {mine}; take another one")
        check_config(saved, config, f"work directory {workdir}", today_s_fields(config))


def _mine_but_empty(name: str) -> bool:
    """What a run killed in its first moments leaves."""
    return name == LOCK or (name.startswith(".") and name.endswith(".tmp"))


def saved_config(workdir: pathlib.Path) -> dict[str, Any] | None:
    """The resolved config of the run in `workdir`, None if there is none. Raises ValueError if it is damaged."""
    path = workdir / CONFIG
    if not path.is_file():
        return None
    return read_object(path, "put back the config that the run wrote there, or take another work directory")


def read_object(path: pathlib.Path, cure: str) -> dict[str, Any]:
    """The JSON object in a file that a run wrote. Raises ValueError, ending in `cure`, if it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); {cure}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} cannot be read (it holds a {type(value).__name__}, not an object); {cure}")
    return value


@contextlib.contextmanager
def full_disk(workdir: pathlib.Path) -> Iterator[None]:
    """Says which disk is full, and what to do; the system's own error names no file where a write fails."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        message = f"{error.strerror}: {error.filename or workdir}; make room and continue with --resume"
        raise OSError(errno.ENOSPC, message) from error


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Makes the directory and holds it for this process. The lock goes with the process, however it ends.

    Raises: BlockingIOError if another process has it.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with open(workdir / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BlockingIOError(
                f"another process ({file.read().strip() or 'unknown'}) is running in work directory {workdir}"
            ) from None
        file.truncate(0)
        file.write(f"pid {os.getpid()}")
        file.flush()
        yield


class JsonLines:
    """A file of one JSON object a line. Each `write` is on disk, whole, when it returns."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._file: Any = None

    def __enter__(self) -> "JsonLines":
        self._file = open(self.path, "ab", buffering=0)
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def write(self, *records: Mapping[str, Any]) -> None:
        lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        written = self._file.write(lines)
        if written != len(lines):
            raise OSError(f"{self.path}: only {written} of {len(lines)} bytes could be written; is the disk full?")
        os.fsync(self._file.fileno())

    def size(self) -> int:
        """Bytes so far: a checkpoint remembers it, and a resume cuts back to it."""
        return os.fstat(self._file.fileno()).st_size

    def cut(self, size: int) -> None:
        """Drops everything after the first `size` bytes. Raises ValueError if lines of before are missing."""
        if self.size() < size:
            raise ValueError(
                f"{self.path} has {self.size()} bytes, but had {size} when the checkpoint was taken: lines were"
                " removed. Put the file back, or start anew in another work directory"
            )
        os.truncate(self.path, size)
        os.fsync(self._file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All records. Raises ValueError, naming the line, for one that is damaged."""
        return [record for _, record in read_jsonl(self.path)]
