"""Responses to prompts, scored: from task and parameters to a batch of groups, and to held-out figures."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lsfuse import data, replay, rl
from lsfuse.types import Array, Params

# (params, prompt_ids [B, P], prompt_lengths [B], key) -> (completion_ids [B, G, R], lengths [B, G], logps [B, G, R]):
# what `rl.make_sampler` returns.
SampleFn = Callable[[Params, Any, Any, Array], tuple[Array, Array, Array]]


def pad_prompts(
    examples: Sequence[Mapping[str, Any]], rows: int, max_prompt: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32 [rows, max_prompt], lengths int32 [rows]), rows beyond the examples of length 0.

    Raises: ValueError for a prompt that is empty or too long.
    """
    ids, lengths = np.full((rows, max_prompt), pad_id, np.int32), np.zeros(rows, np.int32)
    for b, example in enumerate(examples):
        lengths[b] = len(example["prompt_ids"])
        if not 1 <= lengths[b] <= max_prompt:
            raise ValueError(
                f"prompt {b} of the batch has {lengths[b]} tokens, but must have 1 to {max_prompt} (rl.max_prompt)"
            )
        ids[b, : lengths[b]] = example["prompt_ids"]
    return ids, lengths


@dataclasses.dataclass
class Rollout:
    """Responses of a batch of prompts. texts, rewards [B, G]; batch: numpy, without advantages."""

    examples: list[Mapping[str, Any]]
    texts: list[list[str]]
    rewards: np.ndarray
    batch: replay.Batch
    logps: Array
    finished: np.ndarray

    @property
    def spread(self) -> np.ndarray:
        """bool [B]: groups whose rewards are not all equal."""
        return (self.rewards != self.rewards[:, :1]).any(axis=1)

    def metrics(self) -> dict[str, float]:
        lengths = self.batch.completion_lengths
        return {
            "reward": float(self.rewards.mean()),
            "reward_std": float(self.rewards.std(axis=1).mean()),
            "groups_with_spread": float(self.spread.mean()),
            "completion_length": float(lengths.mean()),
            "finished": float(self.finished.mean()),
            "tokens": int(self.batch.prompt_lengths.sum() + lengths.sum()),
        }


def fill_up(out: Rollout, more: Rollout) -> Rollout:
    """`out` with its groups of equal rewards replaced by groups of `more` whose rewards differ, as far as they go."""
    into, given = np.flatnonzero(~out.spread), np.flatnonzero(more.spread)
    source = dict(zip(into.tolist(), given.tolist(), strict=False))

    def rows(a, b):
        return np.stack([np.asarray(b)[source[i]] if i in source else np.asarray(a)[i] for i in range(len(a))])

    def items(a, b):
        return [b[source[i]] if i in source else a[i] for i in range(len(a))]

    return Rollout(
        items(out.examples, more.examples),
        items(out.texts, more.texts),
        rows(out.rewards, more.rewards),
        jax.tree.map(rows, out.batch, more.batch),
        rows(out.logps, more.logps),
        rows(out.finished, more.finished),
    )


def roll_out(
    task: data.Task,
    reward_fn: Callable[[Mapping[str, Any], str], float],
    sample: SampleFn,
    params: Params,
    examples: Sequence[Mapping[str, Any]],
    max_prompt: int,
    key: Array,
    rows: int | None = None,
) -> Rollout:
    """Samples a group for every example and scores it on the host.

    `rows`: the sampler's batch size, if there are fewer examples. `finished` [B, G]: whether a response ended by itself
    rather than at the longest length allowed.
    """
    count = len(examples)
    prompt_ids, prompt_lengths = pad_prompts(examples, rows or count, max_prompt, task.tokenizer.pad_id)
    ids, lengths, logps = sample(params, prompt_ids, prompt_lengths, key)
    ids, lengths = np.asarray(ids)[:count], np.array(lengths)[:count]
    finished = np.zeros(lengths.shape, bool)
    rewards = np.zeros(lengths.shape, np.float64)
    texts: list[list[str]] = []
    for b, example in enumerate(examples):
        texts.append([])
        for g in range(lengths.shape[1]):
            length, text = data.cut_completion(task.tokenizer, ids[b, g], lengths[b, g], task.stop_strings)
            finished[b, g] = _ended(task, ids[b, g, :length])
            lengths[b, g] = length
            rewards[b, g] = reward_fn(example, text)
            texts[b].append(text)
    rl.check_rewards(rewards, np.full(count, lengths.shape[-1]))
    mask = (np.arange(ids.shape[2]) < lengths[..., None]).astype(np.int32)
    batch = replay.Batch(
        prompt_ids=prompt_ids[:count],
        prompt_lengths=prompt_lengths[:count],
        completion_ids=ids.astype(np.int32),
        completion_lengths=lengths.astype(np.int32),
        completion_mask=mask,
        group_sizes=np.full(count, ids.shape[1], np.int32),
        rewards=rewards.astype(np.float32),
    )
    return Rollout(list(examples), texts, rewards, batch, logps[:count], finished)


def _ended(task: data.Task, ids: np.ndarray) -> bool:
    """Whether a response ended by itself."""
    if not ids.size:
        return False
    text = task.tokenizer.decode(ids.tolist()) if task.stop_strings else ""
    return int(ids[-1]) in task.tokenizer.stop_ids or any(stop in text for stop in task.stop_strings)


def evaluate(
    task: data.Task,
    reward_fn: Callable[[Mapping[str, Any], str], float],
    sample: SampleFn,
    params: Params,
    *,
    num_prompts: int,
    batch_size: int,
    max_prompt: int,
    key: Array,
    num_samples: int,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """(means over the first `num_prompts` held-out prompts, `num_samples` responses for the log).

    A finite split with fewer prompts is used whole.
    """
    size = task.size("eval")
    count = num_prompts if size is None else min(num_prompts, size)
    if count == 0:
        raise ValueError("the held-out split is empty; there is nothing to evaluate on")
    rows: list[dict[str, float]] = []
    samples: list[dict[str, Any]] = []
    for start in range(0, count, batch_size):
        examples = [task.example("eval", i) for i in range(start, min(start + batch_size, count))]
        own_key = jax.random.fold_in(key, start)
        out = roll_out(task, reward_fn, sample, params, examples, max_prompt, own_key, batch_size)
        for b in range(len(examples)):
            for g, text in enumerate(out.texts[b]):
                row = {"reward": float(out.rewards[b, g]), "finished": float(out.finished[b, g])}
                row["completion_length"] = float(out.batch.completion_lengths[b, g])
                if hasattr(task, "metrics"):
                    row |= task.metrics(examples[b], text)
                rows.append(row)
                if g == 0 and len(samples) < num_samples:
                    example = examples[b]
                    samples.append(
                        {
                            "index": start + b,
                            "prompt": example.get("prompt", ""),
                            "completion": text,
                            "answer": example.get("answer", ""),
                            "reward": row["reward"],
                        }
                    )
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}, samples
