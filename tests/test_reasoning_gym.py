"""reasoning-gym as a task. The package takes long to install, so CI runs this with the slow tests."""

import sys

import pytest
from test_datasets import Bytes

from lsfuse import train
from lsfuse.data import ReasoningGymTask, Task


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'lsfuse\[reasoning\]'"):
        ReasoningGymTask("chain_sum", Bytes())


def test_the_config_needs_a_tokenizer():
    with pytest.raises(ValueError, match='task "reasoning_gym" needs a tokenizer'):
        train.set_up({"task": {"name": "reasoning_gym", "reasoning_gym": {"dataset": "chain_sum"}}})


@pytest.mark.slow
def test_problems_and_scores():
    pytest.importorskip("reasoning_gym", reason="needs the extra [reasoning]")
    make = lambda seed: ReasoningGymTask("chain_sum", Bytes(), 20, 5, seed, {"min_terms": 2, "max_terms": 2})  # noqa: E731
    task, again, other = make(1), make(1), make(2)
    assert isinstance(task, Task) and (task.size("train"), task.size("eval")) == (20, 5)
    prompts = [task.example("train", i)["prompt"] for i in range(20)]
    assert prompts == [again.example("train", i)["prompt"] for i in range(20)] and len(set(prompts)) > 15
    assert prompts != [other.example("train", i)["prompt"] for i in range(20)]
    example = task.example("eval", 3)
    assert Bytes().decode(example["prompt_ids"]) == example["prompt"] and example["prompt"] not in prompts
    for text, score in ((example["answer"], 1.0), (f"so <answer>{example['answer']}</answer>", 1.0), ("", 0.0)):
        assert task.reward(example, text) == score
    with pytest.raises(ValueError, match='no dataset "chain_sums"; did you mean chain_sum'):
        ReasoningGymTask("chain_sums", Bytes())
    with pytest.raises(ValueError, match="does not take .*min_terms must be positive"):
        ReasoningGymTask("chain_sum", Bytes(), options={"min_terms": -1})
