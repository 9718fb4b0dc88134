"""What a device can do at best, measured: products a second, bytes a second; and what a model asks of it."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from lsfuse.model import ModelConfig
from lsfuse.replay.cost import block_flops
from lsfuse.types import Params

Probes = dict[str, tuple[Callable[[], object], float]]


def make_probes(dtype=jnp.float32) -> Probes:
    """name -> (what to time, bytes or FLOPs of it): a sum over 256 MiB ("read"), a copy of them ("copy"), and a product
    of 2,048 × 2,048 in `dtype` ("matmul")."""
    long, square = jnp.ones((64, 1 << 20), jnp.float32), jnp.ones((2048, 2048), dtype)
    total, copy, product = jax.jit(jnp.sum), jax.jit(jnp.negative), jax.jit(jnp.matmul)
    return {
        "read": (lambda: jax.block_until_ready(total(long)), float(long.nbytes)),
        "copy": (lambda: jax.block_until_ready(copy(long)), 2.0 * long.nbytes),
        "matmul": (lambda: jax.block_until_ready(product(square, square)), 2.0 * 2048**3),
    }


def roofline_seconds(nbytes: float, flops: float, rates: Mapping[str, float]) -> float:
    """The least time on a device of these rates, as `make_probes` measures them: whichever takes longer, moving or
    multiplying. Bytes a second are those of reading or of copying, whichever are more."""
    return max(nbytes / max(rates["read"], rates["copy"]), flops / rates["matmul"])


def weight_bytes(params: Params) -> float:
    """What a step reads of the parameters: all but the embedding, of which it reads a few rows, unless that is the head
    too."""
    unread = params["embed_tokens"].nbytes if "lm_head" in params else 0
    return float(sum(x.nbytes for x in jax.tree.leaves(params)) - unread)


def linear_flops(model: ModelConfig) -> float:
    """FLOPs a token in the blocks' products with weights."""
    return float(sum(block_flops(model, block) for block in model.blocks))


def head_flops(model: ModelConfig) -> float:
    """FLOPs a token whose logits are wanted."""
    return 2.0 * model.hidden_size * model.vocab_size


def pair_flops(model: ModelConfig) -> float:
    """FLOPs of all attentions for one query on one key: a product each for the score and for the value."""
    return 4.0 * model.num_heads * model.head_dim * sum(block.has_attention for block in model.blocks)
