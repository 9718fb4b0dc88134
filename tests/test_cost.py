"""The cost formulas against the compiler's count, on sizes at which every loop body runs once."""

import dataclasses

import jax
import numpy as np
import pytest

from lsfuse import model as models
from lsfuse import replay
from lsfuse.kernels.tail_attention import reference as tiles
from lsfuse.replay import cost as cost_model
from lsfuse.rl import reinforce
from lsfuse.train import measure

# Every block is a run of its own, so that the loop over blocks has one turn.
MODEL = models.ModelConfig(
    vocab_size=512,
    hidden_size=256,
    num_heads=4,
    head_dim=32,
    blocks=(models.BlockConfig("full", 2, 1024), models.BlockConfig("full", 1, 1024)),
)


# Attention is most of it.
HEAVY = dataclasses.replace(
    MODEL,
    vocab_size=64,
    hidden_size=16,
    num_heads=4,
    head_dim=128,
    blocks=(models.BlockConfig("full", 2, 16), models.BlockConfig("full", 1, 16)),
)

# Windows, post-norms, caps and plain FFNs: the same products, and one more forward product where a norm follows it.
FAMILY = dataclasses.replace(
    MODEL,
    blocks=(
        models.BlockConfig("sliding", 2, 1024, window=40),
        models.BlockConfig("sliding", 1, 1024, ffn="plain", window=24),
    ),
    qk_norm=True,
    post_norms=True,
    norm_offset=1.0,
    attn_logit_softcapping=5.0,
    final_logit_softcapping=5.0,
)


def _batch(prompt, response, branches):
    shape = (1, branches, response)
    ids = np.ones(shape, np.int32)
    return replay.Batch(
        prompt_ids=np.ones((1, prompt), np.int32),
        prompt_lengths=np.full(1, prompt, np.int32),
        completion_ids=ids,
        completion_lengths=np.full((1, branches), response, np.int32),
        completion_mask=ids,
        group_sizes=np.full(1, branches, np.int32),
        advantages=np.ones((1, branches), np.float32),
    )


@pytest.mark.parametrize(
    ("model", "mode", "options"),
    [
        (HEAVY, "stop", {"branch_batch": 4}),
        (HEAVY, 129, {"branch_batch": 4, "chunk_size": 128, "prefix_activations": "recompute"}),
        (MODEL, "dense", {"branch_batch": 4}),
        (MODEL, "stop", {"branch_batch": 4}),
        (MODEL, "exact", {"branch_batch": 4, "prefix_activations": "recompute"}),
        (FAMILY, "exact", {"branch_batch": 4, "prefix_activations": "recompute"}),
        (MODEL, "exact", {"branch_batch": 4, "prefix_activations": "recompute", "prefix": "longest_common"}),
        pytest.param(FAMILY, "dense", {"branch_batch": 4, "remat_policy": "nothing_saveable"}, marks=pytest.mark.slow),
    ],
    ids=["heavy-stop", "heavy-n", "dense", "stop", "exact", "family-exact", "trunk", "family-dense"],
)
def test_flops_agree_with_the_compiler(model, mode, options):
    prefix = 256 if model is HEAVY else 64
    batch = _batch(prefix + 1, 32, 4)
    make = replay.dense_value_and_grad if mode == "dense" else replay.value_and_grad
    chosen = measure.options_for(mode, **options)
    params = jax.eval_shape(lambda: models.init_params(model, jax.random.key(0)))
    gradient = {} if mode == "dense" else {"prefix_grad": mode}
    step = jax.jit(make(reinforce(), model, **options, **gradient)).lower(params, batch).compile()
    cost = measure.step_cost(model, mode, chosen, batch, np.float32)
    never = replay.cost.Cost()
    if isinstance(mode, int):
        # 128 constants, in a state with room for one more chunk: nothing stands before their chunk, so its loop over a
        # prefix does not run, but the compiler counts the body; then 128 more, which see them.
        pair = 2 * model.num_heads * model.head_dim
        never = replay.cost.Cost(attention=pair * (2 * 128 * 384 + 5 * 128 * 128))
    compiled = step.cost_analysis()
    compiled = compiled[0] if isinstance(compiled, list) else compiled
    assert cost.flops + never.flops == pytest.approx(compiled["flops"], rel=0.03)


