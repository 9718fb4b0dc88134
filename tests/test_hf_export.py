"""Writing checkpoints: atomically, in shards, readable by other libraries, and never over anything else."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from lsfuse.io import hf_save, load_hf, save_hf
from lsfuse.io.hf_config import config_from_hf, config_to_hf, why_not_standard
from lsfuse.model import BlockConfig, ModelConfig, RopeScaling, param_shapes, uniform_blocks

CONFIG = ModelConfig(19, 8, 2, 4, uniform_blocks(3, 1, 12), eos_token_ids=(2, 5), bos_token_id=1)
FULL, SLIDING = BlockConfig("full", 1, 12), BlockConfig("sliding", 1, 12, window=5)
LOCAL = dataclasses.replace(SLIDING, local_rope=True)
GEMMA = dict(
    post_norms=True,
    norm_offset=1.0,
    embed_scale=8**0.5,
    query_pre_attn_scalar=16,
    hidden_act="gelu_tanh",
    tie_word_embeddings=True,
)
CONFIGS = {
    "llama": CONFIG,
    "biases": dataclasses.replace(CONFIG, qkv_bias=True, o_bias=True, mlp_bias=True, hidden_act="gelu"),
    "llama3": dataclasses.replace(CONFIG, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64), rope_theta=5e5),
    "linear": dataclasses.replace(CONFIG, rope_scaling=RopeScaling("linear", 2.0), hidden_act="gelu_tanh"),
    "tied": dataclasses.replace(CONFIG, tie_word_embeddings=True, head_dim=6, eos_token_ids=(), pad_token_id=0),
    "qwen2": dataclasses.replace(CONFIG, family="qwen2", qkv_bias=True, eos_token_ids=(2,)),
    "mistral": dataclasses.replace(CONFIG, family="mistral", hidden_act="relu"),
    "mistral window": dataclasses.replace(
        CONFIG, family="mistral", blocks=(SLIDING,) * 3, rope_scaling=RopeScaling("yarn", 4.0)
    ),
    "qwen2 window": dataclasses.replace(CONFIG, family="qwen2", qkv_bias=True, blocks=(FULL, SLIDING, SLIDING)),
    "qwen3": dataclasses.replace(
        CONFIG,
        family="qwen3",
        qk_norm=True,
        head_dim=6,
        blocks=(SLIDING, FULL, SLIDING),
        rope_scaling=RopeScaling("yarn", 4.0, 1.0, 4.0, 64, 16.0, 2.0, 1.25, False),
    ),
    "gemma2": dataclasses.replace(
        CONFIG,
        family="gemma2",
        blocks=(SLIDING, FULL, SLIDING),
        attn_logit_softcapping=50.0,
        final_logit_softcapping=None,
        **GEMMA,
    ),
    "gemma3": dataclasses.replace(
        CONFIG,
        family="gemma3_text",
        blocks=(LOCAL, LOCAL, FULL),
        qk_norm=True,
        final_logit_softcapping=30.0,
        local_rope_theta=100.0,
        rope_scaling=RopeScaling("linear", 8.0),
        **GEMMA,
    ),
    "gemma3 scaled": dataclasses.replace(
        CONFIG,
        family="gemma3_text",
        blocks=(LOCAL, FULL, LOCAL),
        qk_norm=True,
        qkv_bias=True,
        o_bias=True,
        local_rope_theta=100.0,
        local_rope_scaling=RopeScaling("linear", 2.0),
        **GEMMA,
    ),
}
OWN = {
    "unlike widths": (BlockConfig("full", 1, 12), BlockConfig("full", 1, 20), BlockConfig("full", 2, 12)),
    "no attention": (BlockConfig("full", 1, 12), BlockConfig("none", 1, 12), BlockConfig("none", 1, 12)),
    "no FFN": (BlockConfig("full", 1, 0),) * 2,
    "parallel": (BlockConfig("full", 1, 12, parallel=True),) * 2,
    "plain FFNs": (BlockConfig("full", 1, 12, ffn="plain"),) * 2,
    "a window": (FULL, SLIDING),
}


def params_of(config):
    """Random everywhere, biases and gains too."""
    rng = np.random.default_rng(0)

    def leaf(shape):
        return jnp.asarray(rng.standard_normal(shape).astype(np.float32))

    return jax.tree.map(leaf, param_shapes(config), is_leaf=lambda x: isinstance(x, tuple))


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def params():
    return params_of(CONFIG)


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_and_parameters_come_back(tmp_path, name):
    config = CONFIGS[name]
    params = params_of(config)
    save_hf(tmp_path / "m", config, params)
    again, loaded = load_hf(tmp_path / "m")
    assert again == config and not why_not_standard(config)
    same(params, loaded)
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    assert raw["model_type"] == config.family and raw["torch_dtype"] == "float32"


@pytest.mark.parametrize("name", OWN)
def test_blocks_no_family_has_get_a_type_of_their_own(tmp_path, name, caplog):
    """Another library must refuse such a model, not fill in random weights."""
    config = dataclasses.replace(CONFIG, blocks=OWN[name], rope_scaling=RopeScaling("linear", 2.0))
    params = params_of(config)
    save_hf(tmp_path / "m", config, params)
    assert "transformers cannot load this model" in caplog.text
    again, loaded = load_hf(tmp_path / "m")
    assert again == config
    same(params, loaded)
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    assert raw["model_type"] == "lsfuse" and raw["why_not_standard"] == why_not_standard(config) != []


def test_what_a_family_cannot_express():
    def reasons(**change):
        return " ".join(why_not_standard(dataclasses.replace(CONFIG, **change)))

    assert "all attention projections or none" in reasons(qkv_bias=True)
    assert "multiple of its heads" in reasons(num_heads=3, blocks=uniform_blocks(1, 1, 4))
    assert "qwen2 does not have biases (qkv, o, mlp) (True, False, True)" in reasons(
        family="qwen2", qkv_bias=True, mlp_bias=True
    )
    assert "'gemma' is none of" in reasons(family="gemma")
    assert "gemma2 has post_norms True, not False" in reasons(family="gemma2")
    assert "llama has qk_norm False, not True" in reasons(qk_norm=True)
    assert "llama has no soft-cap on logits" in reasons(final_logit_softcapping=30.0)
    assert "qwen3 has no soft-cap on attention" in reasons(family="qwen3", qk_norm=True, attn_logit_softcapping=5.0)
    assert "llama has no query_pre_attn_scalar, not 16" in reasons(query_pre_attn_scalar=16)
    assert "gemma2 has a whole query_pre_attn_scalar, not 1.5" in reasons(
        family="gemma2", **{**GEMMA, "query_pre_attn_scalar": 1.5}
    )
    assert "block 0 has no sliding window, and others have" in reasons(family="mistral", blocks=(FULL, SLIDING))
    assert "block 1 has a sliding window, which llama does not have" in reasons(blocks=(FULL, SLIDING))
    wider = dataclasses.replace(SLIDING, window=7)
    differing = reasons(family="mistral", blocks=(wider, SLIDING))
    assert "block 0 has another sliding window than 5, which others have" in differing
    assert "gemma3_text needs rotary" in reasons(family="gemma3_text", qk_norm=True, **GEMMA)
    assert "rotates sliding blocks, and only those" in reasons(
        family="gemma3_text", qk_norm=True, local_rope_theta=9.0, blocks=(FULL, SLIDING), **GEMMA
    )


def test_every_field_of_a_configuration_is_written():
    """A field added to ModelConfig must be taught to hf_config, or exports would lose it."""
    known = {"vocab_size", "hidden_size", "num_heads", "head_dim", "blocks", "max_position_embeddings", "rope_theta"}
    known |= {"rope_scaling", "rms_norm_eps", "hidden_act", "qkv_bias", "o_bias", "mlp_bias", "tie_word_embeddings"}
    known |= {"family", "bos_token_id", "eos_token_ids", "pad_token_id", "qk_norm", "post_norms", "norm_offset"}
    known |= {"embed_scale", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
    known |= {"local_rope_theta", "local_rope_scaling", "sources", "transforms"}
    assert {field.name for field in dataclasses.fields(ModelConfig)} == known
    assert {field.name for field in dataclasses.fields(BlockConfig)} == {
        "attention",
        "num_kv_heads",
        "ffn_width",
        "parallel",
        "window",
        "local_rope",
        "ffn",
        "beside",
    }


def test_own_configurations_of_another_version_are_refused():
    raw = config_to_hf(dataclasses.replace(CONFIG, blocks=OWN["no FFN"]), "float32")
    raw["lsfuse"]["alibi"] = True
    with pytest.raises(ValueError, match="alibi"):
        config_from_hf(raw)
    del raw["lsfuse"]["alibi"], raw["lsfuse"]["vocab_size"]
    with pytest.raises(ValueError, match="vocab_size"):
        config_from_hf(raw)


def test_other_libraries_read_the_file(tmp_path, params):
    save_hf(tmp_path / "m", CONFIG, params)
    with safe_open(tmp_path / "m" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        head = file.get_tensor("lm_head.weight")
        np.testing.assert_array_equal(head, params["lm_head"].T)
        up = file.get_tensor("model.layers.2.mlp.up_proj.weight")
        np.testing.assert_array_equal(up, params["runs"]["0"]["up_proj"][2].T)
        assert len(file.keys()) == 3 + 3 * 9


def test_shards_hold_no_more_than_asked(tmp_path, params):
    save_hf(tmp_path / "m", CONFIG, params, max_shard_bytes=2000)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [f.name for f in files]
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    total = 0
    for file in files:
        with safe_open(file, "np") as tensors:
            sizes = [tensors.get_tensor(name).nbytes for name in tensors.keys()]
            assert all(index["weight_map"][name] == file.name for name in tensors.keys())
        assert sum(sizes) <= 2000
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total == sum(x.nbytes for x in jax.tree.leaves(params))
    same(load_hf(tmp_path / "m")[1], params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(tmp_path, params, dtype):
    save_hf(tmp_path / "m", CONFIG, params, dtype=dtype)
    same(load_hf(tmp_path / "m")[1], jax.tree.map(lambda x: x.astype(dtype), params))
    assert json.loads((tmp_path / "m" / "config.json").read_text())["torch_dtype"] == dtype


def test_mixed_dtypes_and_numpy_parameters(tmp_path, params):
    mixed = jax.tree.map(np.asarray, params) | {"norm": np.asarray(params["norm"]).astype(np.float16)}
    save_hf(tmp_path / "m", CONFIG, mixed)
    loaded = load_hf(tmp_path / "m")[1]
    same(mixed, loaded)
    assert loaded["norm"].dtype == np.float16


def test_float16_refuses_what_it_cannot_hold_and_leaves_nothing(tmp_path, params):
    big = params | {"norm": params["norm"] * 1e6}
    with pytest.raises(ValueError, match="model.norm.weight.*float16"):
        save_hf(tmp_path / "m", CONFIG, big, dtype="float16")
    assert not list(tmp_path.iterdir())


def test_parameters_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, params):
    bad = params | {"norm": params["norm"][:-1]}
    with pytest.raises(ValueError, match=r"norm .*\(7,\).*\(8,\)"):
        save_hf(tmp_path / "m", CONFIG, bad)
    with pytest.raises(ValueError, match="int32"):
        save_hf(tmp_path / "m", CONFIG, params, dtype="int32")
    with pytest.raises(ValueError, match="max_shard_bytes"):
        save_hf(tmp_path / "m", CONFIG, params, max_shard_bytes=0)
    assert not list(tmp_path.iterdir())


class Words:
    """A tokenizer, as far as `save_hf` asks for one."""

    def __init__(self, vocab_size, text="{}"):
        self.vocab_size, self.text = vocab_size, text

    def save(self, folder):
        (folder / "tokenizer.json").write_text(self.text)


def test_a_tokenizer_goes_along_and_stays(tmp_path, params):
    with pytest.raises(ValueError, match="20 ids.*19"):
        save_hf(tmp_path / "m", CONFIG, params, Words(20))
    save_hf(tmp_path / "m", CONFIG, params, Words(18, "one"))
    save_hf(tmp_path / "m", CONFIG, params)
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "one"
    save_hf(tmp_path / "m", CONFIG, params, Words(19, "two"))
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "two"


def test_only_a_model_of_the_same_configuration_is_replaced(tmp_path, params):
    target = tmp_path / "deep" / "m"
    save_hf(target, CONFIG, params, max_shard_bytes=2000)
    newer = jax.tree.map(lambda x: x + 1, params)
    save_hf(target, CONFIG, newer, dtype="float32")
    same(load_hf(target)[1], newer)
    assert sorted(p.name for p in target.iterdir()) == ["config.json", "model.safetensors"]
    other = dataclasses.replace(CONFIG, blocks=uniform_blocks(1, 1, 12))
    with pytest.raises(FileExistsError, match="another model.*overwrite=True"):
        save_hf(target, other, params_of(other))
    same(load_hf(target)[1], newer)
    save_hf(target, other, params_of(other), overwrite=True)
    assert load_hf(target)[0] == other
    (target / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="notes.txt"):
        save_hf(target, other, params_of(other), overwrite=True)
    assert (target / "notes.txt").read_text() == "mine"
    assert [p.name for p in target.parent.iterdir()] == ["m"]
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="is a file"):
        save_hf(tmp_path / "file", CONFIG, params)
    (tmp_path / "empty").mkdir()
    save_hf(tmp_path / "empty", CONFIG, params)


def test_a_full_disk_loses_nothing(tmp_path, params, monkeypatch):
    save_hf(tmp_path / "m", CONFIG, params)
    newer = jax.tree.map(lambda x: x + 1, params)
    usage = hf_save.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(hf_save.shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(OSError, match="bytes, 100 are free") as caught:
        save_hf(tmp_path / "m", CONFIG, newer)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf_save, "write_file", full)
    with pytest.raises(OSError, match="no space left for the .* bytes of the model; nothing was changed"):
        save_hf(tmp_path / "m", CONFIG, newer)
    same(load_hf(tmp_path / "m")[1], params)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("moment", ["write_file", "_sync", "rename 1", "rename 2", "rmtree"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_model(tmp_path, moment, params):
    """kill -9 just before the named call; the next save finds, or puts back, a complete model."""
    target = tmp_path / "m"
    save_hf(target, CONFIG, params)
    script = f"""
        import os, signal, sys
        import jax
        from lsfuse.io import hf_save, load_hf, save_hf
        config, params = load_hf({str(target)!r})
        moment, _, count = {moment!r}.partition(" ")
        place = os if moment == "rename" else hf_save.shutil if moment == "rmtree" else hf_save
        real, calls = getattr(place, moment), 0
        def die(*args, **kwargs):
            global calls
            calls += 1
            if calls == int(count or 1):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(place, moment, die)
        save_hf({str(target)!r}, config, jax.tree.map(lambda x: x + 1, params))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=os.environ, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    newer = jax.tree.map(lambda x: x + 1, params)
    if moment == "rename 2":
        with pytest.raises(
            FileNotFoundError, match=r"interrupted save left the model it was replacing at .*\.m\.previous"
        ):
            load_hf(target)
        same(load_hf(tmp_path / ".m.previous")[1], params)
    else:
        same(load_hf(target)[1], newer if moment == "rmtree" else params)
    save_hf(target, CONFIG, newer)
    same(load_hf(target)[1], newer)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
