"""Log-probs and entropies of given tokens from hidden states, a slab of the vocabulary at a time.

On several devices, which have columns of the head each, all see all tokens.

tokens × vocabulary never exists: the forward pass keeps a running log-sum-exp over slabs, the backward recomputes each
slab's logits from it and writes that slab of the head's gradient once.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from lsfuse.checks import check_arrays
from lsfuse.model.config import ModelConfig
from lsfuse.model.layers import rms_norm, softcap
from lsfuse.types import Array, Params

_ELEMENTS = 1 << 22  # logits of a slab, tokens × columns


@struct.dataclass
class HeadSaved:
    """What the backward needs. h: [T, D] after the final norm; lse, entropies: [T]."""

    h: Array
    lse: Array
    entropies: Array


def slab_width(tokens: int, vocab: int) -> int:
    """Vocabulary columns of a slab."""
    return min(vocab, max(512, _ELEMENTS // max(tokens, 1) // 128 * 128))


def _slabs(params: Params, config: ModelConfig, tokens: int, labels: Array):
    """(number of slabs, width, reader of slab i as [D, width] and its first column, whether the head is tied, labels
    counted from the device's first column)."""
    tied = "lm_head" not in params
    head = params["embed_tokens"] if tied else params["lm_head"]
    vocab = head.shape[0 if tied else 1]
    width = slab_width(tokens, vocab)

    def read(i):
        start = jnp.minimum(i * width, vocab - width)
        return lax.dynamic_slice_in_dim(head, start, width, 0 if tied else 1), start

    return -(-vocab // width), width, read, tied, labels - config.shards.first_word(vocab)


def _slab_logits(config: ModelConfig, h, slab, start, i, width, tied):
    """Logits [T, width] in float32 or wider, and which columns are new (the last slab overlaps the one before)."""
    acc = jnp.promote_types(h.dtype, jnp.float32)
    dims = (((1,), (1 if tied else 0,)), ((), ()))
    products = lax.dot_general(h, slab.astype(h.dtype), dims, preferred_element_type=acc)
    return softcap(products, config.final_logit_softcapping), start + jnp.arange(width) >= i * width


def token_logprobs(
    params: Params, config: ModelConfig, x: Array, labels: Array, temperature: float = 1.0
) -> tuple[Array, Array, HeadSaved]:
    """Args: x [T, D], the residual stream after the last block (before the final norm); labels int32 [T].

    Returns: log-probs of the labels and entropies (nats) of the tempered distribution, [T], float32 or wider, and what
    `token_logprobs_backward` needs.

    Raises: ValueError for arrays of other shapes or kinds.
    """
    given = {"x": (x, "T D", float), "labels": (labels, "T", int)}
    check_arrays("model.token_logprobs", given, {"D": (config.hidden_size, "the config")})
    h = rms_norm(config, x, params["norm"])
    count, width, read, tied, own = _slabs(params, config, x.shape[0], labels)
    acc = jnp.promote_types(x.dtype, jnp.float32)

    def step(i, carry):
        top, total, weighted, label_logit = carry
        slab, start = read(i)
        logits, new_columns = _slab_logits(config, h, slab, start, i, width, tied)
        logits = jnp.where(new_columns, logits / temperature, -jnp.inf)
        new = jnp.maximum(top, logits.max(-1))
        shifted = logits - new[:, None]
        p = jnp.exp(shifted)
        scale = jnp.exp(top - new)
        # Σ p · (logit - top), for the entropy; a first step's top of -inf has total 0.
        moved = jnp.where(total == 0, 0.0, scale * (weighted + total * (top - new)))
        weighted = moved + jnp.sum(jnp.where(p > 0, p * shifted, 0.0), -1)
        at = own - start
        here = (at >= 0) & (at < width) & (own >= i * width)
        picked = jnp.take_along_axis(logits, jnp.clip(at, 0, width - 1)[:, None], 1)[:, 0]
        return new, total * scale + p.sum(-1), weighted, jnp.where(here, picked, label_logit)

    zeros = jnp.zeros(x.shape[0], acc)
    top, total, weighted, label_logit = lax.fori_loop(0, count, step, (zeros - jnp.inf, zeros, zeros, zeros))
    top, total, weighted, label_logit = _all_words(config, top, total, weighted, label_logit)
    log_total = jnp.log(total)
    lse = top + log_total
    entropies = log_total - weighted / total
    return label_logit - lse, entropies, HeadSaved(h, lse, entropies)


def _all_words(config: ModelConfig, top, total, weighted, label_logit):
    """What `token_logprobs` has of its columns, of all devices' columns."""
    shards = config.shards
    if not shards.vocabulary:
        return top, total, weighted, label_logit
    new = shards.max_vocabulary(top)
    scale = jnp.exp(top - new)
    weighted = scale * (weighted + total * (top - new))
    return new, *shards.sum_vocabulary((scale * total, weighted, label_logit))


def token_logprobs_backward(
    params: Params,
    config: ModelConfig,
    x: Array,
    labels: Array,
    saved: HeadSaved,
    dlogps: Array,
    dentropies: Array,
    grads: Params,
    temperature: float = 1.0,
) -> tuple[Array, Params]:
    """Adds the head's and the final norm's gradients to `grads` in place; returns (dx [T, D], grads).

    With p the tempered distribution and z its logits, d log p_y / dz = onehot(y) - p and dH / dz = -p (log p + H). A
    soft-cap lies between the head's products and z.
    """
    count, width, read, tied, own = _slabs(params, config, x.shape[0], labels)
    name = "embed_tokens" if tied else "lm_head"
    h = saved.h

    def step(i, carry):
        dh, dhead = carry
        slab, start = read(i)
        logits, new_columns = _slab_logits(config, h, slab, start, i, width, tied)
        logp = logits / temperature - saved.lse[:, None]
        p = jnp.where(new_columns, jnp.exp(logp), 0.0)
        onehot = (own[:, None] == start + jnp.arange(width)) & new_columns
        dz = jnp.where(onehot, dlogps[:, None], 0.0) - p * (
            dlogps[:, None] + dentropies[:, None] * (logp + saved.entropies[:, None])
        )
        if config.final_logit_softcapping is not None:
            dz = dz * (1 - (logits / config.final_logit_softcapping) ** 2)  # the derivative of c · tanh(z / c)
        dz = (dz / temperature).astype(h.dtype)
        dh = dh + lax.dot_general(
            dz, slab.astype(h.dtype), (((1,), (0 if tied else 1,)), ((), ())), preferred_element_type=dh.dtype
        )
        a, b = (dz, h) if tied else (h, dz)
        at = lax.platform_dependent(a, cpu=lambda a: lax.optimization_barrier(a.T), default=lambda a: a.T)
        dslab = jnp.dot(at, b, preferred_element_type=dhead.dtype)
        old = lax.dynamic_slice_in_dim(dhead, start, width, 0 if tied else 1)
        return dh, lax.dynamic_update_slice_in_dim(dhead, old + dslab, start, 0 if tied else 1)

    acc = jnp.promote_types(x.dtype, jnp.float32)
    dh, dhead = lax.fori_loop(0, count, step, (jnp.zeros(x.shape, acc), grads[name]))
    dh = config.shards.sum_vocabulary(dh)
    _, vjp = jax.vjp(lambda x, gain: rms_norm(config, x, gain), x, params["norm"])
    dx, dgain = vjp(dh.astype(x.dtype))
    return dx, {**grads, name: dhead, "norm": grads["norm"] + dgain.astype(grads["norm"].dtype)}
