"""experiments.compare on work directories written by hand."""

import json
import subprocess
import sys

import numpy as np
import pytest

from experiments import compare


@pytest.fixture
def runs(tmp_path):
    """Two settings; of the first two seeds, the second one step shorter and half written."""

    def write(name, seed, rate, rewards, end="\n"):
        folder = tmp_path / name
        folder.mkdir()
        config = {"seed": seed, "rl": {"optimizer": {"learning_rate": rate}, "steps": 2}}
        (folder / "config.json").write_text(json.dumps(config))
        lines = [{"phase": "eval", "step": i, "reward": r, "time/step": 1.0} for i, r in enumerate(rewards)]
        lines += [{"phase": "rl", "step": i, "reward": r, "loss": -r, "time/step": 2.0} for i, r in enumerate(rewards)]
        (folder / "metrics.jsonl").write_text("\n".join(json.dumps(r) for r in lines) + end)
        return folder

    return [
        write("a", 0, 0.1, [0.0, 0.5, 1.0]),
        write("b", 1, 0.1, [0.2, 0.7], end='\n{"phase": "rl", "st'),
        write("c", 0, 0.2, [0.1, 0.1, 0.3]),
    ]


def test_table_and_intervals(runs):
    groups = compare.group_runs(runs)
    assert list(groups) == ["rl.optimizer.learning_rate=0.1", "rl.optimizer.learning_rate=0.2"]
    first, second = compare.make_rows(groups)
    assert (first["seeds"], first["steps"], second["seeds"], second["steps"]) == (2, 1, 1, 2)
    # t(.975, 1) = 12.706; std of (.5, .7) is .14142, over √2: .1
    np.testing.assert_allclose([first["held-out reward"], first["held-out reward ±"]], [0.6, 1.2706], rtol=1e-4)
    ends = [second[name] for name in ("held-out reward", "best held-out reward", "loss")]
    np.testing.assert_allclose(ends, [0.3, 0.3, -0.3])
    assert second["KL to the reference"] is None
    text = compare.table([first, second])
    assert "0.6 ± 1.3" in text and "KL" not in text


def test_the_command(runs, repo_root, tmp_path):
    command = [sys.executable, "-m", "experiments.compare", *map(str, runs), f"--out={tmp_path / 'out'}"]
    result = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["curves.png", "rows.csv", "rows.json", "table.txt"]
    command[3] = str(tmp_path)
    result = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and result.stderr.startswith(f"error: {tmp_path} holds no config.json")


@pytest.mark.parametrize("name, where", [("config.json", "config.json"), ("metrics.jsonl", "metrics.jsonl, line 1")])
def test_damaged_runs_are_named(tmp_path, name, where):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"phase": "rl", "step": 0}\n')
    compare.read_run(tmp_path)
    (tmp_path / name).write_text("oops}\n")
    with pytest.raises(ValueError, match=f"{where} cannot be read"):
        compare.read_run(tmp_path)
