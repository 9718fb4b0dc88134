"""What a distillation leaves at its end: summary.json, summary.txt and plots.png, all from metrics.jsonl."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lsfuse.files import write_atomic
from lsfuse.train.report import draw

_LAST = 10  # steps that a stage's loss at its end averages over


def summarize_distillation(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """JSON-able: "stages", one entry each, and "held_out": measures before the first stage and after each."""
    stages = []
    for index in sorted({r["stage"] for r in records if r["phase"] != "eval"}):
        steps = [r for r in records if r["phase"] != "eval" and r["stage"] == index]
        stages.append(
            {
                "loss": steps[0]["phase"],
                "steps": len(steps),
                "tokens": sum(r["tokens"] for r in steps),
                "first": steps[0]["loss"],
                "last": float(np.mean([r["loss"] for r in steps[-_LAST:]])),
                "seconds": float(sum(r["time/step"] for r in steps)),
            }
        )
    ends = {0: "before"} | {s["steps"]: "after" for s in stages}
    measured = [r for r in records if r["phase"] == "eval" and r["step"] in ends]
    held_out = {}
    for r in measured:
        name = "before" if r["step"] == 0 else f"after stage {r['stage']}"
        if r["step"] in (0, stages[r["stage"]]["steps"]):
            held_out[name] = {k: v for k, v in r.items() if k not in ("phase", "stage", "step", "time/step")}
    return {"stages": stages, "held_out": held_out}


def format_distillation(summary: Mapping[str, Any]) -> str:
    """Tables for people."""
    lines = [f"{'stage':<8}{'loss':<12}{'steps':>7}{'tokens':>10}{'first':>10}{'last':>10}{'seconds':>10}"]
    for i, s in enumerate(summary["stages"]):
        lines.append(
            f"{i:<8}{s['loss']:<12}{s['steps']:>7}{s['tokens']:>10,}{s['first']:>10.4f}{s['last']:>10.4f}{s['seconds']:>10.1f}"
        )
    held_out = summary["held_out"]
    lines += ["", f"{'held out':<24}" + "".join(f"{name:>16}" for name in held_out)]
    for measure in next(iter(held_out.values()), {}):
        lines.append(f"  {measure:<22}" + "".join(f"{values[measure]:>16.4f}" for values in held_out.values()))
    return "\n".join(lines) + "\n"


def write_distillation_report(
    workdir: pathlib.Path, records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]
) -> None:
    """summary.json, summary.txt, plots.png. Steps are counted over all stages in the plots."""
    starts = np.cumsum([0, *(s["steps"] for s in summary["stages"])])
    losses: dict[str, list[tuple[float, float]]] = {}
    held_out: dict[str, list[tuple[float, float]]] = {}
    probes: dict[str, list[tuple[float, float]]] = {}
    for r in records:
        at = float(starts[r["stage"]] + r["step"])
        if r["phase"] == "eval":
            for name in ("kl", "perplexity"):
                if name in r:
                    held_out.setdefault(name, []).append((at, r[name]))
            for name in (n for n in r if n.startswith("probe/")):
                probes.setdefault(name.removeprefix("probe/"), []).append((at, r[name]))
        else:
            losses.setdefault(f"{r['stage']}: {r['phase']}", []).append((at, r["loss"]))
    panels: list[tuple[str, list[tuple[str, list[tuple[float, float]]]]]] = [("loss", list(losses.items()))]
    panels += [(f"held-out {name}", [(name, points)]) for name, points in held_out.items()]
    if probes:
        panels.append(("perplexity by position", list(probes.items())))
    draw(panels, workdir / "plots.png")
    write_atomic(workdir / "summary.txt", format_distillation(summary))
    write_atomic(workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
