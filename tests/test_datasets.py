"""Data sets on disk: built from jsonl or a task, read back the same, in order, and refused when something is wrong."""

import json
import pathlib

import jax
import numpy as np
import pytest
from helpers import Bytes
from resume_child import CONFIG

from lsfuse import data, train
from lsfuse.data.datasets import built

tfds = pytest.importorskip("tensorflow_datasets", reason="needs the extra [data]")
grain = pytest.importorskip("grain", reason="needs the extra [data]")

from lsfuse.data.builders import build  # noqa: E402

DATA = pathlib.Path(__file__).parent / "data"
TASK = data.RetrievalTask(**CONFIG["task"]["retrieval"], seed=CONFIG["seed"])
GROUPS = [
    {"prompt_ids": [3, 4], "response_ids": [[5], [6, 7]], "rewards": [1.0, 0.1], "old_logps": [[-1], [-0.3, -2]]},
    {"prompt_ids": [3], "response_ids": [[], [6]], "rewards": [0.7, 0.25], "old_logps": [[], [-0.1]]},
    {"prompt_ids": [2], "response_ids": [[], []], "rewards": [0, 1], "old_logps": [[], []]},
]


def lines(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of data sets; not to be changed."""
    root = tmp_path_factory.mktemp("data")
    build("retrieval", {"train": 20, "eval": 5}, root, task=TASK)
    build("gsm8k", {"train": DATA / "problems_train.jsonl", "test": DATA / "problems_eval.jsonl"}, root)
    build("groups/ids", {"train": lines(root / "groups.jsonl", *GROUPS)}, root)
    texts = [{"prompt": f"{i}\u00e9", "answer": str(i)} for i in range(10)]
    build("prompts/texts", {"train": lines(root / "texts.jsonl", *texts)}, root)
    return root


def test_records_are_those_of_the_source_in_its_order(root):
    assert built(root) == ["groups/ids", "gsm8k", "prompts/texts", "retrieval"]
    source = data.load("prompts/texts", "train", root)
    assert [r["prompt"] for r in source] == [f"{i}é" for i in range(10)] and source[-1]["id"] == 10
    assert [r["answer"] for r in data.load("prompts/texts", "train[80%:]", root)] == ["8", "9"]
    assert data.load("prompts/texts:train", data_dir=root)[3]["answer"] == "3"
    splits = data.load("retrieval", data_dir=root)
    assert {s: len(x) for s, x in splits.items()} == {"train": 20, "eval": 5}
    for i, record in enumerate(splits["eval"]):
        example = TASK.example("eval", i)
        np.testing.assert_array_equal(record["prompt_ids"], example["prompt_ids"])
        assert record["answer"] == example["answer"]
    raw = tfds.data_source("gsm8k", split="test", data_dir=str(root))
    assert raw[0]["question"].decode() == data.load("gsm8k", "test", root)[0]["question"]


def test_groups_read_back_give_the_same_batches(root):
    shape = {"max_prompt": 4, "max_response": 3, "num_groups": 3, "num_branches": 2}
    direct = data.make_batch(data.JsonlGroups(root / "groups.jsonl", vocab_size=8), **shape)
    source = data.load("groups/ids", "train", root)
    mine = data.make_batch(data.DatasetGroups(source, vocab_size=8), **shape)
    for name, want in vars(direct).items():
        np.testing.assert_array_equal(getattr(mine, name), want, err_msg=name)
    with pytest.raises(ValueError, match=r"array_record-00000-of-00001, record 0 \(line 1 .*id 7 is outside"):
        data.DatasetGroups(source, vocab_size=7)


def test_gsm8k_is_the_task_of_its_files(root):
    files = data.Gsm8kTask(DATA / "problems_train.jsonl", DATA / "problems_eval.jsonl", Bytes(), 1)
    mine = data.open_dataset("gsm8k", root, tokenizer=Bytes(), num_shots=1)
    for split in ("train", "eval"):
        assert [mine.example(split, i)["prompt"] for i in range(2)] == [
            files.example(split, i)["prompt"] for i in range(2)
        ]


def test_the_order_is_the_run_s_shared_by_processes_and_resumed_from_one_integer(root, monkeypatch):
    source = data.load("prompts/texts", "train", root)
    want = [source[int(i)]["id"] for i in data.indices(10, 5, 0, 30)]
    alone = data.ordered(source, 5, process_index=0, process_count=1)
    assert [alone[i]["id"] for i in range(30)] == want and sorted(want[:10]) == sorted(want[10:20])
    shards = [data.ordered(source, 5, process_index=p, process_count=3) for p in range(3)]
    assert [shards[i % 3][i // 3]["id"] for i in range(30)] == want
    iterator = iter(shards[1].map(lambda r: r["id"]).batch(2).to_iter_dataset())
    assert [next(iterator).tolist() for _ in range(2)] == [want[1:6:3], want[7:12:3]]
    state = iterator.get_state()
    after = [next(iterator).tolist() for _ in range(3)]
    iterator.set_state(state)
    assert [next(iterator).tolist() for _ in range(3)] == after
    with pytest.raises(ValueError, match="process_index 3 is not one of 3"):
        data.ordered(source, 5, process_index=3, process_count=3)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for p in range(3):  # of JAX, unless given; every process has its share of an epoch, and no other's
        monkeypatch.setattr(jax, "process_index", lambda p=p: p)
        assert [data.ordered(source, 5)[i]["id"] for i in range(10)] == want[p::3]


def test_names_and_splits_that_are_not_there(root, tmp_path):
    with pytest.raises(ValueError, match='no split "evl"; valid: train, eval; did you mean "eval"'):
        data.load("retrieval", "evl", root)
    with pytest.raises(ValueError, match='no data set "gsm8"; did you mean "gsm8k"'):
        data.load("gsm8", "train", root)
    with pytest.raises(FileNotFoundError, match="never built; build it with: .*build_dataset --name"):
        data.load("gsm8k", "train", tmp_path)
    (tmp_path / "gsm8k" / "1.0.0.incompleteABC").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="build was interrupted"):
        data.load("gsm8k", "train", tmp_path)
    with pytest.raises(ValueError, match="cannot be understood"):
        data.load("retrieval", "train[:x]", root)
    with pytest.raises(ValueError, match="no split eval, test, validation"):
        data.open_dataset("prompts/texts", root, tokenizer=Bytes())
    with pytest.raises(FileExistsError, match="built already"):
        build("retrieval", {"train": 1}, root)


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("gsm8k", ['{"question": "q", "answer": "#### 1"}', '{"question": "q"'], "x.jsonl, line 2: not JSON"),
        ("gsm8k", ['{"question": "q", "answer": "1"}'], "line 1: field 'answer' must end"),
        ("prompts/a", ['{"prompt": "q"}'], "line 1: field 'answer' must be a text"),
        ("prompts/a", ['{"prompt": "q", "answer": "a", "reward": 1}'], "line 1: unknown field 'reward'"),
        ("groups/a", [GROUPS[0], {k: v for k, v in GROUPS[1].items() if k != "rewards"}], "line 1 has 'rewards', but"),
        ("groups/a", [GROUPS[0] | {"rewards": [1]}], "line 1: 1 rewards for 2 responses"),
        ("groups/a", [""], "x.jsonl holds no records"),
        ("groups/A", [GROUPS[0]], "must be letters a-z"),
        ("groups", [GROUPS[0]], 'no builder for "groups"'),
    ],
)
def test_bad_sources_are_named_and_leave_nothing(tmp_path, name, rows, message):
    with pytest.raises(ValueError, match=message):
        build(name, {"train": lines(tmp_path / "x.jsonl", *rows)}, tmp_path / "data")
    assert built(tmp_path / "data") == [] and not list((tmp_path / "data").rglob("*.array_record*"))


def test_half_written_and_damaged_data_sets_are_named(tmp_path):
    folder = build("prompts/a", {"train": lines(tmp_path / "x.jsonl", {"prompt": "q" * 9, "answer": "a"})}, tmp_path)
    (shard,) = folder.glob("*.array_record*")
    for file, change, message in (
        (shard, lambda b: b[:-1], "array_record-00000-of-00001 .* damaged or cut short"),
        (shard, lambda b: b[: len(b) // 2], "array_record-00000-of-00001 .* damaged or cut short"),
        (shard, lambda b: b"", "array_record-00000-of-00001 .* damaged or cut short"),
        (shard, lambda b: b[:70] + bytes([b[70] ^ 1]) + b[71:], "record 0 cannot be read|damaged"),
        (folder / "dataset_info.json", lambda b: b[:-9], "dataset_info.json is damaged or cut short"),
        (folder / "features.json", lambda b: None, "features.json is missing"),
        (shard, lambda b: None, "00000-of-00001 is missing: the data set is half written"),
    ):
        good = file.read_bytes()
        bad = change(good)
        file.unlink() if bad is None else file.write_bytes(bad)
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            data.load("prompts/a", "train", tmp_path)[0]
        file.write_bytes(good)
    assert data.load("prompts/a", "train", tmp_path)[0]["answer"] == "a"


def test_the_launcher_s_task(root):
    task = {"name": "dataset", "dataset": {"name": "retrieval", "data_dir": str(root)}}
    setup = train.set_up(CONFIG | {"task": task})
    assert isinstance(setup.task, data.DatasetTask) and setup.task.size("train") == 20
    example = setup.task.example("eval", 1)
    assert example["prompt_ids"].dtype == np.int32 and setup.reward_fn(example, example["answer"]) == 1.0
    with pytest.raises(ValueError, match="config.task.dataset.name is not set"):
        train.set_up({"task": {"name": "dataset"}})
    with pytest.raises(ValueError, match="record 0: the prompt has .* max_prompt is 10"):
        train.set_up(CONFIG | {"task": task, "rl": CONFIG["rl"] | {"max_prompt": 10}})
