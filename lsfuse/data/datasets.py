"""Data sets on disk, as tensorflow-datasets keeps them (array_record, no TensorFlow): found by name, verified, read at
random, and in the order of a run.

    DATA_DIR/NAME[/CONFIG]/VERSION/    dataset_info.json, features.json, NAME-SPLIT.array_record-00000-of-00001, …

`lsfuse.data.builders` writes them. Anything else that tensorflow-datasets has prepared as array_record can be read too.
"""

import bisect
import difflib
import functools
import hashlib
import importlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lsfuse.data.order import indices

KINDS = ("retrieval", "gsm8k", "prompts", "groups")
BUILD = "python -m experiments.build_dataset"
_ENDLESS = 2**62


def extra(module: str, extra: str) -> Any:
    """The module, or an ImportError that says which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{error}; install the extra: pip install 'lsfuse[{extra}]'") from error


def data_root(data_dir: str | os.PathLike | None) -> pathlib.Path:
    """`data_dir`, or tensorflow-datasets' own default: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    if data_dir is None:
        data_dir = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
    return pathlib.Path(data_dir).expanduser()


def built(data_dir: str | os.PathLike | None = None) -> list[str]:
    """Names of the data sets in `data_dir`: "gsm8k", "groups/mine"."""
    root = data_root(data_dir)
    found = {p.parent.parent for depth in ("*/*", "*/*/*") for p in root.glob(f"{depth}/dataset_info.json")}
    return sorted(str(p.relative_to(root)) for p in found if _versions(p))


def _versions(folder: pathlib.Path) -> list[pathlib.Path]:
    """Folders 1.2.3, oldest first."""
    found = [p for p in folder.glob("*.*.*") if p.is_dir() and re.fullmatch(r"\d+\.\d+\.\d+", p.name)]
    return sorted(found, key=lambda p: [int(n) for n in p.name.split(".")])


def locate(name: str, data_dir: str | os.PathLike | None = None) -> pathlib.Path:
    """The folder of the newest version of data set `name`.

    Raises:
        ValueError: no such name; the nearest valid ones are in the message.
        FileNotFoundError: it was never built in `data_dir`, or its build was interrupted.
    """
    root = data_root(data_dir)
    kind, _, config = name.partition("/")
    if versions := _versions(root / name):
        return versions[-1]
    there = built(root)
    if kind not in KINDS or config == "" and kind in ("prompts", "groups") or config and kind in ("retrieval", "gsm8k"):
        known = [*KINDS[:2], "prompts/NAME", "groups/NAME", *there]
        near = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f'; did you mean "{near[0]}"?' if near else ";"
        raise ValueError(
            f'there is no data set "{name}"{hint} Known: {", ".join(known[:4])}; built in {root}:'
            f" {', '.join(there) or 'none'}"
        )
    half = sorted((root / name).glob("*incomplete*")) if (root / name).is_dir() else []
    state = f"its build was interrupted (what it left, {half[0]}, can be removed)" if half else "it was never built"
    raise FileNotFoundError(
        f'data set "{name}" is not in {root}: {state}; build it with: {BUILD} --name={name} --data_dir={root}'
        + (f"; built there: {', '.join(there)}" if there else "")
    )


def load(name: str, split: str | None = None, data_dir: str | os.PathLike | None = None) -> Any:
    """A data set's records, as `tfds.data_source` gives them, but with text as `str`.

    Args:
        name: "gsm8k", "retrieval", "prompts/mine", "groups/mine"; "gsm8k:train" is short for split="train".
        split: as tensorflow-datasets writes it: "train", "train[:90%]", "train+test"; None: all of them.
        data_dir: None: $TFDS_DATA_DIR, else ~/tensorflow_datasets.

    Returns:
        A `Source`, or a dict of them by split.

    Raises:
        ImportError: tensorflow-datasets is not installed.
        FileNotFoundError, ValueError: no such data set or split, or a file of it is missing, cut short or damaged.
            Every shard is opened and its records counted; what is in them is checked as they are read.
    """
    name, _, short = name.partition(":")
    if short and split is not None:
        raise ValueError(f'the split is given twice: "{name}:{short}" and split="{split}"')
    folder = locate(name, data_dir)
    builder = _builder(folder)
    wanted = short or split
    if wanted is None:
        return {s: _source(builder, name, s, folder) for s in builder.info.splits}
    return _source(builder, name, wanted, folder)


def _builder(folder: pathlib.Path) -> Any:
    for file in ("dataset_info.json", "features.json"):
        try:
            json.loads((folder / file).read_bytes())
        except FileNotFoundError:
            message = f"{folder / file} is missing: the data set is half written; {_again(folder)}"
            raise FileNotFoundError(message) from None
        except ValueError as error:
            raise ValueError(f"{folder / file} is damaged or cut short ({error}); {_again(folder)}") from None
    tfds = extra("tensorflow_datasets", "data")
    builder = tfds.builder_from_directory(str(folder))
    if not any(f.value == "array_record" for f in builder.info.available_file_formats()):
        raise ValueError(f"{folder} holds {builder.info.file_format}; only array_record can be read at random")
    if not builder.info.splits:
        raise ValueError(f"{folder / 'dataset_info.json'}: the data set has no splits; {_again(folder)}")
    return builder


def _again(folder: pathlib.Path) -> str:
    return f"remove {folder} and build it again with {BUILD}"


