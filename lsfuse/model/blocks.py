"""One block forward and backward against a prefix state. The same functions serve prefix chunks and branches.

The forward returns every piece boundary; a remat policy says which are kept, and `complete` recomputes the others from
the block's input. The backward differentiates the pieces by `jax.vjp` and attention by hand from its log-sum-exp.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from lsfuse.kernels import tail_attention
from lsfuse.model import attention, layers
from lsfuse.model.config import BlockConfig, ModelConfig, ffn_norm
from lsfuse.model.layers import subset
from lsfuse.types import Array

# "attended" and "fed" are outputs of attention and FFN before the norms that `post_norms` adds, and exist only there.
_ATTENTION, _KEYS, _FFN = ("q", "o", "lse", "mid", "attended"), ("k", "v"), ("gate", "up", "fed")

# Kept piece boundaries by JAX's names of checkpoint policies; the block's input is kept always.
REMAT_POLICIES = {
    "everything_saveable": (*_ATTENTION, *_KEYS, *_FFN),
    "dots_saveable": (*_ATTENTION, *_KEYS, *_FFN),
    "dots_with_no_batch_dims_saveable": ("q", "mid", "attended", *_KEYS, *_FFN),
    "nothing_saveable": (),
}

_EVERY_KEY = 2**30  # as a window: more than any position


def saved_names(policy: str) -> tuple[str, ...]:
    """Raises ValueError for an unknown policy."""
    if policy not in REMAT_POLICIES:
        raise ValueError(f"remat_policy {policy!r} is not known; valid: {', '.join(REMAT_POLICIES)}")
    return REMAT_POLICIES[policy]


@struct.dataclass
class Tokens:
    """Tokens that run together: B rows of T, at the same positions, after the same prefix.

    rope: (cos, sin) tables [T, H / 2]; of a model with two bases [2, T, H / 2], until `at_block` has chosen.
    lengths: int32 [B], valid tokens of each row.
    rule: how scores are made in the block that `at_block` was asked for.
    """

    rope: tuple[Array, Array]
    lengths: Array
    rule: tail_attention.Rule = tail_attention.Rule()


def at_block(config: ModelConfig, run: int, layer: Array | int, tokens: Tokens) -> Tokens:
    """`tokens` as block `layer` of a run sees them: its rotary base, its window.

    Where a run's blocks differ in these, they are read at `layer`, so that one compiled body serves them all; full
    attention is then a window beyond any position. Without a window in the run there is no trace of one.
    """
    members = config.members(run)

    def pick(values):
        return jnp.asarray(values, jnp.int32)[layer]

    window = None
    if any(block.window is not None for block in members):
        window = pick([_EVERY_KEY if block.window is None else block.window for block in members])
    rope, local = tokens.rope, [block.local_rope for block in members]
    if config.local_rope_theta is not None:
        index = int(local[0]) if len(set(local)) == 1 else pick(local)
        cos, sin = (lax.dynamic_index_in_dim(table, index, 0, keepdims=False) for table in rope)
        rope = (cos, sin)
    scalar = config.query_pre_attn_scalar
    scale = None if scalar is None else scalar**-0.5
    return Tokens(rope, tokens.lengths, tail_attention.Rule(window, scale, config.attn_logit_softcapping))


def block_forward(
    config: ModelConfig,
    block: BlockConfig,
    p: dict,
    x: Array,
    tokens: Tokens,
    before: attention.Before | None,
    known: dict[str, Array] | None = None,
) -> tuple[Array, dict[str, Array]]:
    """x [B, T, D] → (output [B, T, D], piece boundaries). Boundaries in `known` are taken and not computed.

    tokens: as the block sees them (`at_block`).
    """
    saved, shards = {"x": x, **(known or {})}, config.shards
    mid = x
    if block.has_linear_map and "mid" not in saved:
        y = layers.linear_map(config, subset(p, layers.LINEAR_MAP), x)
        saved |= _join_stream(config, p, x, y)
    if block.has_attention:
        if not {"q", "k", "v"} <= saved.keys():
            q, k, v = layers.attention_in(config, subset(p, layers.ATTENTION_IN), x, tokens.rope)
            saved = {"q": q, "k": k, "v": v, **saved}
        if "o" not in saved:
            saved["o"], saved["lse"] = attention.forward(
                config, saved["q"], saved["k"], saved["v"], tokens.lengths, before, tokens.rule
            )
        if "mid" not in saved:
            y = shards.sum_tensor(layers.attention_out(_attention_out(config, p), saved["o"]))
            saved |= _join_stream(config, p, x, y)
    if block.has_mixer:
        mid = saved["mid"]
    if not block.has_ffn:
        return mid, saved
    names = layers.ffn_boundaries(block)
    if names[0] not in saved:
        activations = layers.ffn_in(config, block, subset(p, layers.ffn_in_names(config)), x if block.parallel else mid)
        saved |= dict(zip(names, activations, strict=True))
    if "fed" in saved:
        y = saved["fed"]
    else:
        y = shards.sum_tensor(layers.ffn_out(config, block, _ffn_out(config, p), *(saved[name] for name in names)))
    if config.post_norms:
        saved["fed"] = y
        y = layers.rms_norm(config, y, p[layers.FFN_NORM])
    return mid + y, saved


def _attention_out(config: ModelConfig, p: dict) -> dict:
    return config.shards.once(subset(p, layers.ATTENTION_OUT), ("o_proj_bias",))


def _ffn_out(config: ModelConfig, p: dict) -> dict:
    return config.shards.once(subset(p, layers.FFN_OUT), ("down_proj_bias", "fc_out_bias"))


def _join_stream(config: ModelConfig, p: dict, x: Array, y: Array) -> dict[str, Array]:
    """The boundaries at which attention's contribution y joins the stream x."""
    if not config.post_norms:
        return {"mid": x + y}
    return {"attended": y, "mid": x + layers.rms_norm(config, y, p[layers.ATTENTION_NORM])}


