"""Token windows that models are analysed and compared on."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Texts:
    """Token sequences, right-padded. ids: int32 [N, T]; lengths: int32 [N], at least 1."""

    ids: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def batches(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids [size, T], lengths [size]) of equal shapes; the last is filled up with texts of length 0."""
        for start in range(0, len(self), size):
            ids, lengths = self.ids[start : start + size], self.lengths[start : start + size]
            lack = size - len(ids)
            yield np.pad(ids, ((0, lack), (0, 0))), np.pad(lengths, (0, lack))


def from_lists(sequences: Sequence[Sequence[int]]) -> Texts:
    """Raises ValueError for no texts, or an empty one."""
    lengths = np.array([len(s) for s in sequences], np.int32)
    if not len(lengths) or lengths.min() < 1:
        raise ValueError(f"texts need at least one token each, got lengths {lengths.tolist()}")
    ids = np.zeros((len(lengths), lengths.max()), np.int32)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    return Texts(ids, lengths)


def windows(text: str, tokenizer: Any, window: int, count: int | None = None) -> Texts:
    """The text's tokens, cut into windows of equal length that do not overlap; what is left over is dropped.

    count: the first so many, None all. Raises: ValueError if the text is shorter than the windows asked for.
    """
    ids = np.array(tokenizer.encode(text), np.int32)
    number = len(ids) // window if count is None else count
    if window < 2 or number < 1 or len(ids) < window * number:
        number = max(number, 1)
        raise ValueError(
            f"the text has {len(ids)} tokens; {number} windows of {window} (at least 2) need {window * number}"
        )
    return Texts(ids[: window * number].reshape(number, window), np.full(number, window, np.int32))
