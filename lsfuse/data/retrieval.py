"""Long-context key-value retrieval, generated: needles among distractors, checked by rule.

    <s> f3 f0 k7 v12 v4 v30 . f1 f1 f6 k2 v8 v21 v5 . f0 … ? k2     →     v8 v21 v5 .

Filler (f…) makes any length out of the same number of pairs. With distinct values (the default) no value symbol occurs
twice in a prompt, so that the one skill needed is to find the earlier occurrence of a token and copy what followed it,
once per answer token and once for the stop: an induction circuit, which two blocks learn.

Two blocks of width 64 with tied embeddings find it from supervised targets in about 400 steps of 32 prompts of 16
tokens (`at_length(16)`; Adam, 2e-3: six seeds of six below 0.3 nats; at 5e-3 one in six stayed at chance), some 20
seconds of one CPU core. With 8 pairs and 64 tokens from the start 400 steps changed nothing. Let lengths grow by steps,
or be ragged; a jump to long prompts alone can lose the circuit.
"""

import dataclasses
import functools
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from lsfuse.data.batching import Group
from lsfuse.data.order import counter_rng
from lsfuse.data.symbols import SymbolTokenizer
from lsfuse.data.task import SPLITS, check_index, check_split
from lsfuse.rl.rewards import Reward, exact_match, token_match

_SPECIAL = ("<pad>", "<s>", ".", "?")
_PAD, _BOS, _STOP, _QUERY = range(4)
_HELD_OUT = 8  # one in this many (key, value) pairs is only ever asked for in the eval split


