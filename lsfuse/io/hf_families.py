"""What sets the model families of Hugging Face apart, and what transformers assumes where config.json is silent."""

from collections.abc import Mapping
from typing import Any

from lsfuse.io.hf_nemotron import first_block, why_not_table
from lsfuse.io.hf_values import boolean, integer, mapping, texts
from lsfuse.model.config import BlockConfig, ModelConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
MAX_BLOCKS = 10_000
GEMMA = ("gemma2", "gemma3_text")
# Families with one key, attention_bias, for all attention projections.
ATTENTION_BIAS = ("llama", "qwen3", *GEMMA)

_QWEN = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
# Keys that are null in config.json are not silent.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "qwen2": _QWEN,
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen3": {**_QWEN, "head_dim": 128},
    "gemma2": {
        **_GEMMA,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {**_GEMMA, "max_position_embeddings": 131072},
}


def find_family(raw: Mapping[str, Any]) -> str:
    """The `model_type`. Raises ValueError for one, or for an architecture, that is not supported."""
    named = texts(raw, "architectures") or []
    family = raw.get("model_type") or next((f for f, a in ARCHITECTURES.items() if a in named), None)
    if not isinstance(family, str) or family not in ARCHITECTURES:
        supported = ", ".join((*ARCHITECTURES, "nemotron-nas"))
        raise ValueError(f"model_type {family!r} (architectures {named}) is not supported; supported: {supported}")
    if named and ARCHITECTURES[family] not in named:
        raise ValueError(
            f"architecture {', '.join(map(str, named))} is not supported for model_type {family!r}; supported:"
            f" {ARCHITECTURES[family]}"
        )
    return family


def refuse_unsupported(raw: Mapping[str, Any], family: str) -> None:
    """Raises ValueError for keys that would change the computation in a way that is not supported."""
    if quantization := mapping(raw, "quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise ValueError(
            f"the checkpoint is quantised (quant_method {method!r}), which is not supported; use the original"
        )
    if boolean(raw, "rope_interleaved"):
        raise ValueError("rope_interleaved true is not supported; supported: rotary pairs in halves (false)")
    if boolean(raw, "use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention true is not supported; supported: causal attention (false)")
    if family == "gemma3_text" and raw.get("attn_logit_softcapping") is not None:
        raise ValueError(
            f"attn_logit_softcapping {raw['attn_logit_softcapping']} is not supported for model_type 'gemma3_text';"
            " supported: null (transformers ignores it)"
        )


def family_features(family: str, hidden_size: int) -> dict[str, Any]:
    """Fields of ModelConfig that the family fixes and config.json does not mention."""
    gemma = family in GEMMA
    return {
        "qk_norm": family in ("qwen3", "gemma3_text"),
        "post_norms": gemma,
        "norm_offset": 1.0 if gemma else 0.0,
        "embed_scale": hidden_size**0.5 if gemma else 1.0,
    }


def blocks_from_hf(raw: Mapping[str, Any], family: str, kv_heads: int) -> tuple[BlockConfig, ...]:
    """The blocks, from `layer_types` or the family's own keys. raw: with the defaults filled in."""
    count, width = integer(raw, "num_hidden_layers"), integer(raw, "intermediate_size")
    if count > MAX_BLOCKS:  # a block is an object: a damaged number would fill the memory with them
        raise ValueError(f"num_hidden_layers {count} is more than the {MAX_BLOCKS} blocks a model may have")
    window = _window(raw, family)
    local = family == "gemma3_text"
    full = BlockConfig("full", kv_heads, width)
    blocks = []
    for i, kind in enumerate(_layer_types(raw, family, count, window)):
        if kind == "full_attention":
            blocks.append(full)
        elif window is not None:
            blocks.append(BlockConfig("sliding", kv_heads, width, window=window, local_rope=local))
        elif local or family == "gemma2":
            raise ValueError(f"block {i} has sliding_attention, but sliding_window is null; a window is needed")
        else:
            blocks.append(full)  # Qwen's, where use_sliding_window false turns windows off
    return tuple(blocks)


def _window(raw: Mapping[str, Any], family: str) -> int | None:
    if family == "llama" or (family in ("qwen2", "qwen3") and not boolean(raw, "use_sliding_window")):
        return None
    return None if raw.get("sliding_window") is None else integer(raw, "sliding_window")


def _layer_types(raw: Mapping[str, Any], family: str, count: int, window: int | None) -> list[str]:
    if family == "llama":
        expected = ["full_attention"] * count
    elif family == "mistral":
        expected = ["full_attention" if window is None else "sliding_attention"] * count
    elif family in GEMMA:
        pattern = 2 if family == "gemma2" else integer(raw, "sliding_window_pattern", 6)
        expected = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)]
    else:
        first = count if window is None else _first_window(raw, count)
        expected = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    given = texts(raw, "layer_types")
    if given is None:
        return expected
    if family in ("llama", "mistral") and given != expected:
        raise ValueError(
            f"layer_types {', '.join(sorted(set(given)))} are not supported for model_type {family!r} with a window of"
            f" {window}; supported: {expected[0]} in all {count} blocks"
        )
    if unknown := set(given) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"layer_types {', '.join(sorted(unknown))} are not supported; supported: full_attention, sliding_attention"
        )
    if len(given) != count:
        raise ValueError(f"layer_types names {len(given)} blocks, num_hidden_layers is {count}")
    return given


