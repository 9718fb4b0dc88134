"""The launcher as a person uses it: in a process of its own."""

import pathlib
import subprocess
import sys

import pytest

CONFIG = """
from lsfuse.train import default_config


def get_config(steps="2"):
    config = default_config()
    config.rl.steps = int(steps)
    return config
"""


@pytest.fixture
def launch(tmp_path, repo_root):
    (tmp_path / "some.py").write_text(CONFIG)

    def run(*arguments: str, config: str = "some.py") -> subprocess.CompletedProcess:
        given = [f"--config={tmp_path / config}"] if config else []
        command = [sys.executable, "-m", "experiments.launch", *given, *arguments]
        return subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=300)

    return run


def expect_one_line(result: subprocess.CompletedProcess, code: int, message: str) -> None:
    assert result.returncode == code, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert message in lines[0]
    assert not result.stdout


@pytest.mark.parametrize(
    "arguments, config, message",
    [
        (["--config.rl.stepz=3"], "some.py", 'config has no field "rl.stepz"; did you mean "rl.steps"'),
        (["--config.rl.steps=many"], "some.py", "--config.rl.steps=many: invalid literal for int()"),
        (["--confg=3"], "some.py", "Unknown command line flag 'confg'. Did you mean: config"),
        (["word"], "some.py", "unexpected argument 'word'"),
        ([], "some.py", "--workdir is missing"),
        (["--workdir=x"], "", "--config is missing"),
        (["--workdir=x"], "absent.py", "absent.py"),
    ],
)
def test_command_line_mistakes(launch, arguments, config, message):
    expect_one_line(launch(*arguments, config=config), 2, message)


def test_mistakes_before_any_work(launch, tmp_path):
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").touch()
    expect_one_line(launch(f"--workdir={used}"), 1, "is not empty (it holds file)")
    new = tmp_path / "new"
    expect_one_line(launch(f"--workdir={new}", "--config.task.name=gsm8k"), 1, 'task "gsm8k" needs a tokenizer')
    expect_one_line(launch(f"--workdir={new}", "--config.rl.temperature=-1"), 1, "temperature must be at least 0.001")
    expect_one_line(launch(f"--workdir={new}", "--config.model.path=nowhere"), 1, "nowhere")
    assert not new.exists()


def test_traceback_on_request(launch, tmp_path):
    result = launch(f"--workdir={tmp_path / 'new'}", "--config.task.name=gsm8k", "--traceback")
    assert result.returncode == 1 and "Traceback" in result.stderr and "make_task" in result.stderr


def test_every_config_says_how_ci_runs_it(repo_root):
    """`.ci/run` reads CI from each file; this lists them."""
    sys.path.insert(0, str(repo_root / ".ci"))
    try:
        from config_flags import ci_flags
    finally:
        sys.path.pop(0)
    files = sorted(p for p in (repo_root / "configs").rglob("*.py") if not p.name.startswith("_"))
    names = {str(p.relative_to(repo_root / "configs")) for p in files}
    assert {"quickstart.py", "grpo_gsm8k.py"} <= names
    for file in files:
        assert isinstance(ci_flags(str(file)), tuple), pathlib.Path(file).name


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["--config.rl.steps=-1"], 1, "config.rl.steps must be at least 0"),
        (["--config.seed=99999999999"], 1, "config.seed must be between 0 and 4294967295"),
        (["--config.rl.optimizer.trainable=[a-"], 1, "'[a-' is not a regular expression"),
        (["--config.rl.num_generations=1"], 1, "num_generations is 1, but the baseline"),
        (["--config.rl.objective.name=dpo"], 1, 'config.rl.objective.name is "dpo"'),
        (["--config.model.path=~no_such_user/x"], 1, "there is no folder ~no_such_user/x"),
        (["--config.warm_start.stages=((2,3),)"], 1, "config.warm_start.stages[0] must be"),
        (["--sweep=rl.stepz=1,2"], 1, 'config has no field "rl.stepz"; did you mean "rl.steps"'),
        (["--sweep=rl.steps=1,-1"], 1, "config.rl.steps must be at least 0"),
        (["--sweep=rl.objective.name=grpo,dpo"], 1, "--sweep, rl.objective.name=dpo: config.rl.obj"),
    ],
)
def test_impossible_configs_are_one_line(launch, tmp_path, arguments, code, message):
    """A handful of those that test_config_fuzz.py draws by the hundred, in a process as a person would."""
    expect_one_line(launch(f"--workdir={tmp_path / 'new'}", *arguments), code, message)
    assert not (tmp_path / "new").exists()
