"""Checkpoints of a training run, through orbax (v1 API).

A save is one atomic orbax commit of the arrays and, as its custom metadata, a manifest of what they must be (see
`checkpoint_manifest`). A load trusts nothing it has not compared with the manifest, and falls back to the checkpoint
before when one is damaged.
"""

import contextlib
import dataclasses
import errno
import logging
import pathlib
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from lsfuse.io.checkpoint_manifest import (
    CheckpointError,
    CorruptCheckpoint,
    Manifest,
    check_config,
    describe,
    leaf_names,
)

_STEP = re.compile(r"\d{8,}")
_LEFTOVER = re.compile(r"\d{8,}\.(orbax-checkpoint-tmp|discarded)")


@dataclasses.dataclass(frozen=True)
class Restored:
    """step, the state in the template's structure, and the info it was saved with."""

    step: int
    state: Any
    info: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, in one directory, the last `keep` of them.

    Args:
        directory: made by the first save.
        config: the run's resolved config, JSON-able. A checkpoint of another one is refused.
        keep: how many to keep; older ones are deleted once a newer one is complete.
        defaults: what fields of the config count as that a checkpoint lacks, because they came after it; None: as
            differences.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        config: Mapping[str, Any],
        keep: int = 3,
        defaults: Mapping[str, Any] | None = None,
    ):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.directory = pathlib.Path(directory).absolute()
        self._config, self._defaults = config, defaults
        self._keep = keep

    def path(self, step: int) -> pathlib.Path:
        return self.directory / f"{step:08d}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        if not self.directory.is_dir():
            return []
        return sorted(int(p.name) for p in self.directory.iterdir() if _STEP.fullmatch(p.name) and p.is_dir())

    def save(self, step: int, state: Any, info: Mapping[str, Any] | None = None) -> pathlib.Path:
        """Writes one checkpoint and returns when it is complete. Checkpoints of later steps (a future that a damaged
        checkpoint made the run compute again) and all but the last `keep` are then deleted.

        state: a tree of arrays (PRNG keys as their `jax.random.key_data`).
        info: JSON-able facts of the host (data position, best reward, …).

        Raises:
            CheckpointError: it could not be written (a full disk); the checkpoints from before are untouched.
        """
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(state)]
        described = {n: describe(np.asarray(x)) for n, x in zip(leaf_names(state), leaves, strict=True)}
        manifest = Manifest(step, dict(self._config), dict(info or {}), described)
        arrays = {n: x for n, x in zip(described, leaves, strict=True) if x.size}
        path = self.path(step)
        logging.getLogger("absl").addFilter(_said_once)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
            if path.exists():
                path.rename(path.with_name(f"{path.name}.discarded"))
            with _context():
                ocp.save_checkpointables(path, {"state": _nest(arrays)}, custom_metadata=manifest.to_json())
        except (OSError, ValueError, RuntimeError) as error:  # orbax and tensorstore raise all three
            with contextlib.suppress(OSError):
                self._sweep()
            raise CheckpointError(self._explain(step, leaves, error)) from error
        self._sweep()
        steps = self.steps()
        for old in [s for s in steps if s > step] + [s for s in steps if s <= step][: -self._keep]:
            shutil.rmtree(self.path(old))
        return path

    def restore(self, template: Any | Callable[[dict[str, Any]], Any]) -> Restored | None:
        """The newest checkpoint that is whole, or None if there is none at all.

        template: a tree of arrays or `jax.ShapeDtypeStruct`s (their sharding, if set, is where the leaf goes), or a
            function from the checkpoint's info to one.

        Warns, naming step and leaf, for every damaged checkpoint passed over.

        Raises:
            CheckpointError: all checkpoints are damaged; or the newest whole one has other leaves, shapes or dtypes
                than the template, or (ConfigMismatch) another config.
        """
        for name in self._leftovers():
            warnings.warn(f"{self.directory / name} is a half-written checkpoint; it is ignored", stacklevel=2)
        reasons: list[str] = []
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self._load(step, template)
            except CorruptCheckpoint as error:
                reasons.append(f"step {step}: {error}")
                warnings.warn(f"checkpoint of step {step} in {self.directory} is damaged: {error}", stacklevel=2)
        if steps:
            raise CheckpointError(
                f"all {len(steps)} checkpoints in {self.directory} are damaged ({'; '.join(reasons)}); start anew in"
                " another work directory, or put an undamaged copy there"
            )
        return None

    def _load(self, step: int, template: Any) -> Restored:
        path = self.path(step)
        with _damage("metadata"), _context():
            metadata = ocp.checkpointables_metadata(path)
            manifest = Manifest.from_json(metadata.custom_metadata or {})
            stored = _unnest(metadata.metadata["state"])
        if manifest.step != step:
            raise CorruptCheckpoint(f"its manifest is of step {manifest.step}")
        check_config(manifest.config, self._config, str(path), self._defaults)
        if callable(template):
            template = template(manifest.info)
        names, (leaves, treedef) = leaf_names(template), jax.tree.flatten(template)
        manifest.check_template(names, leaves)
        wanted = {
            n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(leaf))
            for n, leaf in zip(names, leaves, strict=True)
        }
        _check_metadata(stored, manifest)
        loaded = _read_arrays(path, {n: x for n, x in wanted.items() if x.size})
        arrays = []
        for name, abstract in wanted.items():
            arrays.append(loaded[name] if abstract.size else jnp.zeros(abstract.shape, abstract.dtype))
            manifest.check_leaf(name, np.asarray(arrays[-1]))
        return Restored(step, jax.tree.unflatten(treedef, arrays), manifest.info)

    def _leftovers(self) -> list[str]:
        if not self.directory.is_dir():
            return []
        return sorted(p.name for p in self.directory.iterdir() if _LEFTOVER.match(p.name))

    def _sweep(self) -> None:
        for name in self._leftovers():
            shutil.rmtree(self.directory / name)

    def _explain(self, step: int, leaves: list[Any], error: Exception) -> str:
        message = f"the checkpoint of step {step} could not be written to {self.directory}: {_one_line(error)}."
        with contextlib.suppress(OSError):
            free, size = shutil.disk_usage(self.directory).free, sum(x.nbytes for x in leaves)
            if "No space left" in message or getattr(error, "errno", None) == errno.ENOSPC or free < size:
                message += (
                    f" The disk is full: {free / 1e6:.1f} MB are free, the arrays take {size / 1e6:.1f} MB. Make room"
                    " and continue with --resume."
                )
        return f"{message} Earlier checkpoints are untouched (steps: {', '.join(map(str, self.steps())) or 'none'})"


