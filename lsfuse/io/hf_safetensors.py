"""The safetensors format, read and written a few megabytes at a time.

A file is eight bytes (the header's length, little endian), a JSON header, and the tensors' bytes without gaps. It is
parsed here, and not by the safetensors package, for two reasons: that package maps a file as a whole, so that after a
load the mapped pages stand beside the parameters as a second copy; and its writer wants all tensors of a file in memory
at once. Format: the safetensors README.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

FLOAT_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_ITEMSIZE = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_ITEMSIZE |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
_MAX_HEADER = 100_000_000  # the limit of the safetensors package


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file, known from the header alone. `offset` counts bytes from the beginning of the file."""

    file: Path
    name: str
    dtype_name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def dtype(self) -> np.dtype | None:
        """numpy's dtype, None where the file's is no floating-point type of 16 bits or more."""
        return FLOAT_DTYPES.get(self.dtype_name)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """All tensors of a safetensors file, from its header; no tensor is read.

    Raises ValueError, naming the file and the byte counts, if the file is truncated, damaged or not safetensors at all.
    """
    size = os.path.getsize(file)
    with open(file, "rb") as f:
        start = f.read(64)
        if start.startswith(b"version https://git-lfs"):
            raise ValueError(
                f"{file} is a git-lfs pointer of {size} bytes, not the tensors: fetch it with 'git lfs pull'"
            )
        length = int.from_bytes(start[:8], "little")
        if size < 8 or (8 + length > size and length <= _MAX_HEADER):
            raise _truncated(file, size, f"its header alone needs {8 + length if size >= 8 else 8} bytes")
        if length > _MAX_HEADER:
            raise ValueError(
                f"{file} is not a safetensors file: its first 8 bytes claim a header of {length} bytes; at most"
                f" {_MAX_HEADER} are allowed"
            )
        f.seek(8)
        text = f.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {
            name: (entry["dtype"], tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is damaged: its header of {length} bytes is not a table of tensors ({error!r})"
        ) from None
    return _checked(file, size, 8 + length, entries)


def _checked(file: Path, size: int, data: int, entries: Mapping[str, tuple]) -> dict[str, TensorInfo]:
    end = 0
    for name, (dtype, shape, begin, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        needed = math.prod(shape) * _ITEMSIZE[dtype] if dtype in _ITEMSIZE else stop - begin
        if begin != end or stop - begin != needed:
            raise ValueError(
                f"{file} is damaged: tensor {name} ({dtype}, shape {list(shape)}, {needed} bytes) is said to lie at"
                f" bytes {begin} to {stop}, after one that ends at {end}; fetch the file again"
            )
        end = stop
    if size < data + end:
        raise _truncated(file, size, f"its header describes {data + end}")
    if size > data + end:
        raise ValueError(f"{file} is damaged: it has {size} bytes, its header describes {data + end}; fetch it again")
    return {name: TensorInfo(file, name, d, shape, data + begin) for name, (d, shape, begin, _) in entries.items()}


def _truncated(file: Path, size: int, needs: str) -> ValueError:
    return ValueError(f"{file} is truncated: it has {size} bytes, {needs}; fetch or copy the file again")


def read_rows(info: TensorInfo, start: int, stop: int) -> np.ndarray:
    """Rows start to stop - 1 of a floating-point tensor (along axis 0), mapped from the file, in the file's dtype.

    The mapping ends with the array's life, so that pages already consumed do not count as memory in use.
    """
    dtype = FLOAT_DTYPES[info.dtype_name]
    row = math.prod(info.shape[1:])
    if stop <= start or row == 0:
        return np.empty((max(stop - start, 0), *info.shape[1:]), dtype)
    bytes_per_row = row * dtype.itemsize
    mapped = np.memmap(
        info.file, np.uint8, "r", offset=info.offset + start * bytes_per_row, shape=((stop - start) * bytes_per_row,)
    )
    return mapped.view(np.ndarray).view(dtype).reshape(stop - start, *info.shape[1:])


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """A tensor about to be written: its bytes come in pieces, in order."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header_bytes(plans: Sequence[TensorPlan]) -> bytes:
    """What precedes the tensors' bytes: length and JSON, padded so that the data begins at a multiple of eight."""
    names = {dtype: name for name, dtype in FLOAT_DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    begin = 0
    for plan in plans:
        entry = {"dtype": names[plan.dtype], "shape": list(plan.shape), "data_offsets": [begin, begin + plan.nbytes]}
        header[plan.name] = entry
        begin += plan.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(file: Path, plans: Sequence[TensorPlan], pieces: Iterable[np.ndarray]) -> None:
    """Writes a safetensors file and flushes it to the disk. `pieces` yields the tensors' values, in the order of
    `plans`, each tensor as one or more arrays that follow each other along axis 0."""
    expected = sum(plan.nbytes for plan in plans)
    with open(file, "wb") as f:
        f.write(header_bytes(plans))
        written = 0
        for piece in pieces:
            written += f.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())
    if written != expected:
        raise ValueError(f"{file}: {written} bytes of tensors were given, the header describes {expected}")
