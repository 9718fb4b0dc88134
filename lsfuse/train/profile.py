"""A profile of a few steps: a trace that a browser opens, and a table of the costliest operations."""

import gzip
import json
import pathlib
from collections import defaultdict

import jax

from lsfuse.files import write_atomic

STEPS = 2  # traced; the one before them compiles
# Python's frames (of any thread: a checkpoint is written by some), markers of ends, and the runtime's own loop, which
# waits for the operations it has handed out.
_NO_OPERATION = ("$", "end: ", "ThunkExecutor::", "ThreadpoolListener::")


class Profiler:
    """Traces STEPS steps of a phase, the second and the third of this session. None is traced if there are too few.

    Writes into `folder`: plugins/profile/…/perfetto_trace.json.gz (drop it on https://ui.perfetto.dev) and ops.txt.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._seen = 0
        self._done = False

    def before_step(self) -> None:
        if self._seen == 1 and not self._done:
            self.folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(self.folder), create_perfetto_trace=True)

    def after_step(self, last: bool) -> str | None:
        """The table, once the steps are traced; or, after the last step of a session, that there were too few."""
        self._seen += 1
        if last and self._seen == 1:
            return "--profile: nothing is traced in a session of one step, which compiles"
        tracing = self._seen > 1 and not self._done
        if not tracing or not (self._seen > STEPS or last):
            return None
        jax.profiler.stop_trace()
        self._done = True
        trace = max(self.folder.glob("plugins/profile/*/perfetto_trace.json.gz"), key=lambda p: p.stat().st_mtime)
        text = f"{ops_table(self_times(trace))}\ntrace for https://ui.perfetto.dev: {trace}\n"
        write_atomic(self.folder / "ops.txt", text)
        return text


def self_times(trace: pathlib.Path) -> dict[str, tuple[float, int]]:
    """Operation -> (seconds without what runs inside it, number of calls), from a Chrome-format trace.

    Python's frames and the runtime's loop are left out.
    """
    with gzip.open(trace) as file:
        loaded = json.load(file)
    events = loaded["traceEvents"] if isinstance(loaded, dict) else loaded
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    threads = defaultdict(list)
    for e in events:
        if e.get("ph") != "X" or e["name"].startswith(_NO_OPERATION):
            continue
        if names.get((e["pid"], e["tid"])) != "python":
            threads[e["pid"], e["tid"]].append((e["ts"], -e.get("dur", 0.0), e["name"]))
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for spans in threads.values():
        open_spans: list[tuple[float, str]] = []  # (end, name), outermost first
        for start, minus, name in sorted(spans):
            while open_spans and open_spans[-1][0] <= start:
                open_spans.pop()
            if open_spans:
                total[open_spans[-1][1]][0] += minus
            total[name][0] -= minus
            total[name][1] += 1
            open_spans.append((start - minus, name))
    return {name: (micro / 1e6, int(count)) for name, (micro, count) in total.items()}


def ops_table(times: dict[str, tuple[float, int]], top: int = 25) -> str:
    """The `top` costliest, with their share of all that was traced."""
    whole = sum(seconds for seconds, _ in times.values()) or 1.0
    lines = [f"{'operation':<56} {'calls':>8} {'seconds':>9} {'share':>6}"]
    ordered = sorted(times.items(), key=lambda item: -item[1][0])
    for name, (seconds, count) in ordered[:top]:
        lines.append(f"{name[:56]:<56} {count:>8} {seconds:>9.4f} {seconds / whole:>6.1%}")
    rest = sum(seconds for _, (seconds, _) in ordered[top:])
    if rest:
        lines.append(f"{f'{len(ordered) - top} others':<56} {'':>8} {rest:>9.4f} {rest / whole:>6.1%}")
    return "\n".join(lines)
