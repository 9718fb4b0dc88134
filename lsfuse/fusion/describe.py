"""What a model is made of, from its config alone: blocks, parameters, KV bytes, placement over devices; and what a
transform would make of it, without touching a weight."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lsfuse.fusion.tree import Transform
from lsfuse.model.config import BlockConfig, ModelConfig, block_param_shapes
from lsfuse.model.params import abstract_params, count_params
from lsfuse.replay import state_bytes_per_token
from lsfuse.types import Params


@dataclasses.dataclass(frozen=True)
class Stage:
    """Blocks first … last, inclusive, on one device. nbytes: of their weights, with the embedding on the first device
    and the head (a copy of the embedding, if tied) on the last."""

    first: int
    last: int
    nbytes: int


def block_rows(config: ModelConfig, dtype: Any = jnp.bfloat16) -> list[dict[str, Any]]:
    """One record a block: "attention" (kind, kv heads, window), "width" of the FFN, "parameters", "KV bytes" a token in
    `dtype`, "beside" where it runs in parallel with the one before, "sources" where it came from others."""
    item = jnp.dtype(dtype).itemsize
    sources = config.sources or tuple((i,) for i in range(config.num_blocks))
    return [
        {
            "block": i,
            "attention": _attention(block),
            "width": block.ffn_width,
            "parallel": "beside" if block.beside else "parts" if block.parallel else "",
            "parameters": block_parameters(config, block),
            "KV bytes": 2 * block.num_kv_heads * config.head_dim * item if block.has_attention else 0,
            "sources": "-".join(map(str, (of[0], of[-1]) if len(of) > 1 else of)),
        }
        for i, (block, of) in enumerate(zip(config.blocks, sources, strict=True))
    ]


def summarize(config: ModelConfig, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Figures of the whole model. A real block is one that has attention, a linear map or an FFN."""
    widest = max(range(config.num_blocks), key=lambda i: config.blocks[i].ffn_width)
    return {
        "blocks": config.num_blocks,
        "real blocks": sum(block.has_mixer or block.has_ffn for block in config.blocks),
        "attention blocks": sum(block.has_attention for block in config.blocks),
        "linear maps": sum(block.has_linear_map for block in config.blocks),
        "one after the other": sum((b.has_mixer or b.has_ffn) and not b.beside for b in config.blocks),
        "widest block": widest,
        "widest FFN": config.blocks[widest].ffn_width,
        "parameters": count_params(config),
        "bytes": count_params(config) * jnp.dtype(dtype).itemsize,
        "KV bytes per token": state_bytes_per_token(config, dtype),
    }


def check_tensor_parallel(config: ModelConfig, size: int) -> None:
    """Raises ValueError, naming block and width, if `size` devices cannot share heads, FFN channels or vocabulary
    evenly. Kv heads may also be fewer, each then on size / kv heads devices."""
    for name, count in (("num_heads", config.num_heads), ("vocab_size", config.vocab_size)):
        if count % size:
            raise ValueError(f"{name} {count:,} is no multiple of {size} tensor-parallel devices")
    for i, block in enumerate(config.blocks):
        if block.ffn_width % size:
            below = block.ffn_width // size * size
            raise ValueError(
                f"block {i}: FFN width {block.ffn_width:,} is no multiple of {size} tensor-parallel devices; prune_ffn"
                f" to {below:,} channels, or fuse other spans"
            )
        if block.has_attention and block.num_kv_heads % size and size % block.num_kv_heads:
            raise ValueError(f"block {i}: {block.num_kv_heads} kv heads on {size} tensor-parallel devices")


def block_parameters(config: ModelConfig, block: BlockConfig) -> int:
    return sum(math.prod(shape) for shape in block_param_shapes(config, block).values())


