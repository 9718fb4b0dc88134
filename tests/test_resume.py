"""Killed at any moment and resumed, a run computes the same bits as one that is not."""

import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import warnings

import jax
import numpy as np
import pytest

from lsfuse import train
from lsfuse.io.checkpoint import Checkpoints
from lsfuse.io.checkpoint_manifest import ConfigMismatch
from lsfuse.train.phases import abstract_state
from tests.resume_child import CONFIG

pytestmark = pytest.mark.slow
LAST = CONFIG["warm_start"]["steps"] + CONFIG["rl"]["steps"]


def start(workdir: pathlib.Path, moment: str, resume: bool, repo_root: pathlib.Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.resume_child", str(workdir), moment, str(resume)]
    return subprocess.Popen(command, cwd=repo_root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait(process: subprocess.Popen, code: int) -> str:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors[-3000:]
    return errors


def outcome(workdir: pathlib.Path, config=CONFIG, last: int = LAST) -> dict:
    """Everything that must not depend on kills."""
    setup = train.set_up(config)
    saved = json.loads((workdir / "config.json").read_text())
    params = jax.eval_shape(setup.load_params)
    dtype, key = params["embed_tokens"].dtype, jax.random.key_data(jax.random.key(0))
    template = abstract_state(setup.model, dtype, setup.rl.optimizer, key)
    restored = Checkpoints(workdir / "checkpoints", saved).restore(template)
    assert restored is not None and restored.step == last
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        "state": [np.asarray(x).tobytes() for x in jax.tree.leaves(restored.state)],
        "info": restored.info | {"sizes": None},
        "metrics": [{k: v for k, v in r.items() if not k.startswith("time/")} for r in records],
        "samples": (workdir / "samples.jsonl").read_text(),
        "model": (workdir / "model" / "model.safetensors").read_bytes(),
        "change": json.loads((workdir / "summary.json").read_text())["parameter_change"],
        "files": sorted(p.name for p in workdir.iterdir()),
        "checkpoints": sorted(p.name for p in (workdir / "checkpoints").iterdir()),
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, request):
    """(work directory, outcome) of the run that nobody kills."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    wait(start(workdir, "never", False, request.config.rootpath), 0)
    return workdir, outcome(workdir)


def assert_same(workdir: pathlib.Path, undisturbed) -> None:
    for name, value in outcome(workdir).items():
        assert value == undisturbed[1][name], name


def test_what_an_undisturbed_run_leaves(undisturbed):
    _, result = undisturbed
    assert [(r["phase"], r["step"]) for r in result["metrics"]] == [
        *(("warm_start", i) for i in range(4)),
        ("eval", 0),
        *(("rl", i) for i in range(2)),
        ("eval", 2),
        *(("rl", i) for i in range(2, 4)),
        ("eval", 4),
        ("rl", 4),
        ("eval", 5),
    ]
    assert result["checkpoints"] == ["00000008", "00000009"]
    assert all(r["kl"] != 0 for r in result["metrics"][-3:] if r["phase"] == "rl")


# Every process but the first resumes, and counts from where it does. The resumed run dies in turn, as the last one must
# not care how often that happened.
CHAINS = {
    "warm_start": (
        "before_config:0",
        "mid_warm_step:1",
        "while_saving:0",
        "while_saving:1",  # the parameters RL starts from
        "while_saving:1",  # at the border of the phases
    ),
    "border": (
        "half_a_metrics_line:3",
        "mid_warm_step:1",  # of the two that were left
        "mid_rl_step:-2",  # counted from the fourth step: the first
        "mid_rl_step:1",
    ),
    "rl": (
        "after_saving:3",
        "half_a_metrics_line:1",
        "while_saving:0",
        "while_deleting:0",
    ),
    "export": ("before_exporting:0", "while_exporting:0", "after_exporting:0"),
}


@pytest.mark.parametrize("moments", CHAINS.values(), ids=CHAINS)
def test_killed_and_resumed_again_and_again(moments, tmp_path, undisturbed, repo_root):
    workdir = tmp_path / "run"
    for moment in moments:
        wait(start(workdir, moment, workdir.exists(), repo_root), -signal.SIGKILL)
    wait(start(workdir, "never", True, repo_root), 0)
    assert_same(workdir, undisturbed)


def test_sigterm_ends_promptly_and_resumes(tmp_path, undisturbed, repo_root):
    workdir = tmp_path / "run"
    process = start(workdir, "never", False, repo_root)
    deadline = time.monotonic() + 240
    while not (workdir / "checkpoints").is_dir():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    told = time.monotonic()
    wait(process, -signal.SIGTERM)
    assert time.monotonic() - told < 10
    wait(start(workdir, "never", True, repo_root), 0)
    assert_same(workdir, undisturbed)


def test_damaged_last_checkpoint(tmp_path, undisturbed, repo_root):
    """Falls back, computes the lost steps again, and the damaged one is replaced."""
    workdir = tmp_path / "run"
    shutil.copytree(undisturbed[0], workdir)
    for path in (workdir / "checkpoints" / f"{LAST:08d}" / "state").rglob("d/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    errors = wait(start(workdir, "never", True, repo_root), 0)
    assert f"checkpoint of step {LAST}" in errors and "is damaged" in errors
    assert_same(workdir, undisturbed)


def test_a_finished_run_can_be_resumed(tmp_path, undisturbed, repo_root):
    workdir = tmp_path / "run"
    shutil.copytree(undisturbed[0], workdir)
    wait(start(workdir, "never", True, repo_root), 0)
    assert_same(workdir, undisturbed)


def test_other_config_and_no_resume_are_refused(undisturbed):
    workdir, result = undisturbed
    with pytest.raises(FileExistsError, match="--resume"):
        train.run(CONFIG, workdir)
    for name, value, text in (
        ("seed", 4, "seed: 3 there, 4 here"),
        ("rl.optimizer.learning_rate", 0.5, "rl.optimizer.learning_rate: 0.01 there, 0.5 here"),
        ("replay.prefix_activations", "recompute", "replay.prefix_activations: 'keep' there, 'recompute' here"),
    ):
        config = train.resolve_config(CONFIG)
        train.set_field(config, name, value)
        with pytest.raises(ConfigMismatch, match=text):
            train.run(config, workdir, resume=True)
    assert_same(workdir, undisturbed)


def test_auto_is_decided_once(tmp_path, undisturbed, monkeypatch):
    """The memory that is free when a run is resumed must not change its bits."""
    workdir = tmp_path / "run"
    shutil.copytree(undisturbed[0], workdir)
    assert json.loads((workdir / "config.json").read_text())["replay"]["prefix_activations"] == "keep"
    monkeypatch.setattr(
        train.build,
        "choose_prefix_activations",
        lambda model, options, *shape: (
            options.prefix_activations if options.prefix_activations != "auto" else "recompute"
        ),
    )
    assert train.set_up(CONFIG).config.replay.prefix_activations == "recompute"
    assert train.set_up(CONFIG, workdir, resume=True).config.replay.prefix_activations == "keep"


def test_other_versions_warn(tmp_path, undisturbed):
    workdir = tmp_path / "run"
    shutil.copytree(undisturbed[0], workdir)
    run = json.loads((workdir / "run.json").read_text())
    run["sessions"][-1]["devices"] = ["abacus"] * 3
    (workdir / "run.json").write_text(json.dumps(run))
    with pytest.warns(UserWarning, match="devices: .*abacus.* then, .*cpu.* now; the bits may differ"):
        train.run(CONFIG, workdir, resume=True, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_same(workdir, undisturbed)
