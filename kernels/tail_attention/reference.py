"""Blocked attention of tails over a shared prefix and their own keys, forward and backward, in plain XLA.

Only tiles of at most TILE keys × ROWS rows of scores exist at a time. The prefix is never repeated per branch: all
branches' rows and all query heads of a kv head form one tall tile, so each prefix tile is read once per group. Loop
bounds are dynamic (lengths are data); keys outside the valid range are masked, and their K/V zeroed, so that whatever
fills the padding changes nothing.

Score tiles are [rows, keys] forward and [keys, rows] backward: with these layouts no product contracts the leading
dimension of its left operand, which is slow on CPUs, except two whose small operand is transposed first.
"""

import jax
import jax.numpy as jnp
from jax import lax

from lsfuse.types import Array

TILE = 512  # keys of a prefix tile
ROWS = 2048  # rows (queries × heads of a kv head) of a prefix tile
OWN_TILE = 256  # queries and keys of a tile of the own, causal part


def _transposed(x: Array) -> Array:
    """Swaps the last two axes, on CPU really and not folded into the product that follows."""
    return lax.platform_dependent(x, cpu=lambda x: lax.optimization_barrier(x.mT), default=lambda x: x.mT)


def merge(o1: Array, lse1: Array, o2: Array, lse2: Array) -> tuple[Array, Array]:
    """Attention over the union of two disjoint key sets, from normalised outputs [..., H] and log-sum-exps [...]."""
    top = jnp.maximum(lse1, lse2)
    safe = jnp.where(jnp.isneginf(top), 0.0, top)
    w1, w2 = jnp.exp(lse1 - safe), jnp.exp(lse2 - safe)
    total = w1 + w2
    norm = jnp.where(total == 0, 1.0, total)
    o = (o1 * (w1 / norm)[..., None]) + (o2 * (w2 / norm)[..., None])
    return o, jnp.where(total == 0, -jnp.inf, safe + jnp.log(norm))


def _normalise(acc: Array, top: Array, total: Array) -> tuple[Array, Array]:
    norm = jnp.where(total == 0, 1.0, total)
    return acc / norm[..., None], jnp.where(total == 0, -jnp.inf, top + jnp.log(norm))


def _online(carry, scores, mask, values, product):
    """One step of the online softmax: `scores` [..., rows, keys] join (acc [..., rows, H], max, sum)."""
    acc, top, total = carry
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    new = jnp.maximum(top, scores.max(-1))
    safe = jnp.where(jnp.isneginf(new), 0.0, new)
    p = jnp.exp(scores - safe[..., None])
    scale = jnp.exp(top - safe)
    return acc * scale[..., None] + product(p, values), new, total * scale + p.sum(-1)


# --- the prefix: no causal structure, so rows of all branches are alike ---------------------------------------------


