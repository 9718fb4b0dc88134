"""What fusing does to the time of a decoding step or a prefill: measured, beside what the machine could reach, and why.

Models are timed in turn, round by round, so that a machine whose speed drifts favours none. The fastest round counts
for times; ratios are medians over the rounds, with their range. CPU seconds on a CPU, wall seconds elsewhere.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsfuse.model import ModelConfig, forward, logits
from lsfuse.replay import state_bytes_per_token
from lsfuse.rl import decode as decoding
from lsfuse.rl.sampler import branch_keys
from lsfuse.train import roofline
from lsfuse.types import Array, Params

Model = tuple[ModelConfig, Params]
PARENT, SEQUENTIAL, FUSED = "parent", "sequential", "fused"
WHOLE = (PARENT, SEQUENTIAL, FUSED)
AGAIN = "sequential again"
PHASES = ("decode", "prefill")


@dataclasses.dataclass(frozen=True)
class Row:
    """One model, or one span of it, in one phase at one batch. what: "whole", or a span's blocks of the parent.
    seconds: of a step (decode) or of all prompts (prefill). bytes, flops: what it must move and compute; bound: which
    of them takes longer; reached: roofline_seconds over seconds; in_turn: blocks that run one after the other."""

    phase: str
    batch: int
    what: str
    model: str
    seconds: float
    roofline_seconds: float
    reached: float
    bound: str
    bytes: float
    flops: float
    in_turn: int


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Times of `model` over the sequential model's, round by round; roofline: of their roofline times."""

    phase: str
    batch: int
    what: str
    model: str
    median: float
    least: float
    most: float
    roofline: float


# --- what is timed ----------------------------------------------------------------------------------------------------


def make_decode(model: Model, context: int, batch: int, most: int) -> Callable[[int], object]:
    """A function of a number of steps, `most` at most: what `rl.sample` runs, after `context` tokens a sequence. The
    contexts' keys and values are zeros: no time depends on them."""
    config, params = model
    prompts = jax.ShapeDtypeStruct((batch, context), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    shapes = jax.eval_shape(lambda p, ids, n: decoding.prefill(p, config, ids, n, context), params, *prompts)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    prefilled = zeros.replace(lengths=jnp.full(batch, context - 1), exists=jnp.ones(batch, bool))
    caches = decoding.shared_caches(config, batch, 1, most, params["embed_tokens"].dtype)
    keys = branch_keys(jax.random.key(0), batch, 1)

    @jax.jit
    def run(params: Params, prefilled: decoding.Prefilled, caches, keys: Array, steps: Array):
        return decoding.decode(
            params,
            config,
            prefilled,
            decoding.shared_attention(prefilled),
            caches,
            keys,
            max_tokens=most,
            temperature=1.0,
            top_p=1.0,
            stop_ids=(),
            steps=steps,
        )

    return lambda steps: jax.block_until_ready(run(params, prefilled, caches, keys, jnp.int32(steps)))


def make_prefill(model: Model, context: int, batch: int) -> Callable[[], object]:
    """`batch` prompts of `context` tokens, to the logits of their last token."""
    config, params = model
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (batch, context), dtype=np.int32)

    @jax.jit
    def run(params: Params, ids: Array) -> Array:
        return logits(params, config, forward(params, config, ids)[:, -1])

    return lambda: jax.block_until_ready(run(params, ids))


def work(model: Model, phase: str, context: int, batch: int, steps: int) -> tuple[float, float]:
    """(bytes, FLOPs) that a decoding step (on average over `steps`), or a prefill, must move and compute: the weights
    once, and the keys and values of the contexts."""
    config, params = model
    kv = state_bytes_per_token(config, params["embed_tokens"].dtype)
    if phase == "decode":
        tokens, visible = 1.0, context - 1 + (steps + 1) / 2
        pairs, read = visible, visible * kv
    else:
        tokens, pairs, read = float(context), context * (context + 1) / 2, 0.0
    linear, pair = roofline.linear_flops(config), roofline.pair_flops(config)
    flops = batch * (tokens * linear + pairs * pair + roofline.head_flops(config))
    return roofline.weight_bytes(params) + batch * read, flops


