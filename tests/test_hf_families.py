"""What config.json means in each family: windows, soft-caps, both rotary spellings, and what transformers assumes where
it is silent. Needs no tensors; tests/test_hf_golden.py compares values."""

import copy
import json
import math

import pytest
from hf_raw import GEMMA2, GEMMA3, MISTRAL, QWEN2, QWEN3, RAW

from lsfuse.io.hf_config import config_from_hf, config_to_hf
from lsfuse.io.hf_families import ARCHITECTURES
from lsfuse.model import RopeScaling


def windows(config):
    return [block.window for block in config.blocks]


def test_windows_by_every_family_s_own_rule():
    """What transformers makes of each, where config.json is silent too."""
    assert windows(config_from_hf(RAW | MISTRAL)) == [4096] * 3
    assert windows(config_from_hf(RAW | MISTRAL | dict(sliding_window=None))) == [None] * 3
    for family in (QWEN2, QWEN3):
        on = RAW | family | dict(use_sliding_window=True)
        assert windows(config_from_hf(on)) == [None] * 3  # max_window_layers 28
        assert windows(config_from_hf(on | dict(max_window_layers=1, sliding_window=5))) == [None, 5, 5]
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        assert windows(config_from_hf(on | dict(layer_types=kinds))) == [4096, None, 4096]
        assert windows(config_from_hf(RAW | family | dict(layer_types=kinds))) == [None] * 3  # windows are off
    assert windows(config_from_hf(RAW | GEMMA2 | dict(sliding_window=7))) == [7, None, 7]
    deep = RAW | GEMMA3 | dict(num_hidden_layers=7)
    assert windows(config_from_hf(deep)) == [4096] * 5 + [None, 4096]
    assert windows(config_from_hf(deep | dict(sliding_window_pattern=2))) == [4096, None] * 3 + [4096]
    assert [b.local_rope for b in config_from_hf(deep).blocks] == [True] * 5 + [False, True]
    assert len(config_from_hf(deep).runs) == 1


def test_what_transformers_assumes_where_a_gemma_is_silent():
    silent = {key: RAW[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    for family in (GEMMA2, GEMMA3):
        config = config_from_hf(silent | family | dict(num_attention_heads=8))
        assert (config.head_dim, config.blocks[0].num_kv_heads, config.query_pre_attn_scalar) == (256, 4, 256)
        assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (2, (1,), 0)
        assert config.tie_word_embeddings and config.hidden_act == "gelu_tanh" and config.post_norms
        assert (config.norm_offset, config.embed_scale) == (1.0, 8**0.5)
    assert (config.qk_norm, config.local_rope_theta, config.rope_theta) == (True, 10_000.0, 1_000_000.0)
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (None, None)
    gemma2 = config_from_hf(RAW | GEMMA2)
    assert (gemma2.qk_norm, gemma2.local_rope_theta, gemma2.rope_theta) == (False, None, 10_000.0)
    assert (gemma2.attn_logit_softcapping, gemma2.final_logit_softcapping) == (50.0, 30.0)
    off = config_from_hf(RAW | GEMMA2 | dict(attn_logit_softcapping=None, final_logit_softcapping=None))
    assert (off.attn_logit_softcapping, off.final_logit_softcapping) == (None, None)
    qwen3 = config_from_hf(silent | QWEN3 | dict(num_attention_heads=32, attention_bias=True))
    assert (qwen3.head_dim, qwen3.blocks[0].num_kv_heads, qwen3.qk_norm) == (128, 32, True)
    assert qwen3.qkv_bias and qwen3.o_bias and not qwen3.mlp_bias


def test_gemma3_rope_in_both_spellings():
    linear = dict(rope_type="linear", factor=8.0)
    old = dict(rope_theta=5e5, rope_local_base_freq=123.0, rope_scaling=linear)
    layers = dict(full_attention=linear | dict(rope_theta=5e5), sliding_attention=dict(rope_theta=123.0))
    config = config_from_hf(RAW | GEMMA3 | old)
    assert config == config_from_hf(RAW | GEMMA3 | dict(rope_parameters=layers))
    assert (config.rope_theta, config.local_rope_theta, config.local_rope_scaling) == (5e5, 123.0, None)
    assert config.rope_scaling == RopeScaling("linear", 8.0)
    layers["sliding_attention"] |= dict(rope_type="linear", factor=2.0)
    both = config_from_hf(RAW | GEMMA3 | dict(rope_parameters=layers))
    assert both.local_rope_scaling == RopeScaling("linear", 2.0)
    layers["full_attention"]["factor"] = 9.0
    with pytest.raises(ValueError, match="contradict"):
        config_from_hf(RAW | GEMMA3 | dict(rope_parameters=layers, rope_scaling=linear))


def test_yarn():
    def scaling(length=None, **rope):
        more = {} if length is None else {"max_position_embeddings": length}
        return config_from_hf(RAW | more | dict(rope_scaling=dict(rope_type="yarn", **rope))).rope_scaling

    assert scaling(factor=4.0) == RopeScaling("yarn", 4.0, original_max_position=2048)
    original = {"original_max_position_embeddings": 64}
    assert scaling(512, factor=None, **original) == RopeScaling("yarn", 8.0, original_max_position=64)
    options = dict(beta_fast=16, beta_slow=2, attention_factor=1.5, truncate=False)
    assert scaling(factor=4, **original, **options) == RopeScaling("yarn", 4.0, original_max_position=64, **options)
    # DeepSeek's: the ratio of two of the paper's lengths.
    mscale = scaling(factor=40, mscale=1.0, mscale_all_dim=0.7).attention_factor
    assert mscale == pytest.approx((0.1 * math.log(40) + 1) / (0.07 * math.log(40) + 1), rel=1e-12)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (MISTRAL | dict(layer_types=["full_attention"] * 3), ("layer_types full_attention", "window of 4096")),
        (GEMMA3 | dict(model_type="gemma3"), ("'gemma3'", "gemma3_text")),
        (GEMMA3 | dict(rope_parameters=dict(rope_type="linear", factor=2)), ("by layer type", "rope_type")),
        (GEMMA3 | dict(attn_logit_softcapping=50.0), ("attn_logit_softcapping 50.0", "null")),
        (GEMMA3 | dict(use_bidirectional_attention=True), ("use_bidirectional_attention",)),
        (GEMMA2 | dict(sliding_window=None), ("block 0", "sliding_window is null")),
        (GEMMA2 | dict(hidden_activation="quick_gelu"), ("hidden_activation 'quick_gelu'",)),
        (GEMMA2 | dict(query_pre_attn_scalar=0), ("query_pre_attn_scalar", "got 0")),
    ],
)  # fmt: skip
def test_what_a_family_does_not_have_is_refused(change, parts):
    with pytest.raises(ValueError) as caught:
        config_from_hf(RAW | change)
    for part in ("config.json", *parts):
        assert part in str(caught.value)