def _row_tiles(x_BTNH: Array, num_kv_heads: int) -> Array:
    """[B, T, N, ...] → [tiles, K, rows, ...]: rows of all branches and all query heads of a kv head together."""
    b, t, n = x_BTNH.shape[:3]
    rest = x_BTNH.shape[3:]
    g = n // num_kv_heads
    x = jnp.moveaxis(x_BTNH.reshape(b * t, num_kv_heads, g, *rest), 1, 0).reshape(num_kv_heads, b * t * g, *rest)
    tiles = -(-x.shape[1] // ROWS)
    rows = -(-x.shape[1] // tiles)
    x = jnp.pad(x, [(0, 0), (0, tiles * rows - x.shape[1])] + [(0, 0)] * len(rest))
    return jnp.moveaxis(x.reshape(num_kv_heads, tiles, rows, *rest), 1, 0)


def _from_row_tiles(x: Array, shape: tuple[int, ...], num_kv_heads: int) -> Array:
    """Inverse of `_row_tiles`, to `shape` [B, T, N, ...]."""
    b, t, n = shape[:3]
    rest = shape[3:]
    g = n // num_kv_heads
    x = jnp.moveaxis(x, 0, 1).reshape(num_kv_heads, -1, *rest)[:, : b * t * g]
    return jnp.moveaxis(x.reshape(num_kv_heads, b * t, g, *rest), 0, 1).reshape(shape)


def _corner(layer, position) -> tuple[Array, ...]:
    """Index of (layer, position) in a buffer [L, K, P, H]; one integer type, whatever types lengths come in."""
    return tuple(jnp.asarray(i, jnp.int32) for i in (layer, 0, position, 0))


def _prefix_tile(k: Array, v: Array, layer, start, j, tile: int, lo, hi):
    """Keys and values [K, tile, H] of tile j of [lo, hi), zero outside, and their mask [tile]. `start`: clamped."""
    kt = lax.dynamic_slice(k, _corner(layer, start), (1, k.shape[1], tile, k.shape[3]))[0]
    vt = lax.dynamic_slice(v, _corner(layer, start), (1, v.shape[1], tile, v.shape[3]))[0]
    keys = start + jnp.arange(tile)
    mask = (keys >= lo + j * tile) & (keys < hi)
    return jnp.where(mask[:, None], kt, 0), jnp.where(mask[:, None], vt, 0), mask


def prefix_forward(q: Array, k: Array, v: Array, layer, length) -> tuple[Array, Array]:
    """Scaled queries [B, T, N, H] over keys 0 … length - 1 of `layer` in k, v [L, K, P, H]."""
    kv_heads, size = k.shape[1], k.shape[2]
    tile = min(TILE, size)

    def row_tile(_, qt):
        def step(j, carry):
            start = jnp.minimum(j * tile, size - tile)
            kt, vt, mask = _prefix_tile(k, v, layer, start, j, tile, 0, length)
            scores = jnp.einsum("krh,ksh->krs", qt, kt, preferred_element_type=_accumulator(qt))
            return _online(carry, scores, mask, vt, lambda p, v: _product("krs,ksh->krh", p, v))

        acc = _accumulator(qt)
        init = (jnp.zeros(qt.shape, acc), jnp.full(qt.shape[:2], -jnp.inf, acc), jnp.zeros(qt.shape[:2], acc))
        return None, _normalise(*lax.fori_loop(0, _tiles(length, tile), step, init))

    tiles = _row_tiles(q, kv_heads)
    if tiles.shape[0] == 1:
        o, lse = jax.tree.map(lambda x: x[None], row_tile(None, tiles[0])[1])
    else:
        _, (o, lse) = lax.scan(row_tile, None, tiles)
    return _from_row_tiles(o, q.shape, kv_heads), _from_row_tiles(lse, q.shape[:3], kv_heads)


def prefix_backward(q, k, v, layer, lo, hi, do, lse, delta, dk=None, dv=None):
    """Cotangents of `prefix_forward` over keys lo … hi - 1.

    dk, dv: None if these keys are constants; else buffers [L, K, S, H] into which the cotangents of keys lo … are
    added in place, at index 0 … . Returns (dq of the scaled queries, dk, dv).
    """
    kv_heads, size = k.shape[1], k.shape[2]
    room = size if dk is None else dk.shape[2]
    tile = min(TILE, room)

    def row_tile(carry, xs):
        qt, dot, lset, deltat = xs

        def step(j, carry):
            dq, dk, dv = carry
            if dk is None:
                start = jnp.minimum(lo + j * tile, size - tile)
            else:
                at = jnp.minimum(j * tile, room - tile)
                start = lo + at
            kt, vt, mask = _prefix_tile(k, v, layer, start, j, tile, lo, hi)
            p, ds = _scores_backward("ksh,krh->ksr", kt, vt, qt, dot, lset, deltat, mask[:, None])
            dq = dq + _product("khs,ksr->khr", _transposed(kt), ds)
            if dk is not None:
                dk = _add_tile(dk, _product("ksr,krh->ksh", ds, qt), layer, at)
                dv = _add_tile(dv, _product("ksr,krh->ksh", p, dot), layer, at)
            return dq, dk, dv

        zero = jnp.zeros((kv_heads, qt.shape[2], qt.shape[1]), _accumulator(qt))
        dq, dk, dv = lax.fori_loop(0, _tiles(hi - lo, tile), step, (zero, *carry))
        return (dk, dv), dq.mT

    tiles = tuple(_row_tiles(x, kv_heads) for x in (q, do, lse, delta))
    if tiles[0].shape[0] == 1:
        (dk, dv), dq = row_tile((dk, dv), tuple(x[0] for x in tiles))
        dq = dq[None]
    else:
        (dk, dv), dq = lax.scan(row_tile, (dk, dv), tiles)
    return _from_row_tiles(dq, q.shape, kv_heads), dk, dv


def _add_tile(buffer: Array, tile: Array, layer, at) -> Array:
    old = lax.dynamic_slice(buffer, _corner(layer, at), (1, *tile.shape))
    return lax.dynamic_update_slice(buffer, old + tile[None].astype(buffer.dtype), _corner(layer, at))


# --- the own part: causal with an offset, each branch against itself ------------------------------------------------


def _own_layout(x_BTNH: Array, kv_heads: int, tile: int) -> Array:
    """[B, T, N, ...] → [tiles, B, K, rows, ...], rows being (query of the tile, head of the kv head)."""
    b, t, n = x_BTNH.shape[:3]
    rest = x_BTNH.shape[3:]
    tiles = -(-t // tile)
    x = jnp.pad(x_BTNH, [(0, 0), (0, tiles * tile - t)] + [(0, 0)] * (1 + len(rest)))
    x = x.reshape(b, tiles, tile, kv_heads, n // kv_heads, *rest)
    return jnp.moveaxis(x, (1, 3), (0, 2)).reshape(tiles, b, kv_heads, tile * (n // kv_heads), *rest)


def _from_own_layout(x: Array, shape: tuple[int, ...], kv_heads: int, tile: int) -> Array:
    b, t, n = shape[:3]
    rest = shape[3:]
    x = x.reshape(x.shape[0], b, kv_heads, tile, n // kv_heads, *rest)
    return jnp.moveaxis(x, (0, 2), (1, 3)).reshape(b, -1, n, *rest)[:, :t]


def _own_tiles(t: int, s: int) -> tuple[int, int]:
    return min(t, OWN_TILE), min(s, OWN_TILE)


def _own_bounds(i, q_tile: int, k_tile: int, lengths, offset):
    """How many key tiles query tile i needs."""
    visible = jnp.minimum((i + 1) * q_tile + offset, lengths.max())
    return _tiles(visible, k_tile)


def _own_tile(k, v, i, j, q_tile, k_tile, group, lengths, offset):
    """Key tile j with zeroed padding, its start, and the mask [B, 1, rows, keys] against query tile i."""
    start = jnp.minimum(j * k_tile, k.shape[2] - k_tile)
    keys = start + jnp.arange(k_tile)
    valid = (keys >= j * k_tile) & (keys < lengths[:, None])
    queries = i * q_tile + jnp.arange(q_tile * group) // group
    mask = (keys <= queries[:, None] + offset) & valid[:, None, :]
    kt, vt = (lax.dynamic_slice_in_dim(x, start, k_tile, 2) for x in (k, v))
    kt, vt = (jnp.where(valid[:, None, :, None], x, 0) for x in (kt, vt))
    return kt, vt, start, mask[:, None]


def own_forward(q: Array, k: Array, v: Array, lengths: Array, offset) -> tuple[Array, Array]:
    """Scaled queries [B, T, N, H] over each branch's own keys [B, K, S, H]: query t sees keys j ≤ t + offset."""
    kv_heads, group = k.shape[1], q.shape[2] // k.shape[1]
    q_tile, k_tile = _own_tiles(q.shape[1], k.shape[2])
    acc = _accumulator(q)

    def query_tile(i, qt):
        def step(j, carry):
            kt, vt, _, mask = _own_tile(k, v, i, j, q_tile, k_tile, group, lengths, offset)
            scores = jnp.einsum("bkrh,bksh->bkrs", qt, kt, preferred_element_type=acc)
            return _online(carry, scores, mask, vt, lambda p, v: _product("bkrs,bksh->bkrh", p, v))

        init = (jnp.zeros(qt.shape, acc), jnp.full(qt.shape[:3], -jnp.inf, acc), jnp.zeros(qt.shape[:3], acc))
        if k.shape[2] == k_tile:
            return _normalise(*step(0, init))
        return _normalise(*lax.fori_loop(0, _own_bounds(i, q_tile, k_tile, lengths, offset), step, init))

    tiles = _own_layout(q, kv_heads, q_tile)
    if tiles.shape[0] == 1:
        o, lse = jax.tree.map(lambda x: x[None], query_tile(0, tiles[0]))
    else:
        _, (o, lse) = lax.scan(lambda i, qt: (i + 1, query_tile(i, qt)), 0, tiles)
    return _from_own_layout(o, q.shape, kv_heads, q_tile), _from_own_layout(lse, q.shape[:3], kv_heads, q_tile)


def own_backward(q, k, v, lengths, offset, do, lse, delta) -> tuple[Array, Array, Array]:
    """Cotangents (dq of the scaled queries, dk, dv) of `own_forward`."""
    kv_heads, group = k.shape[1], q.shape[2] // k.shape[1]
    q_tile, k_tile = _own_tiles(q.shape[1], k.shape[2])
    acc = _accumulator(q)

    def query_tile(carry, xs):
        i, dk, dv = carry
        qt, dot, lset, deltat = xs

        def step(j, carry):
            dq, dk, dv = carry
            kt, vt, start, mask = _own_tile(k, v, i, j, q_tile, k_tile, group, lengths, offset)
            p, ds = _scores_backward("bksh,bkrh->bksr", kt, vt, qt, dot, lset, deltat, mask.mT)
            dq = dq + _product("bkhs,bksr->bkhr", _transposed(kt), ds)
            dk, dv = (
                lax.dynamic_update_slice_in_dim(
                    buffer,
                    lax.dynamic_slice_in_dim(buffer, start, k_tile, 2) + _product("bksr,bkrh->bksh", x, y),
                    start,
                    2,
                )
                for buffer, x, y in ((dk, ds, qt), (dv, p, dot))
            )
            return dq, dk, dv

        init = (jnp.zeros((*qt.shape[:2], qt.shape[3], qt.shape[2]), acc), dk, dv)
        if k.shape[2] == k_tile:
            dq, dk, dv = step(0, init)
        else:
            dq, dk, dv = lax.fori_loop(0, _own_bounds(i, q_tile, k_tile, lengths, offset), step, init)
        return (i + 1, dk, dv), dq.mT

    tiles = tuple(_own_layout(x, kv_heads, q_tile) for x in (q, do, lse, delta))
    init = (jnp.int32(0), jnp.zeros(k.shape, acc), jnp.zeros(v.shape, acc))
    if tiles[0].shape[0] == 1:
        (_, dk, dv), dq = query_tile(init, tuple(x[0] for x in tiles))
        dq = dq[None]
    else:
        (_, dk, dv), dq = lax.scan(query_tile, init, tiles)
    return _from_own_layout(dq, q.shape, kv_heads, q_tile), dk, dv


# --- shared ---------------------------------------------------------------------------------------------------------


def _accumulator(x: Array):
    return jnp.promote_types(x.dtype, jnp.float32)


def _tiles(length, tile: int):
    return (jnp.maximum(length, 0) + tile - 1) // tile


def _product(spec: str, a: Array, b: Array) -> Array:
    """einsum with operands in the narrower of the two dtypes, accumulated in float32 or wider."""
    dtype = b.dtype if b.dtype.itemsize < a.dtype.itemsize else a.dtype
    return jnp.einsum(spec, a.astype(dtype), b.astype(dtype), preferred_element_type=_accumulator(a))


def _scores_backward(spec: str, k, v, q, do, lse, delta, mask):
    """Probabilities and cotangents of the scores, both [..., keys, rows]."""
    p = jnp.exp(jnp.einsum(spec, k, q, preferred_element_type=_accumulator(q)) - lse[..., None, :])
    p = jnp.where(mask, p, 0.0)
    dp = jnp.einsum(spec, v, do.astype(v.dtype), preferred_element_type=_accumulator(q))
    return p, p * (dp - delta[..., None, :])
