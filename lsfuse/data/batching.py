"""From groups of unlike size to one `Batch` of fixed shape."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lsfuse.replay.batch import Batch

_ROUNDING = 0.01  # by which an engine in half precision may take a log-prob above 0
_ROW_FIELDS = ("old_per_token_logps", "ref_per_token_logps")


@dataclasses.dataclass
class Group:
    """One prompt and its responses, unpadded.

    prompt_ids: int [P], P ≥ 1.
    completion_ids: G arrays, int [R_i]; an empty response is allowed.
    rewards, advantages: [G] or None.
    completion_masks: G arrays [R_i], non-zero where the token carries loss, or None: all of them do.
    old_per_token_logps, ref_per_token_logps: G arrays [R_i], or None. May hold anything where the mask is 0.
    name: where the group comes from; used in errors.
    """

    prompt_ids: Any
    completion_ids: Sequence[Any]
    rewards: Any | None = None
    advantages: Any | None = None
    completion_masks: Sequence[Any] | None = None
    old_per_token_logps: Sequence[Any] | None = None
    ref_per_token_logps: Sequence[Any] | None = None
    name: str = ""

    @property
    def size(self) -> int:
        return len(self.completion_ids)


def check_group(
    group: Group,
    max_prompt: int | None = None,
    max_response: int | None = None,
    vocab_size: int | None = None,
    labels: Mapping[str, str] | None = None,
) -> None:
    """Raises ValueError, starting with group.name, for anything that could not become a row of a batch.

    labels: what to call a field in the message, where it came under another name.
    """
    where, labels = group.name or "group", labels or {}
    if group.size == 0:
        raise ValueError(f"{where}: it has no responses")
    _check_ids(f"{where}: prompt", group.prompt_ids, vocab_size)
    length = len(group.prompt_ids)
    if length == 0:
        raise ValueError(f"{where}: the prompt is empty; the first response token needs a token before it")
    if max_prompt is not None and length > max_prompt:
        raise ValueError(
            f"{where}: the prompt has {length} tokens, but max_prompt is {max_prompt}; raise it or drop the prompt"
        )
    for field in ("rewards", "advantages"):
        values = getattr(group, field)
        if values is None:
            continue
        if len(values) != group.size:
            raise ValueError(f"{where}: {len(values)} {field} for {group.size} responses")
        finite = np.isfinite(np.asarray(values, np.float64).reshape(group.size, -1)).all(axis=1)
        if not finite.all():
            g = int(np.argmin(finite))
            raise ValueError(f"{where}, branch {g}: {field} must be finite, got {values[g]}")
    for g, ids in enumerate(group.completion_ids):
        _check_ids(f"{where}, branch {g}: response", ids, vocab_size)
        if max_response is not None and len(ids) > max_response:
            raise ValueError(
                f"{where}, branch {g}: the response has {len(ids)} tokens, but max_response is {max_response}; raise it"
                " or shorten the response"
            )
    for field in ("completion_masks", *_ROW_FIELDS):
        _check_rows(where, group, field, labels.get(field, field))


def _check_ids(where: str, ids: Any, vocab_size: int | None) -> None:
    ids = np.asarray(ids)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"{where} must be a flat list of integer token ids, got {ids.dtype} of shape {ids.shape}")
    bad = (ids < 0) | (ids >= (np.iinfo(np.int32).max if vocab_size is None else vocab_size))
    if bad.any():
        t = int(np.argmax(bad))
        raise ValueError(f"{where}, token {t}: id {int(ids[t])} is outside the vocabulary of {vocab_size} ids")


def _check_rows(where: str, group: Group, field: str, label: str) -> None:
    rows = getattr(group, field)
    if rows is None:
        return
    if len(rows) != group.size:
        raise ValueError(f"{where}: {len(rows)} rows of {label} for {group.size} responses")
    for g, (row, ids) in enumerate(zip(rows, group.completion_ids, strict=True)):
        if len(row) != len(ids):
            raise ValueError(f"{where}, branch {g}: {label} has length {len(row)}, the response {len(ids)} tokens")
        if field == "completion_masks":
            continue
        mask = np.ones(len(ids)) if group.completion_masks is None else np.asarray(group.completion_masks[g])
        bad = (mask != 0) & ~np.isfinite(np.asarray(row, np.float64))
        if bad.any():
            t = int(np.argmax(bad))
            raise ValueError(f"{where}, branch {g}, token {t}: {label} is {row[t]} at a token that carries loss")
        positive = (mask != 0) & (np.asarray(row, np.float64) > _ROUNDING)
        if positive.any():
            t = int(np.argmax(positive))
            raise ValueError(
                f"{where}, branch {g}, token {t}: {label} is {row[t]}, but the log of a probability is never positive;"
                " if these are probabilities, take their logarithm"
            )


def make_batch(
    groups: Sequence[Group],
    *,
    max_prompt: int,
    max_response: int,
    num_groups: int,
    num_branches: int,
    pad_id: int = 0,
    vocab_size: int | None = None,
) -> Batch:
    """Right-pads groups to [num_groups, max_prompt] and [num_groups, num_branches, max_response], as numpy arrays.

    Fewer groups or branches leave padding rows (lengths, sizes, masks and advantages 0). An optional field is set if
    every group has it and None if none has. Nothing is ever truncated.

    Raises:
        ValueError: too many groups, branches or tokens; ids outside vocab_size; lengths that disagree; a field only
            some groups have. The message names group, branch and both values.
    """
    if not 1 <= len(groups) <= num_groups:
        raise ValueError(f"make_batch got {len(groups)} groups for the {num_groups} rows of the batch (at least 1)")
    named = [
        dataclasses.replace(group, name=f"group {b}" + (f" ({group.name})" if group.name else ""))
        for b, group in enumerate(groups)
    ]
    for group in named:
        check_group(group, max_prompt, max_response, vocab_size)
        if group.size > num_branches:
            raise ValueError(f"{group.name}: it has {group.size} branches, but num_branches is {num_branches}")
    shape = (num_groups, num_branches, max_response)
    batch: dict[str, Any] = {
        "prompt_ids": np.full((num_groups, max_prompt), pad_id, np.int32),
        "prompt_lengths": np.zeros(num_groups, np.int32),
        "completion_ids": np.full(shape, pad_id, np.int32),
        "completion_lengths": np.zeros(shape[:2], np.int32),
        "completion_mask": np.zeros(shape, np.int32),
        "group_sizes": np.zeros(num_groups, np.int32),
    }
    for b, group in enumerate(named):
        batch["prompt_ids"][b, : len(group.prompt_ids)] = group.prompt_ids
        batch["prompt_lengths"][b] = len(group.prompt_ids)
        batch["group_sizes"][b] = group.size
        for g, ids in enumerate(group.completion_ids):
            batch["completion_ids"][b, g, : len(ids)] = ids
            batch["completion_lengths"][b, g] = len(ids)
            mask = 1 if group.completion_masks is None else np.asarray(group.completion_masks[g]) != 0
            batch["completion_mask"][b, g, : len(ids)] = mask
    for field in ("rewards", "advantages", *_ROW_FIELDS):
        if _in_all(named, field):
            batch[field] = _pad_rows(named, field, shape)
    return Batch(**batch)


def _in_all(groups: Sequence[Group], field: str) -> bool:
    has = [getattr(group, field) is not None for group in groups]
    if any(has) and not all(has):
        with_it, without = groups[has.index(True)].name, groups[has.index(False)].name
        raise ValueError(f"{with_it} has {field}, but {without} has none; give it to every group of a batch or to none")
    return all(has)


def _pad_rows(groups: Sequence[Group], field: str, shape: tuple[int, int, int]) -> np.ndarray:
    per_token = field in _ROW_FIELDS
    rows = np.zeros(shape if per_token else shape[:2], np.float32)
    for b, group in enumerate(groups):
        values = getattr(group, field)
        if not per_token:
            rows[b, : group.size] = values
            continue
        for g, row in enumerate(values):
            rows[b, g, : len(row)] = row
    return rows
