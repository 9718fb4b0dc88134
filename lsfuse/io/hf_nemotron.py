"""The block tables of NVIDIA's `nemotron-nas` checkpoints (Puzzle, FFN Fusion): blocks of any width, or without a part.

`block_configs` has one entry a block: "attention" with `n_heads_in_group` (query heads a kv head) or `no_op`, and "ffn"
with `intermediate_size`, or the older `ffn_mult`, or `no_op`. Everything else in config.json is Llama's.
"""

from collections.abc import Mapping
from typing import Any

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
        attention, ffn = dict(entry.get("attention") or {}), dict(entry.get("ffn") or {})
        if ffn.get("replace_with_linear"):
            raise ValueError(f"block_configs[{i}]: ffn is replaced by a linear layer, which is not supported")
        kv_heads, width = 0, 0
        linear = bool(attention.get("replace_with_linear"))
        if not (attention.get("no_op") or linear):
            group = attention.get("n_heads_in_group")
            if not isinstance(group, int) or group < 1 or num_heads % group:
                raise ValueError(f"block_configs[{i}]: n_heads_in_group {group!r} must divide the {num_heads} heads")
            kv_heads = num_heads // group
        if not ffn.get("no_op"):
            size, mult = ffn.get("intermediate_size"), ffn.get("ffn_mult")
            if size is None and mult is None:
                raise ValueError(f"block_configs[{i}]: ffn has neither intermediate_size nor ffn_mult, and is no no_op")
            width = int(size) if size is not None else width_of_mult(float(mult or 0), hidden_size)
            if width < 1:
                raise ValueError(f"block_configs[{i}]: FFN width {width} must be at least 1")
        kind = "linear_map" if linear else "full" if kv_heads else "none"
        blocks.append(BlockConfig(kind, kv_heads or 1, width))
    return tuple(blocks)


def blocks_to_nemotron(config: ModelConfig) -> list[dict[str, Any]]:
    """`block_configs` of a model that `why_not_nemotron` finds nothing about; explicit widths, and `ffn_mult` where it
    stands for the same one."""
    table = []
    for block in config.blocks:
        attention: dict[str, Any] = {"no_op": not block.has_mixer, "replace_with_linear": block.has_linear_map}
        attention["n_heads_in_group"] = config.num_heads // block.num_kv_heads if block.has_attention else None
        ffn: dict[str, Any] = {"no_op": not block.has_ffn, "replace_with_linear": False}
        ffn["intermediate_size"] = block.ffn_width or None
        ffn["ffn_mult"] = mult_of_width(block.ffn_width, config.hidden_size) if block.has_ffn else None
        table.append({"attention": attention, "ffn": ffn})
    return table


def why_not_nemotron(config: ModelConfig) -> list[str]:
    """Why the model cannot be written as nemotron-nas; empty if it can."""
    reasons = []
    if any(b.parallel for b in config.blocks):
        reasons.append("attention and FFN of a block run in parallel")
    if any(b.beside for b in config.blocks):
        reasons.append("blocks run in parallel")
    if any(b.has_linear_map for b in config.blocks) and (config.qkv_bias or config.o_bias):
        reasons.append("a linear map in place of attention has a bias")
    if any(b.window is not None for b in config.blocks):
        reasons.append("a block has a sliding window")
    if any(b.ffn != "gated" for b in config.blocks):
        reasons.append("a block's FFN is not gated")
    if config.qkv_bias != config.o_bias:
        reasons.append("nemotron-nas has biases on all attention projections or none")
    if config.qk_norm or config.post_norms or config.norm_offset:
        reasons.append("nemotron-nas has no q/k norms, post-norms or norm offsets")
    if config.embed_scale != 1 or config.query_pre_attn_scalar is not None or config.local_rope_theta is not None:
        reasons.append("nemotron-nas has no embedding scale, attention scale or second rotary base")
    if config.attn_logit_softcapping is not None or config.final_logit_softcapping is not None:
        reasons.append("nemotron-nas has no soft-caps")
    return reasons
