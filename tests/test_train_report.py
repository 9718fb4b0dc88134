"""Summaries, tables, plots and the parameter change."""

import json

import numpy as np
import pytest

from lsfuse.train.report import format_summary, parameter_change, plot, summarize, write_report

RECORDS = [
    *({"phase": "warm_start", "step": i, "loss": 3.0 - i, "tokens": 10, "time/step": 0.5} for i in range(2)),
    {"phase": "eval", "step": 0, "reward": 0.25, "exact": 0.0, "time/step": 2.0},
    *(
        {
            "phase": "rl",
            "step": i,
            "loss": 0.1,
            "reward": 0.3 + i / 10,
            "approx_kl": 0.01,
            "tokens": 20,
            "time/step": 1.0,
        }
        for i in range(3)
    ),
    {"phase": "eval", "step": 3, "reward": 0.75, "exact": 0.5, "time/step": 2.0},
]


def test_summary():
    summary = summarize(RECORDS, {"step": 3, "reward": 0.75})
    assert summary["held_out"]["before"] == {"reward": 0.25, "exact": 0.0}
    assert summary["held_out"]["after"] == {"reward": 0.75, "exact": 0.5}
    assert summary["rl"]["steps"] == 3 and summary["rl"]["seconds"] == 3.0
    assert summary["rl"]["reward"] == pytest.approx(0.4)
    assert summary["rl"]["tokens_per_second"] == pytest.approx(20)
    assert summary["warm_start"]["loss"] == pytest.approx(2.5)
    text = format_summary(summary)
    assert "before RL" in text and "0.2500" in text and "0.7500" in text


def test_summary_of_little():
    assert summarize([]) == {}
    assert format_summary({}) == "\n"


def test_write_report(tmp_path):
    write_report(tmp_path, RECORDS, summarize(RECORDS))
    assert (tmp_path / "plots.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "summary.json").read_text())["rl"]["steps"] == 3
    assert "held out" in (tmp_path / "summary.txt").read_text()
    plot([], tmp_path / "empty.png")


def test_parameter_change():
    before = {"a": np.array([3.0, 4.0], np.float32), "b": {"c": np.zeros((2, 2), np.float32)}}
    after = {"a": np.array([3.0, 4.5], np.float32), "b": {"c": np.full((2, 2), 0.1, np.float32)}}
    change = parameter_change(before, after)
    assert change["norm_before"] == pytest.approx(5)
    assert change["norm_of_change"] == pytest.approx((0.25 + 0.04) ** 0.5)
    assert change["relative"] == pytest.approx(change["norm_of_change"] / 5)
    assert change["largest"] == pytest.approx({"a": 0.5, "b/c": 0.1})
    assert "a   " in format_summary({"parameter_change": change})
