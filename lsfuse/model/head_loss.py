"""Losses on the distribution of the next token, straight from hidden states, a chunk of tokens at a time.

tokens × vocabulary never exists. A loss that is a sum over tokens of w · KL(p ‖ q), or of w · cross-entropy, has the
gradient w · (q - p) in q's logits, known as soon as the logits are. So the forward pass, which has a chunk's logits
at hand, makes the gradients of the hidden states and of the head on the way, and the backward only scales them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from lsfuse.model.config import ModelConfig
from lsfuse.model.layers import rms_norm, softcap
from lsfuse.types import Array, Params

_ELEMENTS = 1 << 23  # logits of a chunk, tokens × vocabulary


def kl_to(
    params: Params,
    config: ModelConfig,
    x: Array,
    parent_params: Params,
    parent_config: ModelConfig,
    parent_x: Array,
    weights: Array,
) -> Array:
    """Σ weights · KL(parent ‖ model), nats, a scalar in float32 or wider; differentiable in `params` and `x` alone.

    Args: x, parent_x [T, D]: residual streams after the last block (before the final norm); weights [T].
    Raises: ValueError if the two have unlike vocabularies.
    """
    check_vocabularies(config, parent_config)
    target = (rms_norm(parent_config, parent_x, parent_params["norm"]), _head(parent_params)[0])
    target = jax.tree.map(lax.stop_gradient, target)
    static = (parent_config.final_logit_softcapping, "lm_head" not in parent_params)
    return _loss(params, config, x, weights, target, static)


def check_vocabularies(child: ModelConfig, parent: ModelConfig) -> None:
    """Raises ValueError if distributions of the two cannot be compared."""
    if child.vocab_size != parent.vocab_size:
        raise ValueError(
            f"parent and child have vocabularies of {parent.vocab_size} and {child.vocab_size} tokens; their"
            " distributions cannot be compared"
        )


def cross_entropy(params: Params, config: ModelConfig, x: Array, labels: Array, weights: Array) -> Array:
    """Σ weights · -log p(label), nats. Args: x [T, D] as in `kl_to`; labels int32 [T]; weights [T]."""
    return _loss(params, config, x, weights, (labels,), None)


def _loss(params, config, x, weights, target, static):
    head, tied = _head(params)
    h = rms_norm(config, x, params["norm"])
    return _summed((config.final_logit_softcapping, tied), static, h, head, lax.stop_gradient(weights), target)


def _head(params: Params) -> tuple[Array, bool]:
    tied = "lm_head" not in params
    return params["embed_tokens" if tied else "lm_head"], tied


def _products(h: Array, head: Array, tied: bool) -> Array:
    dims = (((1,), (1 if tied else 0,)), ((), ()))
    return lax.dot_general(
        h, head.astype(h.dtype), dims, preferred_element_type=jnp.promote_types(h.dtype, jnp.float32)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(mine, theirs, h, head, weights, target):
    return _pass(mine, theirs, h, head, weights, target, gradients=False)[0]


def _summed_fwd(mine, theirs, h, head, weights, target):
    loss, dh, dhead = _pass(mine, theirs, h, head, weights, target, gradients=True)
    return loss, (dh.astype(h.dtype), dhead.astype(head.dtype))


def _summed_bwd(mine, theirs, saved, d):
    dh, dhead = saved
    return (dh * d).astype(dh.dtype), (dhead * d).astype(dhead.dtype), None, None


_summed.defvjp(_summed_fwd, _summed_bwd)


def _pass(mine, theirs, h, head, weights, target, gradients: bool):
    """(loss, dh, dhead), the last two for a cotangent of 1; not made (None) without `gradients`.

    mine, theirs: (soft-cap, whether the head is tied) of model and parent; theirs is None where `target` are labels.
    """
    cap, tied = mine
    vocab = head.shape[0 if tied else 1]
    size = min(h.shape[0], max(16, _ELEMENTS // vocab))
    pad = -h.shape[0] % size
    acc = jnp.promote_types(h.dtype, jnp.float32)

    def chunks(x):
        return jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, size, *x.shape[1:])

    def body(carry, chunk):
        loss, dhead = carry
        h, w, target_rows = chunk
        z = softcap(_products(h, head, tied), cap)
        logq = jax.nn.log_softmax(z)
        if theirs is None:
            p = jnp.arange(vocab) == target_rows[:, None]
            losses = -jnp.take_along_axis(logq, target_rows[:, None], 1)[:, 0]
        else:
            logp = jax.nn.log_softmax(softcap(_products(target_rows, target[1], theirs[1]), theirs[0]))
            p = jnp.exp(logp)
            losses = jnp.sum(p * (logp - logq), -1)
        loss = loss + jnp.sum(w * losses)
        if not gradients:
            return (loss, dhead), None
        dz = w[:, None] * (jnp.exp(logq) - p)
        if cap is not None:
            dz = dz * (1 - (z / cap) ** 2)  # the derivative of c · tanh(z / c)
        dz = dz.astype(h.dtype)
        dh = lax.dot_general(
            dz, head.astype(h.dtype), (((1,), (0 if tied else 1,)), ((), ())), preferred_element_type=acc
        )
        a, b = (dz, h) if tied else (h, dz)
        return (loss, dhead + jnp.matmul(a.T, b, preferred_element_type=acc)), dh

    rows = (chunks(h), chunks(weights.astype(acc)), chunks(target[0]))
    start = (jnp.zeros((), acc), jnp.zeros(head.shape, acc) if gradients else jnp.zeros((), acc))
    (loss, dhead), dh = lax.scan(body, start, rows)
    if not gradients:
        return loss, None, None
    return loss, dh.reshape(-1, h.shape[1])[: h.shape[0]], dhead
