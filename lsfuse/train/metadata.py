"""What a run was made with: code, versions, devices."""

import datetime
import hashlib
import importlib.metadata
import json
import pathlib
import platform
import subprocess
import sys
import warnings
from typing import Any

import jax

from lsfuse.io.checkpoint_manifest import flatten_config, missing_fields
from lsfuse.train import workdir as files
from lsfuse.train.config import today_s_fields

_PACKAGES = ("lsfuse", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")


def run_metadata(mesh: dict[str, int] | None = None) -> dict[str, Any]:
    """JSON-able: command, time, git state, versions, devices, the mesh's axes of more than one device."""
    devices = jax.devices()
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "git": git_state(pathlib.Path(__file__).resolve().parent),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "machine": platform.machine(),
        "devices": [f"{d.platform} {d.device_kind}" for d in devices],
        "mesh": {name: size for name, size in (mesh or {}).items() if size > 1},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state(folder: pathlib.Path) -> dict[str, Any] | None:
    """Commit, branch, whether tracked files differ from it, and the SHA-256 of that difference; None without git."""

    def git(*arguments: str) -> bytes | None:
        try:
            return subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, check=True, timeout=30
            ).stdout
        except (OSError, subprocess.SubprocessError):
            return None

    if (commit := git("rev-parse", "HEAD")) is None:
        return None
    diff = git("diff", "HEAD", "--binary") or b""
    return {
        "commit": commit.decode().strip(),
        "branch": (git("rev-parse", "--abbrev-ref", "HEAD") or b"").decode().strip(),
        "dirty": bool(diff),
        "diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None,
        "untracked": len((git("ls-files", "--others", "--exclude-standard") or b"").splitlines()),
    }


def what_changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Differences between two sessions' metadata that can change bits: code, versions, devices, mesh, machine."""
    before = {"mesh": {}, **before}  # sessions of before there were meshes
    return [
        f"{name}: {before.get(name)} then, {now[name]} now"
        for name in ("git", "python", "versions", "devices", "mesh", "machine")
        if before.get(name) != now[name]
    ]


def write_run_files(workdir: pathlib.Path, saved: dict[str, Any], mesh: dict[str, int] | None = None) -> None:
    """config.json, and this session in run.json. Warns where the last session had other code, versions or devices."""
    before = files.saved_config(workdir)
    mine = flatten_config(saved)
    late = {k: v for k, v in missing_fields(before, today_s_fields(saved)).items() if k in mine} if before else {}
    if late:
        listed = ", ".join(f"{name} = {value!r}" for name, value in late.items())
        warnings.warn(f"{workdir} is of before some fields existed; it goes on with {listed}", stacklevel=3)
    if not before or late:
        files.write_atomic(workdir / files.CONFIG, json.dumps(saved, indent=2) + "\n")
    path, now = workdir / "run.json", run_metadata(mesh)
    cure = "it only says what earlier sessions ran on: delete it, and continue with --resume"
    sessions = files.read_object(path, cure).get("sessions", []) if path.exists() else []
    for line in what_changed(sessions[-1], now) if sessions else []:
        warnings.warn(f"since the last session of this run, {line}; the bits may differ", stacklevel=3)
    files.write_atomic(path, json.dumps({"sessions": [*sessions, now]}, indent=2) + "\n")
