"""TensorBoard events: they say what metrics.jsonl says, after kills too."""

import json
import pathlib
import struct
import sys

import numpy as np
import pytest

from lsfuse import train
from lsfuse.train import phases
from lsfuse.train.tensorboard import Events
from tests.resume_child import CONFIG


def events_in(folder: pathlib.Path) -> list:
    """Every event in the order that TensorBoard reads them: files by name, records of length, CRC, bytes, CRC."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            found.append(event_pb2.Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def shown(folder: pathlib.Path) -> dict[tuple[str, int], float]:
    """(tag, step) -> value that TensorBoard shows: a session's start forgets events from its step on."""
    values: dict[tuple[str, int], float] = {}
    for event in events_in(folder):
        if event.HasField("session_log"):
            values = {key: v for key, v in values.items() if key[1] < event.step}
        for value in event.summary.value:
            assert (value.tag, event.step) not in values, "written twice"
            values[value.tag, event.step] = value.simple_value
    return values


def in_metrics(records) -> dict[tuple[str, int], float]:
    return {
        (f"{r['phase']}/{name}", r["step"]): np.float32(value)
        for r in records
        for name, value in r.items()
        if name not in ("phase", "step")
    }


def record(phase: str, step: int, **values) -> dict:
    return {"phase": phase, "step": step, **values}


FIRST = [record("warm_start", s, loss=1.5 - s) for s in range(3)]
FIRST += [record("eval", 0, reward=0.25), record("rl", 0, loss=2.0, **{"time/step": 0.125})]


def test_sessions(tmp_path):
    """The second goes on from a checkpoint in the warm start: step 1 of the RL before it must not stay."""
    pytest.importorskip("tensorboardX")
    folder = tmp_path / "tensorboard"
    with Events(folder) as events:
        events.start([])
        for r in [*FIRST, record("rl", 1, loss=9.0)]:
            events.write(r)
    assert shown(folder) == in_metrics([*FIRST, record("rl", 1, loss=9.0)])
    one = {path.name for path in folder.iterdir()}
    (folder / "notes.txt").touch()
    with Events(folder) as events:
        events.start(FIRST[:2])
        events.write(record("warm_start", 2, loss=7.0))
    (folder / "notes.txt").unlink()  # what is not ours stays
    assert shown(folder) == in_metrics([*FIRST[:2], record("warm_start", 2, loss=7.0)])
    assert one & {path.name for path in folder.iterdir()} == {max(one)}  # which a TensorBoard may have open
    with Events(folder) as events:
        events.start(FIRST)
    assert shown(folder) == in_metrics(FIRST) and not one & {path.name for path in folder.iterdir()}


def test_killed_between_the_new_file_and_the_old_ones_end(tmp_path, monkeypatch):
    """Both are there; what is shown is the new one alone."""
    pytest.importorskip("tensorboardX")
    with Events(tmp_path) as events:
        events.start([])
        for r in FIRST:
            events.write(r)
    with monkeypatch.context() as patch, Events(tmp_path) as events:
        patch.setattr(pathlib.Path, "unlink", lambda self: None)
        events.start(FIRST[:3])
    assert shown(tmp_path) == in_metrics(FIRST[:3])


def test_without_tensorboardx(tmp_path, monkeypatch):
    from experiments.launch import is_users

    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        ImportError, match=r"tensorboardX, which is not installed: pip install 'lsfuse\[tensorboard\]'"
    ) as e:
        train.run({"rl": {"steps": 1}}, tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists() and is_users(e.value)
    with pytest.raises(ImportError) as e:
        import lsfuse.no_such_module  # noqa: F401
    assert not is_users(e.value)  # a bug of ours keeps its trace


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed(tmp_path, monkeypatch):
    """Stopped after steps that no checkpoint has; then with events, and without, and with them again."""
    pytest.importorskip("tensorboardX")
    config = json.loads(json.dumps({**CONFIG, "warm_start": {"steps": 0}, "report": {}}))
    config["rl"] |= {"num_iterations": 1, "objective": {}}
    run, folder = tmp_path / "run", tmp_path / "run" / "tensorboard"
    real, calls = phases.to_host, []

    def stops(*args):
        calls.append(args)
        if len(calls) in (4, 7):
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(phases, "to_host", stops)
    with pytest.raises(KeyboardInterrupt):
        train.run(config, run, tensorboard=True, progress=False)
    assert ("rl/loss", 2) in shown(folder)
    with pytest.raises(KeyboardInterrupt):
        train.run(config, run, resume=True, progress=False)
    train.run(config, run, resume=True, tensorboard=True, progress=False)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {r["step"] for r in records if r["phase"] == "rl"} == set(range(5))
    assert shown(folder) == in_metrics(records)
