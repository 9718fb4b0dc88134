"""Parameters from a Hugging Face checkpoint, in a folder or by hub id.

config.json fixes every name and shape; all headers are compared with it before the first tensor is read. Then tensors
are mapped a few megabytes at a time, transposed, and written in place into the leaf they belong to: besides the
parameters themselves, the host holds one such piece.
"""

import functools
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import lax

from lsfuse.io.hf_arrays import cast, transpose
from lsfuse.io.hf_config import read_config, read_json
from lsfuse.io.hf_names import EMBED, HEAD, TensorSpec, tensor_specs
from lsfuse.io.hf_safetensors import FLOAT_DTYPES, TensorInfo, read_header, read_rows
from lsfuse.model.config import ModelConfig, param_shapes
from lsfuse.model.params import with_all_runs
from lsfuse.types import Array, Params

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # recomputed from config.json
_SHOWN = 12


def load_hf(
    path_or_hub_id: str | os.PathLike, dtype: Any = None, *, revision: str | None = None
) -> tuple[ModelConfig, Params]:
    """Configuration and parameters of a Hugging Face checkpoint.

    Args:
        path_or_hub_id: a folder with config.json and model.safetensors (or its shards and index), or "owner/name" on
            the hub, fetched through huggingface_hub (extra `[hf]`).
        dtype: of the parameters; None keeps the file's, bit for bit.
        revision: branch, tag or commit, for a hub id.

    Returns:
        (config, params): params as `param_shapes(config)` says, on the default device.

    Raises:
        FileNotFoundError: the folder, config.json, the tensors, or a shard that the index names is absent.
        ValueError: an unsupported model, missing, unexpected or misshapen tensors, a truncated or damaged file. All of
            this is found before the first tensor is read.
        ImportError: a hub id without huggingface_hub.
    """
    folder = resolve_hf(path_or_hub_id, revision)
    config, specs, tensors = _read_shapes(folder)
    dtypes = _leaf_dtypes(specs, tensors, dtype)
    if config.tie_word_embeddings and HEAD in tensors:
        _check_tied(tensors[EMBED], tensors[HEAD])
    return config, _read_params(config, specs, tensors, dtypes)


def check_hf(path_or_hub_id: str | os.PathLike) -> ModelConfig:
    """The configuration of a checkpoint whose files are whole and hold the tensors it asks for; none is read.

    Raises: as `load_hf`.
    """
    return _read_shapes(resolve_hf(path_or_hub_id))[0]


def _read_shapes(folder: Path) -> tuple[ModelConfig, list[TensorSpec], dict[str, TensorInfo]]:
    config = read_config(folder)
    tensors = read_headers(folder)
    specs = tensor_specs(config)
    _check_tensors(folder, config, specs, tensors)
    return config, specs, tensors


def resolve_hf(path_or_hub_id: str | os.PathLike, revision: str | None = None) -> Path:
    """The folder that holds the checkpoint: the path itself, or where the hub's files were put."""
    folder = Path(os.path.expanduser(path_or_hub_id))  # Path.expanduser raises for a user who does not exist
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{folder} is a file; give the folder that holds config.json and the tensors")
    if not (isinstance(path_or_hub_id, str) and _HUB_ID.fullmatch(path_or_hub_id)):
        previous = folder.with_name(f".{folder.name}.previous")
        hint = f"; an interrupted save left the model it was replacing at {previous}" if previous.is_dir() else ""
        raise FileNotFoundError(f"there is no folder {folder}, and it has not the form of a hub id (owner/name){hint}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ImportError(
            f"there is no folder {folder}; to fetch {path_or_hub_id!r} from the hub, install the extra: pip install"
            " 'lsfuse[hf]'"
        ) from None
    try:
        return Path(snapshot_download(path_or_hub_id, revision=revision, allow_patterns=_HUB_FILES))
    except Exception as error:
        raise OSError(
            f"there is no folder {folder}, and fetching {path_or_hub_id!r} (revision {revision or 'main'}) from the hub"
            f" failed: {' '.join(str(error).split())}"
        ) from error


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of the checkpoint by name, from the files' headers."""
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    index = folder / INDEX
    if not index.is_file():
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".safetensors", ".gguf", ".pth"))
        found = f"; it has {', '.join(others)}, which is not read (convert it to safetensors)" if others else ""
        raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}{found}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ValueError(f"{index} has no weight_map from tensor names to files")
    files = sorted({str(name) for name in weight_map.values()})
    if absent := [name for name in files if not (folder / name).is_file()]:
        raise FileNotFoundError(
            f"{index} names {len(files)} files, of which {_listed(absent)} are absent from {folder}"
        )
    headers = {name: read_header(folder / name) for name in files}
    if lost := sorted(name for name, file in weight_map.items() if name not in headers[file]):
        raise ValueError(f"{index} places {_listed(lost)} in files that do not hold them, e.g. {weight_map[lost[0]]}")
    tensors = {name: info for header in headers.values() for name, info in header.items()}
    return tensors | {name: headers[file][name] for name, file in weight_map.items()}


