"""python -m experiments.build_dataset, and runs on what it built: resumed to the same bits, refused with other data."""

import json
import pathlib
import shutil
import subprocess
import sys

import helpers
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from lsfuse import data, train
from lsfuse.data import datasets
from lsfuse.io.checkpoint_manifest import ConfigMismatch
from lsfuse.train import phases
from tests.resume_child import CONFIG, at
from tests.test_resume import outcome

pytest.importorskip("tensorflow_datasets", reason="needs the extra [data]")
pytest.importorskip("grain", reason="needs the extra [data]")

from experiments import build_dataset  # noqa: E402
from lsfuse.data.builders import build  # noqa: E402

RETRIEVAL = CONFIG["task"]["retrieval"]


def in_a_process(*arguments, cwd) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "experiments.build_dataset", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def here(**given) -> None:
    """The command in this process, with flags as on the command line."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(**{"name": None, "split": [], "data_dir": None, "field": [], **given}):
        build_dataset.main(["build_dataset"])


def test_the_command(tmp_path, repo_root):
    fields = [f"--field={name}={value}" for name, value in RETRIEVAL.items()]
    arguments = ["--name=retrieval", "--split=train=12", "--split=eval=4", f"--data_dir={tmp_path}", *fields]
    result = in_a_process(*arguments, cwd=repo_root)
    assert result.returncode == 0, result.stderr
    first, *splits = result.stdout.splitlines()
    assert first == f"retrieval in {tmp_path}"
    assert [line.split()[:3] for line in splits] == [["train", "12", "records"], ["eval", "4", "records"]]
    source, task = data.load("retrieval:train", data_dir=tmp_path), data.RetrievalTask(**RETRIEVAL)
    for i, record in enumerate(source):
        np.testing.assert_array_equal(record["prompt_ids"], task.example("train", i)["prompt_ids"])


@pytest.mark.slow
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, repo_root):
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c", "ans')
    arguments = ["--name=prompts/mine", f"--split=train={tmp_path / 'x.jsonl'}", f"--data_dir={tmp_path / 'data'}"]
    result = in_a_process(*arguments, cwd=repo_root)
    (line,) = result.stderr.strip().splitlines()
    assert result.returncode == 1 and not result.stdout
    assert line.startswith(f"error: {tmp_path / 'x.jsonl'}, line 2: not JSON") and "cut short" in line
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_full_disk(small_disk, repo_root):
    arguments = ["--name=retrieval", "--split=train=9000", f"--data_dir={small_disk}"]
    result = in_a_process(*arguments, cwd=repo_root)
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    assert f"error: {small_disk / 'retrieval'} was not built: " in result.stderr and "No space left" in result.stderr
    assert not [path for path in small_disk.rglob("*") if path.is_file()] and datasets.built(small_disk) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "--name is missing: retrieval, gsm8k"),
        ({"name": "gsm9k", "split": ["train=x"]}, 'no builder for "gsm9k"; valid: retrieval, gsm8k'),
        ({"name": "gsm8k"}, '"gsm8k": no split was given'),
        ({"name": "gsm8k", "split": ["train"]}, "--split=train: write --split=NAME=VALUE"),
        ({"name": "gsm8k", "split": ["a=x", "a=y"]}, "--split=a=y: a is given twice"),
        ({"name": "retrieval", "split": ["train=x.jsonl"]}, "retrieval is generated; give a number of examples"),
        ({"name": "retrieval", "split": ["train=3"], "field": ["lenght=3"]}, "--field=lenght: the retrieval task has"),
        ({"name": "retrieval", "split": ["train=3"], "field": ["num_pairs=x"]}, "num_pairs=x: not a number"),
        ({"name": "retrieval", "split": ["train=0"]}, 'split "train": .* holds no records'),
        ({"name": "gsm8k", "split": ["train=x"], "field": ["seed=1"]}, "--field is for --name=retrieval only"),
        ({"name": "gsm8k", "split": ["train=absent.jsonl"]}, "absent.jsonl: no such file"),
    ],
)
def test_mistakes(tmp_path, given, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        here(**given, data_dir=str(tmp_path / "data"))
    assert not (tmp_path / "data").exists()


def test_a_reward_that_is_no_number(tmp_path):
    """Python's JSON takes NaN."""
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "responses": ["b", "c"], "rewards": [1.0, NaN]}\n')
    with pytest.raises(ValueError, match="x.jsonl, line 1, branch 1: rewards must be finite, got nan"):
        here(name="groups/mine", split=[f"train={tmp_path / 'x.jsonl'}"], data_dir=str(tmp_path / "data"))
    assert not (tmp_path / "data" / "groups").exists() or not list((tmp_path / "data").rglob("*.array_record*"))


