"""Rotary embedding in config.json: the older `rope_theta` + `rope_scaling`, and the newer `rope_parameters`."""

import math
from collections.abc import Mapping
from typing import Any

from lsfuse.io.hf_values import boolean, integer, mapping, number, optional_number
from lsfuse.model.config import RopeScaling

Rope = tuple[float, RopeScaling | None]

_ORIGINAL = "original_max_position_embeddings"
_LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_from_hf(raw: Mapping[str, Any], length: int) -> Rope:
    """(theta, scaling) of a model with one rotary embedding for all blocks; length: `max_position_embeddings`.

    As in transformers the dict that is not null counts, and what it says of theta goes before the key beside it.
    """
    rope = _merged(raw, mapping(raw, "rope_parameters"))
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"rope parameters per layer type ({', '.join(rope)}) are not supported, only one set for all")
    return number({**raw, **rope}, "rope_theta", 10000.0), _scaling(raw, rope, length)


def layered_rope_from_hf(raw: Mapping[str, Any], length: int) -> tuple[Rope, Rope]:
    """Gemma 3's two: of its full and of its sliding blocks. The older spelling rescales the former alone."""
    newer = mapping(raw, "rope_parameters")
    if unknown := sorted(newer.keys() - set(_LAYER_TYPES)):
        raise ValueError(
            f"rope_parameters of this model are by layer type ({', '.join(_LAYER_TYPES)}); {', '.join(unknown)} is not"
            " supported beside them"
        )
    full = _merged(raw, mapping(newer, "full_attention"))
    local = mapping(newer, "sliding_attention")
    theta = number({**raw, **full}, "rope_theta", 1_000_000.0)
    local_theta = number({"rope_theta": raw.get("rope_local_base_freq"), **local}, "rope_theta", 10_000.0)
    return (theta, _scaling(raw, full, length)), (local_theta, _scaling({}, local, length))


def _merged(raw: Mapping[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    older = mapping(raw, "rope_scaling")
    for rope in (older, newer):  # of two kinds in two spellings, neither may win unseen
        if "type" in rope:
            rope.setdefault("rope_type", rope["type"])
    differ = [k for k in older.keys() & newer.keys() if older[k] != newer[k]]
    if differ:
        raise ValueError(f"rope_scaling {older} and rope_parameters {newer} contradict each other; keep one")
    return {**newer, **older}


def _scaling(raw: Mapping[str, Any], rope: Mapping[str, Any], length: int) -> RopeScaling | None:
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {partial} is not supported; supported: 1 (all of head_dim)")
    kind = "default" if rope.get("rope_type") is None else rope["rope_type"]
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", number(rope, "factor"))
    original = integer({_ORIGINAL: raw.get(_ORIGINAL) or rope.get(_ORIGINAL) or length}, _ORIGINAL)
    if kind == "llama3":
        factor, low, high = (number(rope, f) for f in ("factor", "low_freq_factor", "high_freq_factor"))
        return RopeScaling("llama3", factor, low, high, original)
    if kind == "yarn":
        factor = length / original if "factor" in rope and rope["factor"] is None else number(rope, "factor")
        return RopeScaling(
            "yarn",
            factor,
            original_max_position=original,
            beta_fast=number(rope, "beta_fast", 32.0),
            beta_slow=number(rope, "beta_slow", 1.0),
            attention_factor=_attention_factor(rope, factor),
            truncate=boolean(rope, "truncate", True),
        )
    raise ValueError(f"rope type {kind!r} is not supported; supported: default, linear, llama3, yarn")


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    """What is written, or what DeepSeek's two mscale keys make of it; None where the paper's rule applies."""
    written = optional_number(rope, "attention_factor")
    if written is not None or not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return written
    above, below = (0.1 * number(rope, key) * math.log(max(factor, 1.0)) + 1.0 for key in ("mscale", "mscale_all_dim"))
    return above / below


def rope_scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """`rope_scaling`, what differs from transformers' defaults."""
    if scaling is None:
        return None
    raw: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return raw
    raw[_ORIGINAL] = scaling.original_max_position
    if scaling.kind == "llama3":
        return raw | {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    default = RopeScaling("yarn", scaling.factor)
    for name in ("beta_fast", "beta_slow", "attention_factor", "truncate"):
        if getattr(scaling, name) != getattr(default, name):
            raw[name] = getattr(scaling, name)
    return raw


def rope_to_hf(rope: Rope) -> dict[str, Any]:
    """The inverse of `rope_from_hf`, in both spellings: tools read one or the other."""
    scaling = rope_scaling_to_hf(rope[1])
    newer = {"rope_theta": rope[0], **(scaling or {"rope_type": "default"})}
    return {"rope_theta": rope[0], "rope_scaling": scaling, "rope_parameters": newer}


def layered_rope_to_hf(full: Rope, local: Rope) -> dict[str, Any]:
    """The inverse of `layered_rope_from_hf`, in both spellings where the older one can say it."""
    parameters = {
        name: {"rope_theta": theta, **(rope_scaling_to_hf(scaling) or {"rope_type": "default"})}
        for name, (theta, scaling) in zip(_LAYER_TYPES, (full, local), strict=True)
    }
    newer = {"rope_parameters": parameters}
    if local[1] is not None:
        return newer
    older = {"rope_theta": full[0], "rope_local_base_freq": local[0], "rope_scaling": rope_scaling_to_hf(full[1])}
    return {**older, **newer}
