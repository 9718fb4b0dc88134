"""What a checkpoint says about itself: the name, shape, dtype and SHA-256 of every leaf, and the run it belongs to.

The manifest is saved inside the same orbax commit as the arrays. Array storage checks little: a flipped bit in a data
file, or a leaf of another dtype, loads without a word. So the digests here are compared on load, leaf by leaf, and
the manifest carries a digest of its own.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint cannot be used or made, for a reason the user can act on."""


class CorruptCheckpoint(CheckpointError):
    """The bytes on disk are not those that were saved."""


class ConfigMismatch(CheckpointError):
    """A checkpoint, or a work directory, of another config."""


def leaf_names(tree: Any) -> list[str]:
    """Names like "opt_state/1/0/mu/norm" of the leaves of any tree, in the order of `jax.tree.leaves`."""
    return ["/".join(_segment(key) for key in path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _segment(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def digest(array: np.ndarray) -> str:
    """SHA-256 of dtype, shape and bytes (C order, the machine's byte order)."""
    array = np.ascontiguousarray(array)
    sha = hashlib.sha256(f"{array.dtype.name}{list(array.shape)}".encode())
    sha.update(array.reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


def describe(array: np.ndarray) -> dict[str, Any]:
    return {"shape": list(array.shape), "dtype": array.dtype.name, "sha256": digest(array)}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """step: of the checkpoint. config, info: JSON mappings. leaves: name -> shape, dtype, sha256."""

    step: int
    config: dict[str, Any]
    info: dict[str, Any]
    leaves: dict[str, dict[str, Any]]

    def to_json(self) -> dict[str, str]:
        """The text and its digest, as they are saved."""
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, sort_keys=True)
        return {"text": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}

    @classmethod
    def from_json(cls, saved: Mapping[str, str]) -> "Manifest":
        """Raises CorruptCheckpoint if the text does not match its digest."""
        text, sha256 = saved.get("text"), saved.get("sha256")
        if not isinstance(text, str) or hashlib.sha256(text.encode()).hexdigest() != sha256:
            raise CorruptCheckpoint("the manifest does not match its SHA-256")
        fields = json.loads(text)
        if fields.pop("format") != FORMAT:
            raise CheckpointError(f"the checkpoint has another format than this version of lsfuse reads ({FORMAT})")
        return cls(**fields)

    def check_template(self, names: list[str], leaves: list[Any]) -> None:
        """Raises CheckpointError if the run at hand has other leaves, shapes or dtypes than the checkpoint."""
        missing, extra = sorted(set(names) - set(self.leaves)), sorted(set(self.leaves) - set(names))
        if missing or extra:
            raise CheckpointError(
                f"the checkpoint of step {self.step} has another tree than this run:"
                f" it lacks {_some(missing)} and has {_some(extra)} besides"
            )
        for name, leaf in zip(names, leaves, strict=True):
            saved = self.leaves[name]
            for field, value in (("shape", list(leaf.shape)), ("dtype", np.dtype(leaf.dtype).name)):
                if saved[field] != value:
                    raise CheckpointError(
                        f"the checkpoint of step {self.step} holds {name} with {field} {saved[field]}, but this run"
                        f" needs {value}"
                    )

    def check_leaf(self, name: str, array: np.ndarray) -> None:
        """Raises CorruptCheckpoint, naming the leaf, if `array` is not what was saved."""
        found, saved = describe(array), self.leaves[name]
        for field in ("shape", "dtype", "sha256"):
            if found[field] != saved[field]:
                raise CorruptCheckpoint(f"leaf {name}: {field} is {found[field]}, but {saved[field]} was saved")


def _some(names: list[str], limit: int = 3) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} to {"a.b": 1}, values as JSON would return them (tuples become lists)."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten_config(value, f"{name}.")
        else:
            flat[name] = json.loads(json.dumps(value, sort_keys=True))
    return flat


def config_differences(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """One line per field that differs, naming both values."""
    absent = object()
    a, b = flatten_config(saved), flatten_config(mine)
    lines = []
    for name in sorted(a.keys() | b.keys()):
        old, new = a.get(name, absent), b.get(name, absent)
        if old is absent or new is absent or old != new or type(old) is not type(new):
            old, new = ("(absent)" if x is absent else repr(x) for x in (old, new))
            lines.append(f"{name}: {old} there, {new} here")
    return lines


def missing_fields(saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted name -> default of the fields that `saved`, a config from before they existed, lacks."""
    have = flatten_config(saved)
    return {name: value for name, value in flatten_config(defaults).items() if name not in have}


def check_config(
    saved: Mapping[str, Any], mine: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None
) -> None:
    """Raises ConfigMismatch, listing every field that differs, if `where` holds a run of another config.

    defaults: of the fields of today. Those that `saved` lacks, because they came after it, count as these.
    """
    came_later = {k: v for k, v in missing_fields(saved, defaults or {}).items() if k in flatten_config(mine)}
    lines = config_differences({**came_later, **flatten_config(saved)}, mine)
    if lines:
        raise ConfigMismatch(
            f"{where} belongs to a run with another config; {'; '.join(lines)}. Take another work directory, or the"
            " config (and data) the run was started with"
        )
