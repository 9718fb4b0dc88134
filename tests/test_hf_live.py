"""Against transformers itself: random checkpoints it writes are read here, and exports are read there.

Opt-in, since it needs torch and transformers (see CONTRIBUTING.md).
"""

import dataclasses
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="live parity needs torch and transformers: pip install torch transformers")
transformers = pytest.importorskip("transformers", reason="live parity needs transformers: pip install transformers")

from lsfuse.io import Tokenizer, load_hf, save_hf  # noqa: E402
from lsfuse.io.hf_names import tensor_specs  # noqa: E402
from lsfuse.model import forward, init_params, logits  # noqa: E402

pytestmark = pytest.mark.slow

SMOLLM2 = os.environ.get("LSFUSE_SMOLLM2")
BASE = dict(vocab_size=83, hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4)


def rope(theta, kind="default", **values):
    return dict(rope_type=kind, rope_theta=theta, **values)


LLAMA3 = rope(
    3e4, "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128
)
YARN = rope(1e4, "yarn", factor=4.0, original_max_position_embeddings=32)
BY_LAYER = dict(full_attention=rope(1e4, "linear", factor=8.0), sliding_attention=rope(100.0))
GEMMA = dict(num_key_value_heads=2, head_dim=16, sliding_window=11, query_pre_attn_scalar=24)
SLIDING = dict(num_key_value_heads=2, use_sliding_window=True, sliding_window=13, max_window_layers=1)
MODELS = {
    "llama2": ("LlamaConfig", dict(rms_norm_eps=1e-5)),
    "llama3": ("LlamaConfig", dict(num_key_value_heads=2, head_dim=16, rope_parameters=LLAMA3)),
    "linear": ("LlamaConfig", dict(num_key_value_heads=1, rope_parameters=rope(1e4, "linear", factor=3.0))),
    "smollm2": ("LlamaConfig", dict(num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=rope(1e5))),
    "biases": ("LlamaConfig", dict(attention_bias=True, mlp_bias=True, hidden_act="gelu")),
    "qwen2": ("Qwen2Config", dict(num_key_value_heads=2, rope_parameters=rope(1e6))),
    "qwen2_tied": ("Qwen2Config", dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "mistral_full": ("MistralConfig", dict(num_key_value_heads=2, sliding_window=None)),
    "mistral": ("MistralConfig", dict(num_key_value_heads=2, sliding_window=9, rope_parameters=rope(1e4))),
    "yarn": ("LlamaConfig", dict(num_key_value_heads=2, rope_parameters=YARN)),
    "yarn_options": (
        "MistralConfig",
        dict(
            num_key_value_heads=2,
            rope_parameters=YARN | dict(beta_fast=16.0, beta_slow=2.0, attention_factor=1.3, truncate=False),
        ),
    ),
    "qwen2_window": ("Qwen2Config", SLIDING),
    "qwen3": ("Qwen3Config", dict(num_key_value_heads=2, head_dim=16)),
    "qwen3_window": ("Qwen3Config", SLIDING | dict(head_dim=8, attention_bias=True, rope_parameters=YARN)),
    "gemma2": ("Gemma2Config", GEMMA | dict(attn_logit_softcapping=4.0, final_logit_softcapping=5.0)),
    "gemma2_uncapped": (
        "Gemma2Config",
        GEMMA | dict(attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False),
    ),
    "gemma3": ("Gemma3TextConfig", GEMMA | dict(num_hidden_layers=7, rope_parameters=BY_LAYER)),
    "gemma3_layers": (
        "Gemma3TextConfig",
        GEMMA | dict(layer_types=["full_attention", "sliding_attention", "full_attention"], attention_bias=True),
    ),
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(name: str, folder: pathlib.Path, dtype=torch.float32, **save):
    """A random checkpoint, written by transformers."""
    kind, change = MODELS[name]
    torch.manual_seed(sorted(MODELS).index(name))
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**BASE | change), attn_implementation="eager"
    )
    gain = 0 if "Gemma" in kind else 1  # Gemma adds one itself
    for key, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        fan_in = parameter.shape[-1] ** 0.5
        parameter.data = gain + 0.3 * noise if "norm" in key else 0.4 * noise if "embed" in key else noise / fan_in
    model.to(dtype).save_pretrained(folder, **save)
    return model.eval()


def tree_as_checkpoint(config, tree):
    for spec in tensor_specs(config):
        leaf = tree
        for key in spec.path:
            leaf = leaf[key]
        leaf = np.asarray(leaf if spec.index is None else leaf[spec.index])
        yield spec.name, leaf.T if spec.transposed else leaf


