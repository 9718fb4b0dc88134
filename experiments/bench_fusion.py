"""Prefill and decode of a model, of the same without some attentions, and with FFNs fused: time and roofline.

    python -m experiments.bench_fusion --model=../SmolLM2-135M-Instruct --remove_attention=6-9 --fuse=6-8

Without --model, random weights of SmolLM2-135M's shape: no time depends on their values. Three models are timed whole,
"parent", "sequential" (attention removed) and "fused"; then the first span of --fuse by itself, in each of them. For
that, --copies of the span run after each other, with weights of their own, so that they do not stay in a cache that the
whole model would have emptied; what is timed less "no blocks" (embedding and head), over the copies, is one span.

    decode   one token for each of --batches sequences, each after a context of its own of --context tokens: what
             `rl.sample` runs, sampling included, less what a call costs without steps
    prefill  so many prompts of --context tokens, to the logits of their last token

The roofline time is max(bytes / bandwidth, FLOPs / matmul rate), both measured on the device between the models' turns;
bytes are the weights once, and keys and values of the contexts. Everything is timed in turn; the fastest of the repeats
counts for times, and ratios are medians over the repeats, with their range. "noise" is the sequential model timed a
second time in each round, over its first. Times are CPU seconds on a CPU, wall seconds elsewhere.

Writes table.txt, rows.csv, rows.json and bench.png into --out.
"""

import dataclasses
import functools
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from absl import app, flags

from experiments import roofline
from experiments.tables import write_table
from lsfuse import fusion, io
from lsfuse import model as models
from lsfuse.replay import state_bytes_per_token
from lsfuse.rl import decode as decoding
from lsfuse.rl.sampler import branch_keys
from lsfuse.types import Array, Params

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

Model = tuple[models.ModelConfig, Params]
WHOLE = ("parent", "sequential", "fused")
AGAIN, NO_BLOCKS = "sequential again", "no blocks"
PHASES = ("decode", "prefill")


@dataclasses.dataclass(frozen=True)
class Row:
    """One model, or one span of it, in one phase at one batch. seconds: of a step (decode) or of all prompts (prefill).
    bytes, flops: what it must move and compute; bound: which of them takes longer; reached: roofline_seconds over
    seconds."""

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


# --- models -----------------------------------------------------------------------------------------------------------


def smollm2_shape() -> models.ModelConfig:
    """SmolLM2-135M's sizes."""
    return models.ModelConfig(
        vocab_size=49_152,
        hidden_size=576,
        num_heads=9,
        head_dim=64,
        blocks=models.uniform_blocks(30, 3, 1536),
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )


def parse_spans(text: str) -> list[tuple[int, int]]:
    """[(6, 8), (12, 12)] of "6-8,12". Raises ValueError for anything else."""
    spans = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"spans are written 6-8 or 6-8,12, got {text!r}")
        spans.append((int(first), int(last or first)))
    return spans


def make_models(parent: Model, removed: Sequence[int], spans: Sequence[tuple[int, int]]) -> dict[str, Model]:
    """Raises ValueError, naming the block, for what cannot be removed or fused."""
    sequential = fusion.remove_attention(removed)(*parent)
    return {"parent": parent, "sequential": sequential, "fused": fusion.fuse_ffn(spans)(*sequential)}


def copies_of(model: Model, first: int, last: int, count: int) -> Model:
    """A model of `count` copies of blocks first … last, each with weights of its own."""
    config, params = fusion.cut(*model, first, last)
    blocks = models.unstack_blocks(config, params) * count
    many = dataclasses.replace(config, blocks=config.blocks * count)
    return many, {**params, "runs": models.stack_blocks(many, blocks)}


def without_blocks(model: Model) -> Model:
    """Embedding and head: one block that is empty."""
    config, params = fusion.cut(*model, 0, 0)
    parts = [fusion.remove_attention([0])] if config.blocks[0].has_mixer else []
    return fusion.chain(*parts, fusion.remove_ffn([0]))(config, params)


# --- what is timed ----------------------------------------------------------------------------------------------------


def make_decode(model: Model, context: int, batch: int, most: int) -> Callable[[int], object]:
    """A function of a number of steps, `most` at most. The contexts' keys and values are zeros: no time depends on
    them."""
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
    config, params = model
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (batch, context), dtype=np.int32)

    @jax.jit
    def run(params: Params, ids: Array) -> Array:
        return models.logits(params, config, models.forward(params, config, ids)[:, -1])

    return lambda: jax.block_until_ready(run(params, ids))


