"""One block forward and backward against a prefix state. The same functions serve prefix chunks and branches.

The forward returns every piece boundary; a remat policy says which are kept, and `complete` recomputes the others from
the block's input. The backward differentiates the pieces by `jax.vjp` and attention by hand from its log-sum-exp.
"""

import jax
import jax.numpy as jnp
from flax import struct

from lsfuse.kernels import tail_attention
from lsfuse.model import layers
from lsfuse.model.config import BlockConfig, ModelConfig
from lsfuse.model.layers import subset
from lsfuse.types import Array

_ATTENTION, _KEYS, _FFN = ("q", "o", "lse", "mid"), ("k", "v"), ("gate", "up")

# Kept piece boundaries by JAX's names of checkpoint policies; the block's input is kept always.
REMAT_POLICIES = {
    "everything_saveable": (*_ATTENTION, *_KEYS, *_FFN),
    "dots_saveable": (*_ATTENTION, *_KEYS, *_FFN),
    "dots_with_no_batch_dims_saveable": ("q", "mid", *_KEYS, *_FFN),
    "nothing_saveable": (),
}


def saved_names(policy: str) -> tuple[str, ...]:
    """Raises ValueError for an unknown policy."""
    if policy not in REMAT_POLICIES:
        raise ValueError(f"remat_policy {policy!r} is not known; valid: {', '.join(REMAT_POLICIES)}")
    return REMAT_POLICIES[policy]


@struct.dataclass
class Tokens:
    """Tokens that run together: B rows of T, at the same positions, after the same prefix.

    rope: (cos, sin) tables [T, H / 2]. lengths: int32 [B], valid tokens of each row.
    """

    rope: tuple[Array, Array]
    lengths: Array


def block_forward(
    config: ModelConfig,
    block: BlockConfig,
    p: dict,
    x: Array,
    tokens: Tokens,
    prefix: tail_attention.Prefix | None,
    known: dict[str, Array] | None = None,
) -> tuple[Array, dict[str, Array]]:
    """x [B, T, D] → (output [B, T, D], piece boundaries). Boundaries in `known` are taken and not computed."""
    saved = {"x": x, **(known or {})}
    mid = x
    if block.has_attention:
        if not {"q", "k", "v"} <= saved.keys():
            q, k, v = layers.attention_in(config, subset(p, layers.ATTENTION_IN), x, tokens.rope)
            saved = {"q": q, "k": k, "v": v, **saved}
        if "o" not in saved:
            saved["o"], saved["lse"] = tail_attention.forward(
                saved["q"], saved["k"], saved["v"], tokens.lengths, prefix
            )
        if "mid" not in saved:
            saved["mid"] = x + layers.attention_out(subset(p, layers.ATTENTION_OUT), saved["o"])
        mid = saved["mid"]
    if not block.has_ffn:
        return mid, saved
    if "gate" not in saved:
        saved["gate"], saved["up"] = layers.ffn_in(config, subset(p, layers.FFN_IN), x if block.parallel else mid)
    return mid + layers.ffn_out(config, subset(p, layers.FFN_OUT), saved["gate"], saved["up"]), saved


def complete(config, block, p, tokens, prefix, saved: dict[str, Array]) -> dict[str, Array]:
    """All piece boundaries, those that the policy dropped recomputed."""
    return block_forward(config, block, p, saved["x"], tokens, prefix, saved)[1]


def block_backward(
    config: ModelConfig,
    block: BlockConfig,
    p: dict,
    dy: Array,
    saved: dict[str, Array],
    tokens: Tokens,
    prefix: tail_attention.Prefix | None,
    dprefix: tuple[Array, Array] | None,
    dkv: tuple[Array, Array] | None = None,
) -> tuple[Array, dict[str, Array], tuple[Array, Array] | None]:
    """Cotangents of `block_forward` from its boundaries.

    dprefix: buffers to which the cotangents of the prefix's K/V are added, None if they are constants.
    dkv: cotangents [K, B, T, H] that later tokens have left for this chunk's own keys and values.

    Returns: (dx, gradients by parameter name, dprefix).
    """
    saved = complete(config, block, p, tokens, prefix, saved)
    dp: dict[str, Array] = {}
    x, dx, dmid = saved["x"], jnp.zeros((), dy.dtype), dy
    if block.has_ffn:
        _, vjp = jax.vjp(lambda p, g, u: layers.ffn_out(config, p, g, u), subset(p, layers.FFN_OUT), *_pair(saved))
        d_out, dgate, dup = vjp(dy)
        ffn_input = saved["mid"] if block.has_attention and not block.parallel else x
        _, vjp = jax.vjp(lambda p, h: layers.ffn_in(config, p, h), subset(p, layers.FFN_IN), ffn_input)
        d_in, dh = vjp((dgate, dup))
        dp |= {**d_out, **d_in}
        if block.parallel:
            dx = dh
        else:
            dmid = dy + dh
    if not block.has_attention:
        return dmid + dx, dp, dprefix
    _, vjp = jax.vjp(layers.attention_out, subset(p, layers.ATTENTION_OUT), saved["o"])
    d_out, do = vjp(dmid)
    dq, dk, dv, dprefix = tail_attention.backward(
        saved["q"], saved["k"], saved["v"], tokens.lengths, prefix, saved["o"], saved["lse"], do, dprefix
    )
    if dkv is not None:
        dk, dv = dk + dkv[0].astype(dk.dtype), dv + dkv[1].astype(dv.dtype)
    _, vjp = jax.vjp(lambda p, x: layers.attention_in(config, p, x, tokens.rope), subset(p, layers.ATTENTION_IN), x)
    d_in, dx2 = vjp((dq, dk, dv))
    return dmid + dx + dx2, {**dp, **d_out, **d_in}, dprefix


def _pair(saved):
    return saved["gate"], saved["up"]


def keys_values_backward(config, p, x, tokens: Tokens, dkv) -> tuple[Array, dict[str, Array]]:
    """(dx, gradients) of a block of which only the keys and values are used."""
    _, vjp = jax.vjp(lambda p, x: layers.keys_values(config, p, x, tokens.rope), subset(p, layers.KEYS_VALUES), x)
    dp, dx = vjp(tuple(d.astype(x.dtype) for d in dkv))
    return dx, dp
