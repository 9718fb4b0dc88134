"""Linear maps in place of attention, and blocks in parallel: against models written out by hand, and everywhere a block
can stand (gradients by replay, the sampler, export)."""

import dataclasses
import json

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import random_params, tiny

from lsfuse import fusion, io, replay, rl
from lsfuse.model import BlockConfig, forward, logits, unstack_blocks

FULL, FFN = BlockConfig("full", 2, 24), BlockConfig("none", 1, 8)
BIASED = tiny(blocks=(FULL, dataclasses.replace(FULL, parallel=True), FFN, FFN), qkv_bias=True, o_bias=True)
IDS = np.random.default_rng(1).integers(0, 23, (2, 9))

# Every place: a map first and last, a map beside attention, attention beside a map. The last block with keys and
# values, of which the prefix needs nothing else, stands beside the one before it; run 1 has blocks beside and not.
PLACED = tiny(
    blocks=(
        BlockConfig("linear_map", 1, 12),
        FULL,
        dataclasses.replace(FULL, beside=True),
        FULL,
        BlockConfig("linear_map", 1, 12, parallel=True, beside=True),
        BlockConfig("full", 4, 8, beside=True),
        BlockConfig("linear_map", 1, 0),
    ),
    qkv_bias=True,
)


def model(config, seed=0):
    return config, jax.tree.map(jnp.asarray, random_params(config, seed))


def hidden(model):
    return forward(model[1], model[0], jnp.asarray(IDS))


