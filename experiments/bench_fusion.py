"""Prefill and decode of a model, of the same without some attentions, and with FFNs fused: time and roofline.

    python -m experiments.bench_fusion --model=../SmolLM2-135M-Instruct --remove_attention=6-9 --fuse=6-8

Without --model, random weights of SmolLM2-135M's shape: no time depends on their values. Three models are timed whole,
"parent", "sequential" (attention removed) and "fused"; then every span of --fuse by itself, in each of them. For that,
--copies of the span run after each other, with weights of their own, so that they do not stay in a cache that the whole
model would have emptied; what is timed less "no blocks" (embedding and head), over the copies, is one span.

    decode   one token for each of --batches sequences, each after a context of its own of --context tokens: what
             `rl.sample` runs, sampling included, less what a call costs without steps
    prefill  so many prompts of --context tokens, to the logits of their last token

The roofline time is max(bytes / bandwidth, FLOPs / matmul rate), both measured on the device between the models' turns;
bytes are the weights once, and keys and values of the contexts. Everything is timed in turn; the fastest of the repeats
counts for times, and ratios are medians over the repeats, with their range. "noise" is the sequential model timed a
second time in each round, over its first. Times are CPU seconds on a CPU, wall seconds elsewhere. The table ends with
what explains the ratio of fused to sequential decoding.

Writes table.txt, rows.csv, rows.json and bench.png into --out.
"""

import dataclasses
import pathlib
import platform
import sys
import textwrap
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from absl import app, flags

from experiments.tables import check_out, whole_numbers, write_table
from lsfuse import fusion, io
from lsfuse import model as models
from lsfuse.fusion.describe import on_shapes
from lsfuse.train import fuse_time as timing
from lsfuse.train.fuse_time import PHASES, WHOLE, Model, Ratio, Row

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

NO_BLOCKS = "no blocks"


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


def parse_spans(flag: str, text: str) -> list[tuple[int, int]]:
    """[(6, 8), (12, 12)] of "6-8,12". Raises ValueError, naming the flag, for anything else."""
    spans = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise ValueError(f"--{flag}={text}: spans are written 6-8 or 6-8,12, first block first")
        spans.append((int(first), int(last or first)))
    return spans


def check_positions(config: models.ModelConfig, context: int, steps: int) -> None:
    """Raises ValueError for more tokens than the model has positions for."""
    if context + steps > config.max_position_embeddings:
        raise ValueError(
            f"--context={context} and --steps={steps}: {context + steps} tokens exceed the model's"
            f" {config.max_position_embeddings} positions"
        )


def make_models(parent: Model, removed: Sequence[int], spans: Sequence[tuple[int, int]]) -> dict[str, Model]:
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


# --- subjects ---------------------------------------------------------------------------------------------------------


def span_name(span: tuple[int, int]) -> str:
    return f"{span[0]}-{span[1]}"


def place_of(name: str, spans: Sequence[tuple[int, int]], n: int) -> tuple[int, int]:
    """First and last block of span n in a model of `WHOLE`: once fused, it is one block, and so are those before it."""
    first, last = spans[n]
    if name != timing.FUSED:
        return first, last
    return (first - sum(b - a for a, b in spans[:n]),) * 2


def make_subjects(wholes: Mapping[str, Model], spans: Sequence[tuple[int, int]], copies: int) -> dict[str, Model]:
    """Everything that is timed: whole models, copies of every span in each of them, and no blocks at all."""
    subjects = dict(wholes)
    for n, span in enumerate(spans):
        for name in WHOLE:
            subjects[f"{name} {span_name(span)}"] = copies_of(wholes[name], *place_of(name, spans, n), copies)
    return subjects | {NO_BLOCKS: without_blocks(wholes[timing.PARENT])}


