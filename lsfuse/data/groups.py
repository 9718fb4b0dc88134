"""Groups sampled elsewhere, by any rollout engine: from jsonl, or from a data set built of it.

The fields of a line are in `lsfuse.data.group_rows`."""

import abc
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lsfuse.data.batching import Group, check_group
from lsfuse.data.datasets import Source
from lsfuse.data.group_rows import plain_row, row_of_flat
from lsfuse.data.jsonl import parse_line
from lsfuse.data.task import Tokenizer
from lsfuse.files import sha256_of

_LABELS = {"completion_masks": "masks", "old_per_token_logps": "old_logps", "ref_per_token_logps": "ref_logps"}
_IN_ALL_OR_NONE = {"rewards": "rewards", "old_per_token_logps": "old_logps", "ref_per_token_logps": "ref_logps"}


@dataclasses.dataclass(frozen=True)
class GroupReader:
    """From a line's object to a checked `Group`.

    tokenizer: for prompts and responses given as text; None if all are ids.
    vocab_size: ids must be below; None takes the tokenizer's.
    max_prompt, max_response: longest allowed, in tokens; None: no limit.
    context: longest prompt + response the model takes; None: no limit.
    append_stop: end responses given as text with the tokenizer's first stop id, as a sampler would have.
    """

    tokenizer: Tokenizer | None = None
    vocab_size: int | None = None
    max_prompt: int | None = None
    max_response: int | None = None
    context: int | None = None
    append_stop: bool = False

    def __post_init__(self):
        if self.append_stop and (self.tokenizer is None or not self.tokenizer.stop_ids):
            raise ValueError("groups: append_stop needs a tokenizer with a stop id")

    def __call__(self, where: str, row: Mapping[str, Any]) -> Group:
        """Raises ValueError, starting with `where`, naming field, branch and both values."""
        row = plain_row(where, row)
        if "responses" in row:
            stop = self.tokenizer.stop_ids[:1] if self.append_stop and self.tokenizer is not None else ()
            texts = row["responses"]
            responses = [np.array([*self._encode(where, "responses", t), *stop], np.int64) for t in texts]
        else:
            responses = row["response_ids"]
        if "prompt" in row:
            prompt = self._encode(where, "prompt", row["prompt"])
        else:
            prompt = row["prompt_ids"]
        group = Group(
            prompt_ids=prompt,
            completion_ids=responses,
            rewards=row.get("rewards"),
            completion_masks=row.get("masks"),
            old_per_token_logps=row.get("old_logps"),
            ref_per_token_logps=row.get("ref_logps"),
            name=where,
        )
        vocab = self.vocab_size
        if vocab is None and self.tokenizer is not None:
            vocab = self.tokenizer.vocab_size
        check_group(group, self.max_prompt, self.max_response, vocab, _LABELS)
        for g, ids in enumerate(responses):
            total = len(prompt) + len(ids)
            if self.context is not None and total > self.context:
                raise ValueError(
                    f"{where}, branch {g}: prompt ({len(prompt)}) and response ({len(ids)}) are {total}"
                    f" tokens, but the model's context is {self.context}"
                )
        return group

    def _encode(self, where: str, field: str, text: str) -> np.ndarray:
        if self.tokenizer is None:
            raise ValueError(f"{where}: field {field!r} is text, but there is no tokenizer")
        return np.array(self.tokenizer.encode(text), np.int64)


class Groups(Sequence):
    """A read-only sequence of `Group`s, every one of them read and checked when the object is made, so that memory
    holds only sizes."""

    def __init__(self, reader: GroupReader):
        self.tokenizer, self._reader = reader.tokenizer, reader
        self._sizes: list[tuple[int, int, int]] = []
        self._given: dict[frozenset[str], str] = {}

    def _note(self, group: Group) -> None:
        given = (label for field, label in _IN_ALL_OR_NONE.items() if getattr(group, field) is not None)
        self._given.setdefault(frozenset(given), group.name)
        longest = max(len(ids) for ids in group.completion_ids)
        self._sizes.append((len(group.prompt_ids), longest, group.size))

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._read(range(len(self))[index])

    @abc.abstractmethod
    def _read(self, index: int) -> Group:
        """The group at an index that is in range."""

    def check_alike(self) -> None:
        """Raises ValueError, naming two groups, if only some have rewards, or log-probs: a batch takes them of all its
        groups or of none."""
        if len(self._given) == 1:
            return
        (these, first), (those, other), *_ = self._given.items()
        field = min(these ^ those)
        given, without = (first, other) if field in these else (other, first)
        raise ValueError(f"{given} has {field}, but {without} has none; give it to all groups or to none")

    @property
    @abc.abstractmethod
    def sha256(self) -> dict[str, str]:
        """{"train": of the file or records the groups come from}; a run is not resumed with others."""

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Branches of every group."""
        return tuple(size for _, _, size in self._sizes)

    @property
    def largest(self) -> tuple[int, int, int]:
        """(tokens of the longest prompt, of the longest response, branches of the largest group)."""
        prompts, responses, sizes = zip(*self._sizes, strict=True)
        return max(prompts), max(responses), max(sizes)


class JsonlGroups(Groups):
    """The groups of a jsonl file; `groups[i]` reads its line again.

    Args:
        path: the file.
        tokenizer, limits: as in `GroupReader`.

    Raises:
        FileNotFoundError, ValueError: naming line, field, branch and both values.
    """

    def __init__(self, path: str | pathlib.Path, tokenizer: Tokenizer | None = None, **limits: Any):
        super().__init__(GroupReader(tokenizer, **limits))
        self.path = pathlib.Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such file")
        self._lines: list[tuple[int, int]] = []  # (number, byte offset)
        offset = 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    self._note(self._parse(number, line))
                    self._lines.append((number, offset))
                offset += len(line)
        if not self._lines:
            raise ValueError(f"{self.path} holds no groups")

    def __str__(self) -> str:
        return str(self.path)

    @property
    def sha256(self) -> dict[str, str]:
        return {"train": sha256_of(self.path)}

    def _read(self, index: int) -> Group:
        number, offset = self._lines[index]
        with self.path.open("rb") as file:
            file.seek(offset)
            return self._parse(number, file.readline())

    def _parse(self, number: int, line: bytes) -> Group:
        where = f"{self.path}, line {number}"
        return self._reader(where, parse_line(where, line))


class DatasetGroups(Groups):
    """The groups of a data set that `lsfuse.data.builders` made of jsonl; `groups[i]` reads its record again.

    Args:
        source: from `lsfuse.data.load("groups/NAME", split)`.
        tokenizer, limits: as in `GroupReader`.

    Raises:
        ValueError: naming file, record, field, branch and both values.
    """

    def __init__(self, source: Source, tokenizer: Tokenizer | None = None, **limits: Any):
        super().__init__(GroupReader(tokenizer, **limits))
        self._source = source
        for i in range(len(source)):
            self._note(self._read(i))

    def __str__(self) -> str:
        return str(self._source)

    @property
    def sha256(self) -> dict[str, str]:
        return {"train": self._source.sha256}

    def _read(self, index: int) -> Group:
        where, record = self._source.where(index), self._source[index]
        line = record.pop("id", "?")
        return self._reader(f"{where} (line {line} of its jsonl)", row_of_flat(record))
