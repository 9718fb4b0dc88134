"""Blocked attention of tails over a shared prefix and their own keys, forward and backward, in plain XLA.

Only tiles of at most TILE keys × ROWS rows of scores exist at a time. Arrays are head-major, [K, B, T, g, H] with g
query heads per kv head, so that the rows of all branches and of a kv head's query heads form one tall tile without
being moved: each prefix tile is read once per group and never repeated per branch. Loop bounds are dynamic (lengths
are data); keys outside the valid range are masked, and their K/V zeroed, so that whatever fills the padding changes
nothing. A window raises the lower bounds: tiles that no query sees any more are not read.

Score tiles are [rows, keys] forward and [keys, rows] backward: with these layouts no product contracts the leading
dimension of its left operand, which is slow on CPUs, except two whose small operand is transposed first.
"""

import jax
import jax.numpy as jnp
from jax import lax

from lsfuse.kernels.layout import row_major
from lsfuse.types import Array

TILE = 512  # keys of a prefix tile
ROWS = 2048  # rows (queries × heads of a kv head) of a prefix tile
OWN_TILE = 256  # queries and keys of a tile of the own, causal part, at most


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


def _online(carry, scores, values):
    """One step of the online softmax: `scores` [..., rows, keys] join (acc [..., rows, H], max, sum)."""
    acc, top, total = carry
    new = jnp.maximum(top, scores.max(-1))
    safe = jnp.where(jnp.isneginf(new), 0.0, new)
    p = jnp.exp(scores - safe[..., None])
    scale = jnp.exp(top - safe)
    return acc * scale[..., None] + _product("...rs,...sh->...rh", p, values), new, total * scale + p.sum(-1)


def _online_start(q: Array):
    acc = _accumulator(q)
    return jnp.zeros(q.shape, acc), jnp.full(q.shape[:-1], -jnp.inf, acc), jnp.zeros(q.shape[:-1], acc)


# --- the prefix: no causal structure, so rows of all branches are alike ---------------------------------------------


