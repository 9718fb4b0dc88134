"""Parameters to a Hugging Face checkpoint: config.json, one safetensors file or shards with an index, tokenizer files.

The folder appears complete or not at all. Everything is written to `.NAME.saving` beside it and renamed; a model that
is replaced is moved to `.NAME.previous` first and removed last. One piece of one tensor is in host memory at a time.
"""

import dataclasses
import errno
import functools
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import lax

from lsfuse.io.hf_arrays import cast, transpose
from lsfuse.io.hf_config import as_format, config_to_hf, read_config, why_not_family
from lsfuse.io.hf_load import INDEX, SINGLE
from lsfuse.io.hf_names import TensorSpec, tensor_specs
from lsfuse.io.hf_safetensors import FLOAT_DTYPES, TensorPlan, header_bytes, write_file
from lsfuse.io.tokenizer import TOKENIZER_FILES
from lsfuse.model.config import ModelConfig
from lsfuse.model.params import check_params, check_trainable
from lsfuse.types import Array, Params

_log = logging.getLogger(__name__)
_OWN_FILES = {"config.json", SINGLE, INDEX, *TOKENIZER_FILES}


class SavesFiles(Protocol):
    """What `save_hf` asks of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def save(self, folder: str | os.PathLike) -> None: ...


@dataclasses.dataclass(frozen=True)
class _Shard:
    file: str
    specs: tuple[TensorSpec, ...]
    plans: tuple[TensorPlan, ...]

    @property
    def nbytes(self) -> int:
        return sum(plan.nbytes for plan in self.plans)


def save_hf(
    path: str | os.PathLike,
    config: ModelConfig,
    params: Params,
    tokenizer: SavesFiles | None = None,
    dtype: Any = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    format: str = "auto",
) -> None:
    """Writes a checkpoint that `load_hf` and, where the family can express the model, transformers read.

    Args:
        path: folder to make. One that is there already is replaced if it holds a model of the same configuration (its
            tokenizer files stay if none is given), or with `overwrite`; never if it holds files of another kind.
        params: as `param_shapes(config)` says; JAX or numpy arrays.
        tokenizer: its files go along.
        dtype: of the tensors written; None keeps each leaf's, bit for bit.
        max_shard_bytes: files are split so that none holds more tensor bytes, unless one tensor alone does.
        format: "auto": as the model's family, or, where that cannot express it, as our own, which no other library
            reads; "lsfuse": as our own; or a model_type ("nemotron-nas", "llama", …): as that family, or not at all.

    Raises:
        ValueError: a format that cannot express the model, naming block and reason.
        ValueError: parameters that do not fit `config` or are quantised, a dtype that is not floating, a tokenizer of
            more ids than the model's vocabulary.
        FileExistsError: the folder holds something else.
        OSError: no space; what was there before stays as it was.
    """
    check_params(config, params)
    check_trainable(params)
    config = as_format(config, format)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} ids, the model's vocabulary {config.vocab_size}")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    leaves = traverse_util.flatten_dict(params)
    shards = _plan(config, leaves, dtype, max_shard_bytes)
    target = Path(os.path.realpath(Path(path).expanduser()))
    saving, previous = (target.with_name(f".{target.name}.{suffix}") for suffix in ("saving", "previous"))
    target.parent.mkdir(parents=True, exist_ok=True)
    _recover(target, saving, previous)
    same_model = _check_target(target, config, overwrite)
    _check_space(target.parent, shards)
    if format == "auto" and (reasons := why_not_family(config)):
        _log.warning("%s: transformers cannot load this model (%s); load_hf can", target, "; ".join(reasons))
    saving.mkdir()
    try:
        if tokenizer is not None:
            tokenizer.save(saving)
        elif same_model:
            _copy_tokenizer(target, saving)
        _write(saving, config_to_hf(config, _common_dtype(shards), format), leaves, shards)
        if target.exists():
            os.rename(target, previous)
        os.rename(saving, target)
        _sync(target.parent)
    except BaseException as error:
        shutil.rmtree(saving, ignore_errors=True)
        _recover(target, saving, previous)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            size = sum(shard.nbytes for shard in shards)
            message = f"no space left for the {size} bytes of the model; nothing was changed"
            raise OSError(errno.ENOSPC, message, str(target)) from error
        raise
    shutil.rmtree(previous, ignore_errors=True)


def _plan(config: ModelConfig, leaves: dict, dtype: Any, max_shard_bytes: int) -> list[_Shard]:
    groups: list[list[tuple[TensorSpec, TensorPlan]]] = [[]]
    filled = 0
    for spec in tensor_specs(config):
        to = jnp.dtype(leaves[spec.path].dtype if dtype is None else dtype)
        if to not in FLOAT_DTYPES.values():
            raise ValueError(f"{'/'.join(spec.path)} cannot be saved as {to}; valid: bfloat16, float16/32/64")
        plan = TensorPlan(spec.name, to, spec.shape)
        if groups[-1] and filled + plan.nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((spec, plan))
        filled += plan.nbytes
    shards = []
    for i, group in enumerate(groups, 1):
        group.sort(key=lambda pair: -pair[1].dtype.itemsize)  # wide types first keeps every tensor aligned
        file = SINGLE if len(groups) == 1 else f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        specs, plans = zip(*group, strict=True)
        shards.append(_Shard(file, specs, plans))
    return shards


def _recover(target: Path, saving: Path, previous: Path) -> None:
    """Undoes what a killed save left behind: half-written files go, a model moved aside comes back."""
    if previous.is_dir() and not target.exists():
        os.rename(previous, target)
    for leftover in (saving, previous):
        if leftover.is_dir():
            shutil.rmtree(leftover)


def _check_target(target: Path, config: ModelConfig, overwrite: bool) -> bool:
    """Whether a model of the same configuration lies there. Raises FileExistsError if anything else does."""
    if not target.exists():
        return False
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file; give a folder to make")
    names = sorted(p.name for p in target.iterdir())
    foreign = [n for n in names if n not in _OWN_FILES and not (n.startswith("model-") and n.endswith(".safetensors"))]
    if foreign:
        raise FileExistsError(f"{target} holds files of another kind: {', '.join(foreign)}; give another folder")
    if not names:
        return False
    try:
        same = read_config(target) == config
    except (OSError, ValueError):
        same = False
    if not same and not overwrite:
        raise FileExistsError(f"{target} holds another model; give another folder, or overwrite=True to replace it")
    return same


def _check_space(folder: Path, shards: Sequence[_Shard]) -> None:
    needed = sum(shard.nbytes + len(header_bytes(shard.plans)) for shard in shards)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC, f"the model needs {needed} bytes, {free} are free; nothing was changed", str(folder)
        )


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _common_dtype(shards: Sequence[_Shard]) -> str:
    dtypes = [plan.dtype for shard in shards for plan in shard.plans]
    return max(set(dtypes), key=dtypes.count).name


def _write(folder: Path, content: dict[str, Any], leaves: dict, shards: Sequence[_Shard]) -> None:
    """content: of config.json."""
    _write_json(folder / "config.json", content)
    for shard in shards:
        pairs = zip(shard.specs, shard.plans, strict=True)
        pieces = (piece for spec, plan in pairs for piece in _rows(leaves[spec.path], spec, plan.dtype))
        write_file(folder / shard.file, shard.plans, pieces)
    if len(shards) > 1:
        weight_map = {plan.name: shard.file for shard in shards for plan in shard.plans}
        size = sum(shard.nbytes for shard in shards)
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    _sync(folder)


def _rows(leaf: Array | np.ndarray, spec: TensorSpec, dtype: np.dtype) -> Iterator[np.ndarray]:
    """A tensor of the checkpoint, from its place in the leaf, a few megabytes at a time."""
    for start, stop in spec.pieces(np.dtype(leaf.dtype).itemsize):
        extent = spec.extent(stop - start)
        if isinstance(leaf, np.ndarray):
            piece = leaf[tuple(slice(a, a + n) for a, n in zip(spec.start(start), extent, strict=True))]
        else:
            piece = np.asarray(_read_bits(leaf, spec.start(start), extent)).view(leaf.dtype)
        piece = piece.reshape(extent[len(extent) - len(spec.shape) :])
        piece = cast(piece, dtype, spec.name)
        yield transpose(piece) if spec.transposed else piece


@functools.partial(jax.jit, static_argnums=2)
def _read_bits(leaf: Array, start: tuple[Array, ...], extent: tuple[int, ...]) -> Array:
    # As integers: some compilers widen bfloat16 on the way, which changes signalling NaNs.
    bits = lax.bitcast_convert_type(leaf, jnp.dtype(f"u{leaf.dtype.itemsize}"))
    return lax.dynamic_slice(bits, start, extent)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    with open(file, "w", encoding="utf-8") as f:
        f.write(json.dumps(content, indent=2) + "\n")
        f.flush()
        os.fsync(f.fileno())


def _sync(folder: Path) -> None:
    """Flushes a folder's entries, so that a rename survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
