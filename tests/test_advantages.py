"""Group advantages against hand-computed values."""

import numpy as np
import pytest

from lsfuse.rl import group_advantages


def test_hand_computed_values():
    """std with ddof 1, plus 1e-4: [1, 0] has std .70711; [1, 0, 0, 1] has .57735 (ddof 0 would give .5, ±.99980)."""
    got = group_advantages([[1.0, 0.0], [5.0, 5.0]], [2, 2])
    np.testing.assert_allclose(got, [[0.70701, -0.70701], [0.0, 0.0]], atol=5e-6)
    got = group_advantages([[1.0, 0.0, 0.0, 1.0]], [4])
    np.testing.assert_allclose(got, [[0.86588, -0.86588, -0.86588, 0.86588]], atol=5e-6)
    assert got.dtype == np.float32


@pytest.mark.parametrize("scale", ["std", "none"])
def test_a_group_of_one_and_equal_rewards_get_exactly_zero(scale):
    got = group_advantages([[0.1, 0.1, 0.1], [7.0, np.nan, np.nan]], [3, 1], scale=scale)
    np.testing.assert_array_equal(got, np.zeros((2, 3)))
    assert not np.signbit(got).any()


def test_padding_branches_are_ignored():
    padded = group_advantages([[1.0, 0.0, np.nan, np.inf], [3.0, 1.0, 2.0, 9.0], [np.nan] * 4], [2, 4, 0])
    np.testing.assert_array_equal(padded[0], [*group_advantages([[1.0, 0.0]], [2])[0], 0, 0])
    np.testing.assert_array_equal(padded[1], group_advantages([[3.0, 1.0, 2.0, 9.0]], [4])[0])
    np.testing.assert_array_equal(padded[2], np.zeros(4))


def test_scale_none_only_centres():
    np.testing.assert_array_equal(group_advantages([[1.0, 0.0, 2.0, 1.0]], [4], scale="none"), [[0.0, -1.0, 1.0, 0.0]])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_reward_is_named(value):
    with pytest.raises(ValueError, match=r"group 1, branch 2: the reward is -?(nan|inf)"):
        group_advantages([[0.0, 1.0, 0.0], [1.0, 1.0, value]], [3, 3])


def test_bad_arguments():
    with pytest.raises(ValueError, match="'ddof'.*std, none"):
        group_advantages([[0.0]], [1], scale="ddof")
    with pytest.raises(ValueError, match="group 0: size 3"):
        group_advantages([[0.0, 1.0]], [3])
    with pytest.raises(ValueError, match=r"\(2,\)"):
        group_advantages([0.0, 1.0], [2])
