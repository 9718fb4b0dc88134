"""Dense and replayed steps side by side: FLOPs by formula, measured time, bytes by the compiler.

Steps are timed interleaved, in turn, so that a machine whose speed drifts favours none; the time is CPU seconds on a
CPU (what a step costs on any number of cores) and wall seconds elsewhere.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lsfuse import replay
from lsfuse.model import ModelConfig
from lsfuse.replay import Batch, Objective, Options
from lsfuse.replay.geometry import group_slice
from lsfuse.replay.trunk import common_length
from lsfuse.train.memory import release_freed_memory
from lsfuse.types import Params


@dataclasses.dataclass(frozen=True)
class Measured:
    """One way of computing the step. flops, tokens: of the step, by formula; seconds: median of the repeats;
    temp_bytes: temporary buffers of the compiled program; compile_seconds: wall, warm or cold cache."""

    mode: str
    flops: float
    tokens: int
    seconds: float
    temp_bytes: int
    compile_seconds: float


def options_for(mode: str | int, **options) -> Options:
    """Replay options of a mode as the benchmark names it: "dense", "exact", "stop" or n."""
    return Options(prefix_grad="exact" if mode == "dense" else mode, **options)


def passes_of(objective: Objective, groups: int) -> str:
    """How a step of `groups` groups runs this objective, as `replay.cost.group_cost` names it."""
    if objective.coupling == "branch":
        return "one"
    return "apart" if objective.coupling == "batch" and groups > 1 else "two"


def step_cost(model: ModelConfig, mode: str | int, options: Options, batch: Batch, dtype, passes: str = "one"):
    """`replay.cost.Cost` of one step on a whole batch."""
    prompt, (_, branches, response) = batch.prompt_ids.shape[1], batch.completion_ids.shape
    geometry = replay.make_geometry(options, prompt, branches, response)
    keep = replay.choose_prefix_activations(model, options, prompt, branches, response, dtype) == "keep"
    total = replay.cost.Cost()
    all_lengths, sizes = np.asarray(batch.completion_lengths), np.asarray(batch.group_sizes)
    for b, (length, row, size) in enumerate(zip(np.asarray(batch.prompt_lengths), all_lengths, sizes, strict=True)):
        lengths = [int(n) for n in row[: int(size)]]
        if mode == "dense":
            total += replay.cost.dense_group_cost(model, options, prompt, response, int(length), lengths, passes=passes)
        else:
            common = int(common_length(group_slice(batch, b))) if geometry.trunk else 0
            args = (model, options, geometry, int(length), lengths)
            total += replay.cost.group_cost(*args, keep=keep, passes=passes, common=common)
    return total


def compare(
    model: ModelConfig,
    params: Params,
    batch: Batch,
    objective: Objective,
    modes: Sequence[str | int] = ("dense", "exact", "stop"),
    repeats: int = 3,
    mode_options: Mapping[str | int, Mapping] | None = None,
    **options,
) -> list[Measured]:
    """Compiles and times one step in every mode, interleaved.

    options: those of `replay.value_and_grad`; mode_options: what a mode overrides. The dense baseline runs one row at
    a time unless told otherwise.
    """
    batch = jax.tree.map(jnp.asarray, batch)
    dtype = params["embed_tokens"].dtype
    passes = passes_of(objective, batch.prompt_ids.shape[0])
    steps, facts = {}, {}
    for mode in modes:
        own = {**options, **({"branch_batch": 1} if mode == "dense" else {}), **(mode_options or {}).get(mode, {})}
        chosen = options_for(mode, **own)
        make = replay.dense_value_and_grad if mode == "dense" else replay.value_and_grad
        start = time.perf_counter()
        step = jax.jit(make(objective, model, **dataclasses.asdict(chosen))).lower(params, batch).compile()
        seconds = time.perf_counter() - start
        release_freed_memory()
        memory = step.memory_analysis()
        facts[mode] = (chosen, 0 if memory is None else memory.temp_size_in_bytes, seconds)
        jax.block_until_ready(step(params, batch))
        steps[mode] = step
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    times: dict[str | int, list[float]] = {mode: [] for mode in modes}
    for _ in range(repeats):
        for mode, step in steps.items():
            start = clock()
            jax.block_until_ready(step(params, batch))
            times[mode].append(clock() - start)
    rows = []
    for mode, (chosen, temp, seconds) in facts.items():
        cost = step_cost(model, mode, chosen, batch, dtype, passes)
        name = mode if isinstance(mode, str) else f"n={mode}"
        rows.append(Measured(name, cost.flops, cost.forward_tokens, float(np.median(times[mode])), int(temp), seconds))
    return rows


def table(rows: Sequence[Measured]) -> str:
    """A text table; ratios are to the first row. "reached" is the time ratio over the FLOP ratio."""
    base = rows[0]
    head = (
        f"{'mode':>8} {'positions':>10} {'TFLOP':>8} {'FLOP ratio':>10} {'step s':>8} {'time ratio':>10}"
        f" {'reached':>8} {'temp MB':>8} {'compile s':>9}"
    )
    lines = [head]
    for r in rows:
        flops, seconds = base.flops / r.flops, base.seconds / r.seconds
        lines.append(
            f"{r.mode:>8} {r.tokens:>10,} {r.flops / 1e12:>8.3f} {flops:>10.2f} {r.seconds:>8.2f} {seconds:>10.2f}"
            f" {seconds / flops:>8.2f} {r.temp_bytes / 1e6:>8.0f} {r.compile_seconds:>9.1f}"
        )
    return "\n".join(lines)
