"""Weight-tree transforms against sums of FFNs and models written out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MIXED, TINY, random_params, tiny

from lsfuse import fusion
from lsfuse.model import BlockConfig, count_params, forward, stack_blocks, unstack_blocks
from lsfuse.model.layers import FFN_OUT, ffn_in, ffn_in_names, ffn_out, subset
from lsfuse.replay import state_bytes_per_token

# Attention in blocks 0, 1 and 6; FFNs of unlike width; all biases.
CONFIG = tiny(
    blocks=(
        BlockConfig("full", 2, 24),
        BlockConfig("full", 2, 8),
        BlockConfig("none", 1, 24),
        BlockConfig("none", 1, 12),
        BlockConfig("none", 1, 40),
        BlockConfig("none", 1, 20),
        BlockConfig("full", 4, 16),
    ),
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
)
IDS = np.random.default_rng(1).integers(0, 23, (2, 9))


def model(config=CONFIG, dtype=np.float64):
    return config, jax.tree.map(jnp.asarray, random_params(config, dtype=dtype))


def hidden(model):
    return forward(model[1], model[0], jnp.asarray(IDS))


def relative_error(a, b):
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def ffn(config, leaves, x, kind="gated"):
    block = BlockConfig("none", 1, 1, ffn=kind)
    activations = ffn_in(config, block, subset(leaves, ffn_in_names(config)), x)
    return ffn_out(config, block, subset(leaves, FFN_OUT), *activations)


@pytest.mark.parametrize("dtype, tol", [(np.float64, 1e-12), (np.float32, 1e-5)])
@pytest.mark.parametrize("span", [(2, 3), (2, 5), (1, 4), (3, 3), (4, 5)])
def test_the_wide_ffn_is_the_sum_of_its_members(x64, span, dtype, tol):
    config, params = model(dtype=dtype)
    parts = unstack_blocks(config, params)
    members = parts[span[0] : span[1] + 1]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 16)), dtype)
    total = sum(ffn(config, m, x) for m in members)
    wide, wide_params = fusion.fuse_ffn([span])(config, params)
    assert wide.blocks[span[0]].ffn_width == sum(b.ffn_width for b in config.blocks[span[0] : span[1] + 1])
    got = ffn(wide, unstack_blocks(wide, wide_params)[span[0]], x)
    assert relative_error(got, total) <= tol
    for order in ([-1, *range(len(members) - 1)], [*reversed(range(len(members)))]):
        assert relative_error(ffn(wide, fusion.wide_ffn(config, [members[i] for i in order]), x), total) <= tol


def test_gates_lie_beside_gates_and_ups_beside_ups(x64):
    """Never member by member; a member's rows of the down projection are where its channels are."""
    config, params = model()
    members = unstack_blocks(config, params)[2:5]
    wide = unstack_blocks(*fusion.fuse_ffn([(2, 4)], norm="last")(config, params))[2]
    for name, axis in (("gate_proj", 1), ("up_proj", 1), ("down_proj", 0), ("gate_proj_bias", 0), ("up_proj_bias", 0)):
        parts = np.split(wide[name], np.cumsum([24, 12]), axis)
        for part, member in zip(parts, members, strict=True):
            np.testing.assert_array_equal(part, member[name])


def test_last_norm_is_the_papers(x64):
    """All members read the stream through the last member's gain."""
    config, params = model()
    members = unstack_blocks(config, params)[2:5]
    gain = members[-1]["post_attention_layernorm"]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 16)))
    total = sum(ffn(config, m | {"post_attention_layernorm": gain}, x) for m in members)
    wide, wide_params = fusion.fuse_ffn([(2, 4)], norm="last")(config, params)
    assert relative_error(ffn(wide, unstack_blocks(wide, wide_params)[2], x), total) <= 1e-12
    folded = fusion.fuse_ffn([(2, 4)])(config, params)
    assert relative_error(hidden(folded), hidden((wide, wide_params))) > 1e-3


