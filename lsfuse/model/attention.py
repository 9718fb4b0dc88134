"""A block's attention, over whatever devices its keys are spread.

Every device has its own positions of the prefix and of the tokens at hand. For attention it takes the queries of all,
runs them against its own keys, and the partial results merge by their log-sum-exps; a query's output goes back to the
device it belongs to. The backward is the same the other way round: cotangents of keys and values stay where the keys
are.
"""

import jax.numpy as jnp
from flax import struct
from jax import lax

from lsfuse.kernels import tail_attention
from lsfuse.model.config import ModelConfig
from lsfuse.model.shards import Shards
from lsfuse.types import Array


@struct.dataclass
class Stripes:
    """How positions of a prefix lie on devices: those before `start` in chunks of `chunk`, the others in chunks of
    `grad_chunk`, counted from `start`; of each chunk every device has one stretch."""

    start: Array
    chunk: int = struct.field(pytree_node=False)
    grad_chunk: int = struct.field(pytree_node=False)

    def own(self, shards: Shards, position: Array) -> Array:
        """How many of the first `position` positions are this device's: where its next one goes in its buffer."""
        if not shards.tokens:
            return position
        constant = shards.striped(jnp.minimum(position, self.start), self.chunk)
        return constant + shards.striped(position - self.start, self.grad_chunk)


@struct.dataclass
class Before:
    """What stands before some tokens: the first `length` positions of one layer of a prefix state, `constant` of them
    constants to the backward (None: none). k, v: the device's part of the state, as `tail_attention.Prefix`'s."""

    k: Array
    v: Array
    layer: Array
    length: Array
    constant: Array | None = None
    stripes: Stripes | None = None

    def own(self, shards: Shards, position: Array) -> Array:
        """Of the first `position` positions, those of this device."""
        return position if self.stripes is None else self.stripes.own(shards, position)

    def prefix(
        self, shards: Shards, queries: int, window: Array | None, offset: Array | int = 0
    ) -> tail_attention.Prefix:
        """The device's part, for `queries` queries at positions `length` + `offset` …."""
        constant = None if self.constant is None else self.own(shards, self.constant)
        first = None
        if window is not None and shards.tokens:
            first = self.own(shards, self.length + offset + jnp.arange(queries, dtype=jnp.int32) - window + 1)
        return tail_attention.Prefix(self.k, self.v, self.layer, self.own(shards, self.length), constant, first)


def forward(
    config: ModelConfig,
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    before: Before | None,
    rule: tail_attention.Rule,
) -> tuple[Array, Array]:
    """`tail_attention.forward` of queries [K, B, T, g, H], keys and values [K, B, T, H] of the device's own T
    positions; lengths [B]: of all. Returns (o, lse) of its own positions."""
    shards, own = config.shards, k.shape[2]
    first = shards.first(own)
    q = shards.gather_tokens(q, 2)
    prefix = None if before is None else before.prefix(shards, q.shape[2], rule.window)
    o, lse = tail_attention.forward(q, k, v, _own(lengths, first, own, shards), prefix, own_offset=-first, rule=rule)
    if not shards.tokens:
        return o, lse
    part, lse = share(shards, o, lse)
    return shards.scatter_tokens(part, 2).astype(o.dtype), shards.own_tokens(lse, 2)


def share(shards: Shards, o: Array, lse: Array) -> tuple[Array, Array]:
    """(this device's summand of the output over all devices' keys, in lse's dtype; the log-sum-exp over them)."""
    top = lax.pmax(lse, shards.tokens)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weight = jnp.exp(lse - top)
    total = lax.psum(weight, shards.tokens)
    part = o.astype(lse.dtype) * (weight / jnp.where(total == 0, 1.0, total))[..., None]
    return part, jnp.where(total == 0, -jnp.inf, top + jnp.log(total))


def backward(
    config: ModelConfig,
    saved: dict[str, Array],
    lengths: Array,
    before: Before | None,
    do: Array,
    dprefix: tuple[Array, Array] | None,
    rule: tail_attention.Rule,
) -> tuple[Array, Array, Array, tuple[Array, Array] | None]:
    """`tail_attention.backward` of the same. saved: q, k, v, o and lse of the device's own positions."""
    shards, k, v = config.shards, saved["k"], saved["v"]
    own = k.shape[2]
    first = shards.first(own)
    q, o, lse, do = (shards.gather_tokens(x, 2) for x in (saved["q"], saved["o"], saved["lse"], do))
    prefix = None if before is None else before.prefix(shards, q.shape[2], rule.window)
    lengths = _own(lengths, first, own, shards)
    dq, dk, dv, dprefix = tail_attention.backward(
        q, k, v, lengths, prefix, o, lse, do, dprefix, own_offset=-first, rule=rule
    )
    return shards.scatter_tokens(dq, 2), dk, dv, dprefix


def _own(lengths: Array, first: Array | int, own: int, shards: Shards) -> Array:
    return jnp.clip(lengths - first, 0, own) if shards.tokens else lengths
