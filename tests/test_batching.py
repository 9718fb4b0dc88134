"""Batches of fixed shape from groups of unlike size, and the order of examples."""

import dataclasses

import numpy as np
import pytest

from lsfuse.data import Group, indices, make_batch

SHAPES = {"max_prompt": 4, "max_response": 3, "num_groups": 3, "num_branches": 2, "pad_id": 9}
GROUPS = [
    Group([3, 4], [[5], [6, 7, 8]], rewards=[1.0, 0.0], completion_masks=[[1], [1, 0, 2]]),
    Group(np.array([1]), [np.array([], np.int64)], rewards=[0.5]),
]


def test_padding_and_masks():
    batch = make_batch(GROUPS, **SHAPES)
    np.testing.assert_array_equal(batch.prompt_ids, [[3, 4, 9, 9], [1, 9, 9, 9], [9, 9, 9, 9]])
    np.testing.assert_array_equal(batch.prompt_lengths, [2, 1, 0])
    np.testing.assert_array_equal(batch.completion_ids[0], [[5, 9, 9], [6, 7, 8]])
    np.testing.assert_array_equal(batch.completion_lengths, [[1, 3], [0, 0], [0, 0]])
    np.testing.assert_array_equal(batch.completion_mask[0], [[1, 0, 0], [1, 0, 1]])
    np.testing.assert_array_equal(batch.completion_mask[1:], np.zeros((2, 2, 3)))
    np.testing.assert_array_equal(batch.group_sizes, [2, 1, 0])
    np.testing.assert_array_equal(batch.rewards, [[1, 0], [0.5, 0], [0, 0]])
    assert batch.old_per_token_logps is None and batch.advantages is None and batch.loss_weights is None
    assert batch.prompt_ids.dtype == batch.completion_mask.dtype == np.int32 and batch.rewards.dtype == np.float32
    assert isinstance(batch.prompt_ids, np.ndarray)


def test_log_probs_and_advantages_are_padded_alike():
    group = Group([1], [[2, 3], [4]], advantages=[1.0, -1.0])
    group = dataclasses.replace(
        group,
        completion_masks=[[1, 0], [1]],
        old_per_token_logps=[[-0.5, np.nan], [-0.25]],  # not finite where it is masked: allowed
        ref_per_token_logps=[[-1.0, -np.inf], [-2.0]],
    )
    batch = make_batch([group], **SHAPES)
    np.testing.assert_array_equal(batch.old_per_token_logps[0], [[-0.5, np.nan, 0], [-0.25, 0, 0]])
    np.testing.assert_array_equal(batch.ref_per_token_logps[0, 0], [-1, -np.inf, 0])
    np.testing.assert_array_equal(batch.advantages[0], [1, -1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": [1] * 5}, "group 1 .here.: the prompt has 5 tokens, but max_prompt is 4"),
        ({"completion_ids": [[1], [2] * 4]}, "branch 1: the response has 4 tokens, but max_response is 3"),
        ({"prompt_ids": []}, "the prompt is empty"),
        ({"completion_ids": []}, "no responses"),
        ({"completion_ids": [[1]] * 3, "rewards": [0.0] * 3}, "3 branches, but num_branches is 2"),
        ({"completion_ids": [[1], [20]]}, "branch 1: response, token 0: id 20 is outside the vocabulary of 20"),
        ({"prompt_ids": [1, -1]}, "prompt, token 1: id -1"),
        ({"prompt_ids": [1.5]}, "integer token ids"),
        ({"prompt_ids": [[1]]}, r"shape \(1, 1\)"),
        ({"rewards": [1.0]}, "1 rewards for 2 responses"),
        ({"rewards": [1.0, np.nan]}, "branch 1: rewards must be finite, got nan"),
        ({"advantages": [np.inf, 1.0]}, "branch 0: advantages must be finite"),
        ({"completion_masks": [[1], [1]]}, "branch 1: completion_masks has length 1, the response 2 tokens"),
        ({"completion_masks": [[1]]}, "1 rows of completion_masks for 2"),
        ({"old_per_token_logps": [[-1.0], [-1.0, np.nan]]}, "branch 1, token 1: old_per_token_logps is nan"),
        ({"rewards": None}, "group 0 has rewards, but group 1 .here. has none"),
    ],
)
def test_errors_name_group_branch_and_values(changes, message):
    good = Group([1, 2], [[1], [2, 3]], rewards=[0.0, 1.0], name="here")
    with pytest.raises(ValueError, match=message):
        make_batch([GROUPS[0], dataclasses.replace(good, **changes)], **SHAPES, vocab_size=20)


def test_number_of_groups():
    for groups in ([], [GROUPS[1]] * 4):
        with pytest.raises(ValueError, match=f"{len(groups)} groups for the 3 rows"):
            make_batch(groups, **SHAPES)


def test_every_epoch_reads_every_example_once_in_an_order_of_its_own():
    order = indices(7, seed=3, position=0, count=21).reshape(3, 7)
    np.testing.assert_array_equal(np.sort(order, axis=1), np.tile(np.arange(7), (3, 1)))
    assert len({tuple(epoch) for epoch in order}) == 3
    assert not np.array_equal(order, indices(7, seed=4, position=0, count=21).reshape(3, 7))


def test_order_resumes_from_the_position_alone():
    whole = indices(7, 3, 0, 40)
    assert whole.dtype == np.int64
    for position, count in ((0, 5), (5, 9), (14, 0), (14, 26)):
        np.testing.assert_array_equal(indices(7, 3, position, count), whole[position : position + count])
    np.testing.assert_array_equal(indices(None, 3, 5, 3), [5, 6, 7])
    with pytest.raises(ValueError, match="at least one example"):
        indices(0, 0, 0, 1)
    with pytest.raises(ValueError, match="-1"):
        indices(3, 0, -1, 1)
