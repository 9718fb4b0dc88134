"""Makes the golden checkpoints and values that tests/test_hf_golden.py compares this package with.

    pip install torch transformers            (made with torch 2.13.0, transformers 5.24.0)
    python tests/golden/make_golden.py [--check] [NAME ...]

Each folder beside this file gets a tiny checkpoint (random weights, float32) in the layout real ones have, and
golden.npz: ids, loss weights, and logits, log-probs and gradients of every parameter by transformers

    in float32, unmodified (keys ending in 32), and
    in float64, with transformers' own float32 casts (norms, rotary tables, softmax) made float64 (keys ending in 64).

The loss is the sum of loss_weights · log p(ids[t + 1] | ids[: t + 1]). --check writes nothing and compares what is
there with a fresh run. Weights are far larger than a trained model's, so that attention is far from uniform and every
part of the network matters to the logits.
"""

import argparse
import contextlib
import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

HERE = pathlib.Path(__file__).resolve().parent
LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    hidden_act="silu",
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    # With head_dim 16 and theta 10,000 two wavelengths are kept, one is blended and five are stretched.
    original_max_position_embeddings=128,
)
GEMMA = {k: v for k, v in LLAMA.items() if k not in ("hidden_act", "tie_word_embeddings")} | dict(
    hidden_activation="gelu_pytorch_tanh",
    num_key_value_heads=2,
    head_dim=8,
    query_pre_attn_scalar=12,
    final_logit_softcapping=12.0,
)
MODELS = {
    # Multi-head attention; neither num_key_value_heads nor head_dim, as in the first Llama 2 files.
    "llama2_mha": LLAMA | dict(rope_scaling=None, torch_dtype="float16", pretraining_tp=1, use_cache=True),
    "llama3_rope": LLAMA
    | dict(num_key_value_heads=2, head_dim=16, rope_theta=10000.0, rope_scaling=LLAMA3_ROPE, eos_token_id=[2, 5, 7]),
    # The older spelling of the rope type.
    "linear_rope": LLAMA | dict(num_key_value_heads=1, rope_scaling=dict(type="linear", factor=4.0)),
    "smollm2_tied": LLAMA
    | dict(
        num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, rope_theta=100000, tie_word_embeddings=True
    ),
    "qwen2_bias": LLAMA
    | dict(
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        num_key_value_heads=2,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        sliding_window=32,
        use_sliding_window=False,
        max_window_layers=1,
    ),
    # Every bias, another activation, the newer spelling of rope, and shards with an index.
    "llama_sharded": LLAMA
    | dict(
        num_key_value_heads=2,
        hidden_act="gelu_pytorch_tanh",
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=dict(rope_type="default", rope_theta=500.0),
    ),
    # Windows are shorter than a row.
    "mistral_window": LLAMA
    | dict(
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=7,
        rope_theta=10000.0,
    ),
    # Half of the first blocks full, the others sliding, as its max_window_layers says; yarn keeps, blends and divides.
    "qwen3_yarn": LLAMA
    | dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        sliding_window=9,
        use_sliding_window=True,
        max_window_layers=1,
        rope_theta=10000.0,
        rope_scaling=dict(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0, beta_slow=0.5
        ),
    ),
    # sliding, full, sliding
    "gemma2": GEMMA
    | dict(
        architectures=["Gemma2ForCausalLM"],
        model_type="gemma2",
        num_hidden_layers=3,
        sliding_window=9,
        attn_logit_softcapping=6.0,
    ),
    # sliding, sliding, full, sliding; two rotary bases, the older spelling
    "gemma3": GEMMA
    | dict(
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        num_hidden_layers=4,
        intermediate_size=20,
        sliding_window=6,
        sliding_window_pattern=3,
        final_logit_softcapping=None,
        rope_theta=10000.0,
        rope_local_base_freq=50.0,
        rope_scaling=dict(rope_type="linear", factor=4.0),
    ),
}
# Their order gives each its seed: new ones come last.
ORDER = ("linear_rope", "llama2_mha", "llama3_rope", "llama_sharded", "qwen2_bias", "smollm2_tied")
ORDER += ("mistral_window", "qwen3_yarn", "gemma2", "gemma3")