def _row_tiles(x: Array, rest: int, fill: int = 0) -> tuple[Array, int]:
    """[K, B, T, g, ...] with `rest` trailing axes → [tiles, K, rows, ...], padded with `fill`, and the rows before."""
    kv_heads, count, tail = x.shape[0], x.shape[1] * x.shape[2] * x.shape[3], x.shape[x.ndim - rest :]
    x = x.reshape(kv_heads, count, *tail)
    tiles = -(-count // ROWS)
    if tiles == 1:
        return x[None], count
    rows = -(-count // tiles)
    x = jnp.pad(x, [(0, 0), (0, tiles * rows - count)] + [(0, 0)] * rest, constant_values=fill)
    return jnp.moveaxis(x.reshape(kv_heads, tiles, rows, *tail), 1, 0), count


def _from_row_tiles(x: Array, shape: tuple[int, ...]) -> Array:
    """Inverse of `_row_tiles`, to `shape` [K, B, T, g, ...]."""
    if x.shape[0] == 1:
        return x.reshape(shape)
    count = shape[1] * shape[2] * shape[3]
    return jnp.moveaxis(x, 0, 1).reshape(shape[0], -1, *x.shape[3:])[:, :count].reshape(shape)


def _over_tiles(step, carry, tiles):
    """`lax.scan`, without a loop where there is one tile."""
    if jax.tree.leaves(tiles)[0].shape[0] > 1:
        return lax.scan(step, carry, tiles)
    carry, out = step(carry, jax.tree.map(lambda x: x[0], tiles))
    return carry, jax.tree.map(lambda x: x[None], out)


def _corner(layer, position) -> tuple[Array, ...]:
    """Index of (layer, position) in a buffer [L, K, P, H]; one integer type, whatever types lengths come in."""
    return tuple(jnp.asarray(i, jnp.int32) for i in (layer, 0, position, 0))


def _bias(mask: Array, q: Array) -> Array:
    """0 where `mask`, else -inf: added to scores, it costs no pass over them of its own."""
    return jnp.where(mask, jnp.zeros((), _accumulator(q)), -jnp.inf)


def _prefix_tile(k: Array, v: Array, layer, start, j, tile: int, lo, hi, dtype):
    """Keys and values [K, tile, H] of tile j of [lo, hi), zero outside, in the queries' dtype, and their mask [tile].
    `start`: clamped."""
    keys = start + jnp.arange(tile)
    mask = (keys >= lo + j * tile) & (keys < hi)
    shape = (1, k.shape[1], tile, k.shape[3])
    kt, vt = (row_major(lax.dynamic_slice(x, _corner(layer, start), shape))[0] for x in (k, v))
    kt, vt = (jnp.where(mask[:, None], x, 0).astype(dtype) for x in (kt, vt))
    return kt, vt, mask


def _first_keys(q: Array, seen) -> Array | None:
    """The first key that every row sees, as row tiles [tiles, rows], if query 0 sees keys from `seen` on; or query t
    from `seen[t]` on."""
    if seen is None:
        return None
    first = jnp.asarray(seen, jnp.int32)
    first = first if first.ndim else first + jnp.arange(q.shape[2], dtype=jnp.int32)
    beyond = jnp.iinfo(first.dtype).max  # padding: must not lower the first tile
    return _row_tiles(jnp.broadcast_to(first[:, None], (1, *q.shape[1:4])), 0, beyond)[0][:, 0]


def _lower(first, start, tile: int):
    """The first tile, counted from `start`, that a row which sees keys from `first` on may need."""
    return 0 if first is None else jnp.maximum(first.min() - start, 0) // tile


def prefix_forward(q: Array, k: Array, v: Array, layer, length, seen=None, softcap=None) -> tuple[Array, Array]:
    """Scaled queries [K, B, T, g, H] over keys 0 … length - 1 of `layer` in k, v [L, K, P, H]: (o, lse).

    seen: the first key that query 0 sees, query t seeing keys from `seen` + t on, or [T] of each; None: all keys.
    """
    size = k.shape[2]
    tile = min(TILE, size)

    def row_tile(_, xs):
        qt, first = xs

        def step(j, carry):
            start = jnp.minimum(j * tile, size - tile)
            kt, vt, mask = _prefix_tile(k, v, layer, start, j, tile, 0, length, qt.dtype)
            if first is not None:
                mask = mask & (start + jnp.arange(tile) >= first[:, None])
            scores = jnp.einsum("krh,ksh->krs", qt, kt, preferred_element_type=_accumulator(qt))
            return _online(carry, _capped(scores, softcap) + _bias(mask, qt), vt)

        bound = _tiles(length, tile)
        return None, _normalise(*lax.fori_loop(_lower(first, 0, tile), bound, step, _online_start(qt)))

    _, (o, lse) = _over_tiles(row_tile, None, (_row_tiles(q, 1)[0], _first_keys(q, seen)))
    return _from_row_tiles(o, q.shape), _from_row_tiles(lse, q.shape[:4])


def prefix_backward(q, k, v, layer, lo, hi, do, lse, delta, dk=None, dv=None, *, seen=None, softcap=None):
    """Cotangents of `prefix_forward` over keys lo … hi - 1.

    dk, dv: None if these keys are constants; else buffers [L, K, S, H] into which the cotangents of keys lo … are
    added in place, at index 0 … . Returns (dq of the scaled queries, dk, dv).
    """
    size = k.shape[2]
    room = size if dk is None else dk.shape[2]
    tile = min(TILE, room)

    def row_tile(carry, xs):
        qt, dot, lset, deltat, first = xs

        def step(j, carry):
            dq, dk, dv = carry
            at = jnp.minimum(j * tile, room - tile)
            start = jnp.minimum(lo + j * tile, size - tile) if dk is None else lo + at
            kt, vt, mask = _prefix_tile(k, v, layer, start, j, tile, lo, hi, qt.dtype)
            mask = mask[:, None]
            if first is not None:
                mask = mask & ((start + jnp.arange(tile))[:, None] >= first)
            p, ds = _scores_backward("ksh,krh->ksr", kt, vt, qt, dot, lset, deltat, _bias(mask, qt), softcap)
            dq = dq + _product("khs,ksr->khr", _transposed(kt), ds)
            if dk is not None:
                dk = _add_tile(dk, _product("ksr,krh->ksh", ds, qt), layer, at)
                dv = _add_tile(dv, _product("ksr,krh->ksh", p, dot), layer, at)
            return dq, dk, dv

        zero = jnp.zeros((qt.shape[0], qt.shape[2], qt.shape[1]), _accumulator(qt))
        dq, dk, dv = lax.fori_loop(_lower(first, lo, tile), _tiles(hi - lo, tile), step, (zero, *carry))
        return (dk, dv), dq.mT

    tiles = tuple(_row_tiles(x, rest)[0] for x, rest in ((q, 1), (do, 1), (lse, 0), (delta, 0)))
    (dk, dv), dq = _over_tiles(row_tile, (dk, dv), (*tiles, _first_keys(q, seen)))
    return _from_row_tiles(dq, q.shape), dk, dv


def _add_tile(buffer: Array, tile: Array, layer, at) -> Array:
    old = row_major(lax.dynamic_slice(buffer, _corner(layer, at), (1, *tile.shape)))
    new = row_major(old + row_major(tile[None].astype(buffer.dtype)))
    return lax.dynamic_update_slice(buffer, new, _corner(layer, at))


# --- the own part: causal with an offset, each branch against itself ------------------------------------------------


def own_tile(length: int) -> int:
    """Positions of a tile: `length` shared out evenly, in eights, so that a few positions more do not cost a whole tile
    of OWN_TILE."""
    count = -(-length // OWN_TILE)
    return length if count == 1 else min(OWN_TILE, 8 * -(-length // (8 * count)))


def _own_layout(x: Array, tile: int) -> Array:
    """[K, B, T, g, ...] → [tiles, K, B, rows, ...], rows being (query of the tile, head of the kv head)."""
    kv_heads, b, t, g = x.shape[:4]
    rest = x.shape[4:]
    tiles = -(-t // tile)
    if tiles == 1:
        return x.reshape(1, kv_heads, b, t * g, *rest)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, tiles * tile - t), (0, 0)] + [(0, 0)] * len(rest))
    return jnp.moveaxis(x.reshape(kv_heads, b, tiles, tile * g, *rest), 2, 0)


def _from_own_layout(x: Array, shape: tuple[int, ...]) -> Array:
    """Inverse of `_own_layout`, to `shape` [K, B, T, g, ...]."""
    if x.shape[0] == 1:
        return x.reshape(shape)
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*shape[:2], -1, *shape[3:])[:, :, : shape[2]]


def _own_bounds(i, q_tile: int, k_tile: int, lengths, offset, window):
    """The key tiles that query tile i needs: first, and one past the last."""
    first = 0 if window is None else jnp.maximum(i * q_tile + offset - window + 1, 0) // k_tile
    return first, _tiles(jnp.minimum((i + 1) * q_tile + offset, lengths.max()), k_tile)


def _own_tile(k, v, i, j, q_tile, k_tile, group, lengths, offset, window):
    """Key tile j [K, B, keys, H] with zeroed padding, its start, and the mask [B, rows, keys] of query tile i."""
    start = jnp.minimum(j * k_tile, k.shape[2] - k_tile)
    keys = start + jnp.arange(k_tile)
    valid = (keys >= j * k_tile) & (keys < lengths[:, None])
    queries = i * q_tile + jnp.arange(q_tile * group) // group
    mask = (keys <= queries[:, None] + offset) & valid[:, None, :]
    if window is not None:
        mask &= keys > queries[:, None] + offset - window
    kt, vt = (lax.dynamic_slice_in_dim(x, start, k_tile, 2) for x in (k, v))
    kt, vt = (jnp.where(valid[:, :, None], x, 0) for x in (kt, vt))
    return kt, vt, start, mask


def own_forward(q: Array, k: Array, v: Array, lengths: Array, offset, window=None, softcap=None) -> tuple[Array, Array]:
    """Scaled queries [K, B, T, g, H] over each branch's own keys [K, B, S, H]: query t sees keys j ≤ t + offset, and of
    them the last `window`."""
    group, q_tile, k_tile = q.shape[3], own_tile(q.shape[2]), own_tile(k.shape[2])

    def query_tile(i, qt):
        def step(j, carry):
            kt, vt, _, mask = _own_tile(k, v, i, j, q_tile, k_tile, group, lengths, offset, window)
            scores = jnp.einsum("kbrh,kbsh->kbrs", qt, kt, preferred_element_type=_accumulator(q))
            return _online(carry, _capped(scores, softcap) + _bias(mask, q), vt)

        if k.shape[2] == k_tile:
            return i + 1, _normalise(*step(0, _online_start(qt)))
        first, bound = _own_bounds(i, q_tile, k_tile, lengths, offset, window)
        return i + 1, _normalise(*lax.fori_loop(first, bound, step, _online_start(qt)))

    _, (o, lse) = _over_tiles(query_tile, jnp.int32(0), _own_layout(q, q_tile))
    return _from_own_layout(o, q.shape), _from_own_layout(lse, q.shape[:4])


def own_backward(q, k, v, lengths, offset, do, lse, delta, window=None, softcap=None) -> tuple[Array, Array, Array]:
    """Cotangents (dq of the scaled queries, dk, dv) of `own_forward`."""
    group, q_tile, k_tile = q.shape[3], own_tile(q.shape[2]), own_tile(k.shape[2])
    acc = _accumulator(q)

    def query_tile(carry, xs):
        i, dk, dv = carry
        qt, dot, lset, deltat = xs

        def step(j, carry):
            dq, dk, dv = carry
            kt, vt, start, mask = _own_tile(k, v, i, j, q_tile, k_tile, group, lengths, offset, window)
            p, ds = _scores_backward("kbsh,kbrh->kbsr", kt, vt, qt, dot, lset, deltat, _bias(mask, qt).mT, softcap)
            dq = dq + _product("kbhs,kbsr->kbhr", _transposed(kt), ds)
            dk, dv = (
                lax.dynamic_update_slice_in_dim(
                    buffer,
                    lax.dynamic_slice_in_dim(buffer, start, k_tile, 2) + _product("kbsr,kbrh->kbsh", x, y),
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
            first, bound = _own_bounds(i, q_tile, k_tile, lengths, offset, window)
            dq, dk, dv = lax.fori_loop(first, bound, step, init)
        return (i + 1, dk, dv), dq.mT

    init = (jnp.int32(0), jnp.zeros(k.shape, acc), jnp.zeros(v.shape, acc))
    tiles = tuple(_own_layout(x, q_tile) for x in (q, do, lse, delta))
    (_, dk, dv), dq = _over_tiles(query_tile, init, tiles)
    return _from_own_layout(dq, q.shape), dk, dv


# --- shared ---------------------------------------------------------------------------------------------------------


def _accumulator(x: Array):
    return jnp.promote_types(x.dtype, jnp.float32)


def _tiles(length, tile: int):
    return (jnp.maximum(length, 0) + tile - 1) // tile


def _product(spec: str, a: Array, b: Array) -> Array:
    """einsum with operands in the narrower of the two dtypes, accumulated in float32 or wider."""
    dtype = b.dtype if b.dtype.itemsize < a.dtype.itemsize else a.dtype
    return jnp.einsum(spec, a.astype(dtype), b.astype(dtype), preferred_element_type=_accumulator(a))


def _capped(scores: Array, softcap: float | None) -> Array:
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _scores_backward(spec: str, k, v, q, do, lse, delta, bias, softcap):
    """Probabilities and cotangents of the products (scores before a soft-cap), both [..., keys, rows]."""
    scores = _capped(jnp.einsum(spec, k, q, preferred_element_type=_accumulator(q)), softcap)
    p = jnp.exp(scores + bias - lse[..., None, :])
    dp = jnp.einsum(spec, v, do.astype(v.dtype), preferred_element_type=_accumulator(q))
    ds = p * (dp - delta[..., None, :])
    return p, ds if softcap is None else ds * (1 - (scores / softcap) ** 2)
