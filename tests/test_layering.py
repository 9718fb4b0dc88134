"""The layout's rules, read off the syntax trees: who may import whom, and how long a file may be."""

import ast
import pathlib
import tomllib

import pytest
from source_tree import ROOT, imports, module_name

MAX_LINES = 400

# A package imports only from those before it, and from itself. The first three are files, lsfuse/types.py ….
LAYERS = ("types", "files", "checks", "kernels", "model", "replay", "fusion", "rl", "data", "io", "scale", "train")
# Narrower than the order: operations know arrays, not models.
ONLY_FROM = {"kernels": {"types"}}
NOT_INSTALLED = {"experiments", "configs"}
OTHER_FRAMEWORKS = {"torch", "transformers", "tensorflow"}
SOURCES = ("lsfuse", "experiments", "configs", "scripts", "tests")


def violations(source: str, path: pathlib.Path) -> list[str]:
    """What the file at `path` (relative to the root, need not exist) imports against the rules."""
    module = module_name(ROOT / path)
    top = path.parts[0]
    found = []
    for line, name in imports(ast.parse(source), module, path.name == "__init__.py"):
        where, first = f"{path}:{line}", name.split(".")[0]
        if first in OTHER_FRAMEWORKS and top not in ("tests", "scripts"):
            found.append(f"{where} imports {name}: only tests and scripts may use {first}")
        if not module.startswith("lsfuse"):
            continue
        if first in NOT_INSTALLED | {"tests", "scripts"}:
            found.append(f"{where} imports {name}: {first} is not installed with lsfuse")
        if first != "lsfuse" or module == "lsfuse":
            continue
        here, there = module.split(".")[1], (name.split(".") + [""])[1]
        if there in ("__version__", "*", here):
            continue
        if there not in LAYERS or here not in LAYERS:
            found.append(f"{where} imports {name}: {there or name} or {here} is no package of the layout")
        elif LAYERS.index(there) > LAYERS.index(here):
            found.append(f"{where} imports {name}: {here} comes before {there}")
        elif here in ONLY_FROM and there not in ONLY_FROM[here]:
            found.append(f"{where} imports {name}: {here} imports only from {', '.join(ONLY_FROM[here])}")
    return found


def source_files() -> list[pathlib.Path]:
    return sorted(p for top in SOURCES for p in (ROOT / top).rglob("*.py") if "__pycache__" not in p.parts)


def test_imports_follow_the_layers():
    found = [v for p in source_files() for v in violations(p.read_text(), p.relative_to(ROOT))]
    assert not found, "\n".join(found)


def test_every_package_has_a_layer():
    names = {p.parent.name for p in ROOT.glob("lsfuse/*/__init__.py")} | {p.stem for p in ROOT.glob("lsfuse/*.py")}
    assert names - {"__init__"} <= set(LAYERS)


def test_files_are_short():
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in source_files()}
    assert not {p: n for p, n in lengths.items() if n > MAX_LINES}


def test_packages_of_pyproject_are_those_of_the_tree():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    files = [p for p in (ROOT / "lsfuse").rglob("*.py") if "__pycache__" not in p.parts]
    assert listed == sorted({module_name(p.parent / "__init__.py") for p in files})
    missing = [str(p.parent.relative_to(ROOT)) for p in files if not (p.parent / "__init__.py").exists()]
    assert not missing, f"no __init__.py in {missing}"


@pytest.mark.parametrize(
    "path, source",
    [
        ("lsfuse/model/a.py", "from lsfuse.replay import batch"),
        ("lsfuse/model/a.py", "from lsfuse import replay"),
        ("lsfuse/model/a.py", "from ..replay import batch"),
        ("lsfuse/model/a.py", "def f():\n    import lsfuse.train.loop"),
        ("lsfuse/train/a.py", "from configs import quickstart"),
        ("lsfuse/train/a.py", "import experiments.launch"),
        ("lsfuse/io/a.py", "import torch.nn as nn"),
        ("lsfuse/io/a.py", "from transformers import AutoModel"),
        ("lsfuse/nowhere/a.py", "from lsfuse import types"),
        ("lsfuse/types.py", "from lsfuse.model import config"),
        ("lsfuse/kernels/op/a.py", "from lsfuse.model import config"),
        ("lsfuse/kernels/op/__init__.py", "from ...model import config"),
        ("lsfuse/kernels/op/a.py", "import configs.quickstart"),
        ("experiments/a.py", "import tensorflow"),
    ],
)
def test_a_violation_is_seen(path, source):
    assert len(violations(source, pathlib.Path(path))) == 1


@pytest.mark.parametrize(
    "path, source",
    [
        ("lsfuse/replay/a.py", "from lsfuse.kernels.tail_attention import api\nfrom lsfuse.types import Array"),
        ("lsfuse/replay/a.py", "from . import batch\nfrom .batch import Batch\nfrom ..model import config"),
        ("lsfuse/replay/__init__.py", "from .batch import Batch\nfrom lsfuse.replay.objective import Mean"),
        ("lsfuse/train/a.py", "import jax\nfrom lsfuse import __version__, replay"),
        ("lsfuse/kernels/op/api.py", "from lsfuse.kernels.op import reference\nfrom lsfuse.types import Array"),
        ("lsfuse/kernels/op/api.py", "from . import reference"),
        ("experiments/a.py", "from lsfuse.train import loop\nfrom configs import quickstart"),
        ("tests/a.py", "import torch, transformers"),
        ("lsfuse/model/a.py", "import tensorflow_datasets"),
    ],
)
def test_a_legal_import_passes(path, source):
    assert violations(source, pathlib.Path(path)) == []
