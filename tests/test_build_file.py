"""BUILD is complete: every file in one library, the dependencies those of the imports, every test file a target."""

import ast
import functools
import pathlib
import re
from typing import Any

import pytest
from source_tree import ROOT, imports, module_name

NOT_SOURCE = {"__pycache__", ".ipynb_checkpoints"}


def glob(patterns: list[str], exclude: tuple[str, ...] | list[str] = ()) -> list[str]:
    """Bazel's glob of the files below the root."""

    def files(pattern: str) -> set[str]:
        return {str(p.relative_to(ROOT)) for p in ROOT.glob(pattern) if p.is_file() and not NOT_SOURCE & set(p.parts)}

    return sorted(set().union(*map(files, patterns)) - set().union(*map(files, exclude)))


def value(node: ast.expr) -> Any:
    """The value of an attribute: a literal, glob(…), sums and comprehensions of these."""
    code = compile(ast.Expression(node), "BUILD", "eval")
    return eval(code, {"glob": glob, "__builtins__": {}})  # The repository's own file.


@functools.cache
def targets() -> dict[str, dict[str, Any]]:
    """name -> attributes of every rule in BUILD, with "rule" among them."""
    found: dict[str, dict[str, Any]] = {}
    for statement in ast.parse((ROOT / "BUILD").read_text()).body:
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
            continue
        call = statement.value
        attributes = {keyword.arg: value(keyword.value) for keyword in call.keywords if keyword.arg}
        assert isinstance(call.func, ast.Name)
        if "name" in attributes:
            assert attributes["name"] not in found, f"two targets {attributes['name']}"
            found[attributes["name"]] = {"rule": call.func.id, **attributes}
    return found


def rules(kind: str) -> dict[str, dict[str, Any]]:
    return {name: attributes for name, attributes in targets().items() if attributes["rule"] == kind}


def library_of(name: str) -> str | None:
    """Library that the module (or name in a module) is in; None outside the repository."""
    parts = name.split(".")
    if parts[0] in ("experiments", "configs"):
        return parts[0]
    if parts[0] != "lsfuse":
        return None
    libraries = rules("py_library")
    return parts[1] if len(parts) > 1 and parts[1] in libraries else "types"


def needed(files: list[str]) -> set[str]:
    """Libraries that the files import, `types` (it holds lsfuse/__init__.py) included."""
    names = set()
    for file in files:
        path = ROOT / file
        tree = ast.parse(path.read_text())
        names |= {library_of(name) for _, name in imports(tree, module_name(path), path.name == "__init__.py")}
    return {"types", *filter(None, names)}


def test_every_source_file_is_in_one_library():
    tree = glob(["lsfuse/**/*.py", "experiments/**/*.py", "configs/**/*.py"])
    tree += [f for f in glob(["tests/**/*.py"]) if not pathlib.Path(f).name.startswith("test_")]
    listed = [f for library in rules("py_library").values() for f in library["srcs"]]
    assert sorted(listed) == sorted(tree)


def test_libraries_are_the_packages():
    packages = {p.parent.name for p in ROOT.glob("lsfuse/*/__init__.py")}
    assert set(rules("py_library")) == packages | {"types", "experiments", "configs", "testing"}


@pytest.mark.parametrize("name", sorted(set(rules("py_library")) - {"testing"}))
def test_dependencies_are_the_imports(name):
    library = rules("py_library")[name]
    deps = sorted(f":{n}" for n in needed(library["srcs"]) - {name})
    assert library.get("deps", []) == deps, f"BUILD, py_library {name}: deps should be {deps}"


def test_testing_has_every_library():
    libraries = rules("py_library")
    assert libraries["testing"]["deps"] == sorted(f":{name}" for name in libraries if name != "testing")


def is_slow_mark(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.slow"


def expected_tests(file: str) -> dict[str, str]:
    """Target name -> tag for a test file: one named like the file, and `…_slow` besides if only some tests are slow."""
    tree, stem = ast.parse((ROOT / file).read_text()), pathlib.Path(file).stem
    if not any(map(is_slow_mark, ast.walk(tree))):
        return {stem: "cpu"}
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
    whole_file = any("pytestmark" in ast.unparse(n) for n in tree.body if isinstance(n, ast.Assign))
    if whole_file or all(any(map(is_slow_mark, f.decorator_list)) for f in functions):
        return {stem: "slow"}
    return {stem: "cpu", f"{stem}_slow": "slow"}


def block(name: str, tag: str, file: str) -> str:
    """The text of a test's target, as BUILD should have it."""
    select = '"-m", "slow", ' if tag == "slow" else ""
    size = "enormous" if tag == "slow" else "medium"
    return f"""py_test(
    name = "{name}",
    size = "{size}",
    srcs = ["tests/bazel_main.py", "{file}"],
    args = [{select}"{file}"],
    main = "tests/bazel_main.py",
    tags = ["{tag}"],
    deps = [":testing"],
)
"""


def test_every_test_file_has_a_target():
    text = (ROOT / "BUILD").read_text()
    expected = {(n, t, f) for f in glob(["tests/**/test_*.py"]) for n, t in expected_tests(f).items()}
    missing = [block(*e) for e in sorted(expected) if block(*e) not in text]
    assert not missing, "BUILD lacks these targets:\n\n" + "\n".join(missing)
    assert set(rules("py_test")) == {name for name, _, _ in expected}


def test_suites():
    suites = {name: attributes["tags"] for name, attributes in rules("test_suite").items()}
    assert suites == {"cpu": ["cpu"], "slow": ["slow"]}


def test_module_version_is_the_project_s():
    module = re.search(r'module\(name = "lsfuse", version = "(.+)"\)', (ROOT / "MODULE.bazel").read_text())
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert module is not None and project is not None and module[1] == project[1]
