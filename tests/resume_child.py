"""The process that `test_resume` kills: a tiny run that may end itself at a chosen moment.

    python -m tests.resume_child WORKDIR MOMENT RESUME

MOMENT: "never", or NAME:N, the N-th time that something happens (from 0).
"""

import os
import pathlib
import signal
import sys
import threading
import time

from lsfuse import train
from lsfuse.io import checkpoint, hf_save
from lsfuse.train import loop, phases, workdir

CONFIG = {
    "seed": 3,
    "model": {
        "hidden_size": 16,
        "num_blocks": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "ffn_width": 24,
        "max_position_embeddings": 64,
    },
    "task": {
        "retrieval": {
            "prompt_length": 24,
            "min_prompt_length": 15,
            "num_pairs": 2,
            "answer_length": 2,
            "num_keys": 4,
            "num_values": 8,
            "num_fillers": 2,
        }
    },
    "rl": {
        "steps": 5,
        "num_prompts": 2,
        "num_generations": 4,
        "max_prompt": 24,
        "max_response": 3,
        "num_iterations": 2,
        "objective": {"beta": 0.1},
        "optimizer": {"learning_rate": 0.01},
    },
    "warm_start": {"steps": 4, "num_prompts": 2, "max_response": 12},
    "replay": {"chunk_size": 16},
    "eval": {"every": 2, "num_prompts": 3, "samples": 2},
    "checkpoint": {"every": 2, "keep": 2},
    "report": {"parameter_change": True},
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at(owner, name: str, n: int, action) -> None:
    """Replaces owner.name by a version that calls action(original, *arguments) the n-th time."""
    original, count = getattr(owner, name), [-1]

    def wrapped(*args, **kwargs):
        count[0] += 1
        return action(original, *args, **kwargs) if count[0] == n else original(*args, **kwargs)

    setattr(owner, name, wrapped)


def before(original, *args, **kwargs):
    die()


def after(original, *args, **kwargs):
    original(*args, **kwargs)
    die()


def half_a_line(original, self, *records):
    self._file.write(b'{"phase": "rl", "st')
    die()


def while_saving(original, path, *args, **kwargs):
    """Dies as soon as orbax's temporary directory holds something."""

    def watch():
        folder = pathlib.Path(path).parent
        while not any(p.is_file() for d in folder.glob("*orbax-checkpoint-tmp*") for p in d.rglob("*")):
            time.sleep(0)
        die()

    threading.Thread(target=watch, daemon=True).start()
    original(path, *args, **kwargs)
    die()


MOMENTS = {
    "mid_warm_step": lambda n: at(phases, "to_host", n, before),
    "mid_rl_step": lambda n: at(phases, "to_host", 4 + n, before),
    "half_a_metrics_line": lambda n: at(workdir.JsonLines, "write", n, half_a_line),
    "while_saving": lambda n: at(checkpoint.ocp, "save_checkpointables", n, while_saving),
    "after_saving": lambda n: at(checkpoint.ocp, "save_checkpointables", n, after),
    "while_deleting": lambda n: at(checkpoint.shutil, "rmtree", n, before),
    "while_exporting": lambda n: at(hf_save, "write_file", n, after),
    "before_exporting": lambda n: at(loop.io, "save_hf", n, before),
    "after_exporting": lambda n: at(loop.io, "save_hf", n, after),
    "before_config": lambda n: at(workdir, "write_atomic", n, before),
}


def main(path: str, moment: str, resume: str) -> None:
    name, _, n = moment.partition(":")
    if name != "never":
        MOMENTS[name](int(n or 0))
    train.run(CONFIG, path, resume=resume == "True", progress=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