def complete(config, block, p, tokens, before, saved: dict[str, Array]) -> dict[str, Array]:
    """All piece boundaries, those that the policy dropped recomputed."""
    return block_forward(config, block, p, saved["x"], tokens, before, saved)[1]


def block_backward(
    config: ModelConfig,
    block: BlockConfig,
    p: dict,
    dy: Array,
    saved: dict[str, Array],
    tokens: Tokens,
    before: attention.Before | None,
    dprefix: tuple[Array, Array] | None,
    dkv: tuple[Array, Array] | None = None,
) -> tuple[Array, dict[str, Array], tuple[Array, Array] | None]:
    """Cotangents of `block_forward` from its boundaries.

    dprefix: buffers to which the cotangents of the prefix's K/V are added, None if they are constants.
    dkv: cotangents [K, B, T, H] that later tokens have left for this chunk's own keys and values.

    Returns: (dx, gradients by parameter name, dprefix).
    """
    saved, shards = complete(config, block, p, tokens, before, saved), config.shards
    dp: dict[str, Array] = {}
    x, dx, dmid = saved["x"], jnp.zeros((), dy.dtype), dy

    def through_norm(dy, name, boundary):
        """Cotangent of what the norm `name` was applied to; its gain's gradient goes to `dp`."""
        if not config.post_norms:
            return dy
        _, vjp = jax.vjp(lambda y, gain: layers.rms_norm(config, y, gain), saved[boundary], p[name])
        dy, dp[name] = vjp(dy)
        return dy

    if block.has_ffn:
        activations = tuple(saved[name] for name in layers.ffn_boundaries(block))
        _, vjp = jax.vjp(lambda p, *a: layers.ffn_out(config, block, p, *a), _ffn_out(config, p), *activations)
        d_out, *d_activations = vjp(through_norm(dy, layers.FFN_NORM, "fed"))
        ffn_input = saved["mid"] if block.has_mixer and not block.parallel else x
        names = layers.ffn_in_names(config)
        _, vjp = jax.vjp(lambda p, h: layers.ffn_in(config, block, p, h), subset(p, names), ffn_input)
        d_in, dh = vjp(tuple(d_activations))
        d_in, dh = shards.sum_gains(d_in, ffn_norm(config)), shards.sum_tensor(dh)
        dp |= {**d_out, **d_in}
        if block.parallel:
            dx = dh
        else:
            dmid = dy + dh
    if block.has_linear_map:
        _, vjp = jax.vjp(lambda p, x: layers.linear_map(config, p, x), subset(p, layers.LINEAR_MAP), x)
        d_map, dx2 = vjp(through_norm(dmid, layers.ATTENTION_NORM, "attended"))
        return dmid + dx + dx2, {**dp, **d_map}, dprefix
    if not block.has_attention:
        return dmid + dx, dp, dprefix
    _, vjp = jax.vjp(layers.attention_out, _attention_out(config, p), saved["o"])
    d_out, do = vjp(through_norm(dmid, layers.ATTENTION_NORM, "attended"))
    dq, dk, dv, dprefix = attention.backward(config, saved, tokens.lengths, before, do, dprefix, tokens.rule)
    if dkv is not None:
        dk, dv = dk + dkv[0].astype(dk.dtype), dv + dkv[1].astype(dv.dtype)
    _, vjp = jax.vjp(lambda p, x: layers.attention_in(config, p, x, tokens.rope), subset(p, layers.ATTENTION_IN), x)
    d_in, dx2 = vjp((dq, dk, dv))
    d_in, dx2 = shards.sum_gains(d_in, "input_layernorm"), shards.sum_tensor(dx2)
    return dmid + dx + dx2, {**dp, **d_out, **d_in}, dprefix


def keys_values_backward(config, p, x, tokens: Tokens, dkv) -> tuple[Array, dict[str, Array]]:
    """(dx, gradients) of a block of which only the keys and values are used."""
    _, vjp = jax.vjp(lambda p, x: layers.keys_values(config, p, x, tokens.rope), subset(p, layers.KEYS_VALUES), x)
    dp, dx = vjp(tuple(d.astype(x.dtype) for d in dkv))
    return config.shards.sum_tensor(dx), config.shards.sum_gains(dp, "input_layernorm")