@pytest.mark.parametrize("window", [1, 3, 7, 20, 100])
def test_executed_tiles_of_a_window(monkeypatch, window):
    """From the first tile in which a query of the row tile sees a key to the last there is, key by key."""
    for name, size in (("TILE", 4), ("ROWS", 6), ("OWN_TILE", 3)):
        monkeypatch.setattr(tiles, name, size)
    model = dataclasses.replace(MODEL, blocks=(models.BlockConfig("sliding", 2, 8, window=window),))
    count, rows = 3, 5
    for first, last in ((0, 0), (0, 11), (3, 14)):
        at = max(last, 7)
        prefix = cost_model._Prefix(first, last, 20, at)
        queries = [(at + t, b, t) for b in range(count) for t in range(rows) for _ in range(2)]
        pairs, step = 0, -(-len(queries) // -(-len(queries) // 6))
        for begin in range(0, len(queries), step):
            part = queries[begin : begin + step]
            seen = {(s - first) // 4 for q, *_ in part for s in range(first, last) if s > q - window}
            spared = max(min(q for q, *_ in part) - window + 1 - first, 0) // 4
            run = max(-(-(last - first) // 4) - spared, 0)
            assert not seen or min(seen) >= spared
            pairs += len(part) * 4 * run
        assert cost_model._visible(model, model.blocks[0], count, rows, prefix) == pairs // 2
    own = sum(
        9 * len([j for j in range(4) if any(0 <= q - s < window for q in i for s in range(3 * j, min(3 * j + 3, 11)))])
        for i in (range(0, 3), range(3, 6), range(6, 9), range(9, 12))
    )
    assert cost_model._own(12, 11, window) == own


def test_a_window_saves_what_it_does_not_see():
    """A prompt of 64 windows: attention of the sliding model costs a small share of the full one's, FFNs the same."""
    batch = _batch(32769, 64, 4)
    costs = {}
    for attention, window in (("full", None), ("sliding", 512)):
        model = models.replace_blocks(MODEL, (models.BlockConfig(attention, 2, 1024, window=window),) * 4)
        costs[attention] = measure.step_cost(model, "exact", measure.options_for("exact"), batch, np.float32)
    assert costs["sliding"].linear == costs["full"].linear
    assert costs["sliding"].attention < 0.08 * costs["full"].attention


def test_positions_and_units():
    """Linear FLOPs in forward-token units: the table of the design, less what the last block spares the prefix."""
    blocks = models.uniform_blocks(50, 2, 1024)
    model = models.replace_blocks(MODEL, blocks)
    batch = _batch(1025, 64, 8)
    token = sum(replay.cost.block_flops(model, block) for block in blocks)
    units = {}
    for mode, keep in (("exact", "keep"), ("exact", "recompute"), ("stop", "keep"), ("dense", "keep")):
        options = measure.options_for(mode, chunk_size=1024, prefix_activations=keep)
        cost = measure.step_cost(model, mode, options, batch, np.float32)
        units[mode, keep] = cost.linear / token
        if mode == "dense":
            assert cost.forward_tokens == 8 * (1025 + 63)
    tails = 8 * 64
    assert units["exact", "keep"] == pytest.approx(3 * 1024 + 3 * tails, rel=0.03)
    assert units["exact", "recompute"] == pytest.approx(4 * 1024 + 3 * tails, rel=0.03)
    assert units["stop", "keep"] == pytest.approx(1024 + 3 * tails, rel=0.03)
    assert units["dense", "keep"] == pytest.approx(3 * 8 * 1089, rel=0.01)


def test_own_tiles_are_even():
    assert [tiles.own_tile(n) for n in (1, 200, 256, 257, 512, 516, 2176)] == [1, 200, 256, 136, 256, 176, 248]
    assert cost_model._own(516, 516) == 6 * 176**2