@pytest.mark.parametrize("post_norms", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_linear_map_is_attention_to_oneself(x64, post_norms):
    """A window of one token: softmax over one score. Two query heads share a kv head; all projections have biases."""
    config, params = model(dataclasses.replace(BIASED, post_norms=post_norms))
    alone = [dataclasses.replace(b, attention="sliding", window=1) if b.has_attention else b for b in config.blocks]
    want = hidden((dataclasses.replace(config, blocks=tuple(alone)), params))
    child = fusion.linear_attention([0, 1])(config, params)
    assert child[0].blocks[0] == BlockConfig("linear_map", 1, 24) and child[0].blocks[1].parallel
    np.testing.assert_allclose(hidden(child), want, rtol=1e-12, atol=1e-12)
    assert replay.state_bytes_per_token(child[0], jnp.float32) == 0
    assert child[0].transforms == ("linear_attention on 0-1",)


@pytest.mark.slow
def test_attention_free_blocks_in_parallel_are_one_wide_ffn(x64):
    whole = model(tiny(blocks=(FULL, FFN, FFN, dataclasses.replace(FFN, ffn_width=5), FULL), mlp_bias=True))
    got, want = fusion.parallel_blocks([(1, 3)])(*whole), fusion.fuse_ffn([(1, 3)])(*whole)
    np.testing.assert_allclose(hidden(got), hidden(want), rtol=1e-12, atol=1e-13)
    assert np.abs(hidden(got) - hidden(whole)).max() > 1e-3
    again = fusion.chain(fusion.parallel_blocks([(1, 3)]), fusion.fuse_ffn([(1, 3)]))(*whole)
    np.testing.assert_array_equal(hidden(again), hidden(want))


def test_parts_in_parallel(x64):
    """Attention and FFN of the first block read the same; the oracle adds them up."""
    config, params = fusion.parallel_parts([0])(*model(BIASED))
    assert config.blocks[0].parallel
    np.testing.assert_allclose(hidden((config, params))[0], oracle.hidden(config, params, IDS[0]), rtol=1e-12)


@pytest.mark.slow
def test_every_place_by_the_oracle(x64):
    """Logits of whole rows, and the exact gradient of a group against the dense one, chunk by chunk."""
    config, params = PLACED, helpers.random_params(PLACED, 2)
    want = np.stack([oracle.logits(config, params, ids) for ids in IDS])
    np.testing.assert_allclose(logits(params, config, hidden((config, params))), want, rtol=1e-11, atol=1e-12)
    batch = helpers.make_batch(config, (11, 8), ((3, 3), (6, 0)), (12, 3, 6), silent=())
    options = {"chunk_size": 4, "branch_batch": 2, "prefix_activations": "recompute"}
    helpers.check_step("plain_grpo", config, params, batch, "placed", remat_policy="nothing_saveable", **options)


PLACES = {
    "normed": (False, True),
    "prefix_grad": ("exact", "stop", 5),
    "prefix_activations": ("keep", "recompute"),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", helpers.all_pairs(PLACES), ids=lambda row: "-".join(map(str, row.values())))
def test_every_place_and_mode(x64, row):
    """Also with the norms of other families."""
    options = {"chunk_size": 3, "branch_batch": 2, **row}
    config = dataclasses.replace(PLACED, post_norms=True, norm_offset=1.0, qk_norm=True)
    config = config if options.pop("normed") else PLACED
    params, batch = helpers.random_params(config, 2), helpers.make_batch(config)
    helpers.check_step("coupled", config, params, batch, "placed whole", **options)


@pytest.mark.slow
def test_the_sampler_takes_the_argmax_of_the_whole_model(x64):
    config, params = PLACED, helpers.random_params(PLACED)
    prompts = np.random.default_rng(0).integers(0, 23, (1, 7), np.int32)
    out = rl.sample(
        params,
        config,
        prompts,
        np.array([7], np.int32),
        num_generations=2,
        max_tokens=4,
        key=jax.random.key(0),
        temperature=0.0,
        chunk_size=3,
    )
    row = np.concatenate([prompts[0], np.asarray(out.completion_ids)[0, 0]])
    want = oracle.logits(config, params, row)[6:-1]
    np.testing.assert_array_equal(np.asarray(out.completion_ids)[0], np.stack([want.argmax(-1)] * 2))


def test_export(tmp_path):
    """As nemotron-nas where its table has the words, else as our own; the same bits come back."""
    maps = tiny(blocks=(BlockConfig("linear_map", 1, 12), FULL, FFN), family="nemotron-nas")
    for config, kind in ((maps, "nemotron-nas"), (PLACED, "lsfuse")):
        params = jax.tree.map(jnp.asarray, random_params(config, dtype=np.float32))
        io.save_hf(tmp_path / kind, config, params)
        raw = json.loads((tmp_path / kind / "config.json").read_text())
        assert raw["model_type"] == kind
        loaded, loaded_params = io.load_hf(tmp_path / kind)
        assert loaded == config
        jax.tree.map(np.testing.assert_array_equal, loaded_params, params)
    table = json.loads((tmp_path / "nemotron-nas" / "config.json").read_text())["block_configs"]
    assert [b["attention"]["replace_with_linear"] for b in table] == [True, False, False]
    assert [b["attention"]["no_op"] for b in table] == [False, False, True]
    reasons = json.loads((tmp_path / "lsfuse" / "config.json").read_text())["why_not_standard"]
    assert any("runs in parallel with the one before it" in reason for reason in reasons)


def test_what_stays_parallel_when_blocks_go(x64):
    """Of x + a + b + c, all of one x, any member may go; what stood beside it stays beside the others."""
    whole = fusion.parallel_blocks([(1, 3)])(*model(tiny(blocks=(FULL, FULL, FULL, FULL, FULL))))
    assert [b.beside for b in whole[0].blocks] == [False, False, True, True, False]
    for gone, beside in (
        ([1], [False, False, True, False]),
        ([2], [False, False, True, False]),
        ([0], [False, True, True, False]),
        ([0, 1, 2], [False, False]),
        ([3], [False, False, True, False]),
    ):
        child = fusion.remove_blocks(gone)(*whole)
        assert [b.beside for b in child[0].blocks] == beside
    np.testing.assert_allclose(hidden(child)[0], oracle.hidden(*child, IDS[0]), rtol=1e-11, atol=1e-12)
    bare = fusion.remove_attention([1, 2, 3])(*whole)
    assert [b.beside for b in bare[0].blocks] == [b.beside for b in whole[0].blocks]


@pytest.mark.slow
def test_scores_and_importance_of_parallel_blocks(x64):
    texts = fusion.from_lists(IDS.tolist())
    whole = fusion.parallel_blocks([(1, 2)])(*model(tiny(blocks=(FULL, FULL, FULL, FFN))))
    got = fusion.replacement_scores(*whole, texts, [(1, 2, None), (3, 3, None)], batch_size=2)
    for score, gone in zip(got, ([1, 2], [3]), strict=True):
        want = fusion.evaluate(fusion.remove_blocks(gone)(*whole), texts, parent=whole, batch_size=2)["kl"]
        np.testing.assert_allclose(score, want, rtol=1e-9)
    with pytest.raises(ValueError, match="span 2-2: blocks 1 and 2 run in parallel, and the span would part them"):
        fusion.replacement_scores(*whole, texts, [(2, 2, None)])
    with pytest.raises(ValueError, match="dependency: span 1-1: blocks 1 and 2 run in parallel"):
        fusion.dependency(*whole, texts)


@pytest.mark.parametrize(
    "transform, message",
    [
        (fusion.linear_attention([2]), "linear_attention: block 2 has no attention"),
        (fusion.chain(fusion.linear_attention([0]), fusion.linear_attention([0])), "block 0 has no attention"),
        (fusion.parallel_parts([2]), "parallel_parts: block 2 has no attention"),
        (fusion.chain(fusion.remove_ffn([0]), fusion.parallel_parts([0])), "block 0 has no FFN"),
        (fusion.parallel_blocks([(0, 2), (2, 3)]), "spans 0-2 and 2-3 overlap"),
        (fusion.parallel_blocks([(2, 4)]), "span 2-4 is out of range"),
        (fusion.chain(*[fusion.parallel_blocks([s]) for s in ((0, 2), (2, 3))]), "blocks 1 and 2 run in parallel"),
        (fusion.chain(fusion.linear_attention([1]), fusion.fuse_ffn([(0, 2)])), "block 1 has attention, which only"),
        (fusion.replace_spans([(0, 4, None)]), "span 0-4 is out of range"),
    ],
)
def test_illegal_requests(transform, message):
    with pytest.raises(ValueError, match=message):
        transform(BIASED, random_params(BIASED, dtype=np.float32))


@pytest.mark.parametrize("transform", [fusion.fuse_ffn, fusion.reverse])
@pytest.mark.parametrize(
    ("group", "span", "message"),
    [
        ((2, 3), (1, 2), "span 1-2: blocks 2 and 3 run in parallel, and the span would part them"),
        ((2, 3), (3, 4), "span 3-4: blocks 2 and 3 run in parallel, and the span would part them"),
        ((0, 1), (0, 1), "blocks 0 and 1 run in parallel, so that the FFN of 1 does not read what the attention of 0"),
    ],
)
def test_fusing_does_not_change_what_parallel_blocks_read(transform, group, span, message):
    config, params = fusion.parallel_blocks([group])(*model(tiny(blocks=(FULL, FFN, FFN, FFN, FFN))))
    with pytest.raises(ValueError, match=message):
        transform([span])(config, params)


def test_the_first_block_stands_beside_none():
    with pytest.raises(ValueError, match="block 0: there is no block before it"):
        tiny(blocks=(dataclasses.replace(FULL, beside=True),))
    assert len(unstack_blocks(*model(PLACED))) == 7
