"""Tiny checkpoints in the layout of real ones: logits, log-probs and gradients as transformers computes them.

tests/golden/make_golden.py made the files; this needs no torch. float32 is compared with transformers as it is, float64
with its float32 casts taken out.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsfuse.io import load_hf, save_hf
from lsfuse.io.hf_config import config_from_hf
from lsfuse.io.hf_names import tensor_specs
from lsfuse.io.hf_safetensors import read_header, read_rows
from lsfuse.model import forward, logits

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
NAMES = sorted(p.name for p in GOLDEN.iterdir() if (p / "golden.npz").exists())
TOLERANCE = {32: 2e-5, 64: 1e-9}


def values_and_grads(config, params, ids, weights):
    """Logits [B, T, V], log-probs [B, T - 1] and the gradient of Σ weights · log-probs."""

    @jax.jit
    def run(params, ids, weights):
        def loss(params):
            scores = logits(params, config, forward(params, config, ids))
            logps = jnp.take_along_axis(jax.nn.log_softmax(scores[:, :-1]), ids[:, 1:, None], -1)[..., 0]
            return (weights * logps).sum(), (scores, logps)

        (_, (scores, logps)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return scores, logps, grads

    return run(params, ids, weights)


def as_checkpoint(config, tree) -> dict[str, np.ndarray]:
    """Arrays of a parameter tree under the names, and with the axes, of the checkpoint."""
    result = {}
    for spec in tensor_specs(config):
        leaf = tree
        for key in spec.path:
            leaf = leaf[key]
        leaf = np.asarray(leaf if spec.index is None else leaf[spec.index])
        result[spec.name] = leaf.T if spec.transposed else leaf
    return result


def compare(name: str, bits: int) -> None:
    dtype = jnp.dtype(f"float{bits}")
    config, params = load_hf(GOLDEN / name, dtype=dtype)
    with np.load(GOLDEN / name / "golden.npz") as golden:
        want = {key.removeprefix(f"grad{bits}/"): golden[key] for key in golden.files if f"{bits}" in key[:8]}
        ids, weights = jnp.asarray(golden["ids"]), jnp.asarray(golden["loss_weights"], dtype)
    scores, logps, grads = values_and_grads(config, params, ids, weights)
    assert scores.dtype == dtype and logps.dtype == dtype
    assert np.abs(np.asarray(scores) - want.pop(f"logits{bits}")).max() <= TOLERANCE[bits]
    assert np.abs(np.asarray(logps) - want.pop(f"logps{bits}")).max() <= TOLERANCE[bits]
    got = as_checkpoint(config, grads)
    assert got.keys() == want.keys()
    errors = {key: float(np.linalg.norm(got[key] - want[key]) / np.linalg.norm(want[key])) for key in want}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= TOLERANCE[bits], (worst, errors[worst])


def test_the_families_are_there():
    llamas = ["linear_rope", "llama2_mha", "llama3_rope", "llama_sharded"]
    others = ["mistral_window", "qwen2_bias", "qwen3_yarn", "smollm2_tied"]
    assert NAMES == ["gemma2", "gemma3", *llamas, *others]


@pytest.mark.parametrize("name", NAMES)
def test_float32_agrees_with_transformers_unmodified(name):
    compare(name, 32)


@pytest.mark.parametrize("name", NAMES)
def test_float64_agrees_with_transformers_without_its_float32_casts(name, x64):
    compare(name, 64)


def without_windows(config):
    blocks = tuple(dataclasses.replace(block, attention="full", window=None) for block in config.blocks)
    return dataclasses.replace(config, blocks=blocks)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("linear_rope", dict(rope_scaling=None)),
        ("llama3_rope", dict(rope_scaling=None)),
        ("qwen3_yarn", dict(rope_scaling=None)),
        ("qwen3_yarn", without_windows),
        ("mistral_window", without_windows),
        ("gemma2", dict(attn_logit_softcapping=None)),
        ("gemma2", dict(final_logit_softcapping=None)),
        ("gemma2", dict(query_pre_attn_scalar=None)),
        ("gemma3", dict(local_rope_theta=10000.0)),
        ("gemma3", without_windows),
    ],
)
def test_every_feature_acts(name, change, x64):
    """The golden values would prove nothing about a feature that does nothing at these positions."""
    config, params = load_hf(GOLDEN / name, dtype=jnp.float64)
    with np.load(GOLDEN / name / "golden.npz") as golden:
        ids, want = jnp.asarray(golden["ids"]), golden["logits64"]
    plain = change(config) if callable(change) else dataclasses.replace(config, **change)
    unscaled = jax.jit(lambda params, ids: logits(params, plain, forward(params, plain, ids)))(params, ids)
    assert np.abs(np.asarray(unscaled) - want).max() > 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_export_of_the_import_is_the_original(name, tmp_path):
    config, params = load_hf(GOLDEN / name)
    save_hf(tmp_path / "copy", config, params, max_shard_bytes=30_000)
    assert len(list((tmp_path / "copy").glob("*.safetensors"))) > 1
    again, copy = load_hf(tmp_path / "copy")
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, params, copy)
    kept = {t.name: t for f in (GOLDEN / name).glob("*.safetensors") for t in read_header(f).values()}
    made = {t.name: t for f in (tmp_path / "copy").glob("*.safetensors") for t in read_header(f).values()}
    assert kept.keys() == made.keys()
    for key, old in kept.items():
        new = made[key]
        assert (old.dtype_name, old.shape) == (new.dtype_name, new.shape)
        assert read_rows(old, 0, old.shape[0]).tobytes() == read_rows(new, 0, new.shape[0]).tobytes()


@pytest.mark.parametrize("name", ["llama3_rope", "linear_rope", "llama_sharded", "qwen3_yarn"])
def test_both_spellings_of_rope_give_the_same_configuration(name, tmp_path):
    raw = json.loads((GOLDEN / name / "config.json").read_text())
    config = config_from_hf(raw)
    theta = (raw.get("rope_parameters") or {}).get("rope_theta", raw.get("rope_theta", 10000.0))
    scaling = raw.pop("rope_scaling", None) or raw.pop("rope_parameters", None)
    raw.pop("rope_parameters", None)
    raw.pop("rope_theta", None)
    newer = raw | {"rope_parameters": scaling | {"rope_theta": theta}}
    older = raw | {"rope_scaling": {k: v for k, v in scaling.items() if k != "rope_theta"}, "rope_theta": theta}
    assert config_from_hf(newer) == config_from_hf(older) == config
