"""The residual stream from block to block, where blocks may stand beside each other.

A block that stands beside the one before it reads what that one read, and its contribution is added to the other's
output. So the stream is a pair: where it has come to, and what the last block read. A model without such blocks carries
no second array, and compiles to what it would be if there were none.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import struct

from lsfuse.model.config import ModelConfig
from lsfuse.types import Array

Beside = Array | bool | None


@struct.dataclass
class Stream:
    """x: [B, T, D] after the blocks so far. read: what the last of them read; None in a model that has no block beside
    another. Also used for their cotangents."""

    x: Array
    read: Array | None = None


def start_stream(config: ModelConfig, x: Array) -> Stream:
    return Stream(x, x if config.has_beside else None)


def stands_beside(config: ModelConfig, run: int, layer: Array | int) -> Beside:
    """Whether block `layer` of a run stands beside the one before it: data where the run's blocks differ in this, None
    in a model that has no such block."""
    if not config.has_beside:
        return None
    flags = [block.beside for block in config.members(run)]
    return flags[0] if len(set(flags)) == 1 else jnp.asarray(flags)[layer]


def block_input(stream: Stream, beside: Beside) -> Array:
    """What the next block reads."""
    return stream.x if stream.read is None else _choose(beside, stream.read, stream.x)


def through_block(
    config: ModelConfig, run: int, layer: Array | int, stream: Stream, block: Callable[[Array], tuple[Array, Any]]
) -> tuple[Stream, Any]:
    """The stream after block `layer` of a run, and what else `block` returns; block: input -> (output, more)."""
    beside = stands_beside(config, run, layer)
    x = block_input(stream, beside)
    y, more = block(x)
    if stream.read is None:
        return Stream(y), more
    return Stream(_choose(beside, stream.x + (y - x), y), x), more


def block_input_backward(d: Stream, beside: Beside, dinput: Array) -> Stream:
    """Cotangents before a block from those after it, `d`, and `dinput`, that of its input by way of its output."""
    if d.read is None:
        return Stream(dinput)
    joined = d.read + dinput - d.x  # the block's output less its input was added
    alone = d.read + dinput
    return Stream(_choose(beside, d.x, alone), _choose(beside, joined, jnp.zeros_like(joined)))


def end_backward(config: ModelConfig, dx: Array, upto: int | None) -> Stream:
    """Cotangents after block `upto` - 1 of what block `upto` reads (None, or beyond the last: of the stream itself)."""
    if not config.has_beside:
        return Stream(dx)
    zero = jnp.zeros_like(dx)
    return Stream(zero, dx) if _next_beside(config, upto) else Stream(dx, zero)


def end_stream(config: ModelConfig, stream: Stream, upto: int | None) -> Array:
    """What block `upto` reads, from the stream before it; the stream itself after the last."""
    return block_input(stream, _next_beside(config, upto))


def _next_beside(config: ModelConfig, upto: int | None) -> bool:
    return upto is not None and upto < config.num_blocks and config.blocks[upto].beside


def _choose(beside: Beside, joined: Array, alone: Array) -> Array:
    if isinstance(beside, bool):
        return joined if beside else alone
    return jnp.where(jnp.asarray(beside), joined, alone)
