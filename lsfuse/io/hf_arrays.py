"""What import and export do to a piece of a tensor on the host."""

import numpy as np


def cast(piece: np.ndarray, dtype: np.dtype, what: str) -> np.ndarray:
    """`piece` in `dtype`, rounded to nearest even; itself if it has that dtype. `what` names it in the error.

    Raises ValueError if a finite value lies beyond float16's range.
    """
    if piece.dtype == dtype:
        return piece
    with np.errstate(over="ignore"):
        result = piece.astype(dtype)
    if dtype == np.float16 and np.any(np.isinf(result) & ~np.isinf(piece.astype(np.float64))):
        raise ValueError(f"{what} has values beyond float16's range (65504); use bfloat16 or float32")
    return result


def transpose(matrix: np.ndarray) -> np.ndarray:
    """Contiguous transpose, by blocks that fit a cache and as plain integers, which numpy copies fastest."""
    source = matrix.view(np.dtype(f"u{matrix.dtype.itemsize}"))
    out = np.empty(source.shape[::-1], source.dtype)
    for r in range(0, source.shape[0], 64):
        out[:, r : r + 64] = source[r : r + 64].T
    return out.view(matrix.dtype)