def test_a_span_of_one_is_the_identity_and_nested_equals_at_once(x64):
    whole = model()
    one = fusion.fuse_ffn([(3, 3)])(*whole)
    assert one[0].blocks == whole[0].blocks
    jax.tree.map(np.testing.assert_array_equal, one[1], whole[1])
    nested = fusion.chain(fusion.fuse_ffn([(2, 3)]), fusion.fuse_ffn([(2, 3)]), fusion.fuse_ffn([(2, 3)]))(*whole)
    at_once = fusion.fuse_ffn([(2, 5)])(*whole)
    assert nested[0].blocks == at_once[0].blocks and nested[0].sources == at_once[0].sources
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-15), nested[1], at_once[1])
    # Three norms of 16 went, and so did three biases of the down projections.
    assert count_params(whole[0]) - count_params(at_once[0]) == 3 * 16 + 3 * 16
    assert at_once[0].sources == ((0,), (1,), (2, 3, 4, 5), (6,))
    assert at_once[0].transforms == ("fuse_ffn(2-5; norm=fold)",)
    for span in ((2, 3), (2, 4)):
        later = fusion.chain(fusion.fuse_ffn([span]), fusion.fuse_ffn([(2, 3)]))(*whole)
        more = fusion.fuse_ffn([(2, span[1] + 1)])(*whole)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-15), later[1], more[1])


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_plain_ffns_and_norms_of_one_plus_w(x64, offset):
    """W_out·act(W_in x) with biases joins in the same way, and a gain is w + offset."""
    block = BlockConfig("none", 1, 8, ffn="plain")
    blocks = block, dataclasses.replace(block, ffn_width=3)
    config, params = model(tiny(blocks=blocks, mlp_bias=True, norm_offset=offset))
    members = unstack_blocks(config, params)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 16)))
    wide, wide_params = fusion.fuse_ffn([(0, 1)])(config, params)
    got = ffn(wide, unstack_blocks(wide, wide_params)[0], x, "plain")
    assert relative_error(got, sum(ffn(config, m, x, "plain") for m in members)) <= 1e-12


def test_reverse(x64):
    config, params = model()
    new, new_params = fusion.reverse([(2, 4)])(config, params)
    assert [b.ffn_width for b in new.blocks] == [24, 8, 40, 12, 24, 20, 16]
    assert new.sources == ((0,), (1,), (4,), (3,), (2,), (5,), (6,))
    before, after = unstack_blocks(config, params), unstack_blocks(new, new_params)
    jax.tree.map(np.testing.assert_array_equal, [before[i] for i in (0, 1, 4, 3, 2, 5, 6)], after)
    again = fusion.reverse([(2, 4)])(new, new_params)
    jax.tree.map(np.testing.assert_array_equal, again[1], params)
    # The first member keeps its attention, whatever FFN it gets.
    new, new_params = fusion.reverse([(1, 3)])(config, params)
    assert new.blocks[1] == BlockConfig("full", 2, 12) and not new.blocks[3].has_attention


def test_removals(x64):
    config, params = model()
    removals = fusion.remove_attention([1, 6]), fusion.remove_ffn([3]), fusion.remove_blocks([5])
    less = fusion.chain(*removals)(config, params)
    assert [b.has_attention for b in less[0].blocks] == [True] + [False] * 5
    assert [b.ffn_width for b in less[0].blocks] == [24, 8, 24, 0, 40, 16]
    assert less[0].sources == ((0,), (1,), (2,), (3,), (4,), (6,))
    # The same by zeroing what was removed.
    zeroed = jax.tree.map(jnp.array, params)
    parts = unstack_blocks(config, zeroed)
    for i, names in ((1, ("o_proj", "o_proj_bias")), (6, ("o_proj", "o_proj_bias")), (3, FFN_OUT), (5, FFN_OUT)):
        parts[i] = parts[i] | {n: jnp.zeros_like(parts[i][n]) for n in names if n in parts[i]}
    want = hidden((config, {**params, "runs": stack_blocks(config, parts)}))
    np.testing.assert_allclose(hidden(less), want, rtol=1e-12)


def test_an_empty_block_changes_no_bit(x64):
    config, params = model()
    empty = fusion.remove_ffn([3])(config, params)
    gone = fusion.remove_blocks([3])(config, params)
    np.testing.assert_array_equal(hidden(empty), hidden(gone))