@pytest.mark.parametrize("name", MODELS)
def test_logits_log_probs_and_gradients(tmp_path, name):
    model = make(name, tmp_path / "m", max_shard_size="20KB")
    rng = np.random.default_rng(0)
    ids = rng.integers(3, BASE["vocab_size"], (3, 50))
    weights = rng.standard_normal((3, 49)).astype(np.float32)
    want = model(torch.from_numpy(ids), use_cache=False).logits
    want_logps = torch.log_softmax(want[:, :-1], -1).gather(-1, torch.from_numpy(ids)[:, 1:, None])[..., 0]
    (torch.from_numpy(weights) * want_logps).sum().backward()

    config, params = load_hf(tmp_path / "m")

    @jax.jit
    def run(params, ids):
        def loss(params):
            scores = logits(params, config, forward(params, config, ids))
            logps = jnp.take_along_axis(jax.nn.log_softmax(scores[:, :-1]), ids[:, 1:, None], -1)[..., 0]
            return (weights * logps).sum(), (scores, logps)

        return jax.grad(loss, has_aux=True)(params)

    grads, (scores, logps) = run(params, jnp.asarray(ids, jnp.int32))
    assert np.abs(np.asarray(scores) - want.detach().numpy()).max() <= 2e-5
    assert np.abs(np.asarray(logps) - want_logps.detach().numpy()).max() <= 2e-5
    references = dict(model.named_parameters())
    for key, grad in tree_as_checkpoint(config, grads):
        reference = references.pop(key).grad.numpy()
        assert np.linalg.norm(grad - reference) <= 2e-5 * np.linalg.norm(reference), key
    assert not references


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_the_export(tmp_path, name, dtype):
    def read(folder):
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", attn_implementation="eager", output_loading_info=True
        )

    make(name, tmp_path / "m", dtype)
    model, _ = read(tmp_path / "m")
    config, params = load_hf(tmp_path / "m")
    save_hf(tmp_path / "copy", config, params, max_shard_bytes=30_000)
    again, info = read(tmp_path / "copy")
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    state = again.state_dict()
    for key, value in model.state_dict().items():
        assert state[key].dtype == value.dtype == dtype
        assert torch.equal(state[key].view(torch.uint8), value.view(torch.uint8)), key
    ids = torch.arange(3, 43)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
    kept = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"]
    kept += ["num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters"]
    kept += ["tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "attention_bias", "mlp_bias"]
    kept += ["sliding_window", "layer_types", "query_pre_attn_scalar", "hidden_activation"]
    kept += ["attn_logit_softcapping", "final_logit_softcapping"]
    for key in kept:
        if hasattr(model.config, key):
            assert getattr(again.config, key) == getattr(model.config, key), key


def test_transformers_refuses_blocks_it_does_not_have(tmp_path):
    make("llama2", tmp_path / "m")
    config, _ = load_hf(tmp_path / "m")
    first, *rest = config.blocks
    config = dataclasses.replace(config, blocks=(dataclasses.replace(first, ffn_width=8), *rest))
    save_hf(tmp_path / "own", config, init_params(config, jax.random.key(0)))
    with pytest.raises(ValueError, match="lsfuse"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own")


TEXTS = [
    "The quick brown fox jumps over 13 lazy dogs.",
    "  leading, doubled  and trailing spaces  \n\n\ttabs\r\n",
    "Ünïcødé, 猫が好き, العربية, emoji 👩‍👩‍👧‍👦🏳️‍🌈, zero\u200bwidth, combining e\u0301",
    "def f(x):\n    return x ** 2  # 1234567890 3.14159e-26\n",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|> not<|im_end|>apart",
    "",
    "a" * 300,
    "it's we'll I'D don't 'quoted' \"double\" `back`",
]
CONVERSATIONS = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be <brief> & kind."}, {"role": "user", "content": "Hi\n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "ç 猫"}],
]


@pytest.mark.skipif(not SMOLLM2, reason="LSFUSE_SMOLLM2 does not name a folder with SmolLM2-135M-Instruct")
def test_tokenizer_and_chat_template_of_a_real_checkpoint():
    ours = Tokenizer.load(SMOLLM2)
    theirs = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (
        theirs.bos_token_id,
        theirs.eos_token_id,
        theirs.pad_token_id,
    )
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text, add_special_tokens=True)
        for skip in (False, True):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip, clean_up_tokenization_spaces=False)
    for messages in CONVERSATIONS:
        for generate in (False, True):
            want = theirs.apply_chat_template(messages, add_generation_prompt=generate, tokenize=False)
            assert ours.apply_chat_template(messages, add_generation_prompt=generate) == want


@pytest.mark.skipif(not SMOLLM2, reason="LSFUSE_SMOLLM2 does not name a folder with SmolLM2-135M-Instruct")
def test_log_probs_of_a_real_checkpoint():
    model = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32, attn_implementation="eager")
    ids = Tokenizer.load(SMOLLM2).encode(TEXTS[0] + TEXTS[3] + json.dumps(CONVERSATIONS))
    with torch.no_grad():
        want = torch.log_softmax(model(torch.tensor([ids])).logits, -1).numpy()
    config, params = load_hf(SMOLLM2, jnp.float32)
    scores = jax.jit(lambda p, i: logits(p, config, forward(p, config, i)))(params, jnp.asarray([ids], jnp.int32))
    got = np.asarray(jax.nn.log_softmax(scores))
    at = np.asarray(ids)[None, 1:, None]
    difference = np.take_along_axis(got[:, :-1] - want[:, :-1], at, -1)
    # 30 blocks in float32: transformers itself differs from float64 by about as much.
    assert np.abs(difference).max() <= 5e-4
