"""Faults over the quickstart: killed at random moments, a full disk, damaged files. It then resumes to the same bits,
or ends in one line and loses nothing that was saved."""

import errno
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments import launch
from lsfuse import train
from lsfuse.io import checkpoint, hf_save
from lsfuse.train import workdir as files
from tests.conftest import ROOT
from tests.resume_child import at
from tests.test_resume import outcome

# A failed read leaves tensorstore futures nobody waits for.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

# The quickstart in seconds: its two stages, then RL with a reference, so that start/ is needed too.
SMALL = {
    "model.hidden_size": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.ffn_width": 16,
    "task.retrieval.prompt_length": 40,
    "warm_start.stages": (
        (2, 4, (("prompt_length", 16), ("num_pairs", 2))),
        (2, 2, (("prompt_length", 40), ("min_prompt_length", 24))),
    ),
    "warm_start.optimizer.warmup_steps": 1,
    "rl.steps": 4,
    "rl.num_prompts": 2,
    "rl.num_generations": 4,
    "rl.max_prompt": 40,
    "rl.optimizer.warmup_steps": 1,
    "rl.objective.beta": 0.1,
    "eval.every": 2,
    "eval.num_prompts": 2,
    "eval.num_generations": 4,
    "checkpoint.every": 1,
    "report.compare_dense": False,
    "report.parameter_change": True,
}
LAST = 8  # steps of both phases


def config():
    return train.load_config(ROOT / "configs" / "quickstart.py", SMALL)


def run(workdir: pathlib.Path) -> None:
    train.run(config(), workdir, resume=True, progress=False)


def launched(workdir: pathlib.Path) -> subprocess.Popen:
    flags = [f"--config.{name}={value}" for name, value in SMALL.items()]
    command = [sys.executable, "-m", "experiments.launch", "--config=configs/quickstart.py", *flags, "--resume"]
    return subprocess.Popen([*command, f"--workdir={workdir}"], cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(work directory, outcome) of a run without faults, and the seconds it took."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    start = time.monotonic()
    run(workdir)
    return workdir, outcome(workdir, config(), LAST), time.monotonic() - start


def assert_same(workdir: pathlib.Path, undisturbed) -> None:
    for name, value in outcome(workdir, config(), LAST).items():
        assert value == undisturbed[1][name], name


def held(workdir: pathlib.Path) -> dict[str, bytes]:
    """What a run has saved."""
    kept = [p for name in ("checkpoints", "start", "model") for p in (workdir / name).rglob("*") if p.is_file()]
    kept += [workdir / name for name in ("config.json", "metrics.jsonl", "samples.jsonl", "summary.json")]
    return {str(p.relative_to(workdir)): p.read_bytes() for p in kept}


def test_killed_at_random_moments(tmp_path, undisturbed):
    """Whatever it is doing: twice without warning, once politely. The seed fixes the delays, not the moments."""
    rng, workdir = np.random.default_rng(11), tmp_path / "run"
    for kind in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        process = launched(workdir)
        deadline, sessions = time.monotonic() + 240, workdir / "run.json"
        before = sessions.stat().st_mtime_ns if sessions.exists() else 0
        while process.poll() is None and not (sessions.exists() and sessions.stat().st_mtime_ns > before):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.7 * undisturbed[2]))
        process.send_signal(kind)
        _, errors = process.communicate(timeout=60)
        assert process.returncode in (-kind, 0) and "Traceback" not in errors, errors[-3000:]
    process = launched(workdir)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    assert_same(workdir, undisturbed)


def full(original, *args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def full_after_half_a_line(original, self, *records):
    self._file.write(b'{"phase": "rl", "st')
    raise OSError(errno.ENOSPC, "No space left on device")


def full_while_saving(original, path, *args, **kwargs):
    path.with_name(f"{path.name}.orbax-checkpoint-tmp").mkdir()
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "name", "n", "action"),
    [
        (checkpoint.ocp, "save_checkpointables", 3, full_while_saving),  # start/
        (checkpoint.ocp, "save_checkpointables", 6, full_while_saving),
        (files.JsonLines, "write", 7, full_after_half_a_line),
        (hf_save, "write_file", 0, full),
        (train.report, "write_atomic", 0, full),
    ],
    ids=["start", "checkpoint", "metrics", "model", "summary"],
)
def test_full_disk(tmp_path, undisturbed, monkeypatch, owner, name, n, action):
    workdir = tmp_path / "run"
    monkeypatch.setattr(owner, name, getattr(owner, name))  # so that undo() puts it back
    at(owner, name, n, action)
    with pytest.raises((OSError, checkpoint.CheckpointError), match="(?i)no space left.*continue with --resume") as e:
        run(workdir)
    assert launch.is_users(e.value) and "\n" not in str(e.value)
    monkeypatch.undo()
    run(workdir)
    assert_same(workdir, undisturbed)


def cut_in_half(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: pathlib.Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def arrays(checkpoint: pathlib.Path) -> list[pathlib.Path]:
    return sorted((checkpoint / "state").rglob("d/*"))


def damaged_start(workdir: pathlib.Path) -> None:
    for path in arrays(workdir / "start" / "00000000"):
        flip(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: cut_in_half(d / "metrics.jsonl"), "metrics.jsonl has .* bytes, but had .*: lines were removed"),
        (lambda d: flip(d / "metrics.jsonl", 0), "metrics.jsonl, line 1: not JSON"),
        (lambda d: cut_in_half(d / "config.json"), "config.json cannot be read .*put back the config"),
        (lambda d: cut_in_half(d / "run.json"), "run.json cannot be read .*delete it, and continue with --resume"),
        (damaged_start, "all 1 checkpoints in .*start are damaged"),
    ],
    ids=["metrics cut", "metrics flipped", "config", "run", "start"],
)
@pytest.mark.filterwarnings("ignore:checkpoint of step 0")
def test_damage_that_cannot_be_mended_is_one_line_and_loses_nothing(tmp_path, undisturbed, damage, message):
    workdir = tmp_path / "run"
    shutil.copytree(undisturbed[0], workdir)
    damage(workdir)
    before = held(workdir)
    with pytest.raises(ValueError, match=message) as error:
        run(workdir)
    assert launch.is_users(error.value) and "\n" not in str(error.value)
    assert held(workdir) == before


@pytest.mark.filterwarnings("ignore:checkpoint of step 8")
def test_one_flipped_byte_in_the_newest_checkpoint(tmp_path, undisturbed):
    workdir, rng = tmp_path / "run", np.random.default_rng(5)
    shutil.copytree(undisturbed[0], workdir)
    path = max(arrays(workdir / "checkpoints" / f"{LAST:08d}"), key=lambda p: p.stat().st_size)
    flip(path, int(rng.integers(path.stat().st_size)))
    run(workdir)
    assert_same(workdir, undisturbed)


def test_a_run_from_before_a_field_existed(tmp_path, undisturbed):
    workdir = tmp_path / "run"
    shutil.copytree(undisturbed[0], workdir)
    saved = json.loads((workdir / "config.json").read_text())
    del saved["rl"]["importance_cap"]
    (workdir / "config.json").write_text(json.dumps(saved))
    with pytest.warns(UserWarning, match="is of before some fields existed; it goes on with rl.importance_cap = 2.0"):
        run(workdir)
    assert json.loads((workdir / "config.json").read_text())["rl"]["importance_cap"] == 2.0
    assert_same(workdir, undisturbed)
