"""The block tables of NVIDIA's `nemotron-nas` checkpoints (Puzzle, FFN Fusion): blocks of any width, or without a part.

`block_configs` has one entry a block: "attention" with `n_heads_in_group` (query heads a kv head) or `no_op`, and "ffn"
with `intermediate_size`, or the older `ffn_mult`, or `no_op`. Everything else in config.json is Llama's.
"""

from collections.abc import Callable, Mapping
from typing import Any

from lsfuse.io.hf_values import boolean, integer, mapping, number
from lsfuse.model.config import BlockConfig, ModelConfig

TYPE, ARCHITECTURE = "nemotron-nas", "DeciLMForCausalLM"


def width_of_mult(ffn_mult: float, hidden_size: int) -> int:
    """The FFN width that `ffn_mult` stands for: int(2 · mult · D / 3), rounded up to a multiple of 256."""
    return -(-int(2 * ffn_mult * hidden_size / 3) // 256) * 256


def mult_of_width(width: int, hidden_size: int) -> float | None:
    """A short `ffn_mult` that stands for exactly this width; None for one that 256 does not divide."""
    if width % 256:
        return None
    mult = 1.5 * width / hidden_size
    return next((m for m in (round(mult, 4), round(mult, 8), mult) if width_of_mult(m, hidden_size) == width), None)


def blocks_from_nemotron(raw: Mapping[str, Any], num_heads: int, hidden_size: int) -> tuple[BlockConfig, ...]:
    """The blocks of `block_configs`.

    Raises: ValueError, naming the block, for FFNs replaced by a linear layer, missing sizes, groups that do not divide
    the heads, another number of blocks than num_hidden_layers.
    """
    table = raw.get("block_configs")
    if not isinstance(table, list) or not table:
        raise ValueError(f"block_configs must be a list of blocks for model_type {TYPE!r}, got {type(table).__name__}")
    count = raw.get("num_hidden_layers")
    if count is not None and count != len(table):
        raise ValueError(f"block_configs has {len(table)} blocks, num_hidden_layers is {count}")
    blocks = []
    for i, entry in enumerate(table):
        try:
            blocks.append(_block(mapping({"block": entry}, "block"), num_heads, hidden_size))
        except ValueError as error:
            raise ValueError(f"block_configs[{i}]: {error}") from None
    return tuple(blocks)


def _block(entry: Mapping[str, Any], num_heads: int, hidden_size: int) -> BlockConfig:
    attention, ffn = mapping(entry, "attention"), mapping(entry, "ffn")
    if boolean(ffn, "replace_with_linear"):
        raise ValueError("ffn is replaced by a linear layer, which is not supported")
    kv_heads, width = 0, 0
    linear = boolean(attention, "replace_with_linear")
    if not (boolean(attention, "no_op") or linear):
        group = attention.get("n_heads_in_group")
        if type(group) is not int or group < 1 or num_heads % group:
            raise ValueError(f"n_heads_in_group {group!r} must divide the {num_heads} heads")
        kv_heads = num_heads // group
    if not boolean(ffn, "no_op"):
        size, mult = ffn.get("intermediate_size"), ffn.get("ffn_mult")
        if size is None and mult is None:
            raise ValueError("ffn has neither intermediate_size nor ffn_mult, and is no no_op")
        width = integer(ffn, "intermediate_size", width_of_mult(number(ffn, "ffn_mult", 1.0), hidden_size))
    return BlockConfig("linear_map" if linear else "full" if kv_heads else "none", kv_heads or 1, width)


def blocks_to_nemotron(config: ModelConfig) -> list[dict[str, Any]]:
    """`block_configs` of a model that `why_not_nemotron` finds nothing about; explicit widths, and `ffn_mult` where it
    stands for the same one."""
    table = []
    for block in config.blocks:
        attention: dict[str, Any] = {"no_op": not block.has_mixer, "replace_with_linear": block.has_linear_map}
        attention["n_heads_in_group"] = config.num_heads // block.num_kv_heads if block.has_attention else None
        ffn: dict[str, Any] = {"no_op": not block.has_ffn, "replace_with_linear": False}
        ffn["intermediate_size"] = block.ffn_width or None
        mult = mult_of_width(block.ffn_width, config.hidden_size) if block.has_ffn else None
        if mult is not None:  # null is no width, and a reader that takes ffn_mult first would stumble over it
            ffn["ffn_mult"] = mult
        table.append({"attention": attention, "ffn": ffn})
    return table


def first_block(config: ModelConfig, has: Callable[[BlockConfig], bool], what: str) -> list[str]:
    """A reason that names the first block that is so, and says how many more there are; none if there is none."""
    found = [i for i, block in enumerate(config.blocks) if has(block)]
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return [f"block {found[0]} {what}{more}"] if found else []


def why_not_table(config: ModelConfig) -> list[str]:
    """What no format but our own has: whatever runs in parallel, plain FFNs."""
    return [
        *first_block(config, lambda b: b.ffn != "gated", "has an FFN that is not gated"),
        *first_block(config, lambda b: b.parallel, "runs attention and FFN in parallel"),
        *first_block(config, lambda b: b.beside, "runs in parallel with the one before it"),
    ]


def why_not_nemotron(config: ModelConfig) -> list[str]:
    """Why the model cannot be written as nemotron-nas; empty if it can."""
    reasons = why_not_table(config)
    biased = config.qkv_bias or config.o_bias
    reasons += first_block(config, lambda b: b.has_linear_map and biased, "has a linear map with a bias for attention")
    reasons += first_block(config, lambda b: b.window is not None, "has a sliding window")
    if config.qkv_bias != config.o_bias:
        reasons.append("nemotron-nas has biases on all attention projections or none")
    if config.qk_norm or config.post_norms or config.norm_offset:
        reasons.append("nemotron-nas has no q/k norms, post-norms or norm offsets")
    if config.embed_scale != 1 or config.query_pre_attn_scalar is not None or config.local_rope_theta is not None:
        reasons.append("nemotron-nas has no embedding scale, attention scale or second rotary base")
    if config.attn_logit_softcapping is not None or config.final_logit_softcapping is not None:
        reasons.append("nemotron-nas has no soft-caps")
    return reasons