def _source(builder: Any, name: str, split: str, folder: pathlib.Path) -> "Source":
    splits = builder.info.splits
    for part in split.split("+"):
        base = part.partition("[")[0].strip()
        if base not in splits:
            near = difflib.get_close_matches(base, list(splits), 1, 0.5)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise ValueError(f'data set "{name}" has no split "{base}"; valid: {", ".join(splits)}{hint}')
    try:
        instructions = splits[split].file_instructions
    except Exception as error:  # tensorflow-datasets raises several kinds
        raise ValueError(f'split "{split}" of data set "{name}" cannot be understood: {_first_line(error)}') from None
    instructions = [i for i in instructions if i.take]
    if not instructions:
        raise ValueError(f'split "{split}" of data set "{name}" in {folder} holds no records')
    for instruction in instructions:
        _check_shard(pathlib.Path(instruction.filename), instruction.examples_in_shard)
    return Source(name, split, instructions, builder.as_data_source(split=split), builder.info.metadata)


def _check_shard(file: pathlib.Path, expected: int) -> None:
    """Opens a shard and compares its number of records with what dataset_info.json says."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: the data set is half written; {_again(file.parent)}")
    module = extra("array_record.python.array_record_module", "data")
    try:
        reader = module.ArrayRecordReader(str(file))
        found = reader.num_records()
        reader.close()
    except Exception as error:  # the C++ reader raises several kinds
        raise ValueError(
            f"{file} ({file.stat().st_size} bytes) is damaged or cut short: {_first_line(error)}; {_again(file.parent)}"
        ) from None
    if found != expected:
        raise ValueError(f"{file} holds {found} records, but dataset_info.json says {expected}; {_again(file.parent)}")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].split(";")[0][:200] or type(error).__name__


class Source(Sequence):
    """Records of a split: `source[i]` is a dict, read from disk when asked for.

    Text is `str`; numbers and their lists are numpy; ragged lists of lists are lists of arrays. `str(source)` and
    `where(i)` name it, and a record of it, in errors. metadata: what the builder noted.
    """

    def __init__(self, name: str, split: str, instructions: Sequence[Any], records: Any, metadata: Mapping | None):
        self.name, self.split, self.metadata = name, split, dict(metadata or {})
        self._instructions, self._records = instructions, records
        self._ends = list(itertools.accumulate(i.take for i in instructions))

    def __len__(self) -> int:
        return self._ends[-1]

    def __str__(self) -> str:
        return f'data set "{self.name}", split "{self.split}"'

    def where(self, index: int) -> str:
        """File and record, from 0, of an element."""
        shard = bisect.bisect_right(self._ends, index)
        instruction = self._instructions[shard]
        before = self._ends[shard - 1] if shard else 0
        return f"{instruction.filename}, record {index - before + instruction.skip}"

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = index.__index__()
        i += len(self) * (i < 0)
        if not 0 <= i < len(self):
            raise IndexError(f"record {index} is out of range; {self} has {len(self)}")
        try:
            return {field: _plain(value) for field, value in self._records[i].items()}
        except Exception as error:  # tensorflow-datasets and the C++ reader raise several kinds
            raise ValueError(f"{self.where(i)} cannot be read: {_first_line(error)}; the file is damaged") from None

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(where, record) of every record, as `read_jsonl` gives lines."""
        for i in range(len(self)):
            yield self.where(i), self[i]

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 of the records as they are read, which all are: of the data, not of the files, whose bytes differ
        when the same data are built again."""
        sha = hashlib.sha256()
        for _, record in self.rows():
            _feed(sha, record)
        return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    """Kind, size and content of a value, so that no two unlike ones feed the same bytes."""
    if isinstance(value, dict):
        value = [part for item in sorted(value.items()) for part in item]
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        value = value.tolist()
    if isinstance(value, list):
        sha.update(f"list {len(value)} ".encode())
        for part in value:
            _feed(sha, part)
        return
    value = value.encode() if isinstance(value, str) else value
    array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
    sha.update(f"{array.dtype} {array.shape} ".encode())
    sha.update(array.tobytes())


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype.kind in "OSU"):
        return [_plain(v) for v in value]
    return value


def ordered(source: Sequence, seed: int, *, process_index: int | None = None, process_count: int | None = None) -> Any:
    """An endless `grain.MapDataset` of `source` in the order in which a run of that seed reads it.

    Element i is the example at position i · process_count + process_index of that order (`lsfuse.data.indices`), so
    that processes share out every epoch between them, and the one integer that a run saves, its position, finds the
    place again for any number of processes. Batch it, `to_iter_dataset()` it; the iterator's state is one integer.

    Args:
        process_index, process_count: None: those of JAX.

    Raises:
        ImportError: grain is not installed.
        ValueError: an index that is not among the processes, or an empty source.
    """
    grain = extra("grain", "data")
    if process_index is None or process_count is None:
        import jax

        process_index = jax.process_index() if process_index is None else process_index
        process_count = jax.process_count() if process_count is None else process_count
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index {process_index} is not one of {process_count} processes")
    size = len(source)
    indices(size, seed, 0, 0)  # raises if it is empty

    def at(position: int) -> Any:
        return source[int(indices(size, seed, position, 1)[0])]

    return grain.MapDataset.range(process_index, _ENDLESS, process_count).map(at)
