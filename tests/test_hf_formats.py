"""Formats that a model can be written in: how it was made goes along, and what a format cannot say writes nothing."""

import dataclasses
import json

import pytest
from test_hf_export import CONFIG, FULL, SLIDING, params_of, same

from lsfuse.io import load_hf, save_hf
from lsfuse.io.hf_config import config_from_hf
from lsfuse.model import BlockConfig


@pytest.mark.parametrize("family", ["llama", "nemotron-nas", "qwen2"])
def test_how_a_model_was_made_stands_in_every_format(tmp_path, family):
    config = dataclasses.replace(CONFIG, family=family, qkv_bias=family == "qwen2")
    made = dataclasses.replace(config, sources=((0,), (1, 2), (4,)), transforms=("remove_blocks(3)", "fuse"))
    params = params_of(made)
    save_hf(tmp_path / "m", made, params)
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    assert raw["model_type"] == family and raw["lsfuse"]["sources"] == [[0], [1, 2], [4]]
    again, loaded = load_hf(tmp_path / "m")
    assert again == made
    same(params, loaded)
    assert config_from_hf({k: v for k, v in raw.items() if k != "lsfuse"}) == config
    for bad in (3, {"sources": [0, 1, 2]}, {"sources": [[0.5]] * 3}, {"transforms": 1}):
        with pytest.raises(ValueError, match="config.json: lsfuse must hold sources, a list of block numbers"):
            config_from_hf({**raw, "lsfuse": bad})
    with pytest.raises(ValueError, match="sources names 1 blocks, the model has 3"):
        config_from_hf({**raw, "lsfuse": {"sources": [[0]]}})


def test_a_format_can_be_asked_for(tmp_path, caplog):
    params = params_of(CONFIG)
    for name in ("auto", "llama", "nemotron-nas", "lsfuse", "mistral"):
        save_hf(tmp_path / name, CONFIG, params, format=name)
        raw = json.loads((tmp_path / name / "config.json").read_text())
        assert raw["model_type"] == ("llama" if name == "auto" else name)
        again, loaded = load_hf(tmp_path / name)
        assert again == dataclasses.replace(CONFIG, family="llama" if name in ("auto", "lsfuse") else name)
        same(params, loaded)
    assert not caplog.text


FREE = BlockConfig("none", 1, 12)


@pytest.mark.parametrize(
    "format, change, message",
    [
        ("nemotron-nas", {"blocks": (FULL, SLIDING, SLIDING)}, "block 1 has a sliding window, and 1 more"),
        ("nemotron-nas", {"blocks": (*[FULL] * 3, dataclasses.replace(FULL, ffn="plain"))}, "block 3 has an FFN"),
        ("nemotron-nas", {"blocks": (FULL, FREE, dataclasses.replace(FREE, beside=True))}, "block 2 runs in parallel"),
        ("nemotron-nas", {"blocks": (FULL, dataclasses.replace(FULL, parallel=True))}, "block 1 runs attention and"),
        (
            "nemotron-nas",
            {"blocks": (FULL, BlockConfig("linear_map", 1, 12)), "qkv_bias": True, "o_bias": True},
            "block 1 has a linear map with a bias",
        ),
        ("nemotron-nas", {"qk_norm": True}, "nemotron-nas has no q/k norms"),
        ("llama", {"blocks": (FULL, FREE)}, "llama: block 1 differs from block 0; block 1 has no attention"),
        ("llama", {"blocks": (FULL, FULL, dataclasses.replace(FULL, ffn_width=8))}, "block 2 differs from block 0"),
        ("llama", {"blocks": (BlockConfig("full", 1, 0),)}, "block 0 has no FFN"),
        ("gguf", {}, "format 'gguf' is unknown; valid: auto, lsfuse, nemotron-nas, llama"),
    ],
)
def test_a_format_that_cannot_express_the_model_writes_nothing(tmp_path, format, change, message):
    config = dataclasses.replace(CONFIG, **change)
    with pytest.raises(ValueError, match=message) as error:
        save_hf(tmp_path / "deep" / "m", config, params_of(config), format=format)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())
