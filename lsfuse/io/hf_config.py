"""config.json of a Hugging Face checkpoint ↔ ModelConfig.

Whatever would change the computation and is not supported raises; keys that change nothing (dropout, initialiser,
cache) are ignored. A model that no family of Hugging Face can express (blocks of unlike width, without attention, …)
is written with model_type "lsfuse" and the whole ModelConfig inside, so that other libraries refuse it instead of
filling in random weights.

How a model came out of another (`ModelConfig.sources`, `transforms`) stands under "lsfuse" in every config.json; other
libraries pass over keys that they do not know.
"""

import dataclasses
import json
import math
import operator
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lsfuse.io import hf_nemotron as nemotron
from lsfuse.io.hf_families import (
    ARCHITECTURES,
    ATTENTION_BIAS,
    DEFAULTS,
    GEMMA,
    blocks_from_hf,
    family_features,
    find_family,
    refuse_unsupported,
    why_not_standard,
    windows_to_hf,
)
from lsfuse.io.hf_rope import layered_rope_from_hf, layered_rope_to_hf, rope_from_hf, rope_to_hf
from lsfuse.io.hf_values import boolean, integer, mapping, number, optional_number, token_ids
from lsfuse.model.config import BlockConfig, ModelConfig, RopeScaling

OWN_TYPE, _OWN_ARCHITECTURE = "lsfuse", "LsfuseForCausalLM"
FORMATS = ("auto", OWN_TYPE, nemotron.TYPE, *ARCHITECTURES)
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
    or activation, quantised weights, and missing or mistyped keys.
    """
    try:
        if raw.get("model_type") == OWN_TYPE:
            return _own(raw)
        return _nemotron(raw) if raw.get("model_type") == nemotron.TYPE else _from_family(raw)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _from_family(raw: Mapping[str, Any]) -> ModelConfig:
    family = find_family(raw)
    defaults = DEFAULTS[family]
    raw = {**defaults, **raw}
    refuse_unsupported(raw, family)
    heads, hidden = integer(raw, "num_attention_heads"), integer(raw, "hidden_size")
    if raw.get("head_dim") is None and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is absent")
    act_key = "hidden_activation" if family in GEMMA else "hidden_act"
    activation = raw.get(act_key, "silu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(f"{act_key} {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    length = integer(raw, "max_position_embeddings", defaults["max_position_embeddings"])
    if family == "gemma3_text":
        rope, (local_theta, local_scaling) = layered_rope_from_hf(raw, length)
    else:
        rope, local_theta, local_scaling = rope_from_hf(raw, length), None, None
    bias = family in ATTENTION_BIAS and boolean(raw, "attention_bias")
    return ModelConfig(
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=hidden,
        num_heads=heads,
        head_dim=integer(raw, "head_dim", hidden // heads),
        blocks=blocks_from_hf(raw, family, integer(raw, "num_key_value_heads", heads)),
        max_position_embeddings=length,
        rope_theta=rope[0],
        rope_scaling=rope[1],
        local_rope_theta=local_theta,
        local_rope_scaling=local_scaling,
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
        hidden_act=_ACTIVATIONS[activation],
        qkv_bias=family == "qwen2" or bias,
        o_bias=bias,
        mlp_bias=family == "llama" and boolean(raw, "mlp_bias"),
        tie_word_embeddings=boolean(raw, "tie_word_embeddings"),
        query_pre_attn_scalar=number(raw, "query_pre_attn_scalar") if family in GEMMA else None,
        attn_logit_softcapping=optional_number(raw, "attn_logit_softcapping") if family in GEMMA else None,
        final_logit_softcapping=optional_number(raw, "final_logit_softcapping") if family in GEMMA else None,
        family=family,
        bos_token_id=next(iter(token_ids(raw.get("bos_token_id"))), None),
        eos_token_ids=token_ids(raw.get("eos_token_id")),
        pad_token_id=next(iter(token_ids(raw.get("pad_token_id"))), None),
        **family_features(family, hidden),
        **_provenance(raw.get(OWN_TYPE)),
    )


def _nemotron(raw: Mapping[str, Any]) -> ModelConfig:
    """Llama's keys, with sizes of a block that stand in for the table's until it takes their place."""
    heads, hidden = integer(raw, "num_attention_heads"), integer(raw, "hidden_size")
    blocks = nemotron.blocks_from_nemotron(raw, heads, hidden)
    like_llama = {**raw, "model_type": "llama", "architectures": [ARCHITECTURES["llama"]]}
    like_llama |= {"intermediate_size": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "layer_types": None}
    history = _provenance(like_llama.pop(OWN_TYPE, None))
    return dataclasses.replace(_from_family(like_llama), blocks=blocks, family=nemotron.TYPE, **history)


def _provenance(history: Any) -> dict[str, Any]:
    """ModelConfig's `sources` and `transforms` from the key "lsfuse" of a config.json, absent by default."""
    shown = repr(history)
    try:
        history = dict(history or {})
        sources = tuple(tuple(operator.index(i) for i in of) for of in history.get("sources") or ())
        return {"sources": sources, "transforms": tuple(map(str, history.get("transforms") or ()))}
    except (TypeError, ValueError):
        raise ValueError(
            "lsfuse must hold sources, a list of block numbers to each block, and transforms, got"
            f" {shown if len(shown) < 200 else shown[:199] + '…'}"
        ) from None