def _places(value, path=()):
    """Paths of all keys and list entries of a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from _places(inner, (*path, key))


@pytest.mark.parametrize("family", [*ARCHITECTURES, "nemotron-nas", "lsfuse"])
def test_no_damaged_value_is_more_than_one_line(family):
    """Every value of every key replaced by one of another type, or out of range: read, or refused by a ValueError."""
    names = {"mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "gemma2": GEMMA2, "gemma3_text": GEMMA3}
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    raw = RAW | names.get(family, {"rope_scaling": yarn})
    if family in ("nemotron-nas", "lsfuse"):
        raw = json.loads(json.dumps(config_to_hf(config_from_hf(raw), "float32", family)))
    optional = ("rope_scaling", "rope_parameters", "layer_types", "quantization_config", "tie_word_embeddings")
    optional += ("attention_bias", "use_sliding_window", "max_window_layers", "hidden_act", "hidden_activation")
    places = [*_places(raw), *((key,) for key in optional if key not in raw)]
    for *parents, last in places:
        for value in (None, "false", True, -1, 1.5, math.inf, math.nan, 10**30, [1], ["a"], {"a": 1}):
            damaged = copy.deepcopy(raw) | ({"use_sliding_window": True} if last == "max_window_layers" else {})
            inner = damaged
            for key in parents:
                inner = inner[key]
            inner[last] = value
            try:
                config_from_hf(damaged)
            except ValueError as error:
                assert "\n" not in str(error) and len(str(error)) < 500, error


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object of keys and values, got 'yarn'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 is more than the 10000 blocks"),
        ({"hidden_size": math.inf}, "hidden_size must be an integer between 1 and 2147483647, got inf"),
        ({"architectures": 3}, "architectures must be a list of texts, got 3"),
    ],
)
def test_damaged_values_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(RAW | change)


def test_of_two_spellings_of_the_kind_neither_wins_unseen():
    older = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    with pytest.raises(ValueError, match="contradict each other"):
        config_from_hf(RAW | older | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}})
    same = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}}
    assert config_from_hf(RAW | older | same).rope_scaling == RopeScaling("linear", 2.0)
