"""The pieces of a block between which attention and the residual stream run.

Each piece is a function of its own parameters and small inputs, without collectives, so that `jax.vjp` differentiates
it; attention in between is differentiated by hand. A saved piece boundary is a piece that need not run again: where
the inputs of a piece are at hand, its backward contains no forward product that its cotangents do not need.
"""

import jax
import jax.numpy as jnp
from jax import lax

from lsfuse.model.config import ModelConfig
from lsfuse.model.rope import rotate
from lsfuse.types import Array

_ACT = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}

# Parameters that each piece reads.
ATTENTION_IN = ("input_layernorm", "q_proj", "k_proj", "v_proj", "q_proj_bias", "k_proj_bias", "v_proj_bias")
KEYS_VALUES = ("input_layernorm", "k_proj", "v_proj", "k_proj_bias", "v_proj_bias")
ATTENTION_OUT = ("o_proj", "o_proj_bias")
FFN_IN = ("post_attention_layernorm", "gate_proj", "up_proj", "gate_proj_bias", "up_proj_bias")
FFN_OUT = ("down_proj", "down_proj_bias")


def subset(params: dict, names: tuple[str, ...]) -> dict:
    return {name: params[name] for name in names if name in params}


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
    """x [..., in] → [..., out] by kernel `name` (in, out), and its bias where there is one."""
    y = _matmul(x, params[name].astype(x.dtype))
    bias = params.get(f"{name}_bias")
    return y if bias is None else y + bias.astype(x.dtype)


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """x / rms(x) · gain over the last axis, computed in float32 or wider, returned in x's dtype (arXiv 1910.07467)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return (wide * scale * gain.astype(wide.dtype)).astype(x.dtype)


def _keys_values(config: ModelConfig, p: dict, h: Array, rope) -> tuple[Array, Array]:
    shape = (*h.shape[:2], -1, config.head_dim)
    k = rotate(linear(h, p, "k_proj").reshape(shape), rope)
    v = linear(h, p, "v_proj").reshape(shape)
    return jnp.moveaxis(k, 2, 0), jnp.moveaxis(v, 2, 0)


def keys_values(config: ModelConfig, p: dict, x: Array, rope) -> tuple[Array, Array]:
    """x [B, T, D] → rotated keys and values [K, B, T, H] of a block, nothing else."""
    return _keys_values(config, p, rms_norm(x, p["input_layernorm"], config.rms_norm_eps), rope)


def attention_in(config: ModelConfig, p: dict, x: Array, rope) -> tuple[Array, Array, Array]:
    """x [B, T, D] → queries [K, B, T, g, H], keys and values [K, B, T, H], rotated by tables [T, H / 2].

    Head-major, g query heads to a kv head: the layout in which attention needs no transposition.
    """
    h = rms_norm(x, p["input_layernorm"], config.rms_norm_eps)
    k, v = _keys_values(config, p, h, rope)
    q = rotate(linear(h, p, "q_proj").reshape(*h.shape[:2], config.num_heads, config.head_dim), rope)
    return jnp.moveaxis(q.reshape(*h.shape[:2], k.shape[0], -1, config.head_dim), 2, 0), k, v


def attention_out(p: dict, o: Array) -> Array:
    """Attention's contribution [B, T, D] from o [K, B, T, g, H]."""
    return linear(jnp.moveaxis(o, 0, 2).reshape(*o.shape[1:3], -1), p, "o_proj")


def ffn_in(config: ModelConfig, p: dict, x: Array) -> tuple[Array, Array]:
    """Gate and up activations [B, T, F] from the residual stream [B, T, D]."""
    h = rms_norm(x, p["post_attention_layernorm"], config.rms_norm_eps)
    return linear(h, p, "gate_proj"), linear(h, p, "up_proj")


def ffn_activation(config: ModelConfig, gate: Array, up: Array) -> Array:
    """act(gate) · up [B, T, F], what the down projection reads."""
    return _ACT[config.hidden_act](gate) * up


def ffn_out(config: ModelConfig, p: dict, gate: Array, up: Array) -> Array:
    """The FFN's contribution down(act(gate) · up) [B, T, D]."""
    return linear(ffn_activation(config, gate, up), p, "down_proj")