def place(config: ModelConfig, devices: int, dtype: Any = jnp.bfloat16) -> list[Stage]:
    """Consecutive blocks for each device, so that the fullest device holds as few bytes as it can.

    Raises: ValueError for fewer blocks than devices.
    """
    if not 1 <= devices <= config.num_blocks:
        raise ValueError(f"{devices} devices for {config.num_blocks} blocks; every device needs one, and there is one")
    item = jnp.dtype(dtype).itemsize
    sizes = [block_parameters(config, block) * item for block in config.blocks]
    embedding = config.vocab_size * config.hidden_size * item
    sizes[0] += embedding
    tied_here = config.tie_word_embeddings and devices == 1
    sizes[-1] += config.hidden_size * item + (0 if tied_here else embedding)
    ends = balance(sizes, devices)
    starts = [0, *(end + 1 for end in ends[:-1])]
    return [Stage(a, b, sum(sizes[a : b + 1])) for a, b in zip(starts, ends, strict=True)]


def balance(sizes: Sequence[int], parts: int) -> list[int]:
    """Last index of each of `parts` consecutive, non-empty parts of which the largest is as small as possible: by
    bisection over that largest sum, whole numbers throughout."""

    def fill(limit: int) -> list[int] | None:
        ends: list[int] = []
        total = 0
        for i, size in enumerate(sizes):
            left = parts - len(ends) - 1  # parts that must still get something
            if i and (total + size > limit or len(sizes) - i <= left) and len(ends) < parts - 1:
                ends.append(i - 1)
                total = 0
            total += size
            if total > limit:
                return None
        return [*ends, len(sizes) - 1]

    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fill(middle) is not None else (middle + 1, high)
    found = fill(low)
    assert found is not None
    return found


def on_shapes(transform: Transform, config: ModelConfig, params: Params | None = None) -> tuple[ModelConfig, Params]:
    """What a transform makes of a model, as config and shapes; params: arrays or shapes, bfloat16 by default.

    Raises what the transform raises. What a transform reads besides the model (importances) is read.
    """
    found: list[ModelConfig] = []

    def run(params):
        config_after, after = transform(config, params)
        found.append(config_after)
        return after

    shapes = jax.eval_shape(run, abstract_params(config, jnp.bfloat16) if params is None else params)
    return found[-1], shapes


def dry_run(transform: Transform, config: ModelConfig, params: Params | None = None) -> str:
    """Text for people: blocks and figures before and after a transform. No weight is touched."""
    after, shapes = on_shapes(transform, config, params)
    dtype = (abstract_params(config, jnp.bfloat16) if params is None else params)["embed_tokens"].dtype
    lines = [f"{'':<22}{'before':>16}{'after':>16}"]
    old, new = summarize(config, dtype), summarize(after, dtype)
    if any(jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in jax.tree.leaves(shapes)):  # quantised
        new["bytes"] = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    lines += [f"{name:<22}{old[name]:>16,}{new[name]:>16,}" for name in old]
    return "\n".join([*lines, "", "before", format_blocks(config, dtype), "", "after", format_blocks(after, dtype)])


def format_blocks(config: ModelConfig, dtype: Any = jnp.bfloat16) -> str:
    """A table of blocks, alike neighbours in one line."""
    rows = block_rows(config, dtype)
    columns = ("attention", "width", "parallel", "parameters", "KV bytes")
    head = f"{'blocks':>9}  {'attention':<18}{'FFN width':>10} {'parallel':<8}{'parameters':>15}"
    lines = [f"{head}{'KV bytes/token':>16}"]
    plain = all(row["sources"] == str(row["block"]) for row in rows)
    for _, same in itertools.groupby(rows, lambda row: [row[c] for c in columns]):
        group = list(same)
        first, last, row = group[0]["block"], group[-1]["block"], group[0]
        where = str(first) if first == last else f"{first}-{last}"
        made_of = "" if plain else f"  of {', '.join(r['sources'] for r in group)}"
        lines.append(
            f"{where:>9}  {row['attention']:<18}{row['width']:>10,} {row['parallel']:<8}{row['parameters']:>15,}"
            f"{row['KV bytes']:>16,}{made_of}"
        )
    return "\n".join(lines)


def _attention(block: BlockConfig) -> str:
    if not block.has_attention:
        return "linear map" if block.has_linear_map else "none"
    return f"{block.num_kv_heads} kv heads" + (f", {block.window}" if block.window else "")
