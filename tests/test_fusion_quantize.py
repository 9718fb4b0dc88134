"""int8 kernels against numpy's arithmetic, and against the same model with its kernels scaled back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_batch, random_params, tiny
from helpers import objective as named

from lsfuse import fusion, io, replay, rl
from lsfuse.model import BlockConfig, forward, logits

CONFIG = tiny(
    blocks=(*(BlockConfig("full", 2, 24),) * 2, *(BlockConfig("none", 1, 8),) * 2),
    mlp_bias=True,
)
IDS = np.random.default_rng(1).integers(0, 23, (1, 9))


def model(dtype=np.float32):
    return CONFIG, jax.tree.map(jnp.asarray, random_params(CONFIG, dtype=dtype))


def scaled_back(params):
    """The same tree with kernels of value × scale, by numpy."""

    def back(leaf):
        if not hasattr(leaf, "qvalue"):
            return leaf
        return jnp.asarray(np.asarray(leaf.qvalue).astype(np.float64) * np.asarray(leaf.scale, np.float64), leaf.dtype)

    return {**params, "runs": {r: {n: back(x) for n, x in run.items()} for r, run in params["runs"].items()}}


def test_one_scale_to_an_output_channel():
    config, params = model()
    same, small = fusion.quantize()(config, params)
    assert same.blocks == config.blocks and same.transforms == ("quantize(int8)",)
    for run, leaves in small["runs"].items():
        for name, leaf in leaves.items():
            old = np.asarray(params["runs"][run][name])
            if old.ndim == 2:  # gains and biases
                np.testing.assert_array_equal(leaf, old)
                continue
            assert leaf.qvalue.dtype == jnp.int8 and leaf.scale.dtype == jnp.float32
            assert leaf.scale.shape == (old.shape[0], 1, old.shape[2])
            largest = np.abs(old).max(1, keepdims=True)
            np.testing.assert_allclose(leaf.scale, largest / 127.5, rtol=5e-3)
            error = np.abs(np.asarray(leaf.qvalue, np.float64) * np.asarray(leaf.scale) - old)
            assert (error <= 0.5001 * np.asarray(leaf.scale)).all()
    assert small["embed_tokens"] is params["embed_tokens"]


def test_it_computes_as_its_kernels_scaled_back():
    config, params = fusion.quantize()(*model())
    got, want = (forward(p, config, jnp.asarray(IDS)) for p in (params, scaled_back(params)))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert np.abs(got - forward(model()[1], config, jnp.asarray(IDS))).max() > 1e-4


@pytest.mark.slow
def test_it_evaluates_and_generates():
    config, params = fusion.quantize()(*model())
    plain = scaled_back(params)
    texts = fusion.from_lists(IDS.tolist())
    got = fusion.evaluate((config, params), texts, parent=model())
    assert 0 < got["kl"] < 0.01
    out = rl.sample(
        params,
        config,
        IDS[:, :4],
        np.array([4], np.int32),
        num_generations=2,
        max_tokens=3,
        key=jax.random.key(0),
        temperature=0.0,
    )
    row = np.concatenate([IDS[0, :4], np.asarray(out.completion_ids)[0, 0]])
    dense = logits(plain, config, forward(plain, config, jnp.asarray(row[None])))[0, 3:-1]
    np.testing.assert_array_equal(np.asarray(out.completion_ids)[0], np.stack([dense.argmax(-1)] * 2))


@pytest.mark.parametrize(
    "then, message",
    [
        (fusion.fuse_ffn([(2, 3)]), "fuse_ffn: .* of block 2 is quantised"),
        (fusion.linear_attention([1]), "linear_attention: .* of block 1 is quantised"),
        (fusion.reduce_kv_heads(1, [0]), "reduce_kv_heads: .* of block 0 is quantised"),
        (fusion.prune_ffn({3: 4}, [np.ones(b.ffn_width) for b in CONFIG.blocks]), "prune_ffn: .* of block 3"),
        (fusion.quantize(), "quantize: .* of block 0 is quantised"),
        (fusion.replace_spans([(0, 0, fusion.remove_attention([0])), (1, 3, None)]), None),
    ],
)
def test_what_may_follow(then, message):
    small = fusion.quantize()(*model())
    if message is None:
        assert then(*small)[0].num_blocks == 1
        return
    with pytest.raises(ValueError, match=message):
        then(*small)


def test_no_training_no_export_no_mixed_run(tmp_path):
    config, params = fusion.quantize()(*model())
    with pytest.raises(ValueError, match="is quantised; such a model can be run, but neither trained nor saved"):
        io.save_hf(tmp_path / "m", config, params)
    assert not list(tmp_path.iterdir())
    batch = jax.tree.map(jnp.asarray, make_batch(config, (5,), ((2,),), (5, 1, 2), silent=(), dtype=np.float32))
    with pytest.raises(ValueError, match="is quantised; such a model"):
        replay.value_and_grad(named("plain_grpo"), config)(params, batch)
    with pytest.raises(ValueError, match="blocks 0 to 1: .*_proj is quantised in some of them only"):
        fusion.replace_spans([(0, 0, fusion.quantize())])(*model())


def test_a_dry_run_counts_its_bytes():
    lines = fusion.dry_run(fusion.quantize(), CONFIG).splitlines()
    figures = next(line for line in lines if line.startswith("bytes")).split()[1:]
    before, after = (int(x.replace(",", "")) for x in figures)
    kernels = sum(x.size for run in random_params(CONFIG)["runs"].values() for x in run.values() if x.ndim == 3)
    scales = sum(
        x.shape[0] * x.shape[2] for run in random_params(CONFIG)["runs"].values() for x in run.values() if x.ndim == 3
    )
    assert before - after == kernels - 4 * scales
