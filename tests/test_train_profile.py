"""The profile: self times of a trace written by hand, and a real one."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from lsfuse.train.profile import Profiler, ops_table, self_times


def test_self_times(tmp_path):
    """while [0, 100) holds dot [10, 40) and dot [50, 70), the latter add [55, 60); another thread has dot [0, 5)."""

    def thread(tid, name):
        return {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}

    def span(tid, name, ts, dur):
        return {"ph": "X", "pid": 1, "tid": tid, "name": name, "ts": ts, "dur": dur}

    events = [thread(1, "python"), thread(2, "pool"), span(1, "$frame", 0, 1000), span(2, "dot", 50, 20)]
    events += [span(4, "$threading.py:1 wait", 0, 900), span(2, "ThunkExecutor::Execute (wait)", 0, 200)]
    events += [span(2, "end: dot", 40, 1)]
    events += [span(2, "while", 0, 100), span(2, "dot", 10, 30), span(2, "add", 55, 5), span(3, "dot", 0, 5)]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    times = self_times(tmp_path / "trace.json.gz")
    half = pytest.approx(50e-6)
    assert times == {"while": (half, 1), "dot": (half, 3), "add": (pytest.approx(5e-6), 1)}
    assert ops_table(times, top=2).splitlines()[-1].split() == ["1", "others", "0.0000", "4.8%"]


def test_two_steps_are_traced(tmp_path):
    f = jax.jit(lambda x: jnp.tanh(x @ x))
    x, profiler, texts = jnp.ones((64, 64)), Profiler(tmp_path / "profile"), []
    for step in range(5):
        profiler.before_step()
        jax.block_until_ready(f(x))
        texts.append(profiler.after_step(step == 4))
    assert [text is not None for text in texts] == [False, False, True, False, False]
    assert "tanh" in texts[2] and "$" not in texts[2] and "Executor" not in texts[2]
    assert "ui.perfetto.dev" in texts[2] and (tmp_path / "profile" / "ops.txt").read_text() == texts[2]


def test_too_few_steps(tmp_path):
    profiler = Profiler(tmp_path / "profile")
    profiler.before_step()
    assert "nothing is traced in a session of one step" in (profiler.after_step(True) or "")
    assert not (tmp_path / "profile").exists()
