"""Rows of an analysis on disk as they are found, so that one that was interrupted goes on where it stopped.

A folder belongs to one model and one text, whose SHA-256 it holds; another's is refused. Every row is a file that
appears whole or not at all.
"""

import dataclasses
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lsfuse.files import write_atomic
from lsfuse.fusion.texts import Texts
from lsfuse.model.config import ModelConfig
from lsfuse.types import Params


def fingerprint(config: ModelConfig, params: Params, texts: Texts) -> dict[str, str]:
    """SHA-256 of the model (its config and every bit of its weights) and of the texts."""
    text = hashlib.sha256(f"{texts.ids.shape}".encode())
    for part in (texts.ids, texts.lengths):
        text.update(np.ascontiguousarray(part, np.int64).tobytes())
    return {"model": sha256_of_model(config, params), "texts": text.hexdigest()}


def sha256_of_model(config: ModelConfig, params: Params) -> str:
    """Of a config and of every bit of a tree of weights, hexadecimal."""
    model = hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True).encode())
    for path, leaf in sorted(jax.tree_util.tree_flatten_with_path(params)[0], key=lambda item: str(item[0])):
        array = np.ascontiguousarray(leaf)
        model.update(f"{jax.tree_util.keystr(path)} {array.dtype.name} {array.shape}".encode())
        model.update(array.reshape(-1).view(np.uint8).data)
    return model.hexdigest()


class Rows:
    """Arrays by name in a folder: `get` what is there, `put` what was found.

    settings: whatever else the rows depend on (the batch size), compared along with model and texts.

    Raises: ValueError if the folder holds the rows of another model, other texts or other settings.
    """

    def __init__(
        self, folder: str | os.PathLike, config: ModelConfig, params: Params, texts: Texts, **settings: Any
    ) -> None:
        self.folder = pathlib.Path(folder)
        mine = {**fingerprint(config, params, texts), **{k: str(v) for k, v in settings.items()}}
        file = self.folder / "rows.json"
        if file.is_file():
            theirs = _described(file)
            for name in sorted(mine.keys() | theirs.keys()):
                if mine.get(name) != theirs.get(name):
                    raise ValueError(
                        f"{self.folder} holds an analysis of another {name}: {_short(theirs.get(name))} there,"
                        f" {_short(mine.get(name))} here; give another folder"
                    )
            return
        if self.folder.is_dir() and any(p for p in self.folder.iterdir() if not p.name.endswith(".tmp")):
            raise ValueError(f"{self.folder} holds files, but no rows.json of an analysis; give another folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(mine, indent=2) + "\n")

    def get(self, name: str) -> np.ndarray | None:
        """None if there is none. Raises ValueError for a file that is not whole."""
        file = self.folder / f"{name}.npy"
        if not file.is_file():
            return None
        try:
            return np.load(file, allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{file} is damaged ({reason}); delete it, and it is computed again") from None

    def put(self, name: str, array: np.ndarray) -> None:
        buffer = io.BytesIO()
        np.save(buffer, array)
        write_atomic(self.folder / f"{name}.npy", buffer.getvalue())


def _described(file: pathlib.Path) -> dict[str, str]:
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError):
        raise ValueError(f"{file} is damaged; delete the folder, and its rows are computed again") from None


def kept(keep: Rows | None, name: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Row `name` from its file, or computed and put there."""
    found = None if keep is None else keep.get(name)
    if found is None:
        found = compute()
        if keep is not None:
            keep.put(name, found)
    return found


def _short(value: str | None) -> str:
    return "none" if value is None else value[:12]
