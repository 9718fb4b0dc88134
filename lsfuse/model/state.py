"""The prefix state: append-only K/V of every attention block, for the tokens that a group's branches share."""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from lsfuse.kernels.layout import row_major
from lsfuse.model.config import ModelConfig
from lsfuse.types import Array


@struct.dataclass
class PrefixState:
    """K/V by run (runs without attention have no entry), each [L, K, P, H] for the run's L blocks.

    Blocks with sliding attention keep the whole prefix, too: the last window would do for the tails, but the prefix's
    backward recomputes every chunk against the keys before it.

    Also used for the cotangents of a state.
    """

    k: dict[str, Array]
    v: dict[str, Array]

    @property
    def size(self) -> int:
        """Token positions there is room for."""
        return next(iter(self.k.values())).shape[2] if self.k else 0


def init_state(config: ModelConfig, size: int, dtype) -> PrefixState:
    """Zeros for `size` token positions."""
    shapes = {
        str(r): (n, block.num_kv_heads, size, config.head_dim)
        for r, (block, n) in enumerate(config.runs)
        if block.has_attention
    }
    return PrefixState(
        {r: jnp.zeros(shape, dtype) for r, shape in shapes.items()},
        {r: jnp.zeros(shape, dtype) for r, shape in shapes.items()},
    )


def _corner(layer: Array | int, position: Array) -> tuple[Array, ...]:
    """Index of (layer, position) in a buffer [layers, K, size, H]; one integer type, whatever types lengths come in."""
    return tuple(jnp.asarray(i, jnp.int32) for i in (layer, 0, position, 0))


def write_state(state: PrefixState, run: str, first: int, k: Array, v: Array, at: Array) -> PrefixState:
    """Puts keys and values [layers, K, C, H] of blocks `first` … of a run at token position `at`."""

    def put(buffer, new):
        return lax.dynamic_update_slice(buffer, row_major(new.astype(buffer.dtype)), _corner(first, at))

    return PrefixState({**state.k, run: put(state.k[run], k)}, {**state.v, run: put(state.v[run], v)})


def read_state(state: PrefixState, run: str, layer: Array | int, at: Array, count: int) -> tuple[Array, Array]:
    """Keys and values [K, 1, count, H] of one block from token position `at`."""

    def get(buffer):
        block = lax.dynamic_slice(buffer, _corner(layer, at), (1, buffer.shape[1], count, buffer.shape[3]))
        return row_major(block).swapaxes(0, 1)

    return get(state.k[run]), get(state.v[run])


def read_positions(state: PrefixState, at: Array, count: int) -> PrefixState:
    """Keys and values of all blocks at `count` token positions from `at`."""
    return jax.tree.map(lambda buffer: row_major(lax.dynamic_slice_in_dim(buffer, at, count, 2)), state)
