"""The files around the code agree with each other: README, CI, configs, changelog."""

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from source_tree import ROOT

CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*.py") if not p.name.startswith("_"))


def command(name: str) -> str:
    """The text between README's marker of that name and the end of its code block."""
    found = re.search(rf"<!-- {name} command -->\n```bash\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found, f"README.md has no block marked <!-- {name} command -->"
    return found[1]


@pytest.mark.parametrize("name", ["quickstart", "test"])
def test_a_command_is_one_line_with_its_own_environment(name):
    text = command(name)
    assert text.count("\n") == 1
    assert text.startswith("python3 -m venv .venv && . .venv/bin/activate && pip install -e ")


def test_ci_runs_readme_s_test_command():
    script = (ROOT / ".ci/run").read_text()
    extract = re.search(r"readme_command\(\) \{\n(.+?)\n\}", script, re.DOTALL)
    assert extract is not None
    shown = subprocess.run(["bash", "-c", extract[1]], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown == command("test")
    assert 'bash -euo pipefail -c "$(readme_command)"' in script


def test_readme_names_files_that_exist():
    text = (ROOT / "README.md").read_text()
    named = re.findall(r"(?:configs|experiments|lsfuse|kernels|tests)/[\w/]*(?:\.py)?", text)
    assert named and not {n for n in named if not (ROOT / n).exists()}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.stem)
def test_config_says_how_it_is_run(config: pathlib.Path):
    script = ROOT / ".ci/config_flags.py"
    subprocess.run([sys.executable, script, config], check=True, stdout=subprocess.PIPE)
    assert f"--config={config.relative_to(ROOT)}" in config.read_text().split('"""')[1]


def test_version_is_stated_once_alike():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = re.search(r'^__version__ = "(.+)"$', (ROOT / "lsfuse/__init__.py").read_text(), re.MULTILINE)
    assert stated is not None and stated[1] == project["version"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_readme_s_example_runs():
    example = re.search(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    names: dict = {}
    exec(example[1], names)
    jax, jnp = names["jax"], names["jnp"]
    assert jnp.isfinite(names["loss"])
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(names["grads"]))
    assert any((g != 0).any() for g in jax.tree.leaves(names["grads"]))
