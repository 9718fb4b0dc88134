"""config.json of a Hugging Face checkpoint ↔ ModelConfig.

Whatever would change the computation and is not supported raises; keys that change nothing (dropout, initialiser,
cache) are ignored. A model that no family of Hugging Face can express (blocks of unlike width, without attention, …)
is written with model_type "lsfuse" and the whole ModelConfig inside, so that other libraries refuse it instead of
filling in random weights.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lsfuse.model.config import BlockConfig, ModelConfig, RopeScaling, uniform_blocks

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "mistral": "MistralForCausalLM"}
OWN_TYPE, _OWN_ARCHITECTURE = "lsfuse", "LsfuseForCausalLM"
# What transformers assumes where config.json is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "qwen2": {"max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None},
    "mistral": {"max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_id": 2},
}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_EXPORTED_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError, naming the file, if it is not one."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds a JSON {type(raw).__name__}, an object is expected")
    return raw


def read_config(folder: Path) -> ModelConfig:
    """ModelConfig of `folder`/config.json. Raises FileNotFoundError if it is absent, else as `config_from_hf`."""
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; a Hugging Face checkpoint has config.json beside its tensors")
    return config_from_hf(read_json(file), str(file))


def config_from_hf(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """ModelConfig from the contents of a config.json.

    Raises ValueError, naming `source`, the key, its value and what is supported, for an unknown architecture, rope type
    or activation, an enabled sliding window, quantised weights, and missing or mistyped keys.
    """
    try:
        return _own(raw) if raw.get("model_type") == OWN_TYPE else _from_family(raw)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _from_family(raw: Mapping[str, Any]) -> ModelConfig:
    family = _family(raw)
    _refuse_unsupported(raw, family)
    heads, hidden = _integer(raw, "num_attention_heads"), _integer(raw, "hidden_size")
    if raw.get("head_dim") is None and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is absent")
    activation = raw.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    length = _integer(raw, "max_position_embeddings", _DEFAULTS[family]["max_position_embeddings"])
    theta, scaling = _rope(raw, length)
    bias = bool(raw.get("attention_bias", False)) if family == "llama" else False
    defaults = _DEFAULTS[family]
    return ModelConfig(
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden,
        num_heads=heads,
        head_dim=_integer(raw, "head_dim", hidden // heads),
        blocks=uniform_blocks(
            _integer(raw, "num_hidden_layers"),
            _integer(raw, "num_key_value_heads", heads),
            _integer(raw, "intermediate_size"),
        ),
        max_position_embeddings=length,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        hidden_act=_ACTIVATIONS[activation],
        qkv_bias=family == "qwen2" or bias,
        o_bias=bias,
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        family=family,
        bos_token_id=next(iter(token_ids(raw.get("bos_token_id", defaults["bos_token_id"]))), None),
        eos_token_ids=token_ids(raw.get("eos_token_id", defaults["eos_token_id"])),
        pad_token_id=next(iter(token_ids(raw.get("pad_token_id"))), None),
    )


def _family(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or []
    family = raw.get("model_type") or next((f for f, a in ARCHITECTURES.items() if a in named), None)
    if family not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ValueError(f"model_type {family!r} (architectures {named}) is not supported; supported: {supported}")
    if named and ARCHITECTURES[family] not in named:
        raise ValueError(
            f"architecture {', '.join(map(str, named))} is not supported for model_type {family!r}; supported:"
            f" {ARCHITECTURES[family]}"
        )
    return family


def _refuse_unsupported(raw: Mapping[str, Any], family: str) -> None:
    if raw.get("quantization_config"):
        method = dict(raw["quantization_config"]).get("quant_method", "unknown")
        raise ValueError(
            f"the checkpoint is quantised (quant_method {method!r}), which is not supported; use the original"
        )
    if raw.get("rope_interleaved"):
        raise ValueError("rope_interleaved true is not supported; supported: rotary pairs in halves (false)")
    window = raw.get("sliding_window", 4096)
    slides = window is not None
    if family == "qwen2":
        first = 28 if raw.get("max_window_layers") is None else raw["max_window_layers"]
        slides = slides and bool(raw.get("use_sliding_window", False)) and first < _integer(raw, "num_hidden_layers")
    if family != "llama" and slides:
        key = "use_sliding_window true" if family == "qwen2" else "sliding_window"
        raise ValueError(
            f"sliding-window attention ({key}, window {window}) is not supported, only full attention; read as full"
            " attention it would be another model beyond the window"
        )
    kinds = set(raw.get("layer_types") or ()) - {"full_attention"}
    if family == "qwen2":
        kinds -= {"sliding_attention"}  # without an enabled window, full attention
    if kinds:
        raise ValueError(
            f"layer_types {', '.join(sorted(map(str, kinds)))} are not supported; supported: full_attention"
        )


def _rope(raw: Mapping[str, Any], length: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_scaling` + `rope_theta` or from the newer `rope_parameters`; as in transformers the
    dict that is not null counts, and what it says of theta goes before the key beside it."""
    older, newer = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    if older and newer:
        differ = [k for k in older.keys() & newer.keys() if older[k] != newer[k]]
        if differ:
            raise ValueError(f"rope_scaling {older} and rope_parameters {newer} contradict each other; keep one")
    rope = {**newer, **older}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"rope parameters per layer type ({', '.join(rope)}) are not supported, only one set for all")
    theta = _number({**raw, **rope}, "rope_theta", 10000.0)
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {partial} is not supported; supported: 1 (all of head_dim)")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", _number(rope, "factor"))
    if kind == "llama3":
        key = "original_max_position_embeddings"
        original = _integer({key: raw.get(key) or rope.get(key) or length}, key)
        factor, low, high = (_number(rope, f) for f in ("factor", "low_freq_factor", "high_freq_factor"))
        return theta, RopeScaling("llama3", factor, low, high, original)
    raise ValueError(f"rope type {kind!r} is not supported; supported: default, linear, llama3")


