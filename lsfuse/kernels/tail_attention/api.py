"""Attention of tails over a shared prefix: the calls the model makes.

One group at a time: B branches of T queries each attend to one prefix K/V (a layer of the prefix state, keys
0 … prefix_length - 1) and to their own keys, causally with an offset. A chunk of the prefix is the same call with one
branch. Outputs carry the log-sum-exp, so that partial results merge across chunks and devices.

Queries and outputs are head-major, [K, B, T, g, H] with g query heads per kv head: the rows of all branches and of a
kv head's query heads lie together, and a prefix tile is read once for all of them.
"""

import jax.numpy as jnp
from flax import struct

from lsfuse.kernels.tail_attention import reference
from lsfuse.types import Array


@struct.dataclass
class Prefix:
    """One layer of a prefix state.

    k, v: [L, K, P, H], the whole run of L layers, so that no layer is copied out. layer: int32 scalar.
    length: int32 scalar, valid keys; whatever lies beyond changes nothing.
    constant: int32 scalar, how many of the first keys have constant K/V, to a backward with `dprefix`; None if none.
    first: int32 [T], the first key that each query sees, not falling, where a rule's window does not say it because the
        keys are not in a row (they are one device's part of them); None: the window says it.
    """

    k: Array
    v: Array
    layer: Array
    length: Array
    constant: Array | None = None
    first: Array | None = None


@struct.dataclass
class Rule:
    """How a query weighs the keys before it.

    window: int32 scalar W, None for all keys: a query sees itself and the W - 1 keys before it (Mistral 7B, arXiv
        2310.06825). Prefix key s stands at position s, own key j at `prefix.length` + j, query t at `prefix.length` +
        own_offset + t. Tiles that no query of theirs can see are not read.
    scale: of the products; None is 1 / sqrt(H).
    softcap: c of c · tanh(score / c) (Gemma 2, arXiv 2408.00118); None leaves scores as they are.
    """

    window: Array | None = None
    scale: float | None = struct.field(pytree_node=False, default=None)
    softcap: float | None = struct.field(pytree_node=False, default=None)

    def times(self, q: Array) -> Array:
        """q [..., H] scaled."""
        return q * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)


PLAIN = Rule()


def forward(
    q: Array,
    own_k: Array,
    own_v: Array,
    own_lengths: Array,
    prefix: Prefix | None,
    *,
    own_offset: Array | int = 0,
    rule: Rule = PLAIN,
) -> tuple[Array, Array]:
    """softmax(q · K / sqrt(H)) V over the prefix and each branch's own keys, or as `rule` says.

    Args:
      q: [K, B, T, g, H].
      own_k, own_v: [K, B, S, H]. Query t of a branch sees own keys j ≤ t + own_offset, j < own_lengths.
      own_lengths: int32 [B].
      prefix: shared by all branches, or None.

    Returns: (o [K, B, T, g, H] in q's dtype, lse [K, B, T, g] float32 or wider). A query that sees no key gets o = 0
    and lse = -inf.
    """
    _check(q, own_k, own_v, own_lengths, prefix)
    scaled = rule.times(q)
    o, lse = reference.own_forward(scaled, own_k, own_v, own_lengths, own_offset, rule.window, rule.softcap)
    if prefix is not None:
        seen = _first_seen(prefix, own_offset, rule)
        args = (scaled, prefix.k, prefix.v, prefix.layer, prefix.length)
        o2, lse2 = reference.prefix_forward(*args, seen, rule.softcap)
        o, lse = reference.merge(o2, lse2, o, lse)
    return o.astype(q.dtype), lse


def backward(
    q: Array,
    own_k: Array,
    own_v: Array,
    own_lengths: Array,
    prefix: Prefix | None,
    o: Array,
    lse: Array,
    do: Array,
    dprefix: tuple[Array, Array] | None = None,
    *,
    own_offset: Array | int = 0,
    rule: Rule = PLAIN,
) -> tuple[Array, Array, Array, tuple[Array, Array] | None]:
    """Cotangents of `forward` from its saved output and log-sum-exp.

    dprefix: buffers (dk, dv) [L, K, S, H] that hold the cotangents of prefix keys `prefix.constant` …, at index 0 …;
        this layer's share is added in place. None: the prefix side is not touched (tail-only).

    Returns: (dq, dk_own, dv_own, dprefix).
    """
    _check(q, own_k, own_v, own_lengths, prefix)
    scaled = rule.times(q)
    delta = jnp.sum(o.astype(lse.dtype) * do.astype(lse.dtype), -1)
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse)
    own = (scaled, own_k, own_v, own_lengths, own_offset)
    dq, dk, dv = reference.own_backward(*own, do, lse, delta, rule.window, rule.softcap)
    if prefix is not None:
        args = (scaled, prefix.k, prefix.v, prefix.layer)
        how = {"seen": _first_seen(prefix, own_offset, rule), "softcap": rule.softcap}
        constant = prefix.length if dprefix is None else prefix.constant
        if constant is not None:
            constant = jnp.minimum(constant, prefix.length)
            dq = dq + reference.prefix_backward(*args, 0, constant, do, lse, delta, **how)[0]
        if dprefix is not None:
            lo = 0 if constant is None else constant
            back = (do, lse, delta, *dprefix)
            more, dk_prefix, dv_prefix = reference.prefix_backward(*args, lo, prefix.length, *back, **how)
            dq, dprefix = dq + more, (dk_prefix, dv_prefix)
    return rule.times(dq).astype(q.dtype), dk.astype(own_k.dtype), dv.astype(own_v.dtype), dprefix


def _first_seen(prefix: Prefix, own_offset: Array | int, rule: Rule) -> Array | None:
    """The first key of the prefix that query 0 (or each query, [T]) sees, may be negative; None where it sees all."""
    if prefix.first is not None:
        return prefix.first
    return None if rule.window is None else prefix.length + own_offset - rule.window + 1


def _check(q, own_k, own_v, own_lengths, prefix):
    if q.ndim != 5 or own_k.ndim != 4 or own_k.shape != own_v.shape:
        raise ValueError(
            f"tail_attention: q must be [K, B, T, g, H] and own_k, own_v alike [K, B, S, H]; got q {q.shape}, own_k"
            f" {own_k.shape}, own_v {own_v.shape}"
        )
    kv_heads, b, _, _, h = q.shape
    if (own_k.shape[0], own_k.shape[1], own_k.shape[3]) != (kv_heads, b, h):
        raise ValueError(
            f"tail_attention: q {q.shape} [K, B, T, g, H] does not go with own_k {own_k.shape} [K, B, S, H]; K, B and H"
            " must be equal"
        )
    if own_lengths.shape != (b,):
        raise ValueError(f"tail_attention: own_lengths must be [{b}], got {own_lengths.shape}")
    if prefix is not None and (
        prefix.k.shape != prefix.v.shape or prefix.k.shape[1] != kv_heads or prefix.k.shape[3] != h
    ):
        raise ValueError(
            f"tail_attention: prefix k {prefix.k.shape}, v {prefix.v.shape} [L, K, P, H] do not go with own_k"
            f" {own_k.shape} [K, B, S, H]; K and H must be equal"
        )
