"""The pieces of a block between which attention and the residual stream run.

Each piece is a function of its own parameters and small inputs, without collectives, so that `jax.vjp` differentiates
it; attention in between is differentiated by hand. A saved piece boundary is a piece that need not run again: where
the inputs of a piece are at hand, its backward contains no forward product that its cotangents do not need.
"""

import jax
import jax.numpy as jnp
from jax import lax

from lsfuse.model.config import BlockConfig, ModelConfig, ffn_norm
from lsfuse.model.params import is_quantized
from lsfuse.model.rope import rotate
from lsfuse.types import Array

_ACT = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}

# Parameters that each piece reads; `ffn_in` also reads `ffn_norm(config)`.
KEYS_VALUES = ("input_layernorm", "k_proj", "v_proj", "k_proj_bias", "v_proj_bias", "k_norm")
ATTENTION_IN = (*KEYS_VALUES, "q_proj", "q_proj_bias", "q_norm")
ATTENTION_OUT = ("o_proj", "o_proj_bias")
LINEAR_MAP = ("input_layernorm", "linear_attn", "linear_attn_bias")
FFN_IN = ("gate_proj", "up_proj", "gate_proj_bias", "up_proj_bias", "fc_in", "fc_in_bias")
FFN_OUT = ("down_proj", "down_proj_bias", "fc_out", "fc_out_bias")
# The norms that `post_norms` adds after attention and FFN.
ATTENTION_NORM, FFN_NORM = "post_attention_layernorm", "post_feedforward_layernorm"


def subset(params: dict, names: tuple[str, ...]) -> dict:
    return {name: params[name] for name in names if name in params}


def cast_here(x: Array, dtype) -> Array:
    """`x` in `dtype`, by the same rounding as `astype`, and inside the loop that takes `x` out of a larger array: XLA
    for TPUs lifts a plain cast to bfloat16 out of it, and then holds a whole run of blocks twice."""
    narrow, wide = jnp.finfo(dtype), jnp.finfo(x.dtype)
    if narrow.nexp == wide.nexp and narrow.bits < wide.bits:
        x = lax.reduce_precision(x, narrow.nexp, narrow.nmant)
    return x.astype(dtype)


@jax.custom_vjp
def _matmul(x: Array, w: Array) -> Array:
    return x @ w


def _matmul_fwd(x, w):
    return x @ w, (x, w)


def _matmul_bwd(saved, dy):
    # The weight gradient contracts the tokens, the leading axis of both: CPUs do that at half speed unless x is
    # really transposed first.
    x, w = saved
    dx = lax.dot_general(dy, w, (((dy.ndim - 1,), (1,)), ((), ())))
    x2, dy2 = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    xt = lax.platform_dependent(x2, cpu=lambda x: lax.optimization_barrier(x.T), default=lambda x: x.T)
    return dx, xt @ dy2


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def linear(x: Array, params: dict, name: str) -> Array:
    """x [..., in] → [..., out] by kernel `name` (in, out), quantised or not, and its bias where there is one."""
    kernel = params[name]
    if is_quantized(kernel):
        import qwix  # which takes a second, and is needed only here

        kernel = qwix.dequantize(kernel)  # in float32 or wider, rounded once, below
    y = _matmul(x, kernel.astype(x.dtype))
    bias = params.get(f"{name}_bias")
    return y if bias is None else y + bias.astype(x.dtype)


def rms_norm(config: ModelConfig, x: Array, gain: Array) -> Array:
    """x / rms(x) · (gain + norm_offset) over the last axis, computed in float32 or wider, returned in x's dtype (arXiv
    1910.07467)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + config.rms_norm_eps)
    gain = gain.astype(wide.dtype)
    if config.norm_offset:
        gain = gain + config.norm_offset
    return (wide * scale * gain).astype(x.dtype)


def softcap(x: Array, cap: float | None) -> Array:
    """cap · tanh(x / cap) (Gemma 2, arXiv 2408.00118); x itself where there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def _heads(config: ModelConfig, p: dict, h: Array, name: str, norm: str) -> Array:
    """[B, T, heads, H], normalised head by head where the model does that."""
    x = linear(h, p, name).reshape(*h.shape[:2], -1, config.head_dim)
    return rms_norm(config, x, p[norm]) if config.qk_norm else x


