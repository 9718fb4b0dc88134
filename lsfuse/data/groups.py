"""Groups sampled elsewhere, by any rollout engine, from jsonl.

One group a line:

    {"prompt": "…" | "prompt_ids": [3, 4],            the shared prompt; or, one per response, all equal:
     "prompts": ["…", "…"],
     "responses": ["…", "…"] | "response_ids": [[5], [6, 7]],
     "rewards": [1.0, 0.0],
     "masks": [[1], [0, 1]],                          optional: 0 where a token carries no loss (a tool's output)
     "old_logps": [[-0.1], [-0.2, -0.3]],             optional: log-probs of the policy that sampled
     "ref_logps": [[-0.1], [-0.2, -0.3]]}             optional: of the reference

Log-probs may be null where the mask is 0. Preferences (for DPO) may also be written as pairs, one or several of one
prompt; they become responses chosen, rejected, chosen, …:

    {"prompt": "…", "chosen": "…" | ["…", "…"], "rejected": "…" | ["…", "…"]}
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from lsfuse.data.batching import Group, check_group
from lsfuse.data.jsonl import parse_line
from lsfuse.data.task import Tokenizer

_FIELDS = {"prompt", "prompt_ids", "prompts", "responses", "response_ids", "rewards", "masks", "old_logps", "ref_logps"}
_FIELDS |= {"chosen", "rejected"}
_LABELS = {"completion_masks": "masks", "old_per_token_logps": "old_logps", "ref_per_token_logps": "ref_logps"}


class JsonlGroups(Sequence):
    """A read-only sequence of `Group`s; `groups[i]` reads line i again, so that memory holds only line offsets.

    Every line is read and checked when the object is made.

    Args:
        path: the file.
        tokenizer: for prompts and responses given as text; None if all are ids.
        vocab_size: ids must be below; None takes the tokenizer's.
        max_prompt, max_response: longest allowed, in tokens; None: no limit.
        context: longest prompt + response the model takes; None: no limit.
        append_stop: end responses given as text with the tokenizer's first stop id, as a sampler would have.

    Raises:
        FileNotFoundError, ValueError: naming line, field, branch and both values.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        tokenizer: Tokenizer | None = None,
        *,
        vocab_size: int | None = None,
        max_prompt: int | None = None,
        max_response: int | None = None,
        context: int | None = None,
        append_stop: bool = False,
    ):
        self.path = pathlib.Path(path)
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size if vocab_size is not None or tokenizer is None else tokenizer.vocab_size
        self._max_prompt, self._max_response, self._context = max_prompt, max_response, context
        self._append_stop = append_stop
        if append_stop and (tokenizer is None or not tokenizer.stop_ids):
            raise ValueError("JsonlGroups: append_stop needs a tokenizer with a stop id")
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such file")
        self._lines: list[tuple[int, int]] = []  # (number, byte offset)
        self._sizes: list[tuple[int, int, int]] = []
        offset = 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    group = self._parse(number, line)
                    self._lines.append((number, offset))
                    longest = max(len(ids) for ids in group.completion_ids)
                    self._sizes.append((len(group.prompt_ids), longest, group.size))
                offset += len(line)
        if not self._lines:
            raise ValueError(f"{self.path} holds no groups")

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number, offset = self._lines[index]
        with self.path.open("rb") as file:
            file.seek(offset)
            return self._parse(number, file.readline())

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Branches of every group."""
        return tuple(size for _, _, size in self._sizes)

    @property
    def largest(self) -> tuple[int, int, int]:
        """(tokens of the longest prompt, of the longest response, branches of the largest group)."""
        prompts, responses, sizes = zip(*self._sizes, strict=True)
        return max(prompts), max(responses), max(sizes)

    def _parse(self, number: int, line: bytes) -> Group:
        where = f"{self.path}, line {number}"
        row = parse_line(where, line)
        if unknown := sorted(row.keys() - _FIELDS):
            raise ValueError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(sorted(_FIELDS))}")
        row = _pairs_to_responses(where, row)
        responses = self._responses(where, row)
        masks = _rows(where, row, "masks")
        group = Group(
            prompt_ids=self._prompt(where, row, len(responses)),
            completion_ids=responses,
            rewards=_floats(f"{where}: field 'rewards'", row.get("rewards")),
            completion_masks=masks,
            old_per_token_logps=_rows(where, row, "old_logps"),
            ref_per_token_logps=_rows(where, row, "ref_logps"),
            name=where,
        )
        if masks is not None and any(np.isnan(m).any() for m in masks):
            raise ValueError(f"{where}: field 'masks' must hold numbers only")
        check_group(group, self._max_prompt, self._max_response, self._vocab_size, _LABELS)
        for g, ids in enumerate(responses):
            total = len(group.prompt_ids) + len(ids)
            if self._context is not None and total > self._context:
                raise ValueError(
                    f"{where}, branch {g}: prompt ({len(group.prompt_ids)}) and response ({len(ids)}) are {total}"
                    f" tokens, but the model's context is {self._context}"
                )
        return group

    def _prompt(self, where: str, row: dict[str, Any], num_responses: int) -> np.ndarray:
        given = [f for f in ("prompt", "prompt_ids", "prompts") if f in row]
        if len(given) != 1:
            raise ValueError(f"{where}: give one of prompt, prompt_ids or prompts; got {', '.join(given) or 'none'}")
        value = row[given[0]]
        if given[0] == "prompts":
            if not isinstance(value, list) or len(value) != num_responses:
                count = len(value) if isinstance(value, list) else repr(value)
                raise ValueError(f"{where}: field 'prompts' has {count} prompts for {num_responses} responses")
            differ = [g for g, prompt in enumerate(value) if prompt != value[0]]
            if differ:
                raise ValueError(
                    f"{where}: field 'prompts': row {differ[0]} differs from row 0, but a group shares one prompt"
                    f" ({_short(value[differ[0]])} and {_short(value[0])}); put the rows into groups of their own"
                )
            value = value[0]
        if isinstance(value, str) and given[0] != "prompt_ids":
            return self._encode(where, given[0], value)
        if given[0] == "prompt":
            raise ValueError(f"{where}: field 'prompt' must be a text, got {_short(value)}; ids go into 'prompt_ids'")
        return _ids(f"{where}: field {given[0]!r}", value)

    def _responses(self, where: str, row: dict[str, Any]) -> list[np.ndarray]:
        given = [f for f in ("responses", "response_ids") if f in row]
        if len(given) != 1:
            raise ValueError(f"{where}: give one of responses or response_ids; got {', '.join(given) or 'none'}")
        field = given[0]
        values = row[field]
        if not isinstance(values, list) or not values:
            raise ValueError(f"{where}: field {field!r} must be a list that is not empty, got {_short(values)}")
        if field == "response_ids":
            return [_ids(f"{where}: field {field!r}, branch {g}", ids) for g, ids in enumerate(values)]
        stop = self.tokenizer.stop_ids[:1] if self._append_stop and self.tokenizer is not None else ()
        encoded = []
        for g, text in enumerate(values):
            if not isinstance(text, str):
                raise ValueError(f"{where}: field 'responses', branch {g} must be a text, got {_short(text)}")
            encoded.append(np.array([*self._encode(where, field, text), *stop], np.int64))
        return encoded

    def _encode(self, where: str, field: str, text: str) -> np.ndarray:
        if self.tokenizer is None:
            raise ValueError(f"{where}: field {field!r} is text, but JsonlGroups was given no tokenizer")
        return np.array(self.tokenizer.encode(text), np.int64)


def _pairs_to_responses(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """`row` with "chosen" and "rejected" laid out as "responses" or "response_ids"."""
    if not {"chosen", "rejected"} & row.keys():
        return row
    if clash := {"responses", "response_ids"} & row.keys():
        raise ValueError(f"{where}: give pairs (chosen, rejected) or {sorted(clash)[0]}, not both")
    if missing := [f for f in ("chosen", "rejected") if f not in row]:
        raise ValueError(f"{where}: field {missing[0]!r} is missing; a preference has chosen and rejected")
    both = []
    for field in ("chosen", "rejected"):
        value = row[field]
        one = isinstance(value, str) or (isinstance(value, list) and all(type(v) is int for v in value))
        both.append([value] if one else value)
        if not isinstance(both[-1], list):
            raise ValueError(f"{where}: field {field!r} must be a text, a list of ids or a list of those; got {value}")
    chosen, rejected = both
    if len(chosen) != len(rejected):
        raise ValueError(f"{where}: {len(chosen)} chosen but {len(rejected)} rejected responses; they are pairs")
    responses = [r for pair in zip(chosen, rejected, strict=True) for r in pair]
    field = "responses" if all(isinstance(r, str) for r in responses) else "response_ids"
    return {**{k: v for k, v in row.items() if k not in ("chosen", "rejected")}, field: responses}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _ids(where: str, values: Any) -> np.ndarray:
    if not isinstance(values, list) or any(type(v) is not int or abs(v) >= 2**62 for v in values):
        raise ValueError(f"{where} must be a list of integer token ids, got {_short(values)}")
    return np.array(values, np.int64)


def _floats(where: str, values: Any) -> np.ndarray | None:
    """float64 array of numbers, null becoming NaN; None if the field is absent."""
    if values is None:
        return None
    if not isinstance(values, list) or any(v is not None and not isinstance(v, int | float) for v in values):
        raise ValueError(f"{where} must be a list of numbers, got {_short(values)}")
    return np.array([np.nan if v is None else float(v) for v in values])


def _rows(where: str, row: dict[str, Any], field: str) -> list[np.ndarray] | None:
    values = row.get(field)
    if values is None:
        return None
    if not isinstance(values, list):
        raise ValueError(f"{where}: field {field!r} must be a list of lists, got {_short(values)}")
    rows = [_floats(f"{where}: field {field!r}, branch {g}", v) for g, v in enumerate(values)]
    if any(v is None for v in rows):
        raise ValueError(f"{where}: field {field!r} must have a list for every response, got null")
    return rows  # type: ignore[return-value]
