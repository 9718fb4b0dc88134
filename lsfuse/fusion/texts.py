"""Token windows that models are analysed and compared on."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lsfuse.checks import check_arrays
from lsfuse.model.config import ModelConfig
from lsfuse.model.params import check_params
from lsfuse.types import Params


@dataclasses.dataclass(frozen=True)
class Texts:
    """Token sequences, right-padded. ids: int32 [N, T]; lengths: int32 [N], at least 1. Raises ValueError otherwise."""

    ids: np.ndarray
    lengths: np.ndarray

    def __post_init__(self):
        check_arrays("Texts", {"ids": (self.ids, "N T", int), "lengths": (self.lengths, "N", int)})

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


def check_texts(where: str, texts: Texts, config: ModelConfig, params: Params, batch_size: int = 1) -> None:
    """Raises ValueError for ids that the model does not have, parameters that are not its own, or a batch size that is
    no whole number of at least 1."""
    check_params(config, params)
    if not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise ValueError(f"{where}: batch_size must be a whole number of texts, at least 1, got {batch_size!r}")
    valid = np.arange(texts.ids.shape[1]) < np.asarray(texts.lengths)[:, None]
    bad = np.argwhere(valid & ((texts.ids < 0) | (texts.ids >= config.vocab_size)))
    if bad.size:
        n, t = (int(i) for i in bad[0])
        raise ValueError(
            f"{where}: text {n} has id {texts.ids[n, t]} at position {t}, but the model's vocabulary has ids 0 to"
            f" {config.vocab_size - 1}; do tokenizer and model belong together?"
        )


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
