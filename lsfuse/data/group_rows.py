"""The fields of a group sampled elsewhere, as one line of jsonl has them.

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

from collections.abc import Mapping
from typing import Any

import numpy as np

_FIELDS = {"prompt", "prompt_ids", "prompts", "responses", "response_ids", "rewards", "masks", "old_logps", "ref_logps"}
_FIELDS |= {"chosen", "rejected"}
LARGEST = float(np.finfo(np.float32).max)  # a batch holds float32
RAGGED = ("response_ids", "masks", "old_logps", "ref_logps")


def plain_row(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A line's object with one prompt and with pairs laid out as responses.

    Returns: "prompt" (str) or "prompt_ids" (int64 [P]); "responses" (texts) or "response_ids" (G arrays int64 [R_i]);
        of "rewards" (float64 [G]), "masks", "old_logps", "ref_logps" (G arrays float64) those that were given.

    Raises: ValueError, starting with `where`, for an unknown field or one of another type.
    """
    if unknown := sorted(row.keys() - _FIELDS):
        raise ValueError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(sorted(_FIELDS))}")
    row = _pairs_to_responses(where, dict(row))
    responses = _responses(where, row)
    masks = _rows(where, row, "masks")
    if masks is not None and any(np.isnan(m).any() for m in masks):
        raise ValueError(f"{where}: field 'masks' must hold numbers only")
    rewards = _floats(f"{where}: field 'rewards'", row.get("rewards"))
    for g, reward in enumerate(() if rewards is None else rewards):
        if not abs(reward) <= LARGEST:
            got = "null" if row["rewards"][g] is None else reward
            raise ValueError(f"{where}, branch {g}: rewards must be finite, got {got}")
    count = len(next(iter(responses.values())))
    if rewards is not None and len(rewards) != count:
        raise ValueError(f"{where}: {len(rewards)} rewards for {count} responses")
    for field in ("masks", "old_logps", "ref_logps"):
        if isinstance(rows := row.get(field), list) and len(rows) != count:
            raise ValueError(f"{where}: {len(rows)} rows of {field} for {count} responses")
    plain = {
        **_prompt(where, row, count),
        **responses,
        "rewards": rewards,
        "masks": masks,
        "old_logps": _rows(where, row, "old_logps"),
        "ref_logps": _rows(where, row, "ref_logps"),
    }
    return {k: v for k, v in plain.items() if v is not None}


def flat_row(plain: Mapping[str, Any]) -> dict[str, Any]:
    """What `plain_row` returns as features of a data set: lists of rows end to end, with their lengths beside them
    (int64 [G], "masks_lengths"), and numbers as the float32 of a batch."""
    flat: dict[str, Any] = {}
    for field, value in plain.items():
        if field in RAGGED:
            flat[f"{field}_lengths"] = np.array([len(row) for row in value], np.int64)
            value = np.concatenate(value)
        floats = isinstance(value, np.ndarray) and value.dtype == np.float64
        flat[field] = value.astype(np.float32) if floats else value
    return flat


def row_of_flat(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A line's object again, from the features that `flat_row` made."""
    row = {}
    for field, value in flat.items():
        if field.endswith("_lengths"):
            continue
        if field in RAGGED:
            value = [v.tolist() for v in np.split(value, np.cumsum(flat[f"{field}_lengths"])[:-1])]
        row[field] = value.tolist() if isinstance(value, np.ndarray) else value
    return row


def _prompt(where: str, row: dict[str, Any], num_responses: int) -> dict[str, Any]:
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
        return {"prompt": value}
    if given[0] == "prompt":
        raise ValueError(f"{where}: field 'prompt' must be a text, got {_short(value)}; ids go into 'prompt_ids'")
    return {"prompt_ids": _ids(f"{where}: field {given[0]!r}", value)}


def _responses(where: str, row: dict[str, Any]) -> dict[str, list]:
    given = [f for f in ("responses", "response_ids") if f in row]
    if len(given) != 1:
        raise ValueError(f"{where}: give one of responses or response_ids; got {', '.join(given) or 'none'}")
    field = given[0]
    values = row[field]
    if not isinstance(values, list) or not values:
        raise ValueError(f"{where}: field {field!r} must be a list that is not empty, got {_short(values)}")
    if field == "response_ids":
        return {field: [_ids(f"{where}: field {field!r}, branch {g}", ids) for g, ids in enumerate(values)]}
    for g, text in enumerate(values):
        if not isinstance(text, str):
            raise ValueError(f"{where}: field 'responses', branch {g} must be a text, got {_short(text)}")
    return {field: values}


def _pairs_to_responses(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """`row` with "chosen" and "rejected" laid out as "responses" or "response_ids"."""
    if not {"chosen", "rejected"} & row.keys():
        return row
    if clash := {"responses", "response_ids"} & row.keys():
        raise ValueError(f"{where}: give pairs (chosen, rejected) or {sorted(clash)[0]}, not both")
    if missing := [f for f in ("chosen", "rejected") if f not in row]:
        raise ValueError(f"{where}: field {missing[0]!r} is missing; a preference has chosen and rejected")
    if "rewards" in row:
        raise ValueError(f"{where}: pairs (chosen, rejected) say which response is better; leave 'rewards' out")
    both = []
    for field in ("chosen", "rejected"):
        value = row[field]
        one = isinstance(value, str) or (isinstance(value, list) and all(type(v) is int for v in value))
        both.append([value] if one else value)
        if not isinstance(both[-1], list):
            raise ValueError(f"{where}: field {field!r} must be a text, a list of ids or a list of those; got {value}")
        if wrong := [v for v in both[-1] if not isinstance(v, str | list)]:
            kind = "a conversation" if isinstance(wrong[0], dict) else type(wrong[0]).__name__
            raise ValueError(
                f"{where}: field {field!r} holds {kind} ({_short(wrong[0])}); write the prompt into 'prompt' and the"
                " last reply alone, as a text, into chosen and rejected"
            )
    chosen, rejected = both
    if len(chosen) != len(rejected):
        raise ValueError(f"{where}: {len(chosen)} chosen but {len(rejected)} rejected responses; they are pairs")
    if same := [i for i, (a, b) in enumerate(zip(chosen, rejected, strict=True)) if a == b]:
        raise ValueError(f"{where}: pair {same[0]}: chosen and rejected are equal ({_short(chosen[same[0]])})")
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
    if huge := [v for v in values if type(v) is int and abs(v) > LARGEST]:
        raise ValueError(f"{where} must be numbers of float32, got {_short(huge[0])}")
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
