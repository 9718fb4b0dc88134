"""Single values of a config.json, checked."""

import math
from collections.abc import Mapping
from typing import Any

# Sizes and positions are int32 on a device.
_LARGEST = 2**31 - 1


def integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; `default` where the key is absent or null. Raises ValueError, naming key and value."""
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{key} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= _LARGEST or value % 1:
        raise ValueError(f"{key} must be an integer between 1 and {_LARGEST}, got {value!r}")
    return int(value)


def number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive, finite number; `default` where the key is absent or null. Raises ValueError, naming key and value."""
    value = raw.get(key, default)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(
            f"{key} must be a positive number, got {value!r}" if value is not None else f"{key} is missing"
        )
    return float(value)


def optional_number(raw: Mapping[str, Any], key: str) -> float | None:
    """A positive number, or None where the key is absent or null."""
    return None if raw.get(key) is None else number(raw, key)


def boolean(raw: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """true or false; `default` where the key is absent or null. Raises ValueError, naming key and value: a text such
    as "false" would count as true."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return value


def mapping(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object; empty where the key is absent or null. Raises ValueError, naming key and value."""
    value = raw.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} must be an object of keys and values, got {value!r}")
    return dict(value or {})


def texts(raw: Mapping[str, Any], key: str) -> list[str] | None:
    """A list of texts; None where the key is absent or null. Raises ValueError, naming key and value."""
    value = raw.get(key)
    if value is not None and not (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)):
        raise ValueError(f"{key} must be a list of texts, got {value!r}")
    return None if value is None else list(value)


def token_ids(value: Any) -> tuple[int, ...]:
    """An id, a list of ids or null as a tuple; negative ids (older configs' "none") are left out."""
    ids = value if isinstance(value, (list, tuple)) else [value]
    for i in ids:
        if i is not None and (isinstance(i, bool) or not isinstance(i, int)):
            raise ValueError(f"token id {i!r} is not an integer")
    return tuple(i for i in ids if i is not None and i >= 0)
