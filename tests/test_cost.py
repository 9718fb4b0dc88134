"""The cost formulas against the compiler's count, on sizes at which every loop body runs once."""

import jax
import numpy as np
import pytest

from lsfuse import model as models
from lsfuse import replay
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
    ("mode", "options"),
    [
        ("dense", {"branch_batch": 4}),
        ("stop", {"branch_batch": 4}),
        ("exact", {"branch_batch": 4, "prefix_activations": "recompute"}),
    ],
)
def test_flops_agree_with_the_compiler(mode, options):
    batch = _batch(65, 32, 4)
    make = replay.dense_value_and_grad if mode == "dense" else replay.value_and_grad
    chosen = measure.options_for(mode, **options)
    params = jax.eval_shape(lambda: models.init_params(MODEL, jax.random.key(0)))
    gradient = {} if mode == "dense" else {"prefix_grad": mode}
    step = jax.jit(make(reinforce(), MODEL, **options, **gradient)).lower(params, batch).compile()
    cost = measure.step_cost(MODEL, mode, chosen, batch, np.float32)
    # The first chunk has nothing before it, so the loop over its prefix does not run, but the compiler counts the body.
    never = replay.cost.Cost()
    if mode != "dense":
        pair = 2 * MODEL.num_heads * MODEL.head_dim * 64 * 64
        never = replay.cost.Cost(attention=pair * (2 if mode == "stop" else 2 + 2 + 5))
    compiled = step.cost_analysis()
    compiled = compiled[0] if isinstance(compiled, list) else compiled
    assert cost.flops + never.flops == pytest.approx(compiled["flops"], rel=0.03)


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