def randomise(model: torch.nn.Module, rng: np.random.Generator) -> None:
    gain = 0 if model.config.model_type.startswith("gemma") else 1  # Gemma adds one itself
    for name, parameter in model.named_parameters():
        noise = rng.standard_normal(tuple(parameter.shape))
        if "norm" in name:
            value = gain + 0.3 * noise
        elif name.endswith("bias"):
            value = 0.3 * noise
        else:
            value = 0.4 * noise if "embed" in name else 1.2 * noise / parameter.shape[1] ** 0.5
        parameter.data.copy_(torch.from_numpy(value.astype(np.float32)))


@contextlib.contextmanager
def float64_everywhere():
    """transformers' `.float()`, `torch.float` and `torch.float32` mean float64; a narrower result anywhere raises."""

    class OnlyFloat64(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_floating_point() and result.dtype != torch.float64:
                raise AssertionError(f"{function} gave {result.dtype}")
            return result

    real, to_float = torch.float32, torch.Tensor.float
    try:
        torch.float32 = torch.float = torch.float64
        torch.Tensor.float = torch.Tensor.double
        torch.set_default_dtype(torch.float64)
        with OnlyFloat64():
            yield
    finally:
        torch.float32 = torch.float = real
        torch.Tensor.float = to_float
        torch.set_default_dtype(real)


def evaluate(folder: pathlib.Path, ids: np.ndarray, weights: np.ndarray, double: bool) -> dict[str, np.ndarray]:
    config = AutoConfig.from_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    state = {name: value.to(torch.float64) for name, value in reference.state_dict().items()}
    with float64_everywhere() if double else contextlib.nullcontext():
        model = reference
        if double:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager")
            model.load_state_dict(state)
        model.eval()
        tokens = torch.from_numpy(ids)
        logits = model(tokens, use_cache=False).logits
        logps = torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]
        loss = (torch.from_numpy(weights.astype(np.float64 if double else np.float32)) * logps).sum()
        loss.backward()
    bits = 64 if double else 32
    values = {f"logits{bits}": logits.detach().numpy(), f"logps{bits}": logps.detach().numpy()}
    return values | {f"grad{bits}/{name}": p.grad.numpy() for name, p in model.named_parameters()}


def make(name: str, folder: pathlib.Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(ORDER.index(name))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name], indent=2) + "\n")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    randomise(model, rng)
    if name == "llama_sharded":
        model.save_pretrained(folder, max_shard_size="40KB")  # writes its own config.json
        (folder / "generation_config.json").unlink()
    else:
        tensors = {n: p.detach() for n, p in model.named_parameters()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # Two rows of 40 positions; no id is used as padding, whose gradient torch's embedding would drop.
    ids = rng.integers(3, MODELS[name]["vocab_size"], (2, 40))
    weights = rng.standard_normal((2, 39)).astype(np.float32)
    values = evaluate(folder, ids, weights, False) | evaluate(folder, ids, weights, True)
    return {"ids": ids.astype(np.int32), "loss_weights": weights, **values}


def compare(name: str, fresh: dict[str, np.ndarray]) -> bool:
    with np.load(HERE / name / "golden.npz") as kept:
        if set(kept.files) != set(fresh):
            return False
        worst = {"32": 0.0, "64": 0.0, "ids": 0.0}
        for key in kept.files:
            kind = next((bits for bits in ("32", "64") if key.split("/")[0].endswith(bits)), "ids")
            difference = np.linalg.norm(kept[key].astype(float) - fresh[key]) / np.linalg.norm(kept[key].astype(float))
            worst[kind] = max(worst[kind], float(difference))
    print(f"{name}: largest relative difference {worst}")
    return worst["32"] < 1e-5 and worst["64"] < 1e-12 and worst["ids"] == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is there, write nothing")
    parser.add_argument("names", nargs="*", help="of models; all by default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    good = True
    for name in args.names or MODELS:
        if args.check:
            with tempfile.TemporaryDirectory() as folder:
                good &= compare(name, make(name, pathlib.Path(folder)))
        else:
            np.savez_compressed(HERE / name / "golden.npz", **make(name, HERE / name))
    sys.exit(0 if good else "golden values differ from a fresh run")


if __name__ == "__main__":
    main()
