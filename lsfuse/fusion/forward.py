"""The forward pass as analysis needs it: every block's output, and restarts in the middle of the stack."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from lsfuse.model.blocks import at_block, block_forward
from lsfuse.model.config import ModelConfig
from lsfuse.model.layers import rms_norm
from lsfuse.model.stream import start_stream, through_block
from lsfuse.model.transformer import block_params, embed, logits, make_tokens
from lsfuse.types import Array, Params

_CHUNK = 128  # tokens whose logits exist at a time


def run_from(
    params: Params, config: ModelConfig, x: Array, lengths: Array, first: Array | int, after: Array | int | None = None
) -> tuple[Array, Array]:
    """Runs blocks `first` … `after` - 1 (None: to the last) on x [B, T, D], with both as data. Neither may part blocks
    that stand beside each other.

    Returns: (x after the last of them, outputs of all blocks [L, B, T, D], 0 for those not run).
    """
    after = config.num_blocks if after is None else after
    tokens = make_tokens(config, 0, x.shape[1], lengths, x.dtype)
    outputs = jnp.zeros((config.num_blocks, *x.shape), x.dtype)
    stream, start = start_stream(config, x), 0
    for r, (block, count) in enumerate(config.runs):

        def body(layer, carry, r=r, block=block, start=start):
            stream, outputs = carry
            here = at_block(config, r, layer, tokens)

            def one(x):
                return block_forward(config, block, block_params(params, config, str(r), layer), x, here, None)

            stream, _ = through_block(config, r, layer, stream, one)
            return stream, lax.dynamic_update_index_in_dim(outputs, stream.x, start + layer, 0)

        stream, outputs = lax.fori_loop(
            jnp.clip(first - start, 0, count), jnp.clip(after - start, 0, count), body, (stream, outputs)
        )
        start += count
    return stream.x, outputs


@functools.partial(jax.jit, static_argnums=0)
def block_outputs(config: ModelConfig, params: Params, ids: Array, lengths: Array) -> Array:
    """[L + 1, B, T, D]: the embedding, and every block's output."""
    x = embed_texts(params, config, ids, lengths)
    return jnp.concatenate([x[None], run_from(params, config, x, lengths, 0)[1]])


def embed_texts(params: Params, config: ModelConfig, ids: Array, lengths: Array) -> Array:
    """[B, T, D]."""
    return embed(params, config, ids, jnp.arange(ids.shape[1]) < lengths[:, None])


def over_chunks(params_list, config_list, hidden_list, fn, *more: Array):
    """fn(logits of each model [C, V], rows of `more`) over tokens, `_CHUNK` of them at a time.

    hidden_list: one [T, D] a model, after the last block. Returns fn's outputs, each [T, …].
    """
    count = hidden_list[0].shape[0]
    size = min(_CHUNK, count)
    pad = -count % size

    def chunks(x):
        return jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, size, *x.shape[1:])

    def one(xs):
        hidden, rest = xs
        out = [
            logits(p, c, rms_norm(c, h, p["norm"]))
            for p, c, h in zip(params_list, config_list, hidden, strict=True)
        ]
        return fn(*out, *rest)

    out = lax.map(one, (tuple(map(chunks, hidden_list)), tuple(map(chunks, more))))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], out)


def token_measures(params_list, config_list, hidden_list, ids: Array) -> dict[str, Array]:
    """Of a child, and of its parent if there are two models, [B · T] each: "nll0" (and "nll1") of the next token
    (meaningless at a row's last); of two "kl", KL(parent ‖ child) in nats, and "top1", whether both find the same token
    likeliest. ids: [B, T]; the rest as in `over_chunks`."""

    def measures(*args: Array) -> dict[str, Array]:
        *out, label = args
        nll = [-jnp.take_along_axis(jax.nn.log_softmax(x), label[:, None], 1)[:, 0] for x in out]
        found: dict[str, Array] = {f"nll{m}": x for m, x in enumerate(nll)}
        if len(out) == 2:
            found |= {"kl": kl_divergence(out[1], out[0]), "top1": (out[0].argmax(-1) == out[1].argmax(-1)) * 1.0}
        return found

    return over_chunks(params_list, config_list, hidden_list, measures, jnp.roll(ids, -1, 1).reshape(-1))


def kl_divergence(parent: Array, child: Array) -> Array:
    """KL(parent ‖ child) of logits [..., V], in nats."""
    p, q = jax.nn.log_softmax(parent), jax.nn.log_softmax(child)
    return jnp.sum(jnp.exp(p) * (p - q), -1)
