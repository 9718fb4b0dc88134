"""Costs of choices from configs, and plans under limits on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny

from lsfuse import fusion
from lsfuse.model import BlockConfig, count_params, init_params
from lsfuse.replay import state_bytes_per_token

FULL, SLIDING = BlockConfig("full", 4, 24), BlockConfig("sliding", 4, 24, window=8)
CONFIG = tiny(blocks=(FULL, FULL, FULL, SLIDING), num_heads=4, head_dim=4)
KEY = jax.random.key(0)
FREE = fusion.chain(fusion.remove_attention(range(3)), fusion.fuse_ffn([(0, 2)]))
ONE = {  # choices of a single block, and what they cost in quality
    "keep": (0.0, None),
    "2 kv heads": (0.1, fusion.reduce_kv_heads(2)),
    "half an FFN": (0.15, fusion.prune_ffn(0.5, [np.arange(24.0)])),
    "linear": (0.3, fusion.linear_attention([0])),
    "no attention": (0.4, fusion.remove_attention([0])),
}
# A made-up device on which a decoding step of the tiny model waits for bytes.
SECONDS = fusion.decode_seconds(CONFIG, batch=2, context=100, bandwidth=1e6, flops=1e9)


def choices():
    found = [fusion.Choice(i, i, name, score, {}, t) for i in range(4) for name, (score, t) in ONE.items()]
    found += [fusion.Choice(i, i + 2, "fused", 0.9, {}, FREE) for i in range(2)]
    return fusion.choice_costs(CONFIG, found, SECONDS)


def test_costs_add_up_to_the_model_s():
    """Of plans of every kind: parameters, KV bytes and depth of the model that comes out."""
    given = choices()
    kept = [c for c in given if c.name == "keep"]
    rest = count_params(CONFIG) - sum(c.costs["parameters"] for c in kept)
    for name in (*ONE, "fused"):
        plan = [c for c in given if c.name == name][: 1 if name == "fused" else 4]
        plan += kept[3:] if name == "fused" else []
        after = fusion.apply_plan(plan)(CONFIG, init_params(CONFIG, KEY))[0]
        total = {cost: sum(c.costs[cost] for c in plan) for cost in plan[0].costs}
        assert rest + total["parameters"] == count_params(after)
        assert total["kv_bytes"] == state_bytes_per_token(after, jnp.bfloat16)
        assert total["depth"] == after.num_blocks


def test_time_by_the_roofline():
    """Weights once, keys and values for each sequence; a window reads no more than itself; FLOPs where they bind."""
    weights = 2 * (16 * 16 * 4 + 3 * 16 * 24 + 2 * 16)
    np.testing.assert_allclose(SECONDS(FULL) * 1e6, weights + 2 * 100 * 2 * 4 * 4 * 2)
    np.testing.assert_allclose((SECONDS(FULL) - SECONDS(SLIDING)) * 1e6, 2 * (100 - 8) * 2 * 4 * 4 * 2)
    slow = fusion.decode_seconds(CONFIG, batch=2, context=100, bandwidth=1e12, flops=1e6)
    np.testing.assert_allclose(slow(FULL) * 1e6, 2 * (2 * (16 * 16 * 4 + 3 * 16 * 24) + 4 * 16 * 100))
    assert SECONDS(BlockConfig("none", 1, 0)) == 0
    with pytest.raises(ValueError, match="decode_seconds: bandwidth must be positive, got 0"):
        fusion.decode_seconds(CONFIG, 1, 1, 0, 1)


def test_plans_under_limits_on_everything():
    given = choices()
    total = lambda plan, cost: sum(c.costs[cost] for c in plan)  # noqa: E731
    whole = {cost: total(given[:20:5], cost) for cost in ("parameters", "kv_bytes", "depth", "seconds")}
    assert [c.name for c in fusion.solve(given, 4, whole)] == ["keep"] * 4
    for limits in (
        {"parameters": 0.9 * whole["parameters"]},
        {"kv_bytes": 0.6 * whole["kv_bytes"]},
        {"seconds": 0.7 * whole["seconds"]},
        {"depth": 2},
        {cost: share * whole[cost] for cost, share in (("parameters", 0.8), ("kv_bytes", 0.5), ("seconds", 0.5))},
    ):
        plan = fusion.solve(given, 4, limits)
        assert all(total(plan, cost) <= limit for cost, limit in limits.items())
        assert any(c.transform is not None for c in plan)
        config = fusion.apply_plan(plan)(CONFIG, init_params(CONFIG, KEY))[0]
        assert state_bytes_per_token(config, jnp.bfloat16) == total(plan, "kv_bytes")
    assert [c.name for c in fusion.solve(given, 4, {"depth": 2})].count("fused") == 1
    for name, limit in (("kv_bytes", "-1"), ("seconds", "1e-09"), ("parameters", "10")):
        message = f"{name} cannot be met even alone .*{name} is limited to {limit}, the least possible is"
        with pytest.raises(fusion.Infeasible, match=message) as error:
            fusion.solve(given, 4, {**whole, name: float(limit)})
        assert error.value.limits == (name,)


def test_measured_times():
    times = {FULL: 3.0, SLIDING: 2.0}
    parallel = fusion.Choice(0, 3, "beside", 0.0, {"x": 1.0}, fusion.parallel_blocks([(0, 3)]))
    empty = fusion.Choice(0, 0, "empty", 0.0, {}, fusion.chain(fusion.remove_attention([0]), fusion.remove_ffn([0])))
    got = fusion.choice_costs(CONFIG, [parallel, empty], fusion.measured_seconds(times))
    assert got[0].costs["seconds"] == 11 and got[0].costs["depth"] == 1 and got[0].costs["x"] == 1
    assert got[1].costs == {"parameters": 0, "kv_bytes": 0, "depth": 0, "seconds": 0}
    free = fusion.Choice(0, 0, "free", 0.0, {}, fusion.remove_attention([0]))
    with pytest.raises(ValueError, match="no time for BlockConfig.*'none'.* measure it, or leave its choice out"):
        fusion.choice_costs(CONFIG, [free], fusion.measured_seconds(times))
    with pytest.raises(ValueError, match="choice_costs: choice 'late': span 4-4 is out of range; .* has 4 blocks"):
        fusion.choice_costs(CONFIG, [fusion.Choice(4, 4, "late", 0.0, {})])
