"""A tokenizer whose words are its vocabulary: for generated tasks, which need no text."""

from collections.abc import Sequence

import numpy as np


class SymbolTokenizer:
    """Ids of space-separated symbols. Symbol i of `symbols` is id i; `hidden` symbols are left out by `decode`."""

    def __init__(self, symbols: Sequence[str], pad: str, stop: str, hidden: Sequence[str] = ()):
        self.symbols = tuple(symbols)
        self._ids = {symbol: i for i, symbol in enumerate(self.symbols)}
        if len(self._ids) != len(self.symbols) or any(s.split() != [s] for s in self.symbols):
            raise ValueError("symbols must be distinct, not empty and without white space")
        self.pad_id = self._ids[pad]
        self.stop_ids = (self._ids[stop],)
        self._hidden = {self._ids[s] for s in hidden}

    @property
    def vocab_size(self) -> int:
        return len(self.symbols)

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[symbol] for symbol in text.split()]
        except KeyError as error:
            raise ValueError(f"symbol {error} is not one of the {self.vocab_size} of this tokenizer") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Ids beyond the symbols, which a model of a padded vocabulary may draw, are written as "<27>"."""
        ids = [int(i) for i in np.asarray(ids).ravel()]
        return " ".join(
            self.symbols[i] if 0 <= i < self.vocab_size else f"<{i}>" for i in ids if i not in self._hidden
        )
