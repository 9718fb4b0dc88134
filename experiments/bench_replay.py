"""Dense, exact, stop and n side by side: step time, FLOPs, the ratio reached over the ratio possible, temp bytes.

    python -m experiments.bench_replay --P=2048 --R=128 --G=8

The defaults are a Llama-shaped model of 8 blocks (d 512, 8 query and 4 kv heads of 64, FFN 1,536, vocabulary 8,192) in
float32. All modes are timed in turn, within one run. Writes table.txt, rows.csv, rows.json and bench.png into --out.
"""

import dataclasses
import pathlib
import platform
import sys
import time
from typing import Any

import jax
import matplotlib
import numpy as np
import optax
from absl import app, flags

from experiments.tables import check_out, write_table
from lsfuse import model as models
from lsfuse import replay
from lsfuse.rl import reinforce
from lsfuse.train import make_update, measure
from lsfuse.types import Params

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

_P = flags.DEFINE_integer("P", 2048, "Prompt tokens.", lower_bound=1)
_R = flags.DEFINE_integer("R", 128, "Tokens of every response.", lower_bound=1)
_G = flags.DEFINE_integer("G", 8, "Responses to the prompt.", lower_bound=1)
_N = flags.DEFINE_integer("n", 128, "Also time prefix_grad=n; 0 leaves it out.", lower_bound=0)
_MODES = flags.DEFINE_list("modes", ["dense", "exact", "stop"], "Modes to time; the first is what ratios refer to.")
_CHUNK = flags.DEFINE_integer("chunk_size", 512, "Prompt tokens run at a time.", lower_bound=1)
_BRANCHES = flags.DEFINE_integer("branch_batch", 0, "Branches run at a time; 0 chooses.", lower_bound=0)
_KEEP = flags.DEFINE_enum("prefix_activations", "auto", ["auto", "keep", "recompute"], "See replay.value_and_grad.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed steps a mode.", lower_bound=1)
_BLOCKS = flags.DEFINE_integer("blocks", 8, "Blocks of the model.", lower_bound=1)
_D = flags.DEFINE_integer("d", 512, "Width of the model; heads of 64, half as many kv heads.", lower_bound=128)
_FFN = flags.DEFINE_integer("ffn", 1536, "Hidden channels of the FFNs.", lower_bound=1)
_VOCAB = flags.DEFINE_integer("vocab", 8192, "Vocabulary.", lower_bound=2)
_UPDATE = flags.DEFINE_bool("training_step", False, "Also compile the exact gradient with AdamW as one program.")
_OUT = flags.DEFINE_string("out", "runs/bench_replay", "Folder for the results.")


def make_batch(model: models.ModelConfig, prompt: int, response: int, branches: int) -> replay.Batch:
    """One full group of random tokens."""
    rng = np.random.default_rng(0)
    shape = (1, branches, response)
    return replay.Batch(
        prompt_ids=rng.integers(0, model.vocab_size, (1, prompt), dtype=np.int32),
        prompt_lengths=np.full(1, prompt, np.int32),
        completion_ids=rng.integers(0, model.vocab_size, shape, dtype=np.int32),
        completion_lengths=np.full((1, branches), response, np.int32),
        completion_mask=np.ones(shape, bool),
        group_sizes=np.full(1, branches, np.int32),
        advantages=rng.normal(size=(1, branches)).astype(np.float32),
    )


def compile_training_step(model: models.ModelConfig, params: Params, batch: replay.Batch, **options) -> float:
    """Wall seconds from Python to machine code of the step that training runs, the optimizer included."""
    optimizer = optax.adamw(1e-4)
    state = jax.eval_shape(optimizer.init, params)
    start = time.perf_counter()
    jax.jit(make_update(reinforce(), model, optimizer, **options)).lower(params, state, batch).compile()
    return time.perf_counter() - start


def save(out: pathlib.Path, rows: list[measure.Measured], text: str, setting: dict) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    names = [r.mode for r in rows]
    for axis, values, title in (
        (axes[0], [r.flops / 1e12 for r in rows], "TFLOP a step (formula)"),
        (axes[1], [r.seconds for r in rows], "seconds a step (measured)"),
        (axes[2], [r.temp_bytes / 2**20 for r in rows], "temporary MiB (compiler)"),
    ):
        axis.bar(names, values, color=["0.6", "C0", "C1", "C2"][: len(names)])
        axis.bar_label(axis.containers[0], fmt="%.3g")
        axis.set_title(title)
    figure.suptitle(f"P {setting['P']}, R {setting['R']}, G {setting['G']}")
    write_table(out, text, [dataclasses.asdict(r) for r in rows], setting, {"bench.png": figure})


def main(argv: list[str]) -> None:
    del argv
    try:
        out = check_out(_OUT.value)
    except ValueError as error:
        sys.exit(f"error: {error}")
    for mode in _MODES.value:
        if mode not in ("dense", "exact", "stop"):
            raise app.UsageError(f"--modes: {mode!r} is none of dense, exact, stop; --n times an int")
    heads = _D.value // 64
    model = models.ModelConfig(
        vocab_size=_VOCAB.value,
        hidden_size=_D.value,
        num_heads=heads,
        head_dim=64,
        blocks=models.uniform_blocks(_BLOCKS.value, max(heads // 2, 1), _FFN.value),
        max_position_embeddings=_P.value + _R.value,
    )
    params = models.init_params(model, jax.random.key(0))
    batch = make_batch(model, _P.value, _R.value, _G.value)
    replay.check_batch(batch, model)
    modes: list[str | int] = [*_MODES.value, *([_N.value] if _N.value else [])]
    options: dict[str, Any] = {
        "chunk_size": _CHUNK.value,
        "branch_batch": _BRANCHES.value or None,
        "prefix_activations": _KEEP.value,
    }
    rows = measure.compare(model, params, batch, reinforce(), modes, _REPEATS.value, **options)
    text = measure.table(rows)
    setting = {name: flags.FLAGS[name].value for name in ("P", "R", "G", "chunk_size", "branch_batch", "blocks", "d")}
    setting |= {"ffn": _FFN.value, "vocab": _VOCAB.value, "prefix_activations": _KEEP.value, "jax": jax.__version__}
    setting |= {"device": jax.devices()[0].device_kind, "python": platform.python_version()}
    if _UPDATE.value:
        setting["training_step_compile_seconds"] = compile_training_step(model, params, batch, **options)
        text += f"\nexact step with AdamW compiles in {setting['training_step_compile_seconds']:.1f} s"
    print(text)
    save(out, rows, text, setting)
    print(f"written to {out}")


if __name__ == "__main__":
    app.run(main)