@dataclasses.dataclass(frozen=True)
class RetrievalTask:
    """An endless task; example = pure function of (the fields here, split, index).

    A pair asked for in one split is never asked for in the other: the (key, value) pairs themselves are divided, by a
    checksum, 7 to 1.

    prompt_length: tokens of a prompt; the longest, if min_prompt_length makes them ragged (uniform between the two).
    num_pairs: pairs in a prompt, the one asked for among them.
    answer_length: symbols of a value. A response needs answer_length + 1 tokens (the stop is the ".").
    num_keys, num_values, num_fillers: sizes of the three alphabets; the vocabulary is their sum plus 4.
    distinct_values: no value symbol twice in a prompt (needs num_values ≥ num_pairs · answer_length). Without it, a
        value symbol may be followed by different ones, and copying needs more than the last token.
    num_queries: pairs asked for in one supervised target, all about one context; None: all that the split may ask.
    score: the reward; partial credit (`token_match`) by default, so that groups have spread.
    """

    prompt_length: int = 512
    min_prompt_length: int | None = None
    num_pairs: int = 4
    answer_length: int = 3
    num_keys: int = 8
    num_values: int = 16
    num_fillers: int = 4
    distinct_values: bool = True
    num_queries: int | None = None
    seed: int = 0
    score: Reward = token_match

    def __post_init__(self):
        for name in ("prompt_length", "num_pairs", "answer_length", "num_values", "num_fillers", "num_keys", "seed"):
            value, low = getattr(self, name), 0 if name == "seed" else 1
            if not _is_int(value) or value < low:
                raise ValueError(f"RetrievalTask.{name} must be at least {low}, a whole number, got {value!r}")
        for name in ("min_prompt_length", "num_queries"):
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and value >= 1):
                raise ValueError(f"RetrievalTask.{name} must be None or a whole number of at least 1, got {value!r}")
        if type(self.distinct_values) is not bool:
            raise ValueError(f"RetrievalTask.distinct_values must be True or False, got {self.distinct_values!r}")
        if not callable(self.score):
            raise ValueError(f"RetrievalTask.score must be a function (example, completion), got {self.score!r}")
        if self.num_keys < self.num_pairs:
            raise ValueError(
                f"RetrievalTask: num_pairs {self.num_pairs} needs as many distinct keys, but num_keys is"
                f" {self.num_keys}"
            )
        if self.distinct_values and self.num_values < self.num_pairs * self.answer_length:
            raise ValueError(
                f"RetrievalTask: num_pairs {self.num_pairs} of answer_length {self.answer_length} distinct values"
                f" need num_values ≥ {self.num_pairs * self.answer_length}, got {self.num_values}; or set"
                " distinct_values=False"
            )
        shortest = self.prompt_length if self.min_prompt_length is None else self.min_prompt_length
        if not self._needed <= shortest <= self.prompt_length:
            raise ValueError(
                f"RetrievalTask: prompts of {shortest} to {self.prompt_length} tokens; the shortest must hold the"
                f" {self._needed} tokens of num_pairs {self.num_pairs} with values of answer_length"
                f" {self.answer_length} and of the question; min_prompt_length must not exceed prompt_length"
            )
        if self.num_keys * self.num_values ** min(self.answer_length, 6) < 64:
            raise ValueError(
                f"RetrievalTask: num_keys {self.num_keys}, num_values {self.num_values} and answer_length"
                f" {self.answer_length} make fewer than 64 (key, value) pairs, which leaves too few to hold out"
            )

    @property
    def _needed(self) -> int:
        return self.num_pairs * (self.answer_length + 2) + 3

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return ()

    @functools.cached_property
    def tokenizer(self) -> SymbolTokenizer:
        alphabets = (("f", self.num_fillers), ("k", self.num_keys), ("v", self.num_values))
        symbols = [*_SPECIAL, *(f"{letter}{i}" for letter, n in alphabets for i in range(n))]
        return SymbolTokenizer(symbols, "<pad>", ".", hidden=("<pad>", "<s>"))

    def size(self, split: str) -> None:
        check_split(split)

    def example(self, split: str, index: int) -> dict[str, Any]:
        context, pairs = self._draw(split, index)
        key, value = pairs[0]
        prompt_ids = np.array([*context, _QUERY, key], np.int32)
        text = self.tokenizer.decode
        return {
            "prompt_ids": prompt_ids,
            "prompt": text(prompt_ids.tolist()),
            "answer": text(value),
            "target": text(value),
        }

    def supervised(self, split: str, index: int) -> Group:
        """The example's prompt and answer, then more questions about the same context with their answers: "? k5" is
        context (mask 0), "v3 v9 v1 ." a target. Many targets for one long prompt make a warm start cheap."""
        context, pairs = self._draw(split, index)
        pairs = pairs[: self.num_queries]
        ids: list[int] = []
        mask: list[int] = []
        for key, value in pairs:
            ids += [_QUERY, key, *value, _STOP]
            mask += [0, 0, *(1 for _ in value), 1]
        prompt = np.array([*context, *ids[:2]], np.int32)
        return Group(
            prompt,
            [np.array(ids[2:], np.int32)],
            completion_masks=[np.array(mask[2:], np.int32)],
            name=f"retrieval {split} {index}",
        )

    def at_length(self, prompt_length: int) -> "RetrievalTask":
        """This task with prompts of (up to) another length, holding as many of its pairs as fit: a curriculum from
        short prompts teaches long ones at a fraction of the cost."""
        fit = (prompt_length - 3) // (self.answer_length + 2)
        shortest = None if self.min_prompt_length is None else min(self.min_prompt_length, prompt_length)
        return dataclasses.replace(
            self,
            prompt_length=prompt_length,
            min_prompt_length=shortest,
            num_pairs=max(1, min(self.num_pairs, fit)),
        )

    def max_supervised_length(self) -> int:
        """Tokens of the longest supervised response."""
        queries = self.num_pairs if self.num_queries is None else min(self.num_queries, self.num_pairs)
        return queries * (self.answer_length + 3) - 2

    def reward(self, example: Mapping[str, Any], completion: str) -> float:
        return self.score(example, completion)

    def metrics(self, example: Mapping[str, Any], completion: str) -> dict[str, float]:
        return {"exact": exact_match(example, completion)}

    def _draw(self, split: str, index: int) -> tuple[list[int], list[tuple[int, list[int]]]]:
        """Context tokens up to the question, and the pairs this split may ask for, in random order."""
        check_split(split)
        check_index(index, None)
        rng = counter_rng(self.seed, SPLITS.index(split), index)
        length = self.prompt_length
        if self.min_prompt_length is not None:
            length = int(rng.integers(self.min_prompt_length, self.prompt_length + 1))
        keys, values, allowed = self._draw_pairs(rng, split == "eval")
        num_fillers = length - self._needed
        context = [_BOS]
        fillers = iter((len(_SPECIAL) + rng.integers(self.num_fillers, size=num_fillers)).tolist())
        # A random sequence of `num_pairs` pairs and `num_fillers` fillers.
        slots = set(rng.choice(num_fillers + self.num_pairs, self.num_pairs, replace=False).tolist())
        pairs = iter(zip(keys, values, strict=True))
        for slot in range(num_fillers + self.num_pairs):
            if slot in slots:
                key, value = next(pairs)
                context += [key, *value, _STOP]
            else:
                context.append(next(fillers))
        return context, [(keys[i], values[i]) for i in rng.permutation(allowed)]

    def _draw_pairs(self, rng: np.random.Generator, held_out: bool) -> tuple[list[int], list[list[int]], list[int]]:
        first_key = len(_SPECIAL) + self.num_fillers
        shape = (self.num_pairs, self.answer_length)
        for _ in range(10_000):
            keys = first_key + rng.permutation(self.num_keys)[: self.num_pairs]
            if self.distinct_values:
                values = rng.permutation(self.num_values)[: shape[0] * shape[1]].reshape(shape)
            else:
                values = rng.integers(self.num_values, size=shape)
            values = values + first_key + self.num_keys
            allowed = [i for i in range(self.num_pairs) if _is_held_out(keys[i], values[i]) == held_out]
            if allowed:
                return keys.tolist(), values.tolist(), allowed
        raise ValueError("RetrievalTask: its alphabets hold no pair for this split; make num_values larger")


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_held_out(key: int, value: np.ndarray) -> bool:
    return zlib.crc32(np.array([key, *value], "<i4").tobytes()) % _HELD_OUT == 0