def test_kv_heads_are_pooled(x64):
    """Two heads of equal keys and values pool to the same function; unlike ones to their mean."""
    config, params = model(tiny(blocks=(BlockConfig("full", 4, 8),), qkv_bias=True))
    run = dict(params["runs"]["0"])
    for name in ("k_proj", "v_proj", "k_proj_bias", "v_proj_bias"):
        heads = run[name].reshape(*run[name].shape[:-1], 4, 4)
        run[name] = jnp.repeat(heads[..., ::2, :], 2, -2).reshape(run[name].shape)
    twins = config, {**params, "runs": {"0": run}}
    pooled = fusion.reduce_kv_heads(2)(*twins)
    assert pooled[0].blocks[0].num_kv_heads == 2
    np.testing.assert_allclose(hidden(pooled), hidden(twins), rtol=1e-12)
    one = fusion.reduce_kv_heads(1)(config, params)[1]["runs"]["0"]["k_proj"]
    np.testing.assert_allclose(one[0], params["runs"]["0"]["k_proj"].reshape(16, 4, 4).mean(1), rtol=1e-14)


def test_pruning_keeps_the_channels_that_matter(x64):
    """Channels whose down row is zero do nothing: pruning them changes nothing, and order does not matter."""
    config, params = model(tiny(blocks=(BlockConfig("full", 2, 8), BlockConfig("none", 1, 6)), mlp_bias=True))
    parts = unstack_blocks(config, params)
    dead = [np.array([0, 3]), np.array([5])]
    parts = [p | {"down_proj": p["down_proj"].at[d].set(0.0)} for p, d in zip(parts, dead, strict=True)]
    parent = config, {**params, "runs": stack_blocks(config, parts)}
    scores = [np.asarray(jnp.abs(p["down_proj"]).sum(1)) for p in parts]
    child = fusion.prune_ffn({0: 6, 1: 5}, scores)(*parent)
    assert [b.ffn_width for b in child[0].blocks] == [6, 5]
    np.testing.assert_allclose(hidden(child), hidden(parent), rtol=1e-12)
    assert [b.ffn_width for b in fusion.prune_ffn(0.5, scores)(*parent)[0].blocks] == [4, 3]


def test_cache_bytes_are_those_of_the_attention_that_is_left():
    """4 blocks of 2 kv heads of 4 in float32: 4 · 2 · 2 · 4 · 4 bytes a token; half of them; none."""
    config = tiny(blocks=(BlockConfig("full", 2, 8),) * 4)
    params = random_params(config, dtype=np.float32)
    sizes = []
    for blocks in ([], [1, 2], range(4)):
        sizes.append(state_bytes_per_token(fusion.remove_attention(blocks)(config, params)[0], jnp.float32))
    assert sizes == [256, 128, 0]


@pytest.mark.parametrize(
    "transform, message",
    [
        (fusion.fuse_ffn([(2, 4), (4, 5)]), "spans 2-4 and 4-5 overlap"),
        (fusion.fuse_ffn([(4, 2)]), "span 4-2 descends"),
        (fusion.fuse_ffn([(5, 7)]), "span 5-7 is out of range; the model has 7 blocks"),
        (fusion.fuse_ffn([(-1, 2)]), "span -1-2 is out of range"),
        (fusion.fuse_ffn([(5, 6)]), "span 5-6: block 6 has attention, which only the first"),
        (fusion.reverse([(0, 1)]), "span 0-1: block 1 has attention"),
        (fusion.remove_attention([2]), "block 2 has no attention"),
        (fusion.remove_attention([7]), "block 7 is out of range; the model has blocks 0 to 6"),
        (fusion.remove_blocks(range(7)), "all 7 blocks"),
        (fusion.reduce_kv_heads(3), "3 does not divide block 0's 2 kv heads"),
        (fusion.reduce_kv_heads(1, [2]), "block 2 has no attention"),
        (fusion.prune_ffn(0.5, [np.ones(3)] * 7), r"block 0 has shape \(3,\), its FFN width 24"),
        (fusion.prune_ffn(0.5, [np.ones(3)]), "importances of 1 blocks for a model of 7"),
        (fusion.prune_ffn({0: 25}, [np.ones(24)] * 7), "block 0 has 24 channels, 25 cannot be kept"),
        (fusion.chain(fusion.remove_ffn([3]), fusion.fuse_ffn([(2, 4)])), "block 3 has no FFN"),
        (fusion.chain(fusion.remove_ffn([3]), fusion.remove_ffn([3])), "block 3 has no FFN"),
    ],
)
def test_illegal_requests_name_block_and_reason(transform, message):
    config, params = CONFIG, random_params(CONFIG, dtype=np.float32)
    with pytest.raises(ValueError, match=message):
        transform(config, params)