def jsonl(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


GROUPS = [
    {"prompt_ids": [3, 4], "response_ids": [[5], [6, 7]], "rewards": [1.0, 0.1], "old_logps": [[-1.0], [-0.3, -2.0]]},
    {"prompt_ids": [3], "response_ids": [[5], [6]], "rewards": [0.7, 0.25], "old_logps": [[-0.2], [-0.1]]},
]


def test_the_digest_is_of_the_records(tmp_path):
    """Built anew, the files differ and the digest does not; any other value, field or order changes it."""
    other = [dict(GROUPS[0], rewards=[1.0, 0.2]), GROUPS[1]]
    plain = [{k: v for k, v in row.items() if k != "old_logps"} for row in GROUPS]
    digests = []
    for i, rows in enumerate((GROUPS, GROUPS, other, plain, GROUPS[::-1], GROUPS[:1])):
        root = tmp_path / str(i)
        root.mkdir()
        build("groups/a", {"train": jsonl(root / "x.jsonl", rows)}, root)
        digests.append(data.DatasetGroups(data.load("groups/a:train", data_dir=root)).sha256["train"])
    assert digests[0] == digests[1] and len(set(digests)) == 5
    assert all(len(digest) == 64 for digest in digests)


def test_a_run_notes_its_data(tmp_path):
    """Of a data set, of a file of groups, of GSM8K's files; generated tasks have none."""
    folder = pathlib.Path(__file__).parent / "data"
    files = [folder / f"problems_{split}.jsonl" for split in ("train", "eval")]
    from_files = data.Gsm8kTask(*files, helpers.Bytes(), 1)
    build("gsm8k", {"train": files[0], "test": files[1]}, tmp_path)
    from_dataset = data.open_dataset("gsm8k", str(tmp_path), tokenizer=helpers.Bytes(), num_shots=1)
    for task in (from_files, from_dataset):
        assert set(task.sha256) == {"train", "eval"} and task.sha256["train"] != task.sha256["eval"]
    config = {**CONFIG, "warm_start": {"steps": 0}}
    groups = data.JsonlGroups(jsonl(tmp_path / "g.jsonl", GROUPS), train.set_up(config).tokenizer)
    assert train.set_up(config, task=groups).saved["data_sha256"] == groups.sha256
    assert "data_sha256" not in train.set_up(config).saved


# --- runs -----------------------------------------------------------------------------------------------------------


def config_on(root) -> dict:
    task = {"name": "dataset", "dataset": {"name": "retrieval", "data_dir": str(root)}}
    return {**CONFIG, "task": task, "warm_start": {"steps": 0}}


def rebuild(root: pathlib.Path, seed: int) -> None:
    shutil.rmtree(root, ignore_errors=True)
    build("retrieval", {"train": 20, "eval": 5}, root, task=data.RetrievalTask(**RETRIEVAL, seed=seed))


def test_resuming_with_other_data_is_refused(tmp_path):
    """With both digests, before any work; the same data built again are the same data, and a run from before digests
    were noted goes on."""
    root, workdir = tmp_path / "data", tmp_path / "run"
    rebuild(root, 0)
    before = train.set_up(config_on(root)).saved
    workdir.mkdir()
    (workdir / "config.json").write_text(json.dumps(before))
    rebuild(root, 0)
    assert train.set_up(config_on(root), workdir, resume=True).saved == before
    rebuild(root, 1)
    now = train.set_up(config_on(root)).saved
    with pytest.raises(ConfigMismatch) as error:
        train.set_up(config_on(root), workdir, resume=True)
    for split in ("train", "eval"):
        theirs, mine = (saved["data_sha256"][split] for saved in (before, now))
        assert theirs != mine and f"data_sha256.{split}: '{theirs}' there, '{mine}' here" in str(error.value)
    assert "config (and data) the run was started with" in str(error.value)
    del before["data_sha256"]
    (workdir / "config.json").write_text(json.dumps(before))
    assert train.set_up(config_on(root), workdir, resume=True).saved == now


@pytest.mark.slow
def test_a_run_on_a_data_set_resumes_to_the_same_bits(tmp_path, monkeypatch):
    """Stopped in RL step 3; the data set is built again in between."""
    root = tmp_path / "data"
    rebuild(root, 0)
    config = config_on(root)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train.run(config, whole, progress=False)

    def stop(original, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(phases, "to_host", phases.to_host)  # so that undo() puts it back
    at(phases, "to_host", 2 * 3 + 1, stop)
    with pytest.raises(KeyboardInterrupt):
        train.run(config, stopped, progress=False)
    monkeypatch.undo()
    assert not (stopped / "summary.json").exists()
    rebuild(root, 0)
    train.run(config, stopped, resume=True, progress=False)
    last = config["rl"]["steps"]
    mine, want = outcome(stopped, config, last), outcome(whole, config, last)
    for name, value in want.items():
        assert mine[name] == value, name
