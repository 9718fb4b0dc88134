"""Reading checkpoints: what is accepted, and that everything else is refused before any work, saying what and where."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hf_raw import QWEN2, RAW
from safetensors import safe_open
from safetensors.numpy import save_file

from lsfuse.io import check_hf, hf_load, load_hf, resolve_hf, save_hf
from lsfuse.io.hf_config import config_from_hf
from lsfuse.model import ModelConfig, RopeScaling, abstract_params, check_params, uniform_blocks

CONFIG = ModelConfig(
    vocab_size=19,
    hidden_size=8,
    num_heads=2,
    head_dim=4,
    blocks=uniform_blocks(3, 1, 12),
    bos_token_id=1,
    eos_token_ids=(2,),
)


def tensors_of(config: dict) -> dict[str, np.ndarray]:
    """Random tensors of a Llama of `config`, named and shaped by hand."""
    rng = np.random.default_rng(0)
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    h = d // config["num_attention_heads"]
    q, kv = d, h * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,), "lm_head.weight": (v, d)}
    for i in range(config["num_hidden_layers"]):
        attention = {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q)}
        mlp = {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}
        shapes |= {f"model.layers.{i}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"model.layers.{i}.mlp.{name}.weight": shape for name, shape in mlp.items()}
        shapes |= {f"model.layers.{i}.{name}.weight": (d,) for name in ("input_layernorm", "post_attention_layernorm")}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(folder, raw=RAW, tensors=None, drop=(), **change):
    folder.mkdir(exist_ok=True)
    raw = {key: value for key, value in (raw | change).items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors_of(RAW) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def refused(folder, *parts, error=ValueError, **options):
    with pytest.raises(error) as caught:
        load_hf(folder, **options)
    for part in parts:
        assert str(part) in str(caught.value), str(caught.value)


@pytest.fixture
def no_reads(monkeypatch):
    """No tensor may be read."""

    def read(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(hf_load, "read_rows", read)


def test_every_tensor_lands_where_it_belongs(tmp_path):
    config, params = load_hf(write(tmp_path / "m"))
    tensors = tensors_of(RAW)
    assert config == CONFIG
    check_params(config, params)
    np.testing.assert_array_equal(params["embed_tokens"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["lm_head"], tensors["lm_head.weight"].T)
    np.testing.assert_array_equal(params["norm"], tensors["model.norm.weight"])
    for i in range(3):
        for leaf, name in [
            ("q_proj", "self_attn.q_proj"),
            ("k_proj", "self_attn.k_proj"),
            ("v_proj", "self_attn.v_proj"),
            ("o_proj", "self_attn.o_proj"),
            ("gate_proj", "mlp.gate_proj"),
            ("up_proj", "mlp.up_proj"),
            ("down_proj", "mlp.down_proj"),
            ("input_layernorm", "input_layernorm"),
            ("post_attention_layernorm", "post_attention_layernorm"),
        ]:
            np.testing.assert_array_equal(params["runs"]["0"][leaf][i], tensors[f"model.layers.{i}.{name}.weight"].T)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_bits_survive_import_and_export(tmp_path, dtype):
    """Every bit pattern, infinities, NaN payloads and denormals among them, in pieces of several rows."""
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    rng = np.random.default_rng(1)
    tensors = {}
    for name, value in tensors_of(RAW).items():
        tensors[name] = rng.integers(0, np.iinfo(bits).max, value.shape, bits, endpoint=True).view(dtype)
    write(tmp_path / "m", tensors=tensors)
    config, params = load_hf(tmp_path / "m")
    save_hf(tmp_path / "copy", config, params)
    with safe_open(tmp_path / "copy" / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(tensors)
        for name, value in tensors.items():
            assert file.get_tensor(name).tobytes() == value.tobytes(), name


def test_pieces_smaller_than_a_tensor(tmp_path, monkeypatch):
    whole = load_hf(write(tmp_path / "m"))[1]
    monkeypatch.setattr("lsfuse.io.hf_names._PIECE_BYTES", 100)
    pieces = load_hf(tmp_path / "m")[1]
    jax.tree.map(np.testing.assert_array_equal, whole, pieces)
    save_hf(tmp_path / "copy", CONFIG, pieces)
    jax.tree.map(np.testing.assert_array_equal, whole, load_hf(tmp_path / "copy")[1])


def test_a_header_that_leaves_the_tensors_unaligned(tmp_path):
    want = load_hf(write(tmp_path / "m"))[1]
    file = tmp_path / "m" / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    file.write_bytes((size + 3).to_bytes(8, "little") + data[8 : 8 + size] + b"   " + data[8 + size :])
    jax.tree.map(np.testing.assert_array_equal, want, load_hf(tmp_path / "m")[1])
    half = load_hf(tmp_path / "m", dtype="bfloat16")[1]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a).astype(ml_dtypes.bfloat16), b), want, half)


def test_dtypes_asked_for(tmp_path, x64):
    write(tmp_path / "m")
    exact = load_hf(tmp_path / "m")[1]
    for dtype in (jnp.bfloat16, "float16", np.float64):
        params = load_hf(tmp_path / "m", dtype)[1]
        jax.tree.map(lambda a, b, to=dtype: np.testing.assert_array_equal(a.astype(to), b), exact, params)
    refused(tmp_path / "m", "int8", "bfloat16", dtype="int8")


def test_float64_needs_x64(tmp_path):
    refused(write(tmp_path / "m"), "jax_enable_x64", dtype="float64")


def test_float16_refuses_what_it_cannot_hold(tmp_path):
    tensors = tensors_of(RAW)
    tensors["model.norm.weight"][3] = 1e5
    refused(write(tmp_path / "m", tensors=tensors), "model.norm.weight", "float16", dtype="float16")


def test_a_leaf_keeps_its_own_dtype_but_blocks_must_agree(tmp_path):
    tensors = tensors_of(RAW)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float16)
    params = load_hf(write(tmp_path / "m", tensors=tensors))[1]
    assert params["norm"].dtype == jnp.float16 and params["embed_tokens"].dtype == jnp.float32
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(np.float16)
    write(tmp_path / "m", tensors=tensors)
    refused(tmp_path / "m", name, "float16", "float32", "dtype")
    assert load_hf(tmp_path / "m", dtype="float32")[1]["runs"]["0"]["up_proj"].dtype == jnp.float32


def test_tied_heads(tmp_path):
    tensors = tensors_of(RAW)
    folder = write(tmp_path / "m", tensors=tensors, tie_word_embeddings=True)
    refused(folder, "tie_word_embeddings", "lm_head.weight", "model.embed_tokens.weight")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    config, params = load_hf(write(folder, tensors=tensors, tie_word_embeddings=True))
    assert config.tie_word_embeddings and "lm_head" not in params
    del tensors["lm_head.weight"]
    again = load_hf(write(folder, tensors=tensors, tie_word_embeddings=True))[1]
    jax.tree.map(np.testing.assert_array_equal, params, again)
    refused(write(folder, tensors=tensors), "missing", "lm_head.weight", "tie_word_embeddings true")


def test_shards_and_their_index(tmp_path, no_reads):
    tensors = tensors_of(RAW)
    folder = write(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    refused(folder, "neither model.safetensors nor model.safetensors.index.json", error=FileNotFoundError)
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, "pytorch_model.bin", "safetensors", error=FileNotFoundError)
    names = sorted(tensors)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    one, two = sorted(set(files.values()))
    save_file({n: tensors[n] for n in names if files[n] == one}, folder / one)
    refused(folder, index, two, "absent", error=FileNotFoundError)
    save_file({n: tensors[n] for n in names[3:] if files[n] == two}, folder / two)
    refused(folder, index, names[1], "do not hold", two)
    index.write_text(json.dumps({"weight_map": {}}))
    refused(folder, index, "weight_map")
    index.write_text("{")
    refused(folder, index, "JSON")


def test_shards_are_read(tmp_path):
    want = load_hf(write(tmp_path / "m"))[1]
    save_hf(tmp_path / "s", CONFIG, want, max_shard_bytes=1000)
    assert len(list((tmp_path / "s").glob("model-*-of-*.safetensors"))) > 3
    jax.tree.map(np.testing.assert_array_equal, want, load_hf(tmp_path / "s")[1])


def test_missing_unexpected_and_misshapen_tensors_are_all_named(tmp_path, no_reads):
    tensors = tensors_of(RAW)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros((12, 8), np.float32)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((8, 8), np.float32)
    tensors["model.layers.1.self_attn.v_proj.weight"] = np.zeros((4, 8), np.int8)
    refused(
        write(tmp_path / "m", tensors=tensors),
        tmp_path / "m",
        "missing, though config.json asks for them: model.layers.2.mlp.up_proj.weight",
        "unexpected, config.json has no place for them: model.layers.3.mlp.up_proj.weight",
        "model.layers.0.self_attn.k_proj.weight in model.safetensors has shape [8, 8], by config.json it is [4, 8]",
        "model.layers.1.self_attn.v_proj.weight in model.safetensors is of type I8",
    )


def test_old_rotary_buffers_are_no_tensors_of_the_model(tmp_path):
    tensors = tensors_of(RAW) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    load_hf(write(tmp_path / "m", tensors=tensors))


@pytest.mark.parametrize("vocab", [16, 24])
def test_padded_vocabularies_are_named(tmp_path, no_reads, vocab):
    refused(write(tmp_path / "m", vocab_size=vocab), "[19, 8]", f"[{vocab}, 8]", "padded", "set vocab_size to 19")


def test_truncated_and_damaged_files(tmp_path, no_reads):
    file = write(tmp_path / "m") / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    for keep in (len(data) - 1, 8 + size, 8 + size // 2, 20, 8, 3, 0):
        file.write_bytes(data[:keep])
        refused(tmp_path / "m", file, "truncated", f"{keep} bytes")
        with pytest.raises(ValueError, match="truncated"):
            check_hf(tmp_path / "m")
    file.write_bytes(data[:-1])
    refused(tmp_path / "m", f"it has {len(data) - 1} bytes, its header describes {len(data)}")
    file.write_bytes(data + b"x")
    refused(tmp_path / "m", file, f"{len(data) + 1} bytes", f"{len(data)}")
    file.write_bytes(b"PK\x03\x04" * 100)
    refused(tmp_path / "m", file, "not a safetensors file")
    file.write_bytes(data[:8] + b"[" + data[9:])
    refused(tmp_path / "m", file, "damaged")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 100\n" + b" " * 100)
    refused(tmp_path / "m", file, "git-lfs pointer")
    overlap = data[8 : 8 + size].replace(b'"data_offsets":[0,', b'"data_offsets":[1,', 1)
    file.write_bytes(data[:8] + overlap + data[8 + size :])
    refused(tmp_path / "m", file, "damaged", "tensor")


def test_missing_folder_and_configuration(tmp_path):
    refused(tmp_path / "nothing", tmp_path / "nothing", "hub id", error=FileNotFoundError)
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", tmp_path / "empty" / "config.json", error=FileNotFoundError)
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is a file")
    (tmp_path / "empty" / "config.json").write_text("[1]")
    refused(tmp_path / "empty", "config.json", "list")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (dict(model_type="gpt2", architectures=["GPT2LMHeadModel"]), ("'gpt2'", "GPT2LMHeadModel", "llama, qwen2")),
        (dict(architectures=["LlamaForTokenClassification"]), ("LlamaForTokenClassification", "LlamaForCausalLM")),
        (dict(rope_scaling=dict(rope_type="yarn", factor=4.0, beta_slow=64)), ("beta_slow < beta_fast, got 64.0",)),
        (dict(rope_scaling=dict(rope_type="yarn")), ("factor is missing",)),
        (dict(rope_scaling=dict(type="dynamic", factor=4.0)), ("rope type 'dynamic'",)),
        (dict(rope_parameters=dict(rope_type="longrope")), ("rope type 'longrope'", "default, linear, llama3, yarn")),
        (dict(rope_scaling=dict(type="linear")), ("factor is missing",)),
        (dict(rope_scaling=dict(rope_type="llama3", factor=8, low_freq_factor=4, high_freq_factor=4)), ("4.0 and 4",)),
        (dict(rope_parameters=dict(full_attention=dict(rope_type="default"))), ("per layer type", "full_attention")),
        (dict(rope_scaling=dict(type="linear", factor=2.0), rope_parameters=dict(factor=4.0)), ("contradict",)),
        (dict(partial_rotary_factor=0.5), ("partial_rotary_factor 0.5",)),
        (dict(hidden_act="quick_gelu"), ("hidden_act 'quick_gelu'", "silu")),
        (QWEN2 | dict(layer_types=["full_attention", "chunked_attention"]), ("chunked_attention", "sliding_attention")),
        (QWEN2 | dict(layer_types=["full_attention"] * 2), ("layer_types names 2 blocks", "3")),
        (QWEN2 | dict(use_sliding_window=True, sliding_window=0), ("sliding_window", "got 0")),
        (dict(layer_types=["full_attention", "linear_attention", "full_attention"]), ("linear_attention",)),
        (dict(layer_types=["sliding_attention"] * 3), ("sliding_attention", "'llama'")),
        (dict(quantization_config=dict(quant_method="gptq")), ("quantised", "gptq")),
        (dict(hidden_size=9), ("hidden_size 9", "num_attention_heads 2")),
        (dict(num_key_value_heads=3), ("num_kv_heads 3", "2 query heads")),
        (dict(num_hidden_layers=0), ("num_hidden_layers", "got 0")),
        (dict(vocab_size="19"), ("vocab_size", "'19'")),
        (dict(vocab_size=None), ("vocab_size is missing",)),
        (dict(rms_norm_eps="small"), ("rms_norm_eps", "'small'")),
        (dict(eos_token_id="</s>"), ("</s>",)),
    ],
)  # fmt: skip
def test_unsupported_models_are_refused(tmp_path, no_reads, change, parts):
    refused(write(tmp_path / "m", **change), tmp_path / "m" / "config.json", *parts)


def test_configurations_that_are_accepted():
    base = {key: value for key, value in RAW.items() if key != "num_key_value_heads"}
    assert config_from_hf(base) == dataclasses.replace(CONFIG, blocks=uniform_blocks(3, 2, 12))
    assert config_from_hf(RAW | dict(head_dim=6)).head_dim == 6
    assert config_from_hf(RAW | dict(eos_token_id=[2, 5], pad_token_id=-1)).eos_token_ids == (2, 5)
    nothing = config_from_hf(RAW | dict(eos_token_id=None, bos_token_id=None))
    assert nothing.eos_token_ids == () and nothing.bos_token_id is None
    del base["architectures"]
    assert config_from_hf(base).family == "llama"
    biases = config_from_hf(RAW | dict(attention_bias=True, mlp_bias=True))
    assert biases.qkv_bias and biases.o_bias and biases.mlp_bias
    qwen = RAW | QWEN2 | dict(sliding_window=16, use_sliding_window=False)
    config = config_from_hf(qwen | dict(layer_types=["full_attention"] * 3, attention_bias=True))
    assert (config.qkv_bias, config.o_bias, config.family) == (True, False, "qwen2")
    assert config_from_hf(qwen | dict(use_sliding_window=True, max_window_layers=3)) == config_from_hf(qwen)
    mistral = RAW | dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=None)
    assert config_from_hf(mistral).family == "mistral"
    assert config_from_hf(RAW | dict(rope_scaling=dict(type="linear", factor=2))).rope_scaling == RopeScaling(
        "linear", 2.0
    )
    llama3 = dict(rope_type="llama3", factor=8, low_freq_factor=1, high_freq_factor=4)
    llama3["original_max_position_embeddings"] = 64
    want = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    assert config_from_hf(RAW | dict(rope_scaling=llama3)).rope_scaling == want
    newer = config_from_hf(RAW | dict(rope_parameters=llama3 | dict(rope_theta=5e5)))
    assert newer.rope_scaling == want and newer.rope_theta == 5e5
    # transformers takes the model's length where the original one is not given.
    del llama3["original_max_position_embeddings"]
    short = config_from_hf(RAW | dict(rope_scaling=llama3, max_position_embeddings=96))
    assert short.rope_scaling.original_max_position == 96


def test_hub_ids_go_through_huggingface_hub(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub (extra [hf]) is not installed")
    monkeypatch.chdir(tmp_path)
    asked = []

    def snapshot_download(repo_id, *, revision=None, allow_patterns=None):
        asked.append((repo_id, revision))
        assert "*.safetensors" in allow_patterns and "*.json" in allow_patterns
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    write(tmp_path / "snapshot")
    config, _ = load_hf("owner/some-model.v2", revision="abc")
    assert config == CONFIG and asked == [("owner/some-model.v2", "abc")]
    # A folder of that name comes first.
    (tmp_path / "owner").mkdir()
    write(tmp_path / "owner" / "local")
    assert str(resolve_hf("owner/local")) == "owner/local" and len(asked) == 1

    def fails(*_, **__):
        raise RuntimeError("no route to the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    refused("owner/other", "owner/other", "no route to the hub", "revision main", error=OSError)


def test_a_hub_id_without_huggingface_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("owner/model", "owner/model", "lsfuse[hf]", error=ImportError)


@pytest.mark.slow
def test_loading_holds_no_second_copy(tmp_path):
    """290 MB, more than a quarter of it one embedding: the process grows by the parameters and a fixed amount."""
    config = ModelConfig(40_000, 512, 8, 64, uniform_blocks(12, 8, 1024))
    file = tmp_path / "measure.py"
    file.write_text(
        textwrap.dedent("""
        import resource, sys, jax, jax.numpy as jnp
        from lsfuse.io import load_hf, save_hf
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        jax.block_until_ready(jnp.zeros(3) + 1)
        before = peak()
        config, params = load_hf(sys.argv[1], *sys.argv[3:])
        loaded = peak()
        save_hf(sys.argv[2], config, params)
        print(before, loaded, peak(), sum(x.nbytes for x in jax.tree.leaves(params)))
        """)
    )
    save_hf(tmp_path / "m", config, jax.tree.map(lambda x: np.ones(x.shape, x.dtype), abstract_params(config)))
    for dtype in ([], ["bfloat16"]):
        command = [sys.executable, str(file), str(tmp_path / "m"), str(tmp_path / f"copy{len(dtype)}"), *dtype]
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout
        before, loaded, saved, size = map(int, output.split())
        assert size > (200e6 if not dtype else 100e6)
        assert loaded - before < size + 80e6, (before, loaded, size)
        assert saved - before < size + 130e6, (before, saved, size)