def work(model: Model, phase: str, context: int, batch: int, steps: int) -> tuple[float, float]:
    """(bytes, FLOPs) that a decoding step (on average over `steps`), or a prefill, must move and compute."""
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
    """(name -> seconds by round, rates by probe); every model and probe once a round, in turn."""
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
    calls[AGAIN] = calls["sequential"]
    probes = roofline.make_probes(subjects["parent"][1]["embed_tokens"].dtype)
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


# --- rows -------------------------------------------------------------------------------------------------------------


def make_rows(
    seconds: Mapping[str, np.ndarray],
    works: Mapping[str, tuple[float, float]],
    rates: Mapping[str, float],
    phase: str,
    batch: int,
    copies: int,
) -> tuple[list[Row], list[Ratio]]:
    """Whole models as measured; spans less what there is without blocks, over the copies."""
    rows, ratios = [], []
    for what, share in (("whole", 1), ("span", copies)):
        if what == "whole":
            times = {name: seconds[name] for name in (*WHOLE, AGAIN)}
            own = {name: np.array(works[name]) for name in WHOLE}
        else:
            times = {name: seconds[f"{name} span"] - seconds[NO_BLOCKS] for name in WHOLE}
            own = {name: np.array(works[f"{name} span"]) - works[NO_BLOCKS] for name in WHOLE}
        ideal = {}
        for name in WHOLE:
            fastest, (nbytes, flops) = float(times[name].min()) / share, own[name] / share
            ideal[name] = roofline.roofline_seconds(nbytes, flops, rates)
            bound = "bytes" if ideal[name] > flops / rates["matmul"] else "FLOPs"
            reached = ideal[name] / fastest
            rows.append(Row(phase, batch, what, name, fastest, ideal[name], reached, bound, nbytes, flops))
        for name in times:
            if name != "sequential":
                of_round = times[name] / times["sequential"]
                possible = ideal.get(name, ideal["sequential"]) / ideal["sequential"]
                found = (float(np.median(of_round)), float(of_round.min()), float(of_round.max()))
                ratios.append(Ratio(phase, batch, what, name, *found, possible))
    return rows, ratios


def table(rows: Sequence[Row], ratios: Sequence[Ratio], members: int) -> str:
    lines = []
    for what in ("whole", "span"):
        lines.append(f"the span by itself: {members} blocks, or one wide" if what == "span" else "whole models")
        head = f"{'phase':>8} {'batch':>5} {'model':>11} {'ms':>10} {'roofline':>9} {'reached':>8} {'bound':>6}"
        lines.append(f"{head} {'MB':>8} {'GFLOP':>9}")
        for r in (r for r in rows if r.what == what):
            lines.append(
                f"{r.phase:>8} {r.batch:>5} {r.model:>11} {r.seconds * 1e3:>10.2f} {r.roofline_seconds * 1e3:>9.2f}"
                f" {r.reached:>8.2f} {r.bound:>6} {r.bytes / 1e6:>8.1f} {r.flops / 1e9:>9.2f}"
            )
        lines.append("")
    lines.append(f"time over the sequential model's{'':>14} median     range      roofline")
    for q in ratios:
        name = "noise" if q.model == AGAIN else q.model
        lines.append(
            f"{q.phase:>8} {q.batch:>5} {q.what:>6} {name:>11} {'':>10} {q.median:>6.3f} {q.least:>6.3f}-{q.most:.3f}"
            f" {q.roofline:>8.3f}"
        )
    return "\n".join(lines)