def measure(
    subjects: Mapping[str, Model], phase: str, context: int, batch: int, steps: int, repeats: int
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """(name -> seconds by round, rates by probe); every model and probe once a round, in turn. Among the subjects are
    `WHOLE`; "sequential" is timed a second time in each round, as `AGAIN`: what differs is noise.

    A decoding step is what `steps` of them take, less what a call costs without steps.
    """
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter

    def timed(call: Callable[[], object]) -> float:
        start = clock()
        call()
        return clock() - start

    def a_step(decode: Callable[[int], object]) -> float:
        return (timed(functools.partial(decode, steps)) - timed(functools.partial(decode, 0))) / steps

    calls: dict[str, Callable[[], float]] = {}
    for name, model in subjects.items():
        if phase == "decode":
            decode = make_decode(model, context, batch, steps)
            decode(1)
            calls[name] = functools.partial(a_step, decode)
        else:
            prefill = make_prefill(model, context, batch)
            prefill()
            calls[name] = functools.partial(timed, prefill)
    calls[AGAIN] = calls[SEQUENTIAL]
    probes = roofline.make_probes(subjects[PARENT][1]["embed_tokens"].dtype)
    for probe, _ in probes.values():
        probe()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    fastest = dict.fromkeys(probes, np.inf)
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(call())
        for name, (probe, _) in probes.items():
            fastest[name] = min(fastest[name], timed(probe))
    rates = {name: amount / fastest[name] for name, (_, amount) in probes.items()}
    return {name: np.array(times) for name, times in seconds.items()}, rates


# --- what comes of it -------------------------------------------------------------------------------------------------


def in_turn(config: ModelConfig) -> int:
    """Blocks that run one after the other: neither empty ones nor those beside another."""
    return sum((block.has_mixer or block.has_ffn) and not block.beside for block in config.blocks)


def make_rows(
    what: str,
    times: Mapping[str, np.ndarray],
    works: Mapping[str, np.ndarray],
    blocks: Mapping[str, int],
    rates: Mapping[str, float],
    phase: str,
    batch: int,
) -> tuple[list[Row], list[Ratio]]:
    """times: seconds by round of `WHOLE`, and of `AGAIN`; works: (bytes, FLOPs), and blocks: `in_turn`, of `WHOLE`."""
    rows, ratios, ideal = [], [], {}
    for name in WHOLE:
        fastest, (nbytes, flops) = float(times[name].min()), (float(x) for x in works[name])
        ideal[name] = roofline.roofline_seconds(nbytes, flops, rates)
        bound = "bytes" if ideal[name] > flops / rates["matmul"] else "FLOPs"
        reached = ideal[name] / fastest
        rows.append(Row(phase, batch, what, name, fastest, ideal[name], reached, bound, nbytes, flops, blocks[name]))
    for name in times:
        if name != SEQUENTIAL:
            of_round = times[name] / times[SEQUENTIAL]
            possible = ideal.get(name, ideal[SEQUENTIAL]) / ideal[SEQUENTIAL]
            found = (float(np.median(of_round)), float(of_round.min()), float(of_round.max()))
            ratios.append(Ratio(phase, batch, what, name, *found, possible))
    return rows, ratios


def decode_times(models: Mapping[str, Model], batch: int, context: int, steps: int, repeats: int) -> dict[str, Any]:
    """A decoding step of `WHOLE` at one batch. JSON-able: "rows", "ratios" and "rates" (a second, by probe), "why", the
    sentences that explain the ratio, "device", and the sizes. Arguments as `measure`'s."""
    sizes = ("decode", context, batch, steps)
    seconds, rates = measure(models, *sizes, repeats)
    works = {name: np.array(work(model, *sizes)) for name, model in models.items()}
    blocks = {name: in_turn(model[0]) for name, model in models.items()}
    rows, ratios = make_rows("whole", seconds, works, blocks, rates, "decode", batch)
    device = jax.devices()[0]
    return {
        "rows": [dataclasses.asdict(row) for row in rows],
        "ratios": [dataclasses.asdict(ratio) for ratio in ratios],
        "rates": rates,
        "why": why(rows, ratios, device.platform),
        "device": device.device_kind,
        **{"batch": batch, "context": context, "steps": steps, "repeats": repeats},
    }


def why(rows: Sequence[Row], ratios: Sequence[Ratio], kind: str) -> str:
    """One paragraph for people on fused over sequential: the ratio, whether it is more than noise, and what explains
    it. rows, ratios: of one phase, batch and "what"; kind: of device, "cpu" or another."""
    of = {row.model: row for row in rows}
    ratio = {q.model: q for q in ratios}
    fused, again, a, b = ratio[FUSED], ratio[AGAIN], of[FUSED], of[SEQUENTIAL]
    apart = fused.median < again.least or fused.median > again.most
    unit, amounts = (
        ("MB", (a.bytes / 1e6, b.bytes / 1e6)) if a.bound == "bytes" else ("GFLOP", (a.flops / 1e9, b.flops / 1e9))
    )
    verb = "moves" if a.bound == "bytes" else "computes"
    ours = (
        "A CPU runs one block after the other either way and launches nothing, so that saved blocks save no time of"
        " their own"
        if kind == "cpu"
        else "Blocks saved are launches, and on several devices synchronisations, saved"
    )
    return (
        f"{fused.phase} at batch {fused.batch}, {fused.what}: fused / sequential {fused.median:.3f}"
        f" ({fused.least:.3f}-{fused.most:.3f}), the sequential model over itself {again.median:.3f}"
        f" ({again.least:.3f}-{again.most:.3f}): {'more' if apart else 'no more'} than noise. The fused one {verb}"
        f" {amounts[0]:,.1f} {unit}, the sequential one {amounts[1]:,.1f}, which is what bounds both, at"
        f" {a.reached:.0%} and {b.reached:.0%} of the machine's best: a ratio of {fused.roofline:.3f} is what that"
        f" allows. {a.in_turn} blocks run in turn instead of {b.in_turn}. {ours}."
    )
