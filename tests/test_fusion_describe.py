"""Figures of models by hand, placement against every split there is, and dry runs against the transforms themselves."""

import itertools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HOLLOW, random_params, tiny

from experiments import describe as command
from lsfuse import fusion
from lsfuse.fusion import describe
from lsfuse.model import BlockConfig, ModelConfig, abstract_params, count_params, unstack_blocks

FULL, FFN, NONE = BlockConfig("full", 2, 24), BlockConfig("none", 1, 8), BlockConfig("none", 1, 0)


def test_figures_by_hand():
    """4 of 5 blocks do something, 2 have attention: 2 blocks × 2 × 2 heads × 4 × 2 bytes."""
    config = tiny(blocks=(FULL, FFN, NONE, BlockConfig("linear_map", 1, 40), FULL))
    got = describe.summarize(config, jnp.bfloat16)
    want = {"blocks": 5, "real blocks": 4, "attention blocks": 2, "linear maps": 1, "widest block": 3, "widest FFN": 40}
    assert got | want == got
    assert got["KV bytes per token"] == 2 * 2 * 2 * 4 * 2 == sum(r["KV bytes"] for r in describe.block_rows(config))
    rows = describe.block_rows(config)
    assert rows[1]["parameters"] == 3 * 16 * 8 + 16 and rows[2]["parameters"] == 0
    assert rows[3]["parameters"] == 16 * 16 + 3 * 16 * 40 + 2 * 16
    assert got["parameters"] == sum(r["parameters"] for r in rows) + 2 * 23 * 16 + 16


@pytest.mark.parametrize("seed", range(5))
def test_the_best_of_all_splits(seed):
    rng = np.random.default_rng(seed)
    sizes = [int(x) for x in rng.integers(0, 40, rng.integers(3, 9))]
    for parts in range(1, len(sizes) + 1):
        ends = describe.balance(sizes, parts)

        def fullest(ends, sizes=sizes):
            starts = [0, *(e + 1 for e in ends[:-1])]
            return max(sum(sizes[a : b + 1]) for a, b in zip(starts, ends, strict=True))

        every = itertools.combinations(range(len(sizes) - 1), parts - 1)
        assert len(ends) == parts and all(a < b for a, b in zip(ends, ends[1:], strict=False))
        assert fullest(ends) == min(fullest([*cuts, len(sizes) - 1]) for cuts in every)


def test_placement_is_by_bytes_and_not_by_count():
    wide, narrow = BlockConfig("none", 1, 700), BlockConfig("none", 1, 100)
    stages = describe.place(tiny(blocks=(wide, *(narrow,) * 7)), 2)
    assert [(s.first, s.last) for s in stages] == [(0, 0), (1, 7)]
    assert sum(s.nbytes for s in stages) == 2 * count_params(tiny(blocks=(wide, *(narrow,) * 7)))
    with pytest.raises(ValueError, match="9 devices for 8 blocks"):
        describe.place(tiny(blocks=(narrow,) * 8), 9)


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({}, 3, "num_heads 8 is no multiple of 3 tensor-parallel devices"),
        ({"vocab_size": 31}, 2, "vocab_size 31 is no multiple of 2"),
        ({"width": 20}, 8, "block 1: FFN width 20 is no multiple of 8 .* prune_ffn to 16 channels"),
        ({"heads": 12, "kv": 3}, 4, "block 1: 3 kv heads on 4"),
    ],
)
def test_tensor_parallel_sizes(change, size, message):
    blocks = (BlockConfig("full", 4, 32), BlockConfig("full", change.get("kv", 4), change.get("width", 32)))
    config = ModelConfig(change.get("vocab_size", 32), 32, change.get("heads", 8), 4, blocks)
    describe.check_tensor_parallel(config, 1)
    with pytest.raises(ValueError, match=message):
        describe.check_tensor_parallel(config, size)
    if not change:
        describe.check_tensor_parallel(config, 8)  # kv heads on two devices each


def test_a_dry_run_is_the_transform_without_weights():
    config = tiny(blocks=(FULL, FULL, FFN, FFN, FULL), qkv_bias=True)
    params = random_params(config, dtype=np.float32)
    importance = [np.arange(b.ffn_width) for b in config.blocks]
    surgery = fusion.chain(
        fusion.linear_attention([0]),
        fusion.remove_attention([1]),
        fusion.prune_ffn(0.5, importance),
        fusion.fuse_ffn([(1, 3)]),
        fusion.reduce_kv_heads(1),
    )
    want, want_params = surgery(config, jax.tree.map(jnp.asarray, params))
    got, shapes = describe.on_shapes(surgery, config, abstract_params(config, jnp.float32))
    assert got == want
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), want_params)
    text = fusion.dry_run(surgery, config)
    assert f"{count_params(config):,}" in text and f"{count_params(want):,}" in text and "linear map" in text
    with pytest.raises(ValueError, match="block 2 has no attention"):
        fusion.dry_run(fusion.remove_attention([2]), config)


@pytest.mark.parametrize(
    "name, billions, attention, real",
    [("llama-3.3-nemotron-super-49b", 49.87, 49, 80), ("llama-3.1-nemotron-ultra-253b", 253.40, 64, 81)],
)
def test_published_tables(repo_root, name, billions, attention, real):
    config = command.read_model(str(repo_root / "tests" / "golden" / "nemotron_blocks.json"), name)
    got = describe.summarize(config)
    assert (got["attention blocks"], got["real blocks"]) == (attention, real)
    assert round(got["parameters"] / 1e9, 2) == billions
    assert got["KV bytes per token"] == attention * 2 * 8 * 128 * 2
    stages = describe.place(config, 8)
    assert max(s.nbytes for s in stages) < 1.35 * sum(s.nbytes for s in stages) / 8
    assert "widest" in command.report(config, 8, "bfloat16")


def test_command(tmp_path, repo_root):
    from lsfuse import io

    io.save_hf(tmp_path / "m", HOLLOW, random_params(HOLLOW, dtype=np.float32))
    run = [sys.executable, "-m", "experiments.describe", f"--model={tmp_path / 'm'}"]
    done = subprocess.run(
        [*run, "--devices=2", f"--out={tmp_path / 'out'}"], cwd=repo_root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out" / "rows.json").read_text())
    assert [r["width"] for r in rows["rows"]] == [8, 24, 24, 12] and rows["setting"]["attention blocks"] == 2
    assert sum(r["parameters"] for r in rows["rows"]) == sum(
        x.size for p in unstack_blocks(HOLLOW, random_params(HOLLOW)) for x in p.values()
    )


@pytest.mark.parametrize(
    "content, table, message",
    [
        ({"a": 1}, None, "neither a config.json"),
        ({"x": {"config": {}, "blocks": []}}, "y", "--table=y is not in .*; choose one of x"),
        (None, "y", "needs a file of block tables"),
    ],
)
def test_bad_input(tmp_path, content, table, message):
    path = tmp_path
    if content is not None:
        path = tmp_path / "f.json"
        path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        command.read_model(str(path), table)
