"""What a person sees while a run goes on: one bar a phase, one line an evaluation."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import tqdm


class _Bar:
    def __init__(self, bar: Any):
        self._bar = bar

    def update(self, metrics: Mapping[str, float]) -> None:
        names = {"loss": "loss", "reward": "reward", "time/tokens_per_s": "tokens/s"}
        shown = {label: f"{metrics[name]:.4g}" for name, label in names.items() if name in metrics}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()


class Progress:
    """Bars on a terminal only (nothing to a file or pipe); lines always. Silent if not `enabled`."""

    def __init__(self, enabled: bool = True):
        self._enabled = enabled

    @contextlib.contextmanager
    def phase(self, name: str, done: int, steps: int) -> Iterator[_Bar]:
        disable = None if self._enabled else True  # None: wherever stderr is not a terminal
        with tqdm.tqdm(total=steps, initial=done, desc=name, disable=disable, unit="step", dynamic_ncols=True) as bar:
            yield _Bar(bar)

    def line(self, text: str) -> None:
        if self._enabled:
            tqdm.tqdm.write(text)
