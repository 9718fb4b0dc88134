"""Kernels of one block, multiplied where they stand in their run.

A step of decoding has few rows, so reading the parameters is what it costs. A CPU's compiler copies a block's kernels
out of their run before it multiplies, and its matrix product packs them once more; read in tiles that stay in the
cache, the same product takes between 0.4 and 0.8 of the time for up to `MAX_ROWS` rows.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from lsfuse.model.config import ModelConfig
from lsfuse.model.params import is_quantized
from lsfuse.model.transformer import block_params
from lsfuse.types import Array, Params

MAX_ROWS = 32
TILE = 1 << 16  # elements


@struct.dataclass
class KernelInRun:
    """Stands for stack[layer] [in, out] on the right of a product. stack: [L, in, out]; layer: int32 scalar."""

    stack: Array
    layer: Array

    def astype(self, dtype) -> "KernelInRun":
        """Itself: tiles are converted to the other operand's dtype as they are read."""
        del dtype
        return self

    def __rmatmul__(self, x: Array) -> Array:
        return lax.platform_dependent(x, self.stack, self.layer, cpu=_tiled, default=_plain)


def _plain(x: Array, stack: Array, layer: Array) -> Array:
    return x @ lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False).astype(x.dtype)


def _tiled(x: Array, stack: Array, layer: Array) -> Array:
    """x [..., in] times stack[layer], `tile` rows of the kernel at a time, added up in float32 or wider."""
    _, size, out = stack.shape
    rows, wide = x.reshape(-1, size), jnp.promote_types(x.dtype, jnp.float32)
    tile = min(size, max(8, TILE // out // 8 * 8))

    def part(start, count):
        corner = (jnp.asarray(layer, jnp.int32), jnp.asarray(start, jnp.int32), jnp.int32(0))
        kernel = lax.dynamic_slice(stack, corner, (1, count, out))[0].astype(x.dtype)
        return jnp.dot(lax.dynamic_slice_in_dim(rows, start, count, 1), kernel, preferred_element_type=wide)

    y = jnp.zeros((rows.shape[0], out), wide)
    y = lax.fori_loop(0, size // tile, lambda j, y: y + part(j * tile, tile), y)
    if size % tile:
        y = y + part(size - size % tile, size % tile)
    return y.astype(x.dtype).reshape(*x.shape[:-1], out)


def decode_params(
    params: Params, config: ModelConfig, run: str, layer: Array, rows: int
) -> dict[str, Array | KernelInRun]:
    """`block_params` for a step of `rows` rows: the kernels are left where they are if that is faster; quantised ones,
    and those that several devices have parts of, are not."""
    if rows > MAX_ROWS or config.shards.tokens or any(is_quantized(leaf) for leaf in params["runs"][run].values()):
        return dict(block_params(params, config, run, layer))
    return {
        name: KernelInRun(leaf, layer) if leaf.ndim == 3 else lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False)
        for name, leaf in jax.tree.map(jnp.asarray, dict(params["runs"][run])).items()
    }
