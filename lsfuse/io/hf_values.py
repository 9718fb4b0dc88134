"""Single values of a config.json, checked."""

from collections.abc import Mapping
from typing import Any


def integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; `default` where the key is absent or null. Raises ValueError, naming key and value."""
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{key} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
        raise ValueError(f"{key} must be an integer of at least 1, got {value!r}")
    return int(value)


def number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive number; `default` where the key is absent or null. Raises ValueError, naming key and value."""
    value = raw.get(key, default)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(
            f"{key} must be a positive number, got {value!r}" if value is not None else f"{key} is missing"
        )
    return float(value)


def optional_number(raw: Mapping[str, Any], key: str) -> float | None:
    """A positive number, or None where the key is absent or null."""
    return None if raw.get(key) is None else number(raw, key)


def token_ids(value: Any) -> tuple[int, ...]:
    """An id, a list of ids or null as a tuple; negative ids (older configs' "none") are left out."""
    ids = value if isinstance(value, (list, tuple)) else [value]
    for i in ids:
        if i is not None and (isinstance(i, bool) or not isinstance(i, int)):
            raise ValueError(f"token id {i!r} is not an integer")
    return tuple(i for i in ids if i is not None and i >= 0)
