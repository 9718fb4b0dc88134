"""Fifty optimizer steps on preferences and on given answers, and what dynamic sampling and small groups are refused."""

import json

import numpy as np
import pytest

from lsfuse import data, rl, train

pytestmark = pytest.mark.slow

TASK = {"prompt_length": 16, "num_pairs": 2, "answer_length": 1, "num_keys": 16, "num_values": 16, "num_fillers": 2}
CONFIG = {
    "seed": 5,
    "model": {
        "hidden_size": 32,
        "num_blocks": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_width": 64,
        "max_position_embeddings": 64,
    },
    "task": {"retrieval": TASK},
    "rl": {
        "steps": 50,
        "num_prompts": 8,
        "num_generations": 8,
        "max_prompt": 16,
        "max_response": 3,
        "optimizer": {"learning_rate": 3e-3, "b2": 0.98},
    },
    "eval": {"every": 0, "num_prompts": 128},
    "checkpoint": {"every": 0},
}


def with_objective(name: str, **more) -> dict:
    return {**CONFIG, "rl": {**CONFIG["rl"], "objective": {"name": name}, **more}}


def preferences(path, count: int) -> None:
    """Two pairs a prompt: the right value before a wrong one, and before a response that does not end."""
    task = data.RetrievalTask(**TASK, seed=5)
    tokenizer = task.tokenizer
    with path.open("w") as file:
        for i in range(count):
            example = task.example("train", i)
            right = wrong = tokenizer.encode(example["answer"])
            other = i
            while wrong == right:
                other += 1
                wrong = tokenizer.encode(task.example("train", other)["answer"])
            stop = [tokenizer.stop_ids[0]]
            line = {
                "prompt_ids": np.asarray(example["prompt_ids"]).tolist(),
                "chosen": [[*right, *stop], [*right, *stop]],
                "rejected": [[*wrong, *stop], [*right, *right]],
            }
            file.write(json.dumps(line) + "\n")


@pytest.mark.parametrize("options", [{}, {"loss_type": "ipo"}, {"reference_free": True, "label_smoothing": 0.1}])
def test_preference_accuracy_rises(tmp_path, options):
    preferences(tmp_path / "pairs.jsonl", 256)
    config = with_objective("dpo", num_generations=4)
    config["rl"]["objective"] |= options
    task = data.RetrievalTask(**TASK, seed=5)
    groups = data.JsonlGroups(tmp_path / "pairs.jsonl", task.tokenizer)
    result = train.run(config, tmp_path / "run", task=groups, progress=False)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    accuracy = [json.loads(line)["accuracy"] for line in lines]
    assert np.mean(accuracy[-10:]) >= 0.7 and np.mean(accuracy[-10:]) >= np.mean(accuracy[:3]) + 0.1, accuracy
    assert np.isfinite(result.summary["rl"]["loss"])


def test_likelihood_of_several_answers_falls(tmp_path):
    preferences(tmp_path / "pairs.jsonl", 64)
    task = data.RetrievalTask(**TASK, seed=5)
    groups = data.JsonlGroups(tmp_path / "pairs.jsonl", task.tokenizer)
    train.run(with_objective("nll", num_generations=4), tmp_path / "run", task=groups, progress=False)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    nll = [json.loads(line)["nll"] for line in lines]
    assert np.mean(nll[-5:]) <= 0.7 * nll[0], nll


def test_dynamic_sampling_that_finds_nothing_says_so(tmp_path):
    config = with_objective("dapo", dynamic_sampling=2)
    with pytest.raises(ValueError, match="none of 16 groups .config.rl.dynamic_sampling 2 batches. has responses"):
        train.run(config, tmp_path / "run", reward_fn=lambda example, text: 1.0, progress=False)


def test_groups_of_one_are_refused_where_a_baseline_needs_two():
    for name in ("rloo", "grpo"):
        with pytest.raises(ValueError, match='num_generations is 1, but the baseline "(leave_one_out|group)"'):
            train.set_up(with_objective(name, num_generations=1))
    train.set_up(with_objective("reinforce", num_generations=1))
    train.set_up(with_objective("grpo", num_generations=1), objective=rl.nll())  # an objective of one's own has none
