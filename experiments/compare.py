"""Runs side by side: curves with intervals over seeds, and a table of where they end.

    python -m experiments.compare runs/lr/* --out=runs/lr_compared

Runs whose configs differ in nothing but the seed are one row and one curve: the mean over seeds, with a 95 % interval
(Student's t) where there are two or more. A row is named by the fields in which the configs differ. Writes table.txt,
rows.csv, rows.json and curves.png into --out.
"""

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from absl import app, flags
from flax import traverse_util
from scipy import stats

from experiments.tables import write_table

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

_OUT = flags.DEFINE_string("out", "runs/compared", "Folder for the results.")

# (title, phase, field) of a panel.
CURVES = (
    ("held-out reward", "eval", "reward"),
    ("reward", "rl", "reward"),
    ("loss", "rl", "loss"),
    ("KL to the reference", "rl", "kl"),
    ("gradient norm", "rl", "grad_norm"),
    ("seconds a step", "rl", "time/step"),
)


def read_run(folder: pathlib.Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(config, flat by dotted names; records). Raises ValueError, naming the folder, if it holds no run."""
    for name in ("config.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}; give work directories of experiments.launch")
    config = traverse_util.flatten_dict(_parsed((folder / "config.json").read_text(), folder / "config.json"), sep=".")
    lines = enumerate((folder / "metrics.jsonl").read_text().splitlines(), 1)
    records = [  # the last may be half written
        _parsed(line, f"{folder / 'metrics.jsonl'}, line {i}") for i, line in lines if line.endswith("}")
    ]
    if not records:
        raise ValueError(f"{folder}/metrics.jsonl is empty; the run has not made a step")
    return config, records


def _parsed(text: str, where: object) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} cannot be read ({error}); leave the run out, or put the file back") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where} cannot be read (it holds {type(value).__name__}, not an object)")
    return value


def group_runs(folders: Sequence[pathlib.Path]) -> dict[str, list[list[dict[str, Any]]]]:
    """name of a setting -> its runs' records, one list a seed."""
    runs = [read_run(folder) for folder in folders]
    fields = sorted(set().union(*(config for config, _ in runs)) - {"seed"})
    differ = [f for f in fields if len({repr(config.get(f)) for config, _ in runs}) > 1]
    groups: dict[str, list[list[dict[str, Any]]]] = {}
    for config, records in runs:
        name = ", ".join(f"{f}={config.get(f)}" for f in differ) or "all"
        groups.setdefault(name, []).append(records)
    return groups


def curve(runs: Sequence[Sequence[Mapping[str, Any]]], phase: str, field: str) -> list[tuple[int, float, float]]:
    """(step, mean, half width of the interval; 0 for one run) at the steps that all runs have."""
    values = [{r["step"]: r[field] for r in run if r["phase"] == phase and field in r} for run in runs]
    steps = sorted(set.intersection(*(set(v) for v in values)))
    return [(step, *interval([v[step] for v in values])) for step in steps]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half width of its 95 % interval)."""
    n = len(values)
    if n < 2:
        return float(np.mean(values)), 0.0
    return float(np.mean(values)), float(stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / np.sqrt(n))


def make_rows(groups: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]) -> list[dict[str, Any]]:
    """One dict a setting: figures at the last step that all of its runs have, None where there is no such figure."""
    rows = []
    for name, runs in groups.items():
        row: dict[str, Any] = {"setting": name, "seeds": len(runs)}
        for title, phase, field in CURVES:
            points = curve(runs, phase, field)
            row[title], row[f"{title} ±"] = points[-1][1:] if points else (None, None)
            if title == "held-out reward":
                row["best held-out reward"] = max((p[1] for p in points), default=None)
                row["steps"] = points[-1][0] if points else None
        rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Text for people, settings down."""
    titles = [t for t, _, _ in CURVES if any(row[t] is not None for row in rows)]
    width = max(len("setting"), *(len(row["setting"]) for row in rows))
    lines = [f"{'setting':<{width}} {'seeds':>5} {'steps':>6} " + " ".join(f"{t:>20}" for t in titles)]
    for row in rows:
        cells = []
        for title in titles:
            half = f" ± {row[f'{title} ±']:.2g}" if row["seeds"] > 1 and row[title] is not None else ""
            cells.append(f"{'-' if row[title] is None else f'{row[title]:.4g}{half}':>20}")
        lines.append(f"{row['setting']:<{width}} {row['seeds']:>5} {row['steps'] or 0:>6} " + " ".join(cells))
    return "\n".join(lines)


def plot(groups: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], path: pathlib.Path) -> None:
    panels = [(t, p, f) for t, p, f in CURVES if any(curve(runs, p, f) for runs in groups.values())]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.4), layout="constrained", squeeze=False)
    for axis, (title, phase, field) in zip(axes[0], panels, strict=True):
        for name, runs in groups.items():
            if points := curve(runs, phase, field):
                steps, mean, half = (np.array(x) for x in zip(*points, strict=True))
                (line,) = axis.plot(steps, mean, label=f"{name} ({len(runs)})")
                if len(runs) > 1:
                    axis.fill_between(steps, mean - half, mean + half, color=line.get_color(), alpha=0.2, linewidth=0)
        axis.set(title=title, xlabel="RL step")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=130)


def main(argv: list[str]) -> None:
    folders = [pathlib.Path(a) for a in argv[1:]]
    try:
        if not folders:
            raise ValueError("give work directories, for example: python -m experiments.compare runs/lr/*")
        groups = group_runs(folders)
    except ValueError as error:
        sys.exit(f"error: {error}")
    rows = make_rows(groups)
    text, out = table(rows), pathlib.Path(_OUT.value)
    print(text)
    try:
        write_table(out, text, rows, {"runs": [str(f) for f in folders]})
        plot(groups, out / "curves.png")
    except OSError as error:
        sys.exit(f"error: {error.strerror}: {error.filename or out}; give another folder with --out")
    print(f"written to {out}")


if __name__ == "__main__":
    app.run(main)