def _check_metadata(stored: dict[str, Any], manifest: Manifest) -> None:
    """Compares orbax's own metadata with the manifest, because orbax casts and pads without a word."""
    expected = {name for name, leaf in manifest.leaves.items() if 0 not in leaf["shape"]}
    if stored.keys() != expected:
        names = ", ".join(sorted(stored.keys() ^ expected)[:3])
        raise CorruptCheckpoint(f"leaf {names}: in the manifest or among the arrays, but not in both")
    for name, found in stored.items():
        saved, shape, dtype = manifest.leaves[name], list(found.shape), np.dtype(found.dtype).name
        if shape != saved["shape"] or dtype != saved["dtype"]:
            raise CorruptCheckpoint(
                f"leaf {name}: stored as {dtype}{shape}, but {saved['dtype']}{saved['shape']} was saved"
            )


def _read_arrays(path: pathlib.Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Leaf name -> array."""
    try:
        with _damage("arrays"), _context():
            return _unnest(ocp.load_checkpointables(path, {"state": _nest(wanted)})["state"])
    except CorruptCheckpoint:
        for name, abstract in wanted.items():  # which one is it?
            with _damage(f"leaf {name}"), _context(partial=True):
                ocp.load_checkpointables(path, {"state": _nest({name: abstract})})
        raise


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextlib.contextmanager
def _context(partial: bool = False) -> Iterator[None]:
    context = ocp.Context()
    # Creating directories in the background makes a failed save hang on signals that never come.
    context.async_options.create_directories_asynchronously = False
    context.pytree.loading.partial_load = partial
    with context:
        yield


def _said_once(record: logging.LogRecord) -> bool:
    """False for the tracebacks that orbax's threads log, even later, of errors that its calls raise as well."""
    return not (record.exc_info and "orbax" in record.pathname)


@contextlib.contextmanager
def _damage(what: str) -> Iterator[None]:
    """Any failure to read inside is damage of `what`, except those that are this process's own."""
    try:
        yield
    except (CheckpointError, MemoryError, PermissionError):
        raise
    except Exception as error:
        raise CorruptCheckpoint(f"{what} cannot be read ({_one_line(error)})") from error


def _sharding(leaf: Any) -> Any:
    return getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return nested


def _unnest(nested: Any) -> dict[str, Any]:
    return dict(zip(leaf_names(nested), jax.tree.leaves(nested), strict=True))
