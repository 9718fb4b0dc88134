"""The scalars of metrics.jsonl as TensorBoard events, tags "rl/loss", "warm_start/loss", "eval/reward".

metrics.jsonl stays the record; the events are made from it. A session begins with a file of its own that holds all of
it, cut back to the checkpoint, and tells TensorBoard to forget what came before; only then are older files removed, but
for the last. So events and metrics agree after any number of kills, also in a TensorBoard that is looking on, and a run
may take up TensorBoard, or leave it, when it is resumed. Wall-clock times are those of the session that wrote the file.
(TensorBoard's own purge_step would not do: it cuts all tags at one step, and each phase counts its own.)
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

_PATTERN = "events.out.tfevents.*"
_LIVE_SECONDS = 5  # until TensorBoard sees a step


def require_tensorboard() -> Any:
    """The `tensorboardX` module. Raises ImportError, saying how to install it."""
    try:
        import tensorboardX
    except ImportError:
        raise ImportError(
            "TensorBoard events need tensorboardX, which is not installed: pip install 'lsfuse[tensorboard]'"
        ) from None
    return tensorboardX


class Events:
    """The event file of one session. Use as a context; `start` before the first `write`."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._writer: Any = None

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._writer is not None:
            self._writer.close()

    def start(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Begins with what metrics.jsonl holds; takes the place of the files of earlier sessions."""
        older = sorted(self.folder.glob(_PATTERN))
        # Names begin with the second; numbers keep two of one second apart, and in order.
        number = 1 + max((int(path.suffix[1:]) for path in older if path.suffix[1:].isdigit()), default=0)
        if older or records:
            with self._open(number, purge_step=0) as history:
                for record in records:
                    _add(history, record)
        for path in older[:-1]:  # a TensorBoard that has the last one open would not get past a file that is gone
            path.unlink()
        self._writer = self._open(number + 1)

    def write(self, record: Mapping[str, Any]) -> None:
        """One record of metrics.jsonl: every number but its step becomes an event."""
        _add(self._writer, record)

    def _open(self, number: int, purge_step: int | None = None) -> Any:
        return require_tensorboard().SummaryWriter(
            str(self.folder), purge_step=purge_step, flush_secs=_LIVE_SECONDS, filename_suffix=f".{number:06d}"
        )


def _add(writer: Any, record: Mapping[str, Any]) -> None:
    for name, value in record.items():
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
            writer.add_scalar(f"{record['phase']}/{name}", value, record["step"])