def _check_tensors(
    folder: Path, config: ModelConfig, specs: Iterable[TensorSpec], tensors: Mapping[str, TensorInfo]
) -> None:
    expected = {spec.name: spec for spec in specs}
    allowed = {HEAD} if config.tie_word_embeddings else set()
    problems = []
    if missing := [name for name in expected if name not in tensors]:
        hint = " (is the head tied? then config.json needs tie_word_embeddings true)" if HEAD in missing else ""
        problems.append(f"missing, though config.json asks for them: {_listed(missing)}{hint}")
    extra = sorted(name for name in tensors.keys() - expected.keys() - allowed if not _IGNORED.fullmatch(name))
    if extra:
        problems.append(f"unexpected, config.json has no place for them: {_listed(extra)}")
    misshapen = []
    for name, spec in [*expected.items(), *((name, expected[EMBED]) for name in allowed)]:
        info = tensors.get(name)
        if info is not None and info.shape != spec.shape:
            hint = _padding_hint(name, info.shape, spec.shape)
            wanted = f"by config.json it is {list(spec.shape)}{hint}"
            misshapen.append(f"{name} in {info.file.name} has shape {list(info.shape)}, {wanted}")
        elif info is not None and info.dtype is None:
            misshapen.append(
                f"{name} in {info.file.name} is of type {info.dtype_name}; supported: {', '.join(FLOAT_DTYPES)}"
            )
    problems += misshapen[:_SHOWN]
    if len(misshapen) > _SHOWN:
        problems.append(f"… and {len(misshapen) - _SHOWN} more tensors like these")
    if problems:
        raise ValueError(f"{folder}: the tensors do not fit config.json:\n  " + "\n  ".join(problems))


def _padding_hint(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    if name not in (EMBED, HEAD) or len(found) != 2 or found[1] != wanted[1]:
        return ""
    return (
        f" — a vocabulary padded to {found[0]} rows is the likely cause: set vocab_size to {found[0]} in config.json"
        if found[0] > wanted[0]
        else f" — the likely cause is a vocabulary padded or extended in config.json only: set vocab_size to {found[0]}"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _leaf_dtypes(
    specs: Iterable[TensorSpec], tensors: Mapping[str, TensorInfo], dtype: Any
) -> dict[tuple[str, ...], np.dtype]:
    """dtype of every leaf. Raises ValueError if a stacked leaf would mix dtypes, or one is not available."""
    wanted = None if dtype is None else jnp.dtype(dtype)
    if wanted is not None and wanted not in FLOAT_DTYPES.values():
        raise ValueError(f"dtype {wanted} is no floating-point type of a checkpoint; valid: bfloat16, float16/32/64")
    dtypes: dict[tuple[str, ...], np.dtype] = {}
    for spec in specs:
        info = tensors[spec.name]
        found = wanted or FLOAT_DTYPES[info.dtype_name]
        if dtypes.setdefault(spec.path, found) != found:
            raise ValueError(
                f"{spec.name} in {info.file} is {found}, the same tensor of an earlier block is {dtypes[spec.path]};"
                " blocks are stacked, so name the dtype to load"
            )
    if np.dtype(np.float64) in dtypes.values() and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise ValueError("float64 parameters need jax.config.update('jax_enable_x64', True)")
    return dtypes


def _check_tied(embed: TensorInfo, head: TensorInfo) -> None:
    """Raises ValueError if a checkpoint that says its head is tied brings another head."""
    spec = TensorSpec(embed.name, embed.shape, ())
    for start, stop in spec.pieces(8):
        one, other = (read_rows(info, start, stop).view(np.uint8) for info in (embed, head))
        if not np.array_equal(one, other):
            raise ValueError(
                f"config.json says tie_word_embeddings true, but {HEAD} in {head.file} differs from {EMBED} (in rows"
                f" {start} to {stop - 1}): set tie_word_embeddings to false to use that head, or remove the tensor"
            )


def _read_params(
    config: ModelConfig,
    specs: list[TensorSpec],
    tensors: Mapping[str, TensorInfo],
    dtypes: Mapping[tuple[str, ...], np.dtype],
) -> Params:
    by_leaf: dict[tuple[str, ...], list[TensorSpec]] = {}
    for spec in specs:
        by_leaf.setdefault(spec.path, []).append(spec)
    shapes = traverse_util.flatten_dict(param_shapes(config))
    leaves = {}
    for path, members in by_leaf.items():
        leaf: Array = jnp.zeros(shapes[path], dtypes[path])
        for spec in members:
            leaf = _fill(leaf, spec, tensors[spec.name])
        leaves[path] = leaf
    return with_all_runs(config, traverse_util.unflatten_dict(leaves))


def _fill(leaf: Array, spec: TensorSpec, info: TensorInfo) -> Array:
    """Writes a tensor of the checkpoint into its place of the leaf."""
    dtype = np.dtype(leaf.dtype)
    for start, stop in spec.pieces(dtype.itemsize):
        rows = cast(read_rows(info, start, stop), dtype, f"{info.name} in {info.file}")
        piece = transpose(rows) if spec.transposed else rows
        # Waiting bounds the pieces in flight to one.
        bits = piece.view(f"u{dtype.itemsize}").reshape(spec.extent(stop - start))
        leaf = _write(leaf, bits, spec.start(start)).block_until_ready()
    return leaf


@functools.partial(jax.jit, donate_argnums=0)
def _write(leaf: Array, piece: Array, start: tuple[Array, ...]) -> Array:
    # As integers: some compilers widen bfloat16 on the way, which changes signalling NaNs.
    bits = lax.dynamic_update_slice(lax.bitcast_convert_type(leaf, piece.dtype), piece, start)
    return lax.bitcast_convert_type(bits, leaf.dtype)