def token_ids(value: Any) -> tuple[int, ...]:
    """An id, a list of ids or null as a tuple; negative ids (older configs' "none") are left out."""
    ids = value if isinstance(value, (list, tuple)) else [value]
    for i in ids:
        if i is not None and (isinstance(i, bool) or not isinstance(i, int)):
            raise ValueError(f"token id {i!r} is not an integer")
    return tuple(i for i in ids if i is not None and i >= 0)


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{key} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
        raise ValueError(f"{key} must be an integer of at least 1, got {value!r}")
    return int(value)


def _number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key, default)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(
            f"{key} must be a positive number, got {value!r}" if value is not None else f"{key} is missing"
        )
    return float(value)


def _own(raw: Mapping[str, Any]) -> ModelConfig:
    fields = dict(raw.get("lsfuse") or {})
    known = {f.name for f in dataclasses.fields(ModelConfig)}
    if unknown := sorted(fields.keys() - known):
        raise ValueError(f"model_type 'lsfuse' has fields {', '.join(unknown)}, which this version does not know")
    try:
        fields["blocks"] = tuple(BlockConfig(**block) for block in fields["blocks"])
        fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"]) if fields.get("rope_scaling") else None
        fields["eos_token_ids"] = tuple(fields.get("eos_token_ids", ()))
        fields["sources"] = tuple(tuple(s) for s in fields.get("sources", ()))
        fields["transforms"] = tuple(fields.get("transforms", ()))
        return ModelConfig(**fields)
    except (TypeError, KeyError) as error:
        raise ValueError(f"model_type 'lsfuse' with fields that do not make a model: {error}") from None


def why_not_standard(config: ModelConfig) -> list[str]:
    """Why the model cannot be written as one of its Hugging Face family; empty if it can."""
    reasons = []
    if len(set(config.blocks)) > 1:
        reasons.append("blocks differ from each other")
    if any(block.attention != "full" for block in config.blocks):
        reasons.append("a block has no full attention")
    if not all(block.has_ffn for block in config.blocks):
        reasons.append("a block has no FFN")
    if any(block.parallel for block in config.blocks):
        reasons.append("attention and FFN of a block run in parallel")
    biases = (config.qkv_bias, config.o_bias, config.mlp_bias)
    if config.family not in ARCHITECTURES:
        reasons.append(f"family {config.family!r} is none of {', '.join(ARCHITECTURES)}")
    elif config.family == "llama":
        if config.qkv_bias != config.o_bias:
            reasons.append("llama has biases on all attention projections or none")
        if config.hidden_size % config.num_heads:
            reasons.append("llama needs a hidden size that is a multiple of its heads")
    elif biases != (config.family == "qwen2", False, False):
        reasons.append(f"{config.family} does not have biases (qkv, o, mlp) {biases}")
    return reasons


def config_to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Contents of config.json, in the spelling that all versions of transformers read. dtype: the tensors', by name."""
    if reasons := why_not_standard(config):
        own = dataclasses.asdict(config)
        note = {"why_not_standard": reasons, "torch_dtype": dtype}
        return {"architectures": [_OWN_ARCHITECTURE], "model_type": OWN_TYPE, **note, "lsfuse": own}
    block, eos = config.blocks[0], config.eos_token_ids
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": block.ffn_width,
        "num_hidden_layers": config.num_blocks,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": _EXPORTED_ACTIVATIONS[config.hidden_act],
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_to_hf(config.rope_scaling),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": (eos[0] if len(eos) == 1 else list(eos)) if eos else None,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": dtype,
    }
    if config.family == "llama":
        raw |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if config.family == "qwen2":
        raw |= {"use_sliding_window": False}
    if config.family == "mistral":
        raw |= {"sliding_window": None}
    return raw


def _rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    raw: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        raw |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        raw["original_max_position_embeddings"] = scaling.original_max_position
    return raw
