"""nemotron-nas block tables: widths, the two published models as shapes, round trips, what is refused.

golden/nemotron_blocks.json holds the tables as their config.json publishes them: (kv heads, FFN width, ffn_mult) each.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import random_params, tiny

from lsfuse import fusion, io
from lsfuse.io.hf_config import config_from_hf, config_to_hf
from lsfuse.io.hf_nemotron import mult_of_width, width_of_mult
from lsfuse.model import BlockConfig, count_params, forward

CASES = {4.875: 53248, 0.4875: 5376, 36.5625: 399360, 39.0: 425984, 31.40625: 343040, 27.5625: 301056, 1.95: 21504}


def published(repo_root, name: str) -> dict:
    """A config.json made of a published table, with `ffn_mult` for widths as the original has."""
    model = json.loads((repo_root / "tests" / "golden" / "nemotron_blocks.json").read_text())[name]
    heads = model["config"]["num_attention_heads"]
    table = [
        {
            "attention": {"no_op": not kv, "n_heads_in_group": heads // kv if kv else None},
            "ffn": {"no_op": not width, "ffn_mult": mult},
        }
        for kv, width, mult in model["blocks"]
    ]
    common = {"model_type": "nemotron-nas", "architectures": ["DeciLMForCausalLM"], "max_position_embeddings": 131072}
    common |= {"num_key_value_heads": None, "intermediate_size": None, "hidden_act": "silu", "rms_norm_eps": 1e-5}
    return {**common, **model["config"], "num_hidden_layers": len(table), "block_configs": table}


@pytest.mark.parametrize("mult, width", CASES.items())
def test_widths(mult, width):
    assert width_of_mult(mult, 16384) == width
    assert width_of_mult(mult_of_width(width, 16384), 16384) == width


def test_a_width_that_no_multiple_expresses():
    assert mult_of_width(5377, 16384) is None


@pytest.mark.parametrize(
    "name, billions, attention",
    [("llama-3.3-nemotron-super-49b", 49.87, 49), ("llama-3.1-nemotron-ultra-253b", 253.40, 64)],
)
def test_published_models_as_shapes(repo_root, name, billions, attention):
    raw = published(repo_root, name)
    config = config_from_hf(raw)
    assert round(count_params(config) / 1e9, 2) == billions
    assert sum(b.has_attention for b in config.blocks) == attention
    again = config_from_hf(config_to_hf(config, "bfloat16"))
    assert again == config
    written = config_to_hf(config, "bfloat16")
    assert "lsfuse" not in written  # as published
    for mine, given in zip(written["block_configs"], raw["block_configs"], strict=True):
        assert mine["attention"]["no_op"] == given["attention"]["no_op"]
        if not mine["ffn"]["no_op"]:
            assert width_of_mult(mine["ffn"]["ffn_mult"], config.hidden_size) == mine["ffn"]["intermediate_size"]


def test_a_fused_model_goes_out_and_comes_back_to_the_bit(tmp_path):
    """Attention-free first and last blocks, one without anything, a fused one."""
    ffns = [BlockConfig("none", 1, width) for width in (8, 8, 16, 0, 8)]
    config = tiny(blocks=(ffns[0], BlockConfig("full", 2, 24), *ffns[1:]))
    params = jax.tree.map(jnp.asarray, random_params(config, dtype=np.float32))
    child, child_params = fusion.fuse_ffn([(1, 3)])(config, params)
    child = dataclasses.replace(child, family="nemotron-nas")
    io.save_hf(tmp_path / "model", child, child_params)
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    assert raw["architectures"] == ["DeciLMForCausalLM"]
    assert [b["ffn"]["intermediate_size"] for b in raw["block_configs"]] == [8, 48, None, 8]
    assert [b["attention"]["no_op"] for b in raw["block_configs"]] == [True, False, True, True]
    assert not any("ffn_mult" in b["ffn"] for b in raw["block_configs"])  # 256 divides none
    loaded, loaded_params = io.load_hf(tmp_path / "model")
    assert loaded == child and child.sources == ((0,), (1, 2, 3), (4,), (5,))
    ids = jnp.arange(12)[None]
    np.testing.assert_array_equal(forward(loaded_params, loaded, ids), forward(child_params, child, ids))


def test_what_the_table_cannot_say_is_written_as_our_own():
    plain = tiny(blocks=(BlockConfig("none", 1, 8, ffn="plain"),), family="nemotron-nas")
    raw = config_to_hf(plain, "float32")
    assert raw["model_type"] == "lsfuse" and raw["why_not_standard"] == ["block 0 has an FFN that is not gated"]
    assert config_from_hf(raw) == plain


@pytest.mark.parametrize(
    "change, message",
    [
        ({"ffn": {"replace_with_linear": True}}, r"block_configs\[1\]: ffn is replaced by a linear layer"),
        ({"attention": {"replace_with_linear": None, "n_heads_in_group": 0}}, "n_heads_in_group 0 must divide"),
        ({"attention": {"n_heads_in_group": 3}}, "n_heads_in_group 3 must divide the 64 heads"),
        ({"attention": {}}, "n_heads_in_group None must divide"),
        ({"ffn": {}}, "neither intermediate_size nor ffn_mult"),
        ({"ffn": {"intermediate_size": -1}}, "intermediate_size must be an integer between 1 and"),
    ],
)
def test_bad_tables_name_the_block(repo_root, change, message):
    raw = published(repo_root, "llama-3.3-nemotron-super-49b")
    raw["block_configs"][1] |= change
    with pytest.raises(ValueError, match=message):
        config_from_hf(raw)
    raw = published(repo_root, "llama-3.3-nemotron-super-49b")
    wrong = (({"num_hidden_layers": 7}, "80 blocks, num_hidden_layers is 7"), ({"block_configs": None}, "a list"))
    for changes, text in wrong:
        with pytest.raises(ValueError, match=text):
            config_from_hf(raw | changes)
