"""What this machine has, and what of lsfuse will and will not work on it.

    python -m experiments.doctor
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import sys

_EXTRAS = {
    "test": "the suite",
    "hf": "checkpoints named by a hub id",
    "tensorboard": "event files for TensorBoard",
    "data": "data sets built with tensorflow-datasets",
    "reasoning": "problems of reasoning-gym",
    "eval": "tasks of lm-eval on our models",
    "notebook": "notebooks",
    "tpu": "TPUs, and compiling for them ahead of time",
    "cuda": "NVIDIA GPUs",
}


def requirements(extra: str | None) -> list[str]:
    """Names of the distributions that lsfuse, or one of its extras, asks for."""
    names = []
    try:
        lines = importlib.metadata.requires("lsfuse") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    for line in lines:
        marker = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if (marker.group(1) if marker else None) == extra:
            names.append(re.split(r"[\s\[<>=!~;(]", line, maxsplit=1)[0])
    return names


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def memory_bytes() -> int:
    """What this process may use: the machine's, or a control group's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = pathlib.Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def versions() -> list[tuple[str, str, bool]]:
    """(name, what was found, whether that is well) of Python and the packages that are always needed."""
    rows = [("Python", platform.python_version(), sys.version_info >= (3, 11))]
    for name in ["lsfuse", *requirements(None)]:
        found = version(name)
        rows.append((name, found or "missing: pip install -e .", found is not None))
    return rows


def devices() -> list[tuple[str, str, bool]]:
    """The same of JAX's devices; a small program is run on the first."""
    import jax
    import jax.numpy as jnp

    try:
        found = jax.devices()
        value = float(jax.jit(lambda x: (x @ x).sum())(jnp.ones((8, 8))))
    except RuntimeError as error:
        return [("devices", f"JAX cannot start: {' '.join(str(error).split())[:200]}", False)]
    stats = found[0].memory_stats() or {}
    memory = f", {stats['bytes_limit'] / 2**30:.1f} GiB each" if "bytes_limit" in stats else ""
    kinds = f"{len(found)} × {found[0].platform} {found[0].device_kind}{memory}"
    return [("devices", kinds, True), ("a product on it", f"{value:g} (512 is right)", value == 512)]


def machine() -> list[tuple[str, str, bool]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory, disk = memory_bytes() / 2**30, shutil.disk_usage(".").free / 2**30
    return [
        ("CPU cores", str(cores), True),
        ("memory", f"{memory:.1f} GiB" + ("" if memory >= 2 else ": too little for a step"), memory >= 2),
        ("free disk here", f"{disk:.1f} GiB" + ("" if disk >= 1 else ": too little for checkpoints"), disk >= 1),
    ]


def abilities() -> list[tuple[str, str, bool]]:
    """What works beyond the CPU quickstart, and what would make the rest work."""
    import jax

    rows = []
    for extra, purpose in _EXTRAS.items():
        missing = [n for n in requirements(extra) if n != "jax" and version(n) is None]
        if extra == "tpu" and version("libtpu") is None:
            missing = ["libtpu"]
        if extra == "cuda" and not any(version(n) for n in ("jax-cuda12-plugin", "jax-cuda13-plugin")):
            missing = ["jax-cuda12-plugin"]
        note = "yes" if not missing else f"no, {', '.join(missing)} missing: pip install -e '.[{extra}]'"
        rows.append((purpose, note, not missing))
    accelerated = jax.default_backend() != "cpu"
    rows.append(("training on an accelerator", "yes" if accelerated else "no, JAX sees only the CPU", accelerated))
    torch = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
    note = "yes" if torch else "no, needs torch and transformers (their slow tests are skipped)"
    rows.append(("live parity with transformers", note, bool(torch)))
    git = shutil.which("git")
    rows.append(("git state in run.json", "yes" if git else "no, git is not installed", bool(git)))
    return rows


def main() -> int:
    sections = {"needed": [*versions(), *machine(), *devices()], "abilities": abilities()}
    width = max(len(name) for rows in sections.values() for name, _, _ in rows)
    for title, rows in sections.items():
        print(title)
        for name, found, good in rows:
            print(f"  {'ok' if good else '--'} {name:<{width}}  {found}")
    lacking = [name for name, _, good in sections["needed"] if not good]
    print(f"not well: {', '.join(lacking)}" if lacking else "all that is needed is there")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
