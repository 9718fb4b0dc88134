"""Rotary position embedding (RoFormer, arXiv 2104.09864), half-split pairs as in Hugging Face's Llama."""

import math

import jax.numpy as jnp
import numpy as np

from lsfuse.model.config import ModelConfig
from lsfuse.types import Array

_BASE, _DIGITS = 256, 3  # positions up to 256³ = 16.8 million


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """float64 [H / 2], radians per position, `rope_scaling` applied."""
    inv = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return inv
    if scaling.kind == "linear":
        return inv / scaling.factor
    # llama3: wavelengths beyond original / low are stretched by `factor`, those below original / high kept.
    turns = scaling.original_max_position * inv / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * inv + (1 - keep) * inv / scaling.factor


def rope_tables(config: ModelConfig, positions: Array, dtype) -> tuple[Array, Array]:
    """(cos, sin) of shape positions.shape + [H / 2] in `dtype` (float32 or float64).

    In float32 the angle itself is never formed: position × frequency near 2 million is off by more than 0.1 radian.
    The position is split into digits of base 256 whose rotations come from tables computed in float64, and the
    rotations are multiplied, which is exact to a few float32 roundings up to position 2^24.
    """
    inv = inverse_frequencies(config)
    if jnp.dtype(dtype) == jnp.float64:
        angles = positions[..., None].astype(jnp.float64) * inv
        return jnp.cos(angles), jnp.sin(angles)

    def digit(i: int) -> tuple[Array, Array]:
        table = (np.arange(_BASE, dtype=np.float64) * _BASE**i)[:, None] * inv
        index = (positions // _BASE**i) % _BASE
        return jnp.asarray(np.cos(table), jnp.float32)[index], jnp.asarray(np.sin(table), jnp.float32)[index]

    cos, sin = digit(0)
    for i in range(1, _DIGITS):
        c, s = digit(i)
        cos, sin = cos * c - sin * s, sin * c + cos * s
    return cos, sin


def rotate(x: Array, rope: tuple[Array, Array]) -> Array:
    """x [..., T, heads, H] by tables [T, H / 2]."""
    cos, sin = (table[:, None, :] for table in rope)
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