def test_attention_that_adds_a_constant_is_attention(x64):
    """A zero output projection takes the keys and values away, but not its bias: the block is not attention-free."""
    config, params = model()
    parts = unstack_blocks(config, params)
    parts[6] = parts[6] | {"o_proj": jnp.zeros_like(parts[6]["o_proj"])}
    quiet = config, {**params, "runs": stack_blocks(config, parts)}
    for fuse in (fusion.fuse_ffn([(5, 6)]), fusion.chain(fusion.fuse_ffn([(2, 3)]), fusion.fuse_ffn([(4, 5)]))):
        with pytest.raises(ValueError, match=r"span (5-6: block 6|4-5: block 5) has attention, which only the first"):
            fuse(*quiet)
    assert relative_error(hidden(fusion.remove_attention([6])(*quiet)), hidden(quiet)) > 1e-3


def test_a_chain_is_gone_through_on_shapes_first():
    """Whatever its last part refuses, the first has touched no weight; parts that read values are let be."""
    touched = []

    def first(config, params):
        touched.append(not isinstance(params["norm"], jax.core.Tracer))
        return config, params

    whole = CONFIG, random_params(CONFIG, dtype=np.float32)
    for bad in (fusion.fuse_ffn([(5, 6)]), fusion.remove_attention([2]), fusion.replace_spans([(0, 7, None)])):
        with pytest.raises(ValueError, match="block 6 has attention|block 2 has no|span 0-7 is out of range"):
            fusion.chain(first, fusion.chain(first, bad))(*whole)
    assert not any(touched) and len(touched) == 6
    with pytest.raises(ValueError, match="block 2 has no attention"):  # not after block 1 has been worked on
        fusion.linear_attention([1, 2])(*whole)

    def largest_first(config, params):
        return fusion.remove_ffn([int(jnp.argmax(params["norm"])) % 6])(config, params)

    assert fusion.chain(first, largest_first)(*whole)[0].blocks.count(BlockConfig("none", 1, 0)) <= 1
    assert touched[-2:] == [False, True]


def test_settings_that_can_never_be_right_raise_at_once():
    for make, message in (
        (lambda: fusion.fuse_ffn([(0, 1)], norm="first"), "fold, last"),
        (lambda: fusion.fuse_ffn((0, 1)), r"fuse_ffn: spans must be a list of pairs .* got \(0, 1\)"),
        (lambda: fusion.reverse([(0, 1, 2)]), "reverse: spans must be a list of pairs"),
        (lambda: fusion.parallel_blocks([0.5]), "parallel_blocks: spans must be a list of pairs"),
        (lambda: fusion.remove_ffn([1, 1]), "block 1 is named twice"),
        (lambda: fusion.remove_attention([2.5]), r"remove_attention: blocks must be a list .* got \[2.5\]"),
        (lambda: fusion.remove_attention(2), r"such as \[6, 7\], got 2"),
        (lambda: fusion.replace_spans([(0, 1.5, None)]), "replace_spans: spans must be a list of pairs"),
        (lambda: fusion.prune_ffn(0.0, []), "keep must be in"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    parallel = dataclasses.replace(MIXED, blocks=(BlockConfig("full", 2, 16, parallel=True), BlockConfig("none", 1, 8)))
    with pytest.raises(ValueError, match="attention and FFN of block 0 run in parallel"):
        fusion.fuse_ffn([(0, 1)])(parallel, random_params(parallel))
    normed = tiny(blocks=(BlockConfig("none", 1, 8),) * 2, post_norms=True)
    with pytest.raises(ValueError, match="span 0-1: every FFN's output has a norm of its own"):
        fusion.fuse_ffn([(0, 1)])(normed, random_params(normed))
    unlike = tiny(blocks=(BlockConfig("none", 1, 8), BlockConfig("none", 1, 8, ffn="plain")))
    with pytest.raises(ValueError, match="FFN of block 1 is plain, of block 0 gated"):
        fusion.fuse_ffn([(0, 1)])(unlike, random_params(unlike))
    with pytest.raises(ValueError, match="names 1 blocks, the model has 2"):
        dataclasses.replace(TINY, sources=((0,),))
