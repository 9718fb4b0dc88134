"""What a fusion leaves at its end: report.md with its tables and pictures, and summary.json with the same figures."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from lsfuse.files import write_atomic, write_figure
from lsfuse.fusion.describe import format_blocks, summarize
from lsfuse.model import ModelConfig
from lsfuse.train.fuse_table import COLUMNS, DISTILLED, PARENT
from lsfuse.train.fuse_time import AGAIN, SEQUENTIAL

Results = Mapping[str, Mapping[str, Any] | None]
_FORMATS = {"perplexity": ".2f", "kl": ".4f", "top1": ".1%", "diverged": ".0%", "agreed": ".1f"}


def write_fusion_report(
    workdir: pathlib.Path,
    config: ConfigDict,
    models: Mapping[str, ModelConfig],
    rows: Mapping[str, Mapping[str, float]],
    results: Results,
) -> dict[str, Any]:
    """summary.json, report.md and its pictures. rows: of the table. results: of the stages, None where one has not run.

    Returns: what summary.json holds.
    """
    training = _read(workdir / "distil" / "summary.json") if results["distil"] else None
    if results["distil"]:
        rows = {**rows, DISTILLED: results["distil"]["row"]}
    summary = {"table": rows, **{name: value for name, value in results.items() if value}, "training": training}
    _plot_table(workdir / "table.png", rows)
    parts = [f"# {_title(config)}", _surgery(models, results), _table(config, rows)]
    if results["time"]:
        parts.append(_time(results["time"]))
    if results["analyse"]:
        _plot_scores(workdir / "analysis" / "attention.png", results["analyse"])
        parts.append(_analysis(config, results["analyse"], results["plan"] or {}))
    if training:
        parts.append(_training(training))
    if results["export"]:
        parts.append(_export(results["export"]))
    parts.append(_blocks(config, models))
    write_atomic(workdir / "report.md", "\n\n".join(parts) + "\n")
    write_atomic(workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _read(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _title(config: ConfigDict) -> str:
    return f"FFN fusion of {pathlib.Path(config.model.path).name if config.model.path else 'a model of its own'}"


def _surgery(models: Mapping[str, ModelConfig], results: Results) -> str:
    plan = results["plan"] or {}
    spans = ", ".join(f"{a}-{b}" for a, b in plan["fuse_ffn"])
    sizes = {name: summarize(model) for name, model in models.items()}
    names = ("real blocks", "attention blocks", "one after the other", "widest FFN", "parameters")
    rows = [[name, *(f"{sizes[m][name]:,}" for m in sizes)] for name in names]
    return (
        f"Attention of blocks {', '.join(map(str, plan['remove_attention']))} is removed; the FFNs of {spans} are fused"
        f" (norm gains: {plan['norm']}).\n\n" + markdown(["", *sizes], rows)
    )


def _table(config: ConfigDict, rows: Mapping[str, Mapping[str, float]]) -> str:
    fields = config.generate
    shown = [[name, *(format(row[c], _FORMATS.get(c, ",")) for c in COLUMNS)] for name, row in rows.items()]
    return (
        "## What it costs\n\n"
        f"On {config.eval.count} held-out windows of {config.eval.window} tokens; KL in nats a token; greedy text:"
        f" {fields.count} continuations of {fields.tokens} tokens, the share that differs from the parent's, and how"
        f" many tokens are alike before; keys and values in {config.dtype}.\n\n"
        + markdown(["", *COLUMNS.values()], shown)
        + "\n\n![KL of every variant](table.png)"
    )


def _time(found: Mapping[str, Any]) -> str:
    over = {q["model"]: f"{q['median']:.3f} ({q['least']:.3f}-{q['most']:.3f})" for q in found["ratios"]}
    over[SEQUENTIAL] = f"1 (timed again: {over.pop(AGAIN)})"
    rows = [
        [r["model"], str(r["in_turn"]), f"{r['seconds'] * 1e3:.2f}", f"{r['roofline_seconds'] * 1e3:.2f}"]
        + [f"{r['bytes'] / 1e6:,.1f}", f"{r['flops'] / 1e9:.2f}", over[r["model"]]]
        for r in found["rows"]
    ]
    columns = ["", "blocks in turn", "ms", "ms at the machine's best", "MB", "GFLOP", "time over the sequential one's"]
    return (
        "## Time of a decoding step\n\n"
        f"{found['batch']} sequences after {found['context']} tokens each, {found['steps']} steps a call, on"
        f" {found['device']}: the fastest of {found['repeats']} rounds, ratios as medians over them, with their range."
        " The sequential model is the parent without the removed attention; the fused one is not distilled, which"
        " changes no time.\n\n" + markdown(columns, rows) + f"\n\n{found['why']}"
    )


def _analysis(config: ConfigDict, found: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    scores = found["attention"]
    order = sorted((i for i, x in enumerate(scores) if x is not None), key=lambda i: scores[i])
    removed = set(found["removed"])
    rows = [
        [str(rank + 1), str(i), f"{scores[i]:.4f}", f"{found['influence'][i]:.4f}", f"{found['relative'][i]:.3f}"]
        + ["removed" if i in removed else ""]
        for rank, i in enumerate(order)
    ]
    largest = [
        f"{a}-{b}: {m:.3f}" for (a, b), m in zip(plan.get("fuse_ffn", ()), plan.get("largest", ()), strict=True)
    ]
    return (
        "## Where the model can spare something\n\n"
        f"On {config.analysis.count} windows of {config.analysis.window} tokens of other text. The"
        f" {len(found['cheapest'])} attentions in a row that cost least in sum are those of blocks"
        f" {found['cheapest'][0]} to {found['cheapest'][-1]}. Largest dependency inside a fused span:"
        f" {', '.join(largest)}.\n\n"
        "![KL without each attention](analysis/attention.png)\n\n"
        "![Dependencies without the removed attention](analysis/region.png)\n\n"
        "![Dependencies of the parent's blocks](analysis/blocks.png)\n\n"
        + markdown(["rank", "block", "KL without its attention", "block influence", "‖h‖ / ‖X‖", ""], rows)
    )


def _training(summary: Mapping[str, Any]) -> str:
    columns = ("loss", "steps", "tokens", "first", "last")
    rows = [
        [str(i), *(f"{s[c]:,.4f}" if isinstance(s[c], float) else str(s[c]) for c in columns)]
        for i, s in enumerate(summary["stages"])
    ]
    measures = list(next(iter(summary["held_out"].values())))
    held_out = [[name, *(f"{values[m]:.4f}" for m in measures)] for name, values in summary["held_out"].items()]
    return "\n\n".join(
        (
            "## Distillation",
            markdown(["stage", "loss", "steps", "tokens", "loss at first", "at last"], rows),
            markdown(["held out", *measures], held_out),
            "![Distillation](distil/plots.png)",
        )
    )


def _export(found: Mapping[str, Any]) -> str:
    lines = [
        f"- `export/{name}`: {found['source']}, read back with the same bits and the same logits"
        for name in found["written"]
    ]
    lines += [f"- not as {name}: {'; '.join(reasons)}" for name, reasons in found["left out"].items()]
    return "## Checkpoints\n\n" + "\n".join(lines)


def _blocks(config: ConfigDict, models: Mapping[str, ModelConfig]) -> str:
    tables = [f"{name}:\n\n```\n{format_blocks(model, config.dtype)}\n```" for name, model in models.items()]
    return "## Blocks\n\n" + "\n\n".join(tables)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its first column to the left, the others to the right."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def _plot_scores(path: pathlib.Path, found: Mapping[str, Any]) -> None:
    having = [i for i, x in enumerate(found["attention"]) if x is not None]
    colours = ["tab:red" if i in found["removed"] else "tab:blue" for i in having]
    values = [found["attention"][i] for i in having]
    figure, axes = _figure(max(5.0, 0.22 * len(having) + 2), 3.2)
    axes.bar(having, values, color=colours)
    axes.set(yscale="log", xlabel="block", ylabel="KL without its attention", title="removed: red")
    write_figure(path, figure)


def _plot_table(path: pathlib.Path, rows: Mapping[str, Mapping[str, float]]) -> None:
    shown = {name: row["kl"] for name, row in rows.items() if name != PARENT}
    figure, axes = _figure(7.0, 0.35 * len(shown) + 1.2)
    bars = axes.barh(list(shown), list(shown.values()), color="tab:blue")
    axes.bar_label(bars, fmt="%.2g", padding=3, fontsize="small")
    axes.set(xscale="log", xlabel="KL to the parent, nats a token")
    axes.margins(x=0.2)
    axes.invert_yaxis()
    write_figure(path, figure)


def _figure(width: float, height: float):
    import matplotlib.figure
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = matplotlib.figure.Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()
