"""Spans by rule, and plans by MILP against every plan there is."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import random_params, tiny
from test_fusion_analysis import CONFIG, TEXTS, model

from lsfuse import fusion
from lsfuse.model import BlockConfig, forward, unstack_blocks
from lsfuse.model.layers import ffn_activation, ffn_in, ffn_in_names, subset

FULL, FFN, NONE = BlockConfig("full", 2, 24), BlockConfig("none", 1, 8), BlockConfig("none", 1, 0)


def test_runs_and_spans_by_rule():
    """The last FFN of a run stays; a block with attention or without FFN ends it."""
    config = tiny(blocks=(FULL, FFN, FFN, FFN, FFN, FULL, NONE, FFN, FFN, FFN, FFN, FFN))
    assert fusion.attention_free_runs(config) == [(1, 4), (7, 11)]
    assert fusion.fusion_spans(config) == [(1, 3), (7, 10)]
    assert fusion.fusion_spans(config, max_width=24) == [(1, 3), (7, 9)]
    assert fusion.fusion_spans(config, max_width=16) == [(1, 2), (7, 8), (9, 10)]
    m = np.zeros((12, 12))
    m[7, 9] = 0.3
    assert fusion.fusion_spans(config, m) == [(1, 3), (8, 10)]
    assert fusion.fusion_spans(config, m, threshold=0.5) == [(1, 3), (7, 10)]
    assert fusion.fusion_spans(tiny(blocks=(FULL, FULL))) == []
    plain = BlockConfig("none", 1, 8, ffn="plain")
    assert fusion.attention_free_runs(tiny(blocks=(FULL, FFN, plain, plain, FFN))) == [(2, 3)]


@pytest.mark.parametrize(
    ("count", "runs", "spans"),
    [
        (80, [(42, 51), (53, 70)], [(42, 50), (53, 69)]),  # Llama-Nemotron 49B, 26 FFNs
        (126, [(66, 115)], [(66, 114)]),  # Ultra 253B, 49 FFNs, there split by what fits a device
        (30, [(6, 9)], [(6, 8)]),  # SmolLM2-135M, the issue's
    ],
)
def test_the_paper_s_spans(count, runs, spans):
    free = {i for first, last in runs for i in range(first, last + 1)}
    config = tiny(blocks=tuple(FFN if i in free else FULL for i in range(count)))
    assert fusion.attention_free_runs(config) == runs and fusion.fusion_spans(config) == spans


def test_the_longest_span_comes_first():
    """Not the first that fits: what is left of a run, on either side of the longest, is searched in turn."""
    config, m = tiny(blocks=(FFN,) * 7), np.zeros((7, 7))
    m[0, 3] = 0.9
    assert fusion.fusion_spans(config, m) == [(1, 5)]  # block 6 stays, block 0 is alone
    m[2, 3] = 0.9
    assert fusion.fusion_spans(config, m) == [(0, 2), (3, 5)]
    m[0, 1] = 0.05
    assert fusion.fusion_spans(config, m, min_members=1) == [(0, 2), (3, 5)]
    assert fusion.fusion_spans(config, m, threshold=0.01, min_members=1) == [(0, 0), (1, 2), (3, 5)]
    ties = np.zeros((7, 7))
    ties[0, 4], ties[1, 5], ties[2, 5], ties[0, 3] = 0.9, 0.9, 0.9, 0.08
    assert fusion.fusion_spans(config, ties) == [(1, 4)]  # as long as 0-3, and less dependent


def test_what_is_no_number_fuses_nothing():
    config, m = tiny(blocks=(FULL, FFN, FFN, FFN, FFN)), np.zeros((5, 5))
    m[0, 2] = m[1, 4] = np.nan  # neither block 0 nor the run's last is asked for
    assert fusion.fusion_spans(config, m) == [(1, 3)]
    for value in (np.nan, np.inf):
        m[1, 3] = value
        with pytest.raises(ValueError, match=f"dependency of block 3 on block 1 is {value}; it was not computed"):
            fusion.fusion_spans(config, m)
    with pytest.raises(ValueError, match="threshold must be a finite number, got nan"):
        fusion.fusion_spans(config, np.zeros((5, 5)), threshold=float("nan"))


def test_attentions_in_a_row_that_cost_least():
    scores = np.array([np.nan, 0.1, 0.4, 0.2, 0.1, np.nan, 0.0])
    assert fusion.cheapest_run(scores, 1) == (6,)
    assert fusion.cheapest_run(scores, 2) == (3, 4)  # neither across what has none, nor the two cheapest
    assert fusion.cheapest_run(scores, 4) == (1, 2, 3, 4)
    for count in (5, 8):
        with pytest.raises(ValueError, match=f"no {count} blocks in a row have attention, of 7 blocks"):
            fusion.cheapest_run(scores, count)


def test_windows_of_whole_blocks():
    """Least largest dependency first, ties by the sum, then the best of those that are left whole."""
    m = np.triu(np.full((10, 10), 0.5), 1)
    m[3:7, 3:7] = np.triu(np.full((4, 4), 0.2), 1)
    assert fusion.block_windows(m, 1) == [(3, 6)]
    with pytest.raises(ValueError, match="1 windows of 4 blocks leave no room for another among 10; 2 are asked for"):
        fusion.block_windows(m, 2)
    assert fusion.block_windows(m, 2, size=2) == [(3, 4), (5, 6)] and len(fusion.block_windows(m, 4, size=2)) == 4
    m[7, 9] = 0.4  # of the windows left, all of largest 0.5, the one of least sum
    assert fusion.block_windows(m, 2, size=3) == [(3, 5), (7, 9)]
    spans = fusion.block_windows(m, 1)
    config = fusion.parallel_blocks(spans)(*model(tiny(blocks=(FULL,) * 10)))[0]
    assert [b.beside for b in config.blocks] == [4 <= i <= 6 for i in range(10)]
    for bad, message in (
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"count": 1, "size": 1}, "size must be 2 to the 10 blocks of the dependency, got 1"),
        ({"count": 1, "size": 11}, "got 11"),
    ):
        with pytest.raises(ValueError, match=f"block_windows: .*{message}"):
            fusion.block_windows(m, **bad)
    m[4, 5] = np.nan
    with pytest.raises(ValueError, match="block_windows: the dependency of block 5 on block 4 is nan"):
        fusion.block_windows(m, 1)


def all_plans(choices, num_blocks, at=0):
    """Every way of covering the blocks from `at` on."""
    if at == num_blocks:
        yield ()
    for c in choices:
        if c.first == at:
            yield from ((c, *rest) for rest in all_plans(choices, num_blocks, c.last + 1))


@pytest.mark.parametrize("seed", range(4))
def test_the_best_of_all_plans(seed):
    rng = np.random.default_rng(seed)

    def costs():
        return {"bytes": float(rng.integers(1, 9)) * 1e9, "depth": 1.0}

    choices = [
        fusion.Choice(i, i + n, f"{i}+{n}.{k}", float(rng.random()), costs())
        for i, n, k in itertools.product(range(6), range(3), range(2))
        if i + n < 6
    ]
    plans = list(all_plans(choices, 6))
    total = lambda plan, name: sum(c.costs[name] for c in plan)  # noqa: E731
    for limits in ({}, {"bytes": 12e9}, {"bytes": 20e9, "depth": 4}, {"depth": 2}):
        fitting = [p for p in plans if all(total(p, n) <= limit for n, limit in limits.items())]
        got = fusion.solve(choices, 6, limits)
        assert tuple(got) in fitting
        np.testing.assert_allclose(sum(c.score for c in got), min(sum(c.score for c in p) for p in fitting))
        listed = fusion.shortlist(choices, 6, limits, 5)
        assert listed[0] == got and len({tuple(map(id, plan)) for plan in listed}) == len(listed)
        want = sorted(sum(c.score for c in p) for p in fitting)[:5]
        np.testing.assert_allclose([sum(c.score for c in plan) for plan in listed], want)


def test_what_binds_is_said():
    def choice(i, name, cost):
        return fusion.Choice(i, i, name, 0.0, cost)

    kinds = {"a": {"bytes": 4, "ms": 1}, "b": {"bytes": 1, "ms": 4}}
    choices = [choice(i, name, cost) for i in range(2) for name, cost in kinds.items()]
    assert [c.name for c in fusion.solve(choices, 2, {"bytes": 5, "ms": 5})] in (["a", "b"], ["b", "a"])
    everything = fusion.shortlist(choices, 2, {"bytes": 5}, 9)  # all but the one of 8 bytes
    assert [[c.name for c in plan].count("a") for plan in everything].count(1) == 2 and len(everything) == 3
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        fusion.shortlist(choices, 2, {}, 0)
    for limits, binding, message in (
        ({"bytes": 1, "ms": 9}, ("bytes",), "bytes cannot be met even alone.*limited to 1, the least possible is 2"),
        ({"bytes": 4, "ms": 4}, ("bytes", "ms"), "giving up bytes or ms would let one"),
    ):
        with pytest.raises(fusion.Infeasible, match=message) as error:
            fusion.solve(choices, 2, limits)
        assert error.value.limits == binding
    for bad, message in (
        (choices[:2], "block 1 has no choice"),
        ([*choices, fusion.Choice(1, 2, "x", 0.0, {"bytes": 1, "ms": 1})], "'x' .1-2"),
        ([*choices, fusion.Choice(1, 1, "x", float("nan"), {"bytes": 1, "ms": 1})], "score nan"),
        ([*choices, fusion.Choice(1, 1, "x", 0.0, {"bytes": 1})], "says nothing of 'ms'"),
        ([*choices, fusion.Choice(1, 1, "x", 0.0, {"bytes": 1, "ms": np.nan})], "'x' .1-1. costs nan of 'ms'"),
    ):
        with pytest.raises(ValueError, match=message):
            fusion.solve(bad, 2, {"bytes": 9, "ms": 9})
    with pytest.raises(ValueError, match="the limit of 'ms' is nan; it must be a finite number"):
        fusion.solve(choices, 2, {"ms": float("nan")})


def test_a_plan_is_the_chain_of_its_choices(x64):
    whole = model()
    free = fusion.remove_attention([0])
    plan = [
        fusion.Choice(0, 0, "keep", 0.0, {}),
        fusion.Choice(1, 2, "fuse", 0.1, {}, fusion.fuse_ffn([(0, 1)])),
        fusion.Choice(3, 3, "no attention", 0.2, {}, free),
    ]
    config, params = fusion.apply_plan(plan)(*whole)
    want = fusion.chain(fusion.remove_attention([3]), fusion.fuse_ffn([(1, 2)]))(*whole)
    assert config.blocks == want[0].blocks and config.sources == ((0,), (1, 2), (3,))
    jax.tree.map(np.testing.assert_array_equal, params, want[1])
    assert config.transforms == ("1-2: fuse_ffn(0-1; norm=fold); 3-3: remove_attention on 0",)
    gone = fusion.replace_spans([(1, 2, None)])(*whole)
    np.testing.assert_array_equal(gone[1]["runs"]["0"]["q_proj"][1], whole[1]["runs"]["2"]["q_proj"][0])


def test_a_plan_of_another_model_is_refused():
    """Whoever made it; but changes that name no block to keep go into any model that has the blocks."""
    config, params = model()
    free = fusion.remove_attention([0])
    gone = [fusion.Choice(i, i, "free", 0.0, {}, fusion.remove_ffn([0])) for i in range(3)]
    by_hand = [gone[0], fusion.Choice(1, 2, "keep", 0.0, {})]
    message = "the plan is of a model of 3 blocks, this one has 4"
    for plan in (fusion.solve(gone, 3, {}), fusion.shortlist(gone, 3, {}, 1)[0], by_hand):
        with pytest.raises(ValueError, match=f"apply_plan: {message}"):
            fusion.apply_plan(plan)(config, params)
        with pytest.raises(ValueError, match=f"plan_scores: {message}"):
            fusion.plan_scores(config, params, TEXTS, [gone[:1], plan])
    longer = fusion.solve([*gone, *(fusion.Choice(i, i, "keep", 0.0, {}) for i in (3, 4))], 5, {})
    with pytest.raises(ValueError, match="of 5 blocks, this one has 4"):
        fusion.dry_run(fusion.apply_plan(longer), config)
    assert fusion.apply_plan([fusion.Choice(0, 0, "free", 0.0, {}, free)])(config, params)[0].num_blocks == 4


def test_scores_of_spans(x64):
    """KL of a fused span, restarted at its first block, is that of the whole fused model."""
    whole = model()
    span = (1, 2, fusion.fuse_ffn([(0, 1)]))
    scores = fusion.replacement_scores(*whole, TEXTS, [span, (1, 2, None), (0, 0, fusion.remove_attention([0]))])
    for got, transform in zip(
        scores, (fusion.fuse_ffn([(1, 2)]), fusion.remove_blocks([1, 2]), fusion.remove_attention([0])), strict=True
    ):
        np.testing.assert_allclose(got, fusion.evaluate(transform(*whole), TEXTS, parent=whole)["kl"], rtol=1e-9)


def test_scores_of_whole_plans(x64):
    """Several choices together, some of them as the blocks are: the KL of the model that the plan makes."""
    whole = model()
    free, fuse = fusion.remove_attention([0]), fusion.fuse_ffn([(0, 1)])
    plans = [
        [fusion.Choice(3, 3, "free", 0.0, {}, free), fusion.Choice(1, 2, "fuse", 0.0, {}, fuse)],
        [fusion.Choice(0, 3, "keep", 0.0, {})],
    ]
    got = fusion.plan_scores(*whole, TEXTS, plans)
    want = [fusion.evaluate(fusion.apply_plan(plan)(*whole), TEXTS, parent=whole)["kl"] for plan in plans[:1]]
    np.testing.assert_allclose(got[:1], want, rtol=1e-9)
    assert got[1] == 0
    with pytest.raises(ValueError, match="plan_scores: spans 1-2 and 2-3 overlap"):
        fusion.plan_scores(*whole, TEXTS, [[*plans[0][1:], fusion.Choice(2, 3, "fuse", 0.0, {}, fuse)]])


def test_channel_importance(x64):
    """mean |act(gate) · up| over real tokens, times the norm of the channel's row."""
    config, params = whole = model(tiny(blocks=(FFN, FULL, NONE)))
    got = fusion.ffn_importance(*whole, TEXTS, batch_size=2)
    assert got[2] is None and [len(g) for g in got[:2]] == [8, 24]
    leaves, names = unstack_blocks(config, params)[0], ffn_in_names(config)
    active = []
    for ids, n in zip(TEXTS.ids, TEXTS.lengths, strict=True):
        x = jnp.asarray(params["embed_tokens"])[ids[None, :n]]
        active.append(np.abs(ffn_activation(config, *ffn_in(config, FFN, subset(leaves, names), x)))[0])
    want = np.concatenate(active).mean(0) * np.linalg.norm(leaves["down_proj"], axis=1)
    np.testing.assert_allclose(got[0], want, rtol=1e-6)
    half = fusion.prune_ffn(0.5, got)(config, params)
    assert [b.ffn_width for b in half[0].blocks[:2]] == [4, 12]
    assert np.isfinite(forward(half[1], half[0], jnp.asarray(TEXTS.ids))).all()


def test_config_with_a_history_is_hashable_and_loads_again(tmp_path):
    from lsfuse import io

    config = CONFIG
    params = random_params(config, dtype=np.float32)
    child = fusion.fuse_ffn([(1, 2)])(config, params)
    assert hash(child[0]) != hash(config)
    io.save_hf(tmp_path / "model", *child)
    loaded = io.load_hf(tmp_path / "model")
    assert loaded[0] == child[0]
    jax.tree.map(np.testing.assert_array_equal, loaded[1], child[1])


def test_small_scores_and_tight_limits():
    """A thousand beyond a billion is beyond; scores of 1e-8 still have a least."""
    big, small = fusion.Choice(0, 0, "big", 0.0, {"p": 1e9 + 1000}), fusion.Choice(0, 0, "small", 1e-8, {"p": 5e8})
    assert [c.name for c in fusion.solve([big, small], 1, {"p": 1e9})] == ["small"]
    exact = fusion.Choice(0, 0, "exact", 5e-9, {"p": 1e9})
    assert [c.name for c in fusion.solve([small, exact, big], 1, {"p": 1e9})] == ["exact"]
