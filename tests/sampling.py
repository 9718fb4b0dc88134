"""Distributions in numpy float64, for the tests of the sampler."""

import numpy as np


def chi_square(tokens, probabilities) -> float:
    """Pearson's statistic, as a number of standard deviations above its mean (of cells expected 5 times or more)."""
    expected = probabilities * tokens.size
    observed = np.bincount(tokens, minlength=expected.size)
    assert not observed[probabilities == 0].any()
    cells = expected >= 5
    freedom = cells.sum() - 1
    return (((observed - expected) ** 2 / np.where(cells, expected, 1))[cells].sum() - freedom) / np.sqrt(2 * freedom)


def tempered(logits, temperature):
    z = np.asarray(logits, np.float64) / temperature
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def smallest_set(p, top_p):
    """By sorting: bool [V], the likeliest tokens until their mass reaches top_p."""
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    kept = np.zeros(p.size, bool)
    kept[order[before < top_p]] = True
    return kept
