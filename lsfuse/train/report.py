"""What a run leaves at its end: summary.json, summary.txt and plots.png, all from metrics.jsonl."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lsfuse.files import write_atomic, write_figure
from lsfuse.io.checkpoint_manifest import leaf_names
from lsfuse.types import Params

_LAST = 10  # steps that "at the end" averages over


def summarize(records: Sequence[Mapping[str, Any]], best: Mapping[str, float] | None = None) -> dict[str, Any]:
    """JSON-able figures of a run from its metrics' records."""
    phases = {name: [r for r in records if r["phase"] == name] for name in ("warm_start", "rl", "eval")}
    summary: dict[str, Any] = {}
    for name in ("warm_start", "rl"):
        if steps := phases[name]:
            last = steps[-_LAST:]
            seconds = [r["time/step"] for r in steps]
            summary[name] = {
                "steps": len(steps),
                "loss": float(np.mean([r["loss"] for r in last])),
                "seconds": float(sum(seconds)),
                "seconds_per_step": float(np.median(seconds)),
                "tokens_per_second": float(np.mean([r["tokens"] for r in steps]) / np.median(seconds)),
            }
            if "reward" in last[0]:
                summary[name]["reward"] = float(np.mean([r["reward"] for r in last]))
            if "groups_with_spread" in last[0]:
                summary[name]["groups_with_spread"] = float(np.mean([r["groups_with_spread"] for r in steps]))
    if evaluations := phases["eval"]:
        keep = [k for k in evaluations[0] if k not in ("phase", "step", "time/step")]
        summary["held_out"] = {
            "before": {k: evaluations[0][k] for k in keep},
            "after": {k: evaluations[-1][k] for k in keep},
            "best": dict(best or {}),
            "seconds": float(sum(r["time/step"] for r in evaluations)),
        }
    return summary


def parameter_change(before: Params, after: Params) -> dict[str, Any]:
    """How far training moved the parameters: norms over all leaves in float64, and the largest entry of each leaf."""
    total = moved = 0.0
    largest = {}
    for name, a, b in zip(leaf_names(after), jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
        total, moved = total + float(np.sum(a * a)), moved + float(np.sum((b - a) ** 2))
        largest[name] = float(np.max(np.abs(b - a), initial=0.0))
    norm, change = total**0.5, moved**0.5
    return {"norm_before": norm, "norm_of_change": change, "relative": change / max(norm, 1e-300), "largest": largest}


def format_summary(summary: Mapping[str, Any]) -> str:
    """A table for people."""
    lines = []
    if held_out := summary.get("held_out"):
        before, after = held_out["before"], held_out["after"]
        lines.append(f"{'held out':<28}{'before RL':>12}{'after RL':>12}")
        lines += [f"  {name:<26}{before[name]:>12.4f}{after[name]:>12.4f}" for name in before]
    for name, title in (("warm_start", "warm start"), ("rl", "RL")):
        if phase := summary.get(name):
            lines.append(title)
            lines += [f"  {k.replace('_', ' '):<26}{v:>12.4g}" for k, v in phase.items()]
    if change := summary.get("parameter_change"):
        lines.append("parameter change in RL")
        for k in ("norm_before", "norm_of_change", "relative"):
            lines.append(f"  {k.replace('_', ' '):<26}{change[k]:>12.4g}")
        lines.append("  largest change of an entry, by leaf")
        lines += [f"    {name:<40}{value:>12.3g}" for name, value in change["largest"].items()]
    if dense := summary.get("replay_against_dense"):
        lines.append(f"{'one gradient step':<28}{'replay':>12}{'dense':>12}{'dense/replay':>14}")
        for k, (mine, other) in dense.items():
            lines.append(f"  {k.replace('_', ' '):<26}{mine:>12.4g}{other:>12.4g}{other / mine:>14.2f}")
    return "\n".join(lines) + "\n"


def plot(records: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """One PNG: loss in the warm start; reward, loss, KL and step time in RL. Panels without data are left out."""
    by_phase = {name: [r for r in records if r["phase"] == name] for name in ("warm_start", "rl", "eval")}
    panels = []
    for title, curves in (
        ("warm start: loss", (("warm_start", "loss", "nats per token"),)),
        ("RL: reward", (("rl", "reward", "training"), ("eval", "reward", "held out"))),
        ("RL: loss", (("rl", "loss", "loss"),)),
        ("RL: KL, nats per token", (("rl", "kl", "to the reference"), ("rl", "approx_kl", "to the old policy"))),
        ("RL: seconds", (("rl", "time/step", "a step"),)),
    ):
        drawn = [
            (label, points)
            for phase, name, label in curves
            if (points := [(r["step"], r[name]) for r in by_phase[phase] if name in r])
        ]
        if drawn:
            panels.append((title, drawn))
    draw(panels, path)


def draw(panels: Sequence[tuple[str, Sequence[tuple[str, Sequence[tuple[float, float]]]]]], path: pathlib.Path) -> None:
    """One PNG of panels (title, [(label, [(step, value), …]), …]) side by side."""
    import matplotlib.figure
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = matplotlib.figure.Figure(figsize=(4.5 * max(len(panels), 1), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for i, (title, curves) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), i + 1)
        for label, points in curves:
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) < 20 else None, markersize=3)
        axes.set(title=title, xlabel="step")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    write_figure(path, figure)


def write_report(workdir: pathlib.Path, records: Sequence[Mapping[str, Any]], summary: dict[str, Any]) -> None:
    """summary.json, summary.txt, plots.png."""
    plot(records, workdir / "plots.png")
    write_atomic(workdir / "summary.txt", format_summary(summary))
    write_atomic(workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
