"""Work directories: who may write them, and files that survive a kill."""

import json
import multiprocessing

import pytest

from lsfuse import train
from lsfuse.io.checkpoint_manifest import ConfigMismatch
from lsfuse.train import workdir as files
from lsfuse.train.metadata import git_state, run_metadata, what_changed


def test_empty_and_absent_directories_are_fine(tmp_path):
    for resume in (False, True):
        files.check_workdir(tmp_path / "absent", {"a": 1}, resume)
        files.check_workdir(tmp_path, {"a": 1}, resume)
    assert not (tmp_path / "absent").exists()


def test_what_a_run_killed_at_once_leaves_does_not_count(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".config.json.tmp").write_text("{")
    files.check_workdir(tmp_path, {"a": 1}, resume=False)


def test_fields_that_came_later_are_those_of_the_run_s_program(tmp_path):
    """A distillation from before `probe` existed has the probe's defaults, and group RL's fields are not asked for."""
    now = train.default_config(train.DISTIL_SCHEMA).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in now.items() if k != "probe"}))
    files.check_workdir(tmp_path, json.loads(json.dumps(now)), resume=True)
    now["probe"]["count"] = 5
    with pytest.raises(ConfigMismatch, match="probe.count: 1 there, 5 here"):
        files.check_workdir(tmp_path, json.loads(json.dumps(now)), resume=True)


def test_of_another_program_only_the_program_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(train.default_config(train.DISTIL_SCHEMA).to_dict()))
    with pytest.raises(ConfigMismatch, match="holds a run of distil, not of group RL; take another"):
        files.check_workdir(tmp_path, train.default_config().to_dict(), resume=True)


def test_used_directories(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileExistsError, match="not empty .it holds notes.txt.; .*--resume, or take another"):
        files.check_workdir(tmp_path, None, resume=False)
    with pytest.raises(FileExistsError, match="no config.json: no run was started in it"):
        files.check_workdir(tmp_path, None, resume=True)
    (tmp_path / "config.json").write_text(json.dumps({"rl": {"steps": 3}, "seed": 0}))
    files.check_workdir(tmp_path, {"rl": {"steps": 3}, "seed": 0}, resume=True)
    with pytest.raises(ConfigMismatch, match="rl.steps: 3 there, 4 here"):
        files.check_workdir(tmp_path, {"rl": {"steps": 4}, "seed": 0}, resume=True)
    with pytest.raises(FileExistsError, match="is not empty"):
        files.check_workdir(tmp_path, {"rl": {"steps": 3}, "seed": 0}, resume=False)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json cannot be read"):
        files.check_workdir(tmp_path, {}, resume=True)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json cannot be read .it holds a list, not an object.; put back"):
        files.check_workdir(tmp_path, {}, resume=True)
    with pytest.raises(FileExistsError, match="is a file, not a work directory"):
        files.check_workdir(tmp_path / "notes.txt", {}, resume=True)


def test_fields_that_came_after_a_run_count_as_their_defaults(tmp_path):
    now = train.default_config().to_dict()
    before = json.loads(json.dumps(now))
    del before["rl"]["importance_cap"], before["report"]
    (tmp_path / "config.json").write_text(json.dumps(before))
    files.check_workdir(tmp_path, now, resume=True)
    now["rl"]["importance_cap"], now["seed"] = 3.0, 1
    with pytest.raises(ConfigMismatch) as error:
        files.check_workdir(tmp_path, now, resume=True)
    text = str(error.value)
    assert "rl.importance_cap: 2.0 there, 3.0 here" in text and "seed: 0 there, 1 here" in text and "report" not in text
    before["rl"]["gone"] = 1
    (tmp_path / "config.json").write_text(json.dumps(before))
    with pytest.raises(ConfigMismatch, match=r"rl.gone: 1 there, \(absent\) here"):
        files.check_workdir(tmp_path, train.default_config().to_dict(), resume=True)


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    with files.JsonLines(path) as file:
        file.write({"a": 1}, {"a": 2})
        path.write_bytes(path.read_bytes().replace(b"2}", b"2)"))
        with pytest.raises(ValueError, match="m.jsonl, line 2: not JSON"):
            file.read()


def _hold(path, ready, done):
    with files.locked(path):
        ready.set()
        done.wait(30)


def test_a_directory_has_one_process(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "run", ready, done))
    process.start()
    assert ready.wait(60)
    try:
        with pytest.raises(BlockingIOError, match=rf"another process \(pid {process.pid}\) is running"):
            with files.locked(tmp_path / "run"):
                pass
    finally:
        process.kill()
        process.join()
    with files.locked(tmp_path / "run"):
        pass


def test_json_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    with files.JsonLines(path) as file:
        file.write({"a": 1})
        size = file.size()
        file.write({"a": 2}, {"a": float("inf")})
        assert [r["a"] for r in file.read()] == [1, 2, float("inf")]
    path.write_bytes(path.read_bytes() + b'{"half')
    with files.JsonLines(path) as file:
        file.cut(size)
        file.write({"a": 3})
        assert [r["a"] for r in file.read()] == [1, 3]
        with pytest.raises(ValueError, match="lines were removed"):
            file.cut(1000)


def test_write_atomic_replaces(tmp_path):
    path = tmp_path / "x.json"
    files.write_atomic(path, "old")
    files.write_atomic(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_metadata(tmp_path):
    now = run_metadata()
    json.dumps(now)
    assert now["versions"]["jax"] and now["devices"]
    assert git_state(tmp_path) is None
    assert what_changed(now, now) == []
    assert what_changed({**now, "devices": ["cpu cpu"] * 9}, now)[0].startswith("devices: ['cpu cpu'")


def test_git_state_sees_the_difference(tmp_path):
    import subprocess

    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "first")
    clean = git_state(tmp_path)
    assert clean["dirty"] is False and clean["diff_sha256"] is None and len(clean["commit"]) == 40
    (tmp_path / "a").write_text("2")
    dirty = git_state(tmp_path)
    assert dirty["dirty"] and dirty["commit"] == clean["commit"] and len(dirty["diff_sha256"]) == 64