def _own(raw: Mapping[str, Any]) -> ModelConfig:
    fields = mapping(raw, OWN_TYPE)
    known = {f.name for f in dataclasses.fields(ModelConfig)}
    if unknown := sorted(fields.keys() - known):
        raise ValueError(f"model_type 'lsfuse' has fields {', '.join(unknown)}, which this version does not know")
    try:
        named = {f"blocks[{i}]": block for i, block in enumerate(fields["blocks"])}
        blocks = tuple(BlockConfig(**_typed(f"{name}.", BlockConfig, mapping(named, name))) for name in named)
        for key in ("rope_scaling", "local_rope_scaling"):
            scaling = mapping(fields, key)
            fields[key] = RopeScaling(**_typed(f"{key}.", RopeScaling, scaling)) if scaling else None
        given = _typed("", ModelConfig, fields) | {"blocks": blocks, **_provenance(fields)}
        return ModelConfig(**given | {"eos_token_ids": token_ids(fields.get("eos_token_ids", ()))})
    except (TypeError, KeyError) as error:
        raise ValueError(f"model_type 'lsfuse' with fields that do not make a model: {error}") from None


def _typed(where: str, cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values. Raises ValueError, starting with `where`, for one that is not of its field's type, where that is a
    plain one: a length of 1.5 or a flag that is a text would be met far from here."""
    types = typing.get_type_hints(cls)
    for name, value in values.items():
        allowed = set(typing.get_args(types[name]) or (types[name],)) if name in types else set()
        if not allowed or allowed - {int, float, bool, str, type(None)}:
            continue  # no field, which its class says; or one that is checked by itself
        number = type(value) is int and abs(value) < 2**31 or type(value) is float and math.isfinite(value)
        if type(value) not in allowed | ({int} if float in allowed else set()) or (
            isinstance(value, int | float) and not isinstance(value, bool) and not number
        ):
            expected = " or ".join(sorted("null" if t is type(None) else t.__name__ for t in allowed))
            raise ValueError(f"model_type 'lsfuse': {where}{name} must be of type {expected}, got {value!r}")
    return dict(values)


def why_not_family(config: ModelConfig) -> list[str]:
    """Why the model cannot be written as its family; empty if it can."""
    return nemotron.why_not_nemotron(config) if config.family == nemotron.TYPE else why_not_standard(config)


def as_format(config: ModelConfig, format: str) -> ModelConfig:
    """The config as it is read back from that format: of the family that the format names, by its model_type.

    format: "auto" and "lsfuse" leave it as it is. Raises: ValueError for an unknown format, and, naming block and
    reason, for one that cannot express the model.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is unknown; valid: {', '.join(FORMATS)}")
    if format in ("auto", OWN_TYPE):
        return config
    new = dataclasses.replace(config, family=format)
    if reasons := why_not_family(new):
        why = "; ".join(reasons)
        raise ValueError(f'the model cannot be written as {format}: {why}. Format "lsfuse" holds any model')
    return new


def config_to_hf(config: ModelConfig, dtype: str, format: str = "auto") -> dict[str, Any]:
    """Contents of config.json, in the spelling that all versions of transformers read. dtype: the tensors', by name.
    format: as `save_hf`'s. Raises: ValueError as `as_format`.

    A model of family "nemotron-nas" gets a table of blocks, others one width and one number of kv heads for all; what
    its family cannot express is written as "lsfuse". All hold `sources` and `transforms`, where there are any.
    """
    config = as_format(config, format)
    tabled, reasons = config.family == nemotron.TYPE, why_not_family(config)
    if reasons or format == OWN_TYPE:
        own = dataclasses.asdict(config)
        note = {"why_not_standard": reasons, "torch_dtype": dtype}
        return {"architectures": [_OWN_ARCHITECTURE], "model_type": OWN_TYPE, **note, "lsfuse": own}
    block, eos = config.blocks[0], config.eos_token_ids
    raw: dict[str, Any] = {
        "architectures": [nemotron.ARCHITECTURE if tabled else ARCHITECTURES[config.family]],
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
        **rope_to_hf((config.rope_theta, config.rope_scaling)),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": (eos[0] if len(eos) == 1 else list(eos)) if eos else None,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": dtype,
    }
    if config.sources or config.transforms:
        raw[OWN_TYPE] = {"sources": config.sources, "transforms": config.transforms}
    if tabled:
        raw |= {"intermediate_size": None, "num_key_value_heads": None}
        raw["block_configs"] = nemotron.blocks_to_nemotron(config)
    if tabled or config.family in ATTENTION_BIAS:
        raw["attention_bias"] = config.qkv_bias
    if tabled or config.family == "llama":
        raw["mlp_bias"] = config.mlp_bias
    if config.family in GEMMA:
        raw |= {
            "hidden_activation": raw["hidden_act"],
            "query_pre_attn_scalar": int(config.query_pre_attn_scalar or 0),
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
        }
    if config.local_rope_theta is not None:
        local = (config.local_rope_theta, config.local_rope_scaling)
        del raw["rope_theta"], raw["rope_scaling"], raw["rope_parameters"]
        raw |= layered_rope_to_hf((config.rope_theta, config.rope_scaling), local)
    return raw | windows_to_hf(config)
