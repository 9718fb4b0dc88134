"""tensorflow-datasets builders: from jsonl files, or a generated task, to array_record shards. No TensorFlow is needed.

Importing this module needs the extra `[data]`. The builders are not registered with tensorflow-datasets:
`tfds.data_source` reads what they wrote from the files, without this code. `build` checks every line before anything is
written, and the data set appears under its name whole or not at all. Records stay in the order of their file; shuffling
belongs to the reader (`lsfuse.data.ordered`).
"""

import abc
import contextlib
import dataclasses
import functools
import io
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
import tqdm
from absl import logging

from lsfuse.data.datasets import built, data_root
from lsfuse.data.group_rows import RAGGED, flat_row, plain_row
from lsfuse.data.groups import GroupReader
from lsfuse.data.gsm8k import check_problem
from lsfuse.data.jsonl import read_jsonl
from lsfuse.data.retrieval import RetrievalTask

Rows = Iterator[tuple[str, dict[str, Any]]]  # (where, features), `where` for errors
_ROWS_A_SHARD = 50_000  # tensorflow-datasets holds the records of one shard in memory while it writes them

_TEXT = tfds.features.Text
_FLOATS = tfds.features.Tensor(shape=(None,), dtype=np.float32)
_IDS = tfds.features.Tensor(shape=(None,), dtype=np.int64)


