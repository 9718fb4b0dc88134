"""Rotary position embedding (RoFormer, arXiv 2104.09864), half-split pairs as in Hugging Face's Llama."""

import math

import jax.numpy as jnp
import numpy as np

from lsfuse.model.config import ModelConfig, RopeScaling
from lsfuse.types import Array

_BASE, _DIGITS = 256, 3  # positions up to 256³ = 16.8 million


def inverse_frequencies(config: ModelConfig, local: bool = False) -> np.ndarray:
    """float64 [H / 2], radians per position, scaling applied; of `local_rope_theta` if `local`."""
    theta, scaling = _rope(config, local)
    inv = theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    if scaling is None:
        return inv
    if scaling.kind == "linear":
        return inv / scaling.factor
    if scaling.kind == "yarn":
        keep = _yarn_keep(scaling, theta, config.head_dim)
    else:
        # llama3: wavelengths beyond original / low are stretched by `factor`, those below original / high kept.
        turns = scaling.original_max_position * inv / (2 * math.pi)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
    return keep * inv + (1 - keep) * inv / scaling.factor


def amplitude(config: ModelConfig, local: bool = False) -> float:
    """What rotation multiplies queries and keys by: 1 but for yarn (arXiv 2309.00071, equation 22)."""
    scaling = _rope(config, local)[1]
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 1.0 + 0.1 * math.log(max(scaling.factor, 1.0))


def _rope(config: ModelConfig, local: bool) -> tuple[float, RopeScaling | None]:
    if not local:
        return config.rope_theta, config.rope_scaling
    assert config.local_rope_theta is not None
    return config.local_rope_theta, config.local_rope_scaling


def _yarn_keep(scaling: RopeScaling, theta: float, head_dim: int) -> np.ndarray:
    """Share [H / 2] of the unscaled frequency: falls from one to zero between two rotary pairs (arXiv 2309.00071, 3.2;
    the borders, and what happens at the ends, as in transformers)."""

    def pair(turns: float) -> float:
        return head_dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float64) - low) / ((high - low) or 0.001)
    return 1.0 - np.clip(ramp, 0.0, 1.0)


def rope_tables(config: ModelConfig, positions: Array, dtype) -> tuple[Array, Array]:
    """(cos, sin) of shape positions.shape + [H / 2] in `dtype` (float32 or float64), times `amplitude`.

    A model with a second, local base gets both: [2, ...], the local one last.
    """
    tables = [_tables(inverse_frequencies(config), amplitude(config), positions, dtype)]
    if config.local_rope_theta is None:
        return tables[0]
    tables.append(_tables(inverse_frequencies(config, True), amplitude(config, True), positions, dtype))
    cos, sin = (jnp.stack(pair) for pair in zip(*tables, strict=True))
    return cos, sin


def _tables(inv: np.ndarray, scale: float, positions: Array, dtype) -> tuple[Array, Array]:
    """In float32 the angle itself is never formed: position × frequency near 2 million is off by more than 0.1 radian.
    The position is split into digits of base 256 whose rotations come from tables computed in float64, and the
    rotations are multiplied, which is exact to a few float32 roundings up to position 2^24.
    """
    if jnp.dtype(dtype) == jnp.float64:
        angles = positions[..., None].astype(jnp.float64) * inv
        return scale * jnp.cos(angles), scale * jnp.sin(angles)

    def digit(i: int, scale: float = 1.0) -> tuple[Array, Array]:
        table = (np.arange(_BASE, dtype=np.float64) * _BASE**i)[:, None] * inv
        index = (positions // _BASE**i) % _BASE
        cos, sin = (jnp.asarray(scale * f(table), jnp.float32)[index] for f in (np.cos, np.sin))
        return cos, sin

    cos, sin = digit(0, scale)
    for i in range(1, _DIGITS):
        c, s = digit(i)
        cos, sin = cos * c - sin * s, sin * c + cos * s
    return cos, sin


def rotate(x: Array, rope: tuple[Array, Array]) -> Array:
    """x [..., T, heads, H] by tables [T, H / 2]."""
    cos, sin = (table[:, None, :] for table in rope)
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
