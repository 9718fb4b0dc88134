"""Sweeps: one run for every combination of some fields' values, each in a work directory of its own."""

import ast
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from lsfuse.train.config import check_fields, resolve_config, set_field
from lsfuse.train.schema import SCHEMA


def parse_sweep(given: Sequence[str], schema: Mapping[str, Any] = SCHEMA) -> dict[str, list[Any]]:
    """{"field": [values]} from texts "field=a,b,c". A comma inside brackets or quotes does not separate.

    Raises: ValueError for an unknown field (the nearest name is in the message), a field given twice, a value given
    twice, no values.
    """
    fields: dict[str, list[Any]] = {}
    for text in given:
        name, sign, values = text.partition("=")
        name = name.strip().removeprefix("config.")
        if not sign or not values.strip():
            raise ValueError(f"--sweep={text}: write field=value,value,… as in --sweep=rl.temperature=0.7,1.0")
        check_fields([name], schema)
        if name in fields:
            raise ValueError(f"--sweep={text}: {name} is swept twice; give all of its values at once")
        fields[name] = [_value(v) for v in _split(values)]
        if len({repr(v) for v in fields[name]}) < len(fields[name]):
            raise ValueError(f"--sweep={text}: a value is given twice")
    return fields


def sweep(config: ConfigDict, fields: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, ConfigDict]]:
    """(name, config) of every combination, the last field fastest. Names are those of work directories.

    Raises: ValueError as `resolve_config` for a value that its field does not take, before the first is yielded.
    """
    combinations = []
    for values in itertools.product(*fields.values()):
        mine = resolve_config(config)
        for name, value in zip(fields, values, strict=True):
            set_field(mine, name, value)
        label = ",".join(f"{name}={_label(value)}" for name, value in zip(fields, values, strict=True))
        combinations.append((label, resolve_config(mine)))
    yield from combinations


def is_finished(workdir: pathlib.Path) -> bool:
    """Whether the run in `workdir` came to its end."""
    return (workdir / "summary.json").is_file()


def _split(values: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for char in values:
        if char == "," and not depth and not quote:
            parts.append("")
            continue
        if char in "'\"":
            quote = "" if char == quote else quote or char
        elif not quote:
            depth += (char in "([{") - (char in ")]}")
        parts[-1] += char
    if any(not part.strip() for part in parts):
        raise ValueError(f"--sweep: an empty value in {values!r}")
    return [part.strip() for part in parts]


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _label(value: Any) -> str:
    """A value as part of a directory's name."""
    return "".join(c if c.isalnum() or c in "._-+()" else "_" for c in str(value))