def _first_window(raw: Mapping[str, Any], count: int) -> int:
    """Qwen's `max_window_layers`: the blocks before the first with a window; 0 is all of them with one."""
    return 0 if raw.get("max_window_layers") == 0 else integer(raw, "max_window_layers", count)


def windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The keys about windows, for a model that `why_not_standard` finds nothing about."""
    windows = [block.window for block in config.blocks]
    window = next((w for w in windows if w is not None), None)
    types = ["full_attention" if w is None else "sliding_attention" for w in windows]
    if config.family == "mistral":
        return {"sliding_window": window}
    if config.family in GEMMA:
        return {"sliding_window": window, "layer_types": types}
    if config.family in ("qwen2", "qwen3"):
        if window is None:
            return {"use_sliding_window": False}
        first = next(i for i, w in enumerate(windows) if w is not None)
        return {
            "use_sliding_window": True,
            "sliding_window": window,
            "max_window_layers": first,
            "layer_types": types,
        }
    return {}


def why_not_standard(config: ModelConfig) -> list[str]:
    """Why the model cannot be written as one of its Hugging Face family; empty if it can."""
    first = config.blocks[0].structure
    reasons = first_block(config, lambda b: b.structure != first, "differs from block 0")
    reasons += first_block(config, lambda b: not b.has_attention, "has no attention")
    reasons += first_block(config, lambda b: not b.has_ffn, "has no FFN")
    reasons += why_not_table(config)
    if config.family not in ARCHITECTURES:
        return [*reasons, f"family {config.family!r} is none of {', '.join(ARCHITECTURES)}"]
    return reasons + _unlike_family(config)


def _unlike_family(config: ModelConfig) -> list[str]:
    family, gemma = config.family, config.family in GEMMA
    reasons = []
    if family in ATTENTION_BIAS and config.qkv_bias != config.o_bias:
        reasons.append(f"{family} has biases on all attention projections or none")
    biases = (config.qkv_bias, config.o_bias, config.mlp_bias)
    if family in ("qwen2", "mistral") and biases != (family == "qwen2", False, False):
        reasons.append(f"{family} does not have biases (qkv, o, mlp) {biases}")
    elif family != "llama" and config.mlp_bias:
        reasons.append(f"{family} has no biases in its FFNs")
    if family in ("llama", *GEMMA) and config.hidden_size % config.num_heads:
        reasons.append(f"{family} needs a hidden size that is a multiple of its heads")
    for name, value in family_features(family, config.hidden_size).items():
        if getattr(config, name) != value:
            reasons.append(f"{family} has {name} {value}, not {getattr(config, name)}")
    scalar = config.query_pre_attn_scalar
    if (scalar is not None) != gemma or (scalar is not None and scalar != int(scalar)):
        reasons.append(f"{family} {'has a whole' if gemma else 'has no'} query_pre_attn_scalar, not {scalar}")
    if config.attn_logit_softcapping is not None and family != "gemma2":
        reasons.append(f"{family} has no soft-cap on attention scores")
    if config.final_logit_softcapping is not None and not gemma:
        reasons.append(f"{family} has no soft-cap on logits")
    return reasons + _unlike_windows(config)


def _unlike_windows(config: ModelConfig) -> list[str]:
    family, local = config.family, config.family == "gemma3_text"
    reasons = []
    kinds = {block.attention for block in config.blocks if block.has_attention}
    windows = {block.window for block in config.blocks if block.window is not None}
    if len(windows) > 1:
        one = min(windows)
        what = f"has another sliding window than {one}, which others have; {family} has one for all"
        reasons += first_block(config, lambda b: b.window not in (None, one), what)
    if windows and family == "llama":
        what = "has a sliding window, which llama does not have"
        reasons += first_block(config, lambda b: b.window is not None, what)
    if windows and family == "mistral" and len(kinds) > 1:
        what = "has no sliding window, and others have; mistral has it in all blocks or none"
        reasons += first_block(config, lambda b: b.window is None, what)
    if (config.local_rope_theta is not None) != local:
        reasons.append(f"{family} {'needs' if local else 'has no'} rotary embedding of its own for sliding blocks")
    rule = "rotates sliding blocks, and only those," if local else "does not rotate"
    what = f"has local_rope or lacks it; {family} {rule} locally"
    reasons += first_block(config, lambda b: b.local_rope != (local and b.attention == "sliding"), what)
    return reasons
