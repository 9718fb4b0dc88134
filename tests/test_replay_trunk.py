"""prefix="longest_common" and response buckets: the same oracle, which knows of neither."""

import dataclasses
import itertools

import families
import helpers
import jax
import numpy as np
import oracle
import pytest

from lsfuse import replay
from lsfuse.replay.geometry import group_slice
from lsfuse.replay.trunk import common_length

TINY, PARAMS = helpers.TINY, helpers.random_params(helpers.TINY, 1)


def sharing(batch, counts):
    """The batch with the first `counts[b]` tokens of group b's responses alike (fewer where a response is shorter)."""
    ids = np.array(batch.completion_ids)
    for b, count in enumerate(counts):
        lengths = np.asarray(batch.completion_lengths)[b, : batch.group_sizes[b]]
        if not len(lengths):
            continue
        longest = int(np.argmax(lengths))
        for i, length in enumerate(lengths):
            n = min(count, length)
            ids[b, i, :n] = ids[b, longest, :n]
            if n < min(length, lengths[longest]) and i != longest:  # and differs right after
                ids[b, i, n] = (ids[b, longest, n] + 1) % 23
    return batch.replace(completion_ids=ids)


# Groups: four of which one is empty and one ends inside what is shared; a lone one, shared as a whole; padding; three.
# All in the same buffers, so that a program is compiled once.
BATCHES = {
    "ragged": sharing(helpers.make_batch(TINY), (2, 9, 0, 3)),
    "ends": sharing(helpers.make_batch(TINY), (1, 9, 0, 4)),
    "whole": sharing(helpers.make_batch(TINY, (11, 8, 0, 0), ((6, 6, 0, 6), (4, 4), (), ())), (6, 4, 0, 0)),
    "nothing": sharing(helpers.make_batch(TINY, (11, 8, 0, 0), ((6, 3), (6, 4, 4), (), ())), (0, 0, 0, 0)),
}
LENGTHS = {"ragged": (1, 5, 0, 3), "ends": (1, 5, 0, 4), "whole": (6, 4, 0, 0), "nothing": (0, 0, 0, 0)}

FACTORS = {
    "name": ("coupled", "plain_grpo"),
    "prefix_grad": ("exact", "stop", 5),
    "prefix_activations": ("recompute", "keep"),
    "remat_policy": ("everything_saveable", "nothing_saveable"),
    "chunk_size": (3, 64),
    "response_buckets": ((), (3,)),
}


def check(key, name="coupled", **options):
    options = {"prefix": "longest_common", "chunk_size": 4, "branch_batch": 2, **options}
    return helpers.check_step(name, TINY, PARAMS, BATCHES[key], ("trunk", key), **options)


@pytest.mark.parametrize("key", BATCHES)
def test_what_is_common(key):
    found = [int(common_length(group_slice(BATCHES[key], b))) for b in range(len(LENGTHS[key]))]
    assert tuple(found) == LENGTHS[key]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("coupled", {"prefix_grad": "exact"}),
        pytest.param("plain_grpo", {"prefix_grad": "stop", "response_buckets": (2, 4)}, marks=pytest.mark.slow),
        pytest.param("plain_dpo", {"prefix_grad": 3, "response_buckets": (3,)}, marks=pytest.mark.slow),
    ],
)
def test_the_gradient_is_the_oracle_s(x64, name, options):
    for key in ("ragged", "whole", "nothing"):
        check(key, name, **options)


@pytest.mark.slow
@pytest.mark.parametrize("row", helpers.all_pairs(FACTORS), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_options(x64, row):
    for key in BATCHES:
        check(key, **row)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "prefix_grad"),
    [
        *zip(families.FAMILIES, itertools.cycle((3, "exact", "stop")), strict=False),
        *zip(families.LLAMAS, itertools.cycle(("exact", "stop", 3)), strict=False),
        ("hollow", 4),
    ],
)
def test_every_family(x64, family, prefix_grad):
    """Windows that end inside the trunk, blocks without attention, post-norms."""
    config = {**families.FAMILIES, **families.LLAMAS, "hollow": helpers.HOLLOW}[family]
    params = helpers.random_params(config, 3)
    batch = sharing(helpers.make_batch(config), (2, 9, 0, 3))
    options = {"prefix_grad": prefix_grad, "chunk_size": 3, "branch_batch": 3, "prefix": "longest_common"}
    helpers.check_step("plain_grpo", config, params, batch, "trunk unlike", **options)


def test_buckets_alone(x64):
    """Tails of 6 tokens at most run at 4 or 6 rows; the gradient and the log-probs are the same."""
    batch = helpers.make_batch(TINY, (11, 8, 3), ((2, 1), (4, 1, 0), (6, 6)), (11, 4, 6))
    options = {"chunk_size": 4, "branch_batch": 2, "response_buckets": (4, 64)}
    helpers.check_step("plain_grpo", TINY, PARAMS, batch, "buckets", **options)
    logps, entropies = helpers.scorer(TINY, **options, prefix="longest_common")(PARAMS, batch)
    want = oracle.per_token_logps(TINY, PARAMS, batch)
    np.testing.assert_allclose(logps, want[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(entropies, want[1], rtol=0, atol=1e-12)


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="prefix must be one of prompt, longest_common, got 'longest'"):
        replay.value_and_grad(helpers.PLAIN_GRPO, TINY, prefix="longest")
    with pytest.raises(ValueError, match="response_buckets must be a tuple of padded lengths .* got \\(0,\\)"):
        replay.value_and_grad(helpers.PLAIN_GRPO, TINY, response_buckets=(0,))


def test_state_and_cotangent_have_room_for_the_trunk():
    for prefix_grad in ("exact", "stop", 5):
        options = replay.Options(prefix_grad, 4, 2, prefix="longest_common")
        plain = replay.make_geometry(dataclasses.replace(options, prefix="prompt"), 14, 4, 6)
        room = replay.make_geometry(options, 14, 4, 6)
        assert (plain.trunk, room.trunk) == (0, 6)
        assert room.state >= 13 + 6 and room.state >= 13 - room.grad_tokens + room.cotangent + 6
        assert jax.tree.leaves(room.cotangent) == jax.tree.leaves(plain.cotangent)
