"""What a task is: prompts, answers and a rule that scores responses. Any object of this shape can be trained on."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lsfuse.checks import check_arrays
from lsfuse.data.batching import Group

SPLITS = ("train", "eval")


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back.

    vocab_size: ids are 0 … vocab_size - 1; compared with the model's.
    pad_id: any valid id; padding is masked by length, never by id.
    stop_ids: ids that end a response.
    A tokenizer with a chat template also has `apply_chat_template(messages, add_generation_prompt=True) -> str`.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text` alone: nothing is put before or behind it; special tokens written in it are recognised."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        ...


@runtime_checkable
class Task(Protocol):
    """A source of prompts with a reward.

    stop_strings: a response also ends with the token that completes one of these; () for none.

    Three members are optional. `supervised(split, index) -> Group`: one target for supervised training; without it the
    example's "target" text is used (see `sft_group`). `metrics(example, completion) -> dict[str, float]`: more figures
    for the evaluation, averaged. `sha256: dict[str, str]` says which data the task is made of: a run is not resumed
    with others.
    """

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stop_strings(self) -> tuple[str, ...]: ...

    def size(self, split: str) -> int | None:
        """Number of examples of "train" or "eval"; None if they are generated without end."""
        ...

    def example(self, split: str, index: int) -> Mapping[str, Any]:
        """A pure function of its arguments. Has "prompt_ids" (int32 [P]), "prompt" (str), "answer" (str); "target"
        (str), a right response, where one is known; and whatever the reward needs."""
        ...

    def reward(self, example: Mapping[str, Any], completion: str) -> float:
        """Score of a response, given as text without its stop token or stop string."""
        ...


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; valid: {', '.join(SPLITS)}")


def check_index(index: int, size: int | None) -> None:
    if index < 0 or (size is not None and index >= size):
        raise IndexError(f"example {index} is out of range; the split has {size} examples")


def cut_completion(
    tokenizer: Tokenizer, ids: Any, length: int | None = None, stop_strings: Sequence[str] = ()
) -> tuple[int, str]:
    """Where a response ends, and its text.

    ids: int [R]; only the first `length` count (all if None). The response ends with its first stop id, or with the
    token that completes a stop string, whichever comes first.

    Returns:
        (length, text): number of tokens up to and including the one that ended it; text without stop id or string.
    """
    ids = np.asarray(ids)
    if ids.size:  # an empty list has no kind
        check_arrays("cut_completion", {"ids": (ids, "R", int)})
    ids = [int(i) for i in ids[:length]]
    stops = set(tokenizer.stop_ids)
    end = next((t for t, i in enumerate(ids) if i in stops), None)
    body = ids if end is None else ids[:end]
    text = tokenizer.decode(body)
    if not any(stop in text for stop in stop_strings):
        return (len(body) if end is None else end + 1), text
    low, high = 1, len(body)
    while low < high:  # the shortest beginning that holds a stop string
        middle = (low + high) // 2
        if any(stop in tokenizer.decode(body[:middle]) for stop in stop_strings):
            high = middle
        else:
            low = middle + 1
    text = tokenizer.decode(body[:low])
    return low, text[: min(text.find(stop) for stop in stop_strings if stop in text)]


def sft_group(task: Task, split: str, index: int) -> Group:
    """A group of one response for supervised training: `task.supervised` if there is one, else the example's "target"
    followed by the first stop id."""
    if hasattr(task, "supervised"):
        return task.supervised(split, index)
    example = task.example(split, index)
    if "target" not in example:
        raise ValueError(f"{type(task).__name__} gives no supervised target: its examples have no 'target' text")
    ids = [*task.tokenizer.encode(example["target"]), *task.tokenizer.stop_ids[:1]]
    return Group(example["prompt_ids"], [np.array(ids, np.int32)], name=f"{split} example {index}")
