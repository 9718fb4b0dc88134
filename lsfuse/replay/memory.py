"""Whether the prompt's activations fit: bytes from formulas, decided once, before a run."""

import os

import jax
import jax.numpy as jnp

from lsfuse.model.blocks import saved_names
from lsfuse.model.config import ModelConfig
from lsfuse.model.layers import ffn_boundaries
from lsfuse.replay.geometry import Geometry, Options, make_geometry


def state_bytes_per_token(model: ModelConfig, dtype) -> int:
    """Bytes of K and V of one prefix token over all blocks with attention."""
    heads = sum(block.num_kv_heads for block in model.blocks if block.has_attention)
    return 2 * heads * model.head_dim * jnp.dtype(dtype).itemsize


def kept_bytes_per_token(model: ModelConfig, policy: str, dtype, *, with_kv: bool = False) -> int:
    """Bytes of what `policy` keeps of one prefix token; `with_kv`: of one tail token, which runs all blocks."""
    item, wide = jnp.dtype(dtype).itemsize, jnp.promote_types(dtype, jnp.float32).itemsize
    names = saved_names(policy)
    blocks = model.blocks if with_kv else model.blocks[: max(model.last_attention_block, 0)]
    total = model.hidden_size * item
    for block in blocks:
        width = {"x": model.hidden_size}
        if block.has_attention:
            width |= {"q": model.num_heads * model.head_dim, "o": model.num_heads * model.head_dim}
            total += model.num_heads * wide * ("lse" in names)
            if with_kv:
                width |= dict.fromkeys("kv", block.num_kv_heads * model.head_dim)
        if block.has_mixer:
            width["mid"] = model.hidden_size
            if model.post_norms:
                width["attended"] = model.hidden_size
        if block.has_ffn:
            width |= dict.fromkeys(ffn_boundaries(block), block.ffn_width)
            if model.post_norms:
                width["fed"] = model.hidden_size
        total += item * sum(n for name, n in width.items() if name == "x" or name in names)
    return total


def kept_bytes(model: ModelConfig, policy: str, geometry: Geometry, dtype) -> int:
    """Bytes that prefix_activations="keep" adds over "recompute", for one group."""
    return geometry.cotangent * kept_bytes_per_token(model, policy, dtype)


def default_memory_budget() -> int:
    """Half of the device's memory in bytes; on a CPU, half of the host's."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return (limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // 2


def resolve_prefix_activations(model: ModelConfig, options: Options, geometry: Geometry, dtype) -> str:
    """ "keep" or "recompute" for `options`; "auto" keeps if the kept activations fit into the memory budget."""
    if options.prefix_activations != "auto":
        return options.prefix_activations
    budget = default_memory_budget() if options.memory_budget is None else options.memory_budget
    return "keep" if kept_bytes(model, options.remat_policy, geometry, dtype) <= budget else "recompute"


def choose_prefix_activations(
    model: ModelConfig, options: Options, prompt: int, branches: int, response: int, dtype
) -> str:
    """`resolve_prefix_activations` from padded sizes; a run calls it once and stores the answer."""
    return resolve_prefix_activations(model, options, make_geometry(options, prompt, branches, response), dtype)