def _keys_values(config: ModelConfig, p: dict, h: Array, rope) -> tuple[Array, Array]:
    k = rotate(_heads(config, p, h, "k_proj", "k_norm"), rope)
    v = linear(h, p, "v_proj").reshape(*h.shape[:2], -1, config.head_dim)
    return _as_stored(config, jnp.moveaxis(k, 2, 0)), _as_stored(config, jnp.moveaxis(v, 2, 0))


def _as_stored(config: ModelConfig, x: Array) -> Array:
    """x as it is read back from the prefix state, so that later tokens and a recomputation see what its own see; the
    rounding is a constant to the backward."""
    if config.state_dtype is None or jnp.dtype(config.state_dtype) == x.dtype:
        return x
    return x + lax.stop_gradient(x.astype(config.state_dtype).astype(x.dtype) - x)


def keys_values(config: ModelConfig, p: dict, x: Array, rope) -> tuple[Array, Array]:
    """x [B, T, D] → rotated keys and values [K, B, T, H] of a block, nothing else."""
    return _keys_values(config, p, rms_norm(config, x, p["input_layernorm"]), rope)


def attention_in(config: ModelConfig, p: dict, x: Array, rope) -> tuple[Array, Array, Array]:
    """x [B, T, D] → queries [K, B, T, g, H], keys and values [K, B, T, H], rotated by tables [T, H / 2].

    Head-major, g query heads to a kv head: the layout in which attention needs no transposition.
    """
    h = rms_norm(config, x, p["input_layernorm"])
    k, v = _keys_values(config, p, h, rope)
    q = rotate(_heads(config, p, h, "q_proj", "q_norm"), rope)
    return jnp.moveaxis(q.reshape(*h.shape[:2], k.shape[0], -1, config.head_dim), 2, 0), k, v


def attention_out(p: dict, o: Array) -> Array:
    """Attention's contribution [B, T, D] from o [K, B, T, g, H]."""
    return linear(jnp.moveaxis(o, 0, 2).reshape(*o.shape[1:3], -1), p, "o_proj")


def linear_map(config: ModelConfig, p: dict, x: Array) -> Array:
    """Contribution [B, T, D] of what stands in for attention, from the residual stream x [B, T, D]."""
    return linear(rms_norm(config, x, p["input_layernorm"]), p, "linear_attn")


def ffn_boundaries(block: BlockConfig) -> tuple[str, ...]:
    """Names of what `ffn_in` returns."""
    return ("gate",) if block.ffn == "plain" else ("gate", "up")


def ffn_in_names(config: ModelConfig) -> tuple[str, ...]:
    return (ffn_norm(config), *FFN_IN)


def ffn_in(config: ModelConfig, block: BlockConfig, p: dict, x: Array) -> tuple[Array, ...]:
    """Gate and up activations [B, T, F] from the residual stream [B, T, D]; of a plain FFN the one there is."""
    h = rms_norm(config, x, p[ffn_norm(config)])
    return tuple(linear(h, p, name) for name in (("fc_in",) if block.ffn == "plain" else ("gate_proj", "up_proj")))


def ffn_activation(config: ModelConfig, gate: Array, up: Array | None = None) -> Array:
    """act(gate) · up [B, T, F], or act(gate): what the last projection reads."""
    hidden = _ACT[config.hidden_act](gate)
    return hidden if up is None else hidden * up


def ffn_out(config: ModelConfig, block: BlockConfig, p: dict, gate: Array, up: Array | None = None) -> Array:
    """The FFN's contribution [B, T, D]: down(act(gate) · up), or out(act(gate))."""
    return linear(ffn_activation(config, gate, up), p, "fc_out" if up is None else "down_proj")