def all_rows(
    seconds: Mapping[str, np.ndarray],
    works: Mapping[str, tuple[float, float]],
    rates: Mapping[str, float],
    blocks: Mapping[str, int],
    spans: Sequence[str],
    phase: str,
    batch: int,
    copies: int,
) -> tuple[list[Row], list[Ratio]]:
    """Whole models as measured; spans less what there is without blocks, over the copies. blocks: in turn, of every
    subject."""
    times = {name: seconds[name] for name in (*WHOLE, timing.AGAIN)}
    whole = {name: np.array(works[name]) for name in WHOLE}
    rows, ratios = timing.make_rows("whole", times, whole, blocks, rates, phase, batch)
    for span in spans:
        times = {name: (seconds[f"{name} {span}"] - seconds[NO_BLOCKS]) / copies for name in WHOLE}
        own = {name: (np.array(works[f"{name} {span}"]) - works[NO_BLOCKS]) / copies for name in WHOLE}
        each = {name: blocks[f"{name} {span}"] // copies for name in WHOLE}
        more = timing.make_rows(span, times, own, each, rates, phase, batch)
        rows, ratios = rows + more[0], ratios + more[1]
    return rows, ratios


# --- rows -------------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row], ratios: Sequence[Ratio]) -> str:
    lines = []
    for what in dict.fromkeys(r.what for r in rows):
        lines.append("whole models" if what == "whole" else f"FFNs of {what} by themselves, in each of the models")
        head = f"{'phase':>8} {'batch':>5} {'model':>11} {'in turn':>7} {'ms':>10} {'roofline':>9} {'reached':>8}"
        lines.append(f"{head} {'bound':>6} {'MB':>8} {'GFLOP':>9}")
        for r in (r for r in rows if r.what == what):
            lines.append(
                f"{r.phase:>8} {r.batch:>5} {r.model:>11} {r.in_turn:>7} {r.seconds * 1e3:>10.2f}"
                f" {r.roofline_seconds * 1e3:>9.2f} {r.reached:>8.2f} {r.bound:>6} {r.bytes / 1e6:>8.1f}"
                f" {r.flops / 1e9:>9.2f}"
            )
        lines.append("")
    lines.append(f"time over the sequential model's{'':>14} median     range      roofline")
    for q in ratios:
        name = "noise" if q.model == timing.AGAIN else q.model
        lines.append(
            f"{q.phase:>8} {q.batch:>5} {q.what:>6} {name:>11} {'':>10} {q.median:>6.3f} {q.least:>6.3f}-{q.most:.3f}"
            f" {q.roofline:>8.3f}"
        )
    return "\n".join(lines)


def reasons(rows: Sequence[Row], ratios: Sequence[Ratio], kind: str) -> str:
    """Of fused over sequential decoding of whole models, a paragraph to every batch."""
    texts = []
    for batch in dict.fromkeys(r.batch for r in rows):
        own = [r for r in rows if (r.phase, r.what, r.batch) == ("decode", "whole", batch)]
        texts.append(
            timing.why(own, [q for q in ratios if (q.phase, q.what, q.batch) == ("decode", "whole", batch)], kind)
        )
    return "\n".join(textwrap.fill(text, 120) for text in texts)


def save(
    out: pathlib.Path, rows: Sequence[Row], ratios: Sequence[Ratio], text: str, setting: Mapping[str, object]
) -> None:
    setting = {**setting, "ratios": [dataclasses.asdict(q) for q in ratios]}
    whats = list(dict.fromkeys(r.what for r in rows))
    size = (9, 3.5 * len(whats))
    figure, axes = plt.subplots(len(whats), 2, figsize=size, layout="constrained", squeeze=False)
    for line, what in zip(axes, whats, strict=True):
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
    write_table(out, text, [dataclasses.asdict(r) for r in rows], setting, {"bench.png": figure})


def main(argv: list[str]) -> None:
    del argv
    given = flags.FLAGS
    dtype = jnp.dtype(given.dtype)
    try:
        out = check_out(given.out)
        batches = whole_numbers("batches", given.batches)
        spans = sorted(parse_spans("fuse", given.fuse))
        removed = [i for a, b in parse_spans("remove_attention", given.remove_attention) for i in range(a, b + 1)]
        config = smollm2_shape() if given.model is None else io.check_hf(given.model)
        check_positions(config, given.context, given.steps)
        # What cannot be removed or fused is said before a weight is loaded.
        on_shapes(fusion.chain(fusion.remove_attention(removed), fusion.fuse_ffn(spans)), config)
        if given.model is None:
            parent = config, models.init_params(config, jax.random.key(0), dtype)
        else:
            parent = io.load_hf(given.model, dtype)
        wholes = make_models(parent, removed, spans)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    subjects = make_subjects(wholes, spans, given.copies)
    blocks = {name: timing.in_turn(model[0]) for name, model in subjects.items()}
    names, kind = [span_name(span) for span in spans], jax.devices()[0].platform
    rows: list[Row] = []
    ratios: list[Ratio] = []
    rates: dict[str, float] = {}
    for batch in batches:
        for phase in PHASES:
            sizes = (phase, given.context, batch, given.steps)
            seconds, found = timing.measure(subjects, *sizes, given.repeats)
            works = {name: timing.work(model, *sizes) for name, model in subjects.items()}
            more = all_rows(seconds, works, found, blocks, names, phase, batch, given.copies)
            rows, ratios = rows + more[0], ratios + more[1]
            rates = {name: max(rate, rates.get(name, 0.0)) for name, rate in found.items()}
            print(table(*more), flush=True)
    text = f"{table(rows, ratios)}\n\n{reasons(rows, ratios, kind)}\n"
    units = {"read": "GB/s", "copy": "GB/s", "matmul": "GFLOP/s"}
    best = ", ".join(f"{name} {rate / 1e9:.1f} {units[name]}" for name, rate in rates.items())
    text += f"\nthe device's best: {best}"
    print(text)
    kept = ("model", "remove_attention", "fuse", "context", "steps", "batches", "copies", "repeats", "dtype")
    setting = {name: given[name].value for name in kept} | {"rates": rates, "jax": jax.__version__}
    setting |= {"device": jax.devices()[0].device_kind, "python": platform.python_version()}
    save(out, rows, ratios, text, setting)
    print(f"written to {out}")


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
