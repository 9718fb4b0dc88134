"""Settings and fixtures of the whole suite.

Tests run on the CPU unless JAX_PLATFORMS says otherwise. Compiled programs are kept in the repository's ignored
`.cache/jax` (or where JAX_COMPILATION_CACHE_DIR points), also for the processes that tests start, so that a second run
of the suite, and a run resumed after a kill, does not compile again. `rm -r .cache` starts over.
"""

import importlib.metadata
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
# Compiling is most of the suite's time, and unoptimised machine code takes half as long to make. Without the fusion
# emitters of JAX 0.10 it takes half of that again; the newest JAX has no such flag, and unknown flags end the process.
QUICK = "--xla_backend_optimization_level=0"
QUICK += " --xla_force_host_platform_device_count=8"  # for meshes; whatever names none runs on the first
if importlib.metadata.version("jaxlib").startswith("0.10."):
    QUICK += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", QUICK)
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# A first example may compile for seconds, which is no fault of the code under test; the examples are the same each run.
settings.register_profile("suite", deadline=None, max_examples=20, derandomize=True, print_blob=True)
settings.load_profile("suite")


@pytest.fixture
def x64():
    """float64 and int64 as JAX's widest types, for this test only."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def strict_promotion():
    """Implicit promotion between dtypes, and between ranks, raises."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def repo_root() -> pathlib.Path:
    """The repository's root, where `experiments` and `configs` are run from."""
    return ROOT


@pytest.fixture
def small_disk(tmp_path):
    """A folder that is a file system of 2 MB."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture(autouse=True)
def few_compiled_programs():
    """Drops JAX's programs once they hold 20,000 memory maps: Linux allows a process 65,530, and LLVM then crashes."""
    yield
    try:
        maps = pathlib.Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:  # another system
        return
    if maps > 20_000:
        jax.clear_caches()


def pytest_sessionfinish(session):
    """A worker of pytest-xdist hands its worst errors to the one that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["worst"] = _worst()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    for name, error in getattr(node, "workeroutput", {}).get("worst", {}).items():
        _worst()[name] = max(_worst().get(name, (0.0, "")), tuple(error))


def pytest_terminal_summary(terminalreporter):
    for name, (error, test) in sorted(_worst().items()):
        terminalreporter.write_line(f"gradients against the dense oracle, worst leaf, {name}: {error:.1e} ({test})")


def _worst() -> dict[str, tuple[float, str]]:
    import oracle

    return oracle.WORST
