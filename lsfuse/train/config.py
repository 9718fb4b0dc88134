"""From a config, as a person wrote it, to one that is complete and checked."""

import difflib
import importlib.util
import json
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from lsfuse.train.distil_schema import DISTIL_SCHEMA
from lsfuse.train.fuse_schema import FUSE_SCHEMA
from lsfuse.train.schema import LARGEST_INT, SCHEMA, Field, default_config, fields

# What a config's `program` may name besides group RL, which has no such field.
PROGRAMS: Mapping[str, Mapping[str, Any]] = {"distil": DISTIL_SCHEMA, "fuse": FUSE_SCHEMA}


def load_config(path: str | pathlib.Path, overrides: Mapping[str, Any] | None = None) -> ConfigDict:
    """The config of a file, `configs/x.py` or `configs/x.py:argument`, with dotted overrides ({"rl.steps": 2})."""
    file, _, argument = str(path).partition(":")
    spec = importlib.util.spec_from_file_location(pathlib.Path(file).stem, file)
    if spec is None or spec.loader is None or not pathlib.Path(file).is_file():
        raise FileNotFoundError(f"there is no config file {file}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(argument) if argument else module.get_config()
    for name, value in (overrides or {}).items():
        set_field(config, name, value)
    return config


def set_field(config: ConfigDict, name: str, value: Any) -> None:
    """config.a.b = value for the name "a.b"; ValueError, with the nearest name, if there is no such field."""
    check_fields([name], schema_of(config))
    *parents, last = name.split(".")
    for parent in parents:
        config = config[parent]
    try:
        config[last] = value
    except TypeError:
        raise ValueError(f"config.{name}: {value!r} does not fit there; it is {config[last]!r} now") from None


def schema_of(config: Mapping[str, Any] | ConfigDict) -> Mapping[str, Any]:
    """The fields a config may have: those of the program it names, distillation or fusion, else those of group RL."""
    program = config.get("program")
    return next((schema for name, schema in PROGRAMS.items() if name == program), SCHEMA)


def today_s_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of all fields that a config of this program may have: what counts where a saved one lacks some.
    Where a run did not note its data, they count as those of today."""
    noted = {k: config[k] for k in ("data_sha256",) if k in config}
    return default_config(schema_of(config)).to_dict() | noted


def check_fields(names: Iterable[str], schema: Mapping[str, Any] = SCHEMA) -> None:
    """Raises ValueError for the first dotted name that is no field, with the nearest one that is."""
    known = fields(schema)
    for name in names:
        if name in known:
            continue
        groups = [n for n in known if n.startswith(f"{name}.")]
        if groups:
            raise ValueError(f"config.{name} is a group of fields, not a value; it has {_listed(groups)}")
        last = {n: n.rsplit(".", 1)[-1] for n in known}
        near = difflib.get_close_matches(name, known, 1, 0.7) or [
            n for n in known if last[n] in difflib.get_close_matches(name.rsplit(".", 1)[-1], last.values(), 1, 0.7)
        ]
        hint = f'; did you mean "{near[0]}"?' if near else f"; the groups are {', '.join(schema)}"
        raise ValueError(f'config has no field "{name}"{hint}')


def resolve_config(config: ConfigDict | Mapping[str, Any]) -> ConfigDict:
    """A complete copy of `config`, checked: what it leaves out has its default.

    Raises:
        ValueError: an unknown field (the nearest valid name is in the message), one given twice, a value of another
            type, out of range or not among the valid ones.
    """
    if not isinstance(config, ConfigDict | Mapping):
        raise ValueError(f"a config is a ConfigDict or a dict of fields, got {_shown(config)}")
    schema = schema_of(config)
    known, flat = fields(schema), _flatten(config, schema)
    check_fields(flat, schema)
    resolved = default_config(schema)
    for name, value in flat.items():
        set_field(resolved, name, checked(name, value, known[name]))
    return resolved


def _flatten(config: ConfigDict | Mapping[str, Any], schema: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        inner = schema.get(key) if isinstance(schema, Mapping) else None
        group = isinstance(value, ConfigDict | Mapping) and not isinstance(inner, Field)
        more = _flatten(value, inner, f"{prefix}{key}.") if group else {f"{prefix}{key}": value}
        if twice := more.keys() & flat.keys():
            name = min(twice)
            raise ValueError(f"config.{name} is given twice, {_shown(flat[name])} and {_shown(more[name])}")
        flat |= more
    return flat


def _listed(names: list[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def checked(name: str, value: Any, field: Field) -> Any:
    """The value as its field takes it. Raises ValueError, naming config.name, if it is not one of the field's."""
    if (
        isinstance(value, str)
        and str not in field.allowed
        and value in ("None", "none")
        and type(None) in field.allowed
    ):
        value = None
    if isinstance(value, np.generic):
        value = value.item()  # from a notebook's np.arange or np.logspace
    if isinstance(value, str) and int in field.allowed and len(value) < 20 and value.strip().isdecimal():
        value = int(value)  # the command line cannot tell "4" from 4
    if isinstance(value, list) and tuple in field.allowed:
        value = tuple(value)
    if type(value) is int and float in field.allowed and int not in field.allowed:
        value = float(value) if abs(value) < 2**1023 else math.inf if value > 0 else -math.inf
    if type(value) not in field.allowed:
        expected = " or ".join("None" if t is type(None) else t.__name__ for t in field.allowed)
        raise ValueError(f"config.{name} must be of type {expected} ({field.help}), got {_shown(value)}")
    if field.choices and value is not None and value not in field.choices:
        near = difflib.get_close_matches(str(value), field.choices, 1, 0.4)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ValueError(f"config.{name} must be one of {', '.join(field.choices)}, got {_shown(value)}{hint}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = field.minimum, field.maximum
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ValueError(f"config.{name} must be {bounds} ({field.help}), got {_shown(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"config.{name} must be finite ({field.help}), got {value}")
        if isinstance(value, int) and high is None and not -LARGEST_INT <= value <= LARGEST_INT:
            raise ValueError(f"config.{name} must be at most {LARGEST_INT} ({field.help}), got {_shown(value)}")
    if isinstance(value, tuple):
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"config.{name} must hold numbers and texts only ({field.help}): {error}") from None
    if field.check is not None:
        field.check(f"config.{name}", value)
    return value


def _shown(value: Any, limit: int = 80) -> str:
    """A value on one short line, whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits; tuples in tuples without end
        text = f"a {type(value).__name__} too large to print"
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
