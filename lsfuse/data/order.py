"""The order in which examples are read: a pure function of (seed, position), so that a resume needs one integer."""

import functools

import numpy as np


def counter_rng(seed: int, stream: int, counter: int) -> np.random.Generator:
    """A generator that depends on its three arguments alone; streams and counters do not overlap (Philox)."""
    key = np.array([seed % 2**64, stream % 2**64], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, counter], np.uint64)))


def indices(size: int | None, seed: int, position: int, count: int) -> np.ndarray:
    """Indices of the examples at `position` … `position + count - 1`, int64 [count].

    A finite set is read in epochs, each once through in an order of its own. An endless one (size None: generated
    examples) is read as it comes.

    Raises:
        ValueError: size < 1, or a negative position or count.
    """
    if position < 0 or count < 0:
        raise ValueError(f"position and count must not be negative, got {position} and {count}")
    positions = np.arange(position, position + count, dtype=np.int64)
    if size is None:
        return positions
    if size < 1:
        raise ValueError(f"a data set needs at least one example to draw from, got size {size}")
    epochs, offsets = np.divmod(positions, size)
    return np.array([_epoch(size, seed, int(e))[o] for e, o in zip(epochs, offsets, strict=True)], np.int64)


@functools.lru_cache(maxsize=4)
def _epoch(size: int, seed: int, epoch: int) -> np.ndarray:
    """An epoch's order, kept because a pipeline asks for one position at a time."""
    return counter_rng(seed, epoch, 0).permutation(size)
