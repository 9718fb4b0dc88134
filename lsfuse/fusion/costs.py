"""What choices use of limited resources, from configs alone: parameters, KV bytes, sequential blocks, time.

All of it adds up over blocks, as the planner (`solve`) needs it. What no choice changes is not counted: take the
embedding, the final norm and the head off the limits.

    made = fusion.choice_costs(config, choices, fusion.decode_seconds(config, batch, context, bandwidth, flops))
    plan = fusion.solve(made, config.num_blocks, {"parameters": 90e6, "kv_bytes": 20_000, "seconds": 0.004})
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from lsfuse.fusion.describe import block_parameters, on_shapes
from lsfuse.fusion.planner import Choice
from lsfuse.fusion.surgery import cut
from lsfuse.fusion.tree import Transform, check_spans
from lsfuse.model.config import BlockConfig, ModelConfig
from lsfuse.replay.cost import block_flops

Seconds = Callable[[BlockConfig], float]


def choice_costs(
    config: ModelConfig, choices: Sequence[Choice], seconds: Seconds | None = None, dtype: Any = jnp.bfloat16
) -> list[Choice]:
    """The same choices, their `costs` with these entries set:

    "parameters": of the blocks; "kv_bytes": a token, in `dtype`; "depth": blocks that run one after the other, so
    neither empty ones nor those beside another; "seconds": with `seconds`, its sum over the blocks, beside or not.

    seconds: of one block, by a model (`decode_seconds`) or as measured (`measured_seconds`).

    Every transform runs on shapes. Raises: ValueError for a span out of range, and what a transform raises.
    """
    found = []
    for choice in choices:
        first, last = check_spans(f"choice_costs: choice {choice.name!r}", [(choice.first, choice.last)], config)[0]
        blocks = config.blocks[first : last + 1]
        if choice.transform is not None:
            blocks = _made(config, choice.transform, first, last)
        costs = {
            "parameters": float(sum(block_parameters(config, block) for block in blocks)),
            "kv_bytes": float(sum(kv_bytes(config, block, dtype) for block in blocks)),
            "depth": float(sum((b.has_mixer or b.has_ffn) and not b.beside for b in blocks)),
        }
        if seconds is not None:
            costs["seconds"] = float(sum(seconds(block) for block in blocks))
        found.append(dataclasses.replace(choice, costs={**choice.costs, **costs}))
    return found


def _made(config: ModelConfig, transform: Transform, first: int, last: int) -> tuple[BlockConfig, ...]:
    return on_shapes(lambda config, params: transform(*cut(config, params, first, last)), config)[0].blocks


def kv_bytes(config: ModelConfig, block: BlockConfig, dtype: Any = jnp.bfloat16) -> int:
    """Bytes of a block's keys and values for one token."""
    return 2 * block.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize if block.has_attention else 0


def decode_seconds(
    config: ModelConfig, batch: int, context: int, bandwidth: float, flops: float, dtype: Any = jnp.bfloat16
) -> Seconds:
    """The roofline time of a block in one decoding step: max(bytes / bandwidth, FLOPs / flops).

    Bytes: the block's weights once, and for each of `batch` sequences the keys and values of `context` tokens (of
    `window`, where that is less), all in `dtype`. FLOPs: 2 a weight of a product and sequence, 4 a head dimension and
    key for scores and values. No launch or collective is counted; where they matter, measure (`measured_seconds`).

    bandwidth: bytes a second; flops: FLOPs a second. Raises: ValueError for sizes or rates that are not positive.
    """
    for name, value in {"batch": batch, "context": context, "bandwidth": bandwidth, "flops": flops}.items():
        if not value > 0:
            raise ValueError(f"decode_seconds: {name} must be positive, got {value}")

    def seconds(block: BlockConfig) -> float:
        keys = min(context, block.window or context) if block.has_attention else 0
        moved = block_parameters(config, block) * jnp.dtype(dtype).itemsize
        moved += batch * keys * kv_bytes(config, block, dtype)
        work = batch * (block_flops(config, block) + 4 * config.num_heads * config.head_dim * keys)
        return max(moved / bandwidth, work / flops)

    return seconds


def measured_seconds(times: Mapping[BlockConfig, float]) -> Seconds:
    """Times by block, whatever a block stands beside; an empty block takes none.

    Raises: ValueError, when a block is asked for that was not measured.
    """
    known = {dataclasses.replace(block, beside=False): time for block, time in times.items()}

    def seconds(block: BlockConfig) -> float:
        if not (block.has_mixer or block.has_ffn):
            return 0.0
        alone = dataclasses.replace(block, beside=False)
        if alone not in known:
            raise ValueError(f"measured_seconds: no time for {alone}; measure it, or leave its choice out")
        return known[alone]

    return seconds
