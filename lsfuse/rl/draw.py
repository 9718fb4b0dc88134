"""The next token of every row from its logits: temperature, nucleus, and a draw with the row's own key."""

import jax
import jax.numpy as jnp
from jax import lax

from lsfuse.types import Array


def draw_tokens(logits: Array, keys: Array, temperature: float, top_p: float) -> tuple[Array, Array]:
    """Args:
      logits: [rows, V], float32 or wider. keys: one PRNG key per row.
      temperature: divides the logits; 0 takes the likeliest token (the first of equals).
      top_p: draws from the nucleus only; 1 draws from all tokens.

    Returns: (tokens int32 [rows], log-probs [rows]). The log-probs are those of the tempered distribution over the
    whole vocabulary, at temperature 1 if `temperature` is 0, and are not renormalised over the nucleus: they are what a
    scoring pass at the same temperature gives.
    """
    logps: Array = jax.nn.log_softmax(logits / temperature if temperature > 0 else logits)
    if temperature == 0:
        tokens: Array = jnp.argmax(logits, -1)
    else:
        allowed = jnp.where(nucleus(jnp.exp(logps), top_p), logps, -jnp.inf) if top_p < 1 else logps
        tokens = jax.vmap(_categorical)(keys, allowed)
    return tokens.astype(jnp.int32), jnp.take_along_axis(logps, tokens[:, None], 1)[:, 0]


def nucleus(probabilities: Array, top_p: float) -> Array:
    """bool [rows, V]: the fewest tokens of each row [rows, V] whose mass reaches `top_p` (arXiv 1904.09751), never
    none; of equally likely tokens those with the smallest ids.

    The least probability in the nucleus is found by bisection over its bit pattern, which for non-negative floats is
    ordered as they are: exact, and on CPU many times faster than sorting the vocabulary.
    """
    dtype = probabilities.dtype
    bits = jnp.dtype(f"int{8 * dtype.itemsize}")

    def halve(_, bounds):
        low, high = bounds  # mass{p ≥ low} reaches top_p (or low is 0), mass{p ≥ high} does not
        middle = low + (high - low) // 2
        least = lax.bitcast_convert_type(middle, dtype)
        reached = jnp.sum(jnp.where(probabilities >= least, probabilities, 0), -1, keepdims=True) >= top_p
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    shape = (probabilities.shape[0], 1)
    above_one = lax.bitcast_convert_type(jnp.asarray(2.0, dtype), bits)
    bounds = (jnp.zeros(shape, bits), jnp.full(shape, above_one, bits))
    low, _ = lax.fori_loop(0, 8 * dtype.itemsize, halve, bounds)
    least = lax.bitcast_convert_type(low, dtype)
    more, equal = probabilities > least, probabilities == least
    missing = top_p - jnp.sum(jnp.where(more, probabilities, 0), -1, keepdims=True)
    before = jnp.cumsum(equal, -1, dtype=jnp.int32) - 1
    return more | (equal & ((before == 0) | (before * least < missing)))


def _categorical(key: Array, logps: Array) -> Array:
    """An index of logps [V] (not necessarily normalised): first a block of the vocabulary, then a token in it.

    Exact, with about 2 √V random numbers where the usual Gumbel maximum takes V. Tokens of -inf are never drawn.
    """
    vocab = logps.shape[0]
    width = 1 << (vocab.bit_length() // 2)
    blocks = jnp.pad(logps, (0, -vocab % width), constant_values=-jnp.inf).reshape(-1, width)
    outer, inner = jax.random.split(key)
    block = jax.random.categorical(outer, jax.nn.logsumexp(blocks, -1))
    return block * width + jax.random.categorical(inner, blocks[block])