def save(
    out: pathlib.Path, rows: Sequence[Row], ratios: Sequence[Ratio], text: str, setting: Mapping[str, object]
) -> None:
    setting = {**setting, "ratios": [dataclasses.asdict(q) for q in ratios]}
    write_table(out, text, [dataclasses.asdict(r) for r in rows], setting)
    figure, axes = plt.subplots(2, 2, figsize=(9, 7), layout="constrained", squeeze=False)
    for line, what in zip(axes, ("whole", "span"), strict=True):
        for axis, phase in zip(line, PHASES, strict=True):
            for i, name in enumerate(WHOLE):
                own = [r for r in rows if (r.phase, r.what, r.model) == (phase, what, name)]
                batches = [r.batch for r in own]
                axis.plot(batches, [r.seconds * 1e3 for r in own], f"C{i}o-", label=name)
                axis.plot(batches, [r.roofline_seconds * 1e3 for r in own], f"C{i}--", linewidth=0.8)
            axis.set(xscale="log", yscale="log", xlabel="batch", ylabel="ms", title=f"{phase}, {what}")
            axis.set_xticks(sorted({r.batch for r in rows}), labels=[str(b) for b in sorted({r.batch for r in rows})])
            axis.minorticks_off()
    axes[0, 0].plot([], [], "k--", linewidth=0.8, label="roofline")
    axes[0, 0].legend()
    figure.savefig(out / "bench.png", dpi=130)


def main(argv: list[str]) -> None:
    del argv
    given = flags.FLAGS
    dtype = jnp.dtype(given.dtype)
    try:
        batches = [int(b) for b in given.batches]
        spans = sorted(parse_spans(given.fuse))
        removed = [i for a, b in parse_spans(given.remove_attention) for i in range(a, b + 1)]
        if given.model is None:
            config = smollm2_shape()
            parent = config, models.init_params(config, jax.random.key(0), dtype)
        else:
            parent = io.load_hf(given.model, dtype)
        wholes = make_models(parent, removed, spans)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    first, last = spans[0]
    # After fusing, the first span is one block, at the place of its first member: no span comes before it.
    places = {"parent": (first, last), "sequential": (first, last), "fused": (first, first)}
    subjects = dict(wholes)
    subjects |= {f"{name} span": copies_of(wholes[name], *places[name], given.copies) for name in WHOLE}
    subjects[NO_BLOCKS] = without_blocks(parent)
    rows: list[Row] = []
    ratios: list[Ratio] = []
    rates: dict[str, float] = {}
    for batch in batches:
        for phase in PHASES:
            size = (phase, given.context, batch, given.steps)
            seconds, found = measure(subjects, *size, given.repeats)
            works = {name: work(model, *size) for name, model in subjects.items()}
            more = make_rows(seconds, works, found, phase, batch, given.copies)
            rows, ratios = rows + more[0], ratios + more[1]
            rates = {name: max(rate, rates.get(name, 0.0)) for name, rate in found.items()}
            print(table(*more, last - first + 1), flush=True)
    text = table(rows, ratios, last - first + 1)
    units = {"read": "GB/s", "copy": "GB/s", "matmul": "GFLOP/s"}
    best = ", ".join(f"{name} {rate / 1e9:.1f} {units[name]}" for name, rate in rates.items())
    text += f"\nthe device's best: {best}"
    print(text)
    names = ("model", "remove_attention", "fuse", "context", "steps", "batches", "copies", "repeats", "dtype")
    setting = {name: given[name].value for name in names} | {"rates": rates, "jax": jax.__version__}
    setting |= {"device": jax.devices()[0].device_kind, "python": platform.python_version()}
    save(pathlib.Path(given.out), rows, ratios, text, setting)
    print(f"written to {given.out}")


def define_flags() -> None:
    """Only where this is the program."""
    flags.DEFINE_string("model", None, "Checkpoint folder; random weights of SmolLM2-135M's shape if not given.")
    flags.DEFINE_string("remove_attention", "6-9", "Blocks that lose their attention.")
    flags.DEFINE_string("fuse", "6-8", "Spans of FFNs that become one, inclusive.")
    flags.DEFINE_integer("context", 64, "Tokens of a prompt, and before the first decoded one.", lower_bound=2)
    flags.DEFINE_integer("steps", 8, "Tokens decoded a timed call.", lower_bound=1)
    flags.DEFINE_list("batches", ["1", "4", "16", "64"], "Sequences at a time.")
    flags.DEFINE_integer("copies", 8, "Of the span, timed after each other.", lower_bound=1)
    flags.DEFINE_integer("repeats", 5, "Rounds.", lower_bound=1)
    flags.DEFINE_enum("dtype", "float32", ["bfloat16", "float16", "float32"], "Of weights, keys and values.")
    flags.DEFINE_string("out", "runs/bench_fusion", "Folder for the results.")


if __name__ == "__main__":
    define_flags()
    app.run(main)