class _Builder(tfds.core.ShardBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """What the builders share. sources: split -> where its rows come from (a jsonl file, or a number of examples)."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # where checksums of downloads would be; finding it needs a package that nothing requires

    def __init__(self, sources: Mapping[str, Any], *, data_dir: Any = None, name: str | None = None, progress=False):
        self.sources, self.progress = dict(sources), progress
        self.counts = {split: sum(1 for _ in self.rows(source)) for split, source in self.sources.items()}
        for split, count in self.counts.items():
            if not count:
                raise ValueError(f'split "{split}": {self.sources[split]} holds no records')
        config = None if name is None else tfds.core.BuilderConfig(name=name)
        super().__init__(data_dir=str(data_root(data_dir)), config=config, file_format="array_record")

    @abc.abstractmethod
    def rows(self, source: Any) -> Rows:
        """The checked features of every record of a split, in order."""

    @abc.abstractmethod
    def fields(self) -> dict[str, Any]:
        """The features beside "id"."""

    def notes(self) -> dict[str, Any]:
        """JSON-able metadata of the data set."""
        return {"files": {split: pathlib.Path(source).name for split, source in self.sources.items()}}

    def _info(self):
        features = {"id": tfds.features.Scalar(np.int64), **self.fields()}
        return tfds.core.DatasetInfo(
            builder=self,
            description=type(self).__doc__,
            features=tfds.features.FeaturesDict(features),
            metadata=tfds.core.MetadataDict(self.notes()),
            disable_shuffling=True,
        )

    def _shard_iterators_per_split(self, dl_manager):
        del dl_manager
        return {split: self._shards(split) for split in self.sources}

    def _shards(self, split: str) -> list[Callable[[], Iterator[tuple[int, dict[str, Any]]]]]:
        """Generators of consecutive pieces of the split; they are run in turn, in this process."""
        total = self.counts[split]
        rows = enumerate(row for _, row in self.rows(self.sources[split]))
        bar = tqdm.tqdm(
            rows, total=total, desc=f"{self.name} {split}", unit="record", disable=None if self.progress else True
        )
        keyed = iter(bar)
        count = -(-total // _ROWS_A_SHARD)
        sizes = [total * (i + 1) // count - total * i // count for i in range(count)]
        return [functools.partial(itertools.islice, keyed, size) for size in sizes]


class Retrieval(_Builder, skip_registration=True):  # type: ignore[call-arg]
    """Key-value retrieval among distractors (`lsfuse.data.RetrievalTask`); the metadata holds the task's fields."""

    def __init__(self, sources: Mapping[str, int], *, task: RetrievalTask | None = None, **kwargs):
        if unknown := [s for s in sources if s not in ("train", "eval")]:
            raise ValueError(f'retrieval has the splits train and eval, not "{unknown[0]}"')
        self.task = RetrievalTask() if task is None else task
        super().__init__({split: (split, int(count)) for split, count in sources.items()}, **kwargs)

    def rows(self, source):
        split, count = source
        for i in range(count):
            example = self.task.example(split, i)
            text = {field: example[field] for field in ("prompt", "answer")}
            yield f"retrieval {split} {i}", {"id": i, "prompt_ids": example["prompt_ids"].astype(np.int64), **text}

    def fields(self):
        return {"prompt_ids": _IDS, "prompt": _TEXT(), "answer": _TEXT()}

    def notes(self):
        fields = dataclasses.asdict(self.task)
        del fields["score"]  # a function; the default's
        return {"retrieval": fields}


class Gsm8k(_Builder, skip_registration=True):  # type: ignore[call-arg]
    """GSM8K (Cobbe et al., arXiv 2110.14168) from the jsonl files that its authors publish."""

    def rows(self, source):
        for number, where, row in _numbered(source):
            problem = check_problem(where, row)
            yield where, {"id": number, "question": problem["question"], "answer": row["answer"]}

    def fields(self):
        return {"question": _TEXT(), "answer": _TEXT()}


class Prompts(_Builder, skip_registration=True):  # type: ignore[call-arg]
    """Prompts and answers from jsonl: {"prompt": "…", "answer": "…"}; "target", a right response, in all or in none."""

    def rows(self, source):
        first = None
        for number, where, row in _numbered(source):
            if unknown := sorted(row.keys() - {"prompt", "answer", "target"}):
                raise ValueError(f"{where}: unknown field {unknown[0]!r}; known: prompt, answer, target")
            for field in ("prompt", "answer", *(f for f in ("target",) if f in row)):
                if not isinstance(row.get(field), str) or (field == "prompt" and not row[field]):
                    raise ValueError(f"{where}: field {field!r} must be a text, got {row.get(field)!r}")
            first = _check_alike(first, where, row)
            yield where, {"id": number, **row}

    def fields(self):
        return {field: _TEXT() for field in _first(self) if field != "id"}


class Groups(_Builder, skip_registration=True):  # type: ignore[call-arg]
    """Groups sampled elsewhere, or preferences, from jsonl with the fields of `lsfuse.data.group_rows`. A field that
    one group has, all have: a data set has one set of features."""

    def rows(self, source):
        first = None
        for number, where, row in _numbered(source):
            plain = plain_row(where, row)
            if {"prompt_ids", "response_ids"} <= plain.keys():
                GroupReader()(where, row)
            elif "rewards" in plain and len(plain["rewards"]) != len(plain.get("responses") or plain["response_ids"]):
                raise ValueError(f"{where}: {len(plain['rewards'])} rewards for its responses")
            first = _check_alike(first, where, plain)
            yield where, {"id": number, **flat_row(plain)}

    def fields(self):
        features = {"prompt": _TEXT(), "responses": tfds.features.Sequence(_TEXT())}
        for field in ("prompt_ids", "response_ids", *(f"{ragged}_lengths" for ragged in RAGGED)):
            features[field] = _IDS
        for field in ("rewards", "masks", "old_logps", "ref_logps"):
            features[field] = _FLOATS
        return {field: features[field] for field in _first(self) if field != "id"}


BUILDERS = {"retrieval": Retrieval, "gsm8k": Gsm8k, "prompts": Prompts, "groups": Groups}


def _numbered(path: Any) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(line number, where, object) of every line."""
    for where, row in read_jsonl(path):
        yield int(where.rpartition(" ")[2]), where, row


def _first(builder: _Builder) -> dict[str, Any]:
    """The first record; its fields are those of all, in all splits."""
    firsts = {split: next(builder.rows(source)) for split, source in builder.sources.items()}
    (_, row), *_ = firsts.values()
    reference = None
    for where, other in firsts.values():
        reference = _check_alike(reference, where, other)
    return row


def _check_alike(first: tuple[str, set[str]] | None, where: str, row: Mapping[str, Any]) -> tuple[str, set[str]]:
    """(where, fields) of the first row. Raises ValueError if `row` has others."""
    if first is None:
        return where, set(row)
    if differ := sorted(first[1] ^ set(row)):
        with_it, without = (first[0], where) if differ[0] in first[1] else (where, first[0])
        raise ValueError(f"{with_it} has {differ[0]!r}, but {without} has not; give it to every record or to none")
    return first


def build(
    name: str, sources: Mapping[str, Any], data_dir: str | os.PathLike | None = None, *, progress: bool = False, **more
) -> pathlib.Path:
    """Builds a data set and returns its folder.

    Args:
        name: "retrieval", "gsm8k", "prompts/NAME" or "groups/NAME".
        sources: split -> jsonl file; for retrieval, split ("train", "eval") -> number of examples.
        data_dir: None: $TFDS_DATA_DIR, else ~/tensorflow_datasets.
        progress: a bar, where stderr is a terminal.
        more: `task` of retrieval.

    Raises:
        FileNotFoundError, ValueError: before anything is written; for a line, naming file, line and field.
        FileExistsError: it is built already. Nothing is ever replaced.
        OSError: it cannot be written, as on a full disk; nothing is kept.
    """
    kind, slash, config = name.partition("/")
    if kind not in BUILDERS or bool(slash) != (kind in ("prompts", "groups")):
        raise ValueError(f'there is no builder for "{name}"; valid: retrieval, gsm8k, prompts/NAME, groups/NAME')
    if slash and not re.fullmatch(r"[a-z][a-z0-9_]*", config):
        raise ValueError(f'"{name}": the part behind the slash must be letters a-z, digits and _, got "{config}"')
    if not sources:
        raise ValueError(f'"{name}": no split was given')
    for split in sources:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", split):
            raise ValueError(f'the name of a split must be letters a-z, digits and _, got "{split}"')
    if name in built(data_dir):
        folder = data_root(data_dir) / name
        raise FileExistsError(f"{folder} is built already; remove it first, or take another data_dir")
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # tensorflow-datasets warns of every configuration that has a name
    try:
        builder = BUILDERS[kind](sources, data_dir=data_dir, name=config or None, progress=progress, **more)
        with contextlib.redirect_stdout(io.StringIO()):  # it talks of downloads
            builder.download_and_prepare()
    except RuntimeError as error:  # array_record's writer: a full disk, no permission
        why = str(error).split("\n")[0].split(";")[0]
        raise OSError(f"{data_root(data_dir) / name} was not built: {why}; nothing was kept") from error
    finally:
        logging.set_verbosity(verbosity)
    return pathlib.Path(builder.data_dir)
