"""Rollouts and evaluation, with a sampler that says what it is told."""

import dataclasses

import jax
import numpy as np
import pytest

from lsfuse import data
from lsfuse.train.rollout import evaluate, fill_up, pad_prompts, roll_out

TOKENIZER = data.SymbolTokenizer(["<pad>", ".", "a", "b", "STOP"], "<pad>", ".", hidden=("<pad>",))
PAD, DOT, A, B, STOP = range(5)


@dataclasses.dataclass
class Repeat:
    """The answer to prompt i is "a" i times."""

    stop_strings: tuple[str, ...] = ()
    count: int = 5
    tokenizer = TOKENIZER

    def size(self, split):
        return self.count

    def example(self, split, index):
        return {"prompt_ids": np.full(index + 1, B, np.int32), "prompt": "b " * index, "answer": "a " * index}

    def reward(self, example, completion):
        return float(completion.split() == example["answer"].split())

    def metrics(self, example, completion):
        return {"words": len(completion.split())}


def says(*rows):
    """A sampler of G = len(rows) fixed responses, for any prompts; "length" is where the id -1 stands."""
    ids = np.array(rows, np.int32)
    lengths = np.array([(list(row) + [-1]).index(-1) for row in rows], np.int32)

    def sample(params, prompt_ids, prompt_lengths, key):
        shape = (len(prompt_ids), *ids.shape)
        return np.broadcast_to(np.maximum(ids, 0), shape), np.broadcast_to(lengths, shape[:2]), np.zeros(shape)

    return sample


def rolled(task, sample, indices=(0, 1, 2)):
    examples = [task.example("train", i) for i in indices]
    return roll_out(task, task.reward, sample, None, examples, 6, jax.random.key(0))


def test_batch_and_rewards():
    out = rolled(Repeat(), says([DOT, -1, -1], [A, DOT, -1], [A, A, A]))
    np.testing.assert_array_equal(out.rewards, [[1, 0, 0], [0, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(out.batch.completion_lengths, [[1, 2, 3]] * 3)
    np.testing.assert_array_equal(out.finished, [[True, True, False]] * 3)
    np.testing.assert_array_equal(out.batch.prompt_lengths, [1, 2, 3])
    np.testing.assert_array_equal(out.batch.completion_mask[0], [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    assert out.texts[0] == ["", "a", "a a a"]
    metrics = out.metrics()
    assert metrics["reward"] == pytest.approx(2 / 9)
    assert metrics["groups_with_spread"] == pytest.approx(2 / 3)
    assert metrics["tokens"] == 6 + 18


def test_stop_strings_shorten_a_response():
    out = rolled(Repeat(stop_strings=("STOP",)), says([A, STOP, A, DOT], [A, A, A, A]), [1])
    np.testing.assert_array_equal(out.batch.completion_lengths, [[2, 4]])
    np.testing.assert_array_equal(out.finished, [[True, False]])
    assert [t.strip() for t in out.texts[0]] == ["a", "a a a a"] and out.rewards[0, 0] == 1


def test_bad_rewards_and_prompts_are_named():
    task = Repeat()
    examples = [task.example("train", i) for i in range(2)]
    with pytest.raises(ValueError, match="group 0, branch 1: the reward is nan"):
        scores = iter([0.0, np.nan, 1.0, 1.0])
        roll_out(task, lambda e, c: next(scores), says([A], [B]), None, examples, 6, jax.random.key(0))
    with pytest.raises(ValueError, match="prompt 1 of the batch has 7 tokens, but must have 1 to 6"):
        pad_prompts([task.example("train", 0), task.example("train", 6)], 3, 6, PAD)


def evaluated(task, sample, **changes):
    options = {"num_prompts": 5, "batch_size": 2, "max_prompt": 6, "key": jax.random.key(0), "num_samples": 2}
    return evaluate(task, task.reward, sample, None, **options | changes)


def test_evaluation_uses_every_prompt_once():
    means, samples = evaluated(Repeat(), says([A, DOT], [A, A]))
    # "a" answers prompt 1, "a a" prompt 2; 10 responses.
    assert means["reward"] == pytest.approx(2 / 10) and means["words"] == pytest.approx(1.5)
    assert means["finished"] == pytest.approx(0.5)
    assert [s["index"] for s in samples] == [0, 1] and samples[1]["completion"] == "a"
    assert evaluated(Repeat(count=3), says([A, DOT]))[0]["reward"] == pytest.approx(1 / 3)
    assert evaluated(Repeat(), says([A, DOT]), num_prompts=2)[0]["reward"] == pytest.approx(1 / 2)
    with pytest.raises(ValueError, match="held-out split is empty"):
        evaluated(Repeat(count=0), says([A]))


def test_filling_up_with_groups_whose_rewards_differ():
    """Of the first batch only prompt 1 has spread; of the second, prompts 0 and 2 of three."""
    first = rolled(Repeat(), says([A, DOT, -1], [A, A, A]), (1, 4, 0))
    second = rolled(Repeat(), says([A, A, DOT], [DOT, -1, -1]), (0, 4, 2))
    np.testing.assert_array_equal(first.spread, [True, False, False])
    np.testing.assert_array_equal(second.spread, [True, False, True])
    out = fill_up(first, second)
    assert [len(e["prompt_ids"]) for e in out.examples] == [2, 1, 3]
    np.testing.assert_array_equal(out.batch.prompt_lengths, [2, 1, 3])
    np.testing.assert_array_equal(out.rewards, [[1, 0], [0, 1], [1, 0]])
    assert out.spread.all() and out.texts[0] == first.texts[0] and out.texts[1] == second.texts[0]
    kept = fill_up(first, rolled(Repeat(), says([A, A, A], [A, A, A]), (0, 4, 2)))
    np.testing.assert_array_equal(kept.rewards, first.rewards)
