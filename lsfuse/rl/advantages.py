"""Rewards of a group to advantages, on the host, between sampling and the gradient step."""

import numpy as np

from lsfuse.checks import REAL, check_arrays

SCALES = ("std", "none")
BASELINES = ("group", "leave_one_out", "batch", "none")


def check_rewards(rewards: np.ndarray, group_sizes: np.ndarray) -> None:
    """Raises ValueError, naming group and branch, if a reward of an existing branch is NaN or infinite.

    rewards: [B, G]; group_sizes: [B]. Padding branches may hold anything.
    """
    rewards, group_sizes = np.asarray(rewards), np.asarray(group_sizes)
    if rewards.ndim != 2 or group_sizes.shape != rewards.shape[:1]:
        raise ValueError(
            f"rewards must be [B, G] and group_sizes [B], got shapes {rewards.shape} and {group_sizes.shape}"
        )
    check_arrays("advantages", {"rewards": (rewards, "B G", REAL), "group_sizes": (group_sizes, "B", int)})
    if np.any(group_sizes < 0) or np.any(group_sizes > rewards.shape[1]):
        b = int(np.argmax((group_sizes < 0) | (group_sizes > rewards.shape[1])))
        raise ValueError(f"group {b}: size {group_sizes[b]} does not fit the {rewards.shape[1]} columns of rewards")
    bad = _exists(rewards, group_sizes) & ~np.isfinite(rewards)
    if bad.any():
        b, g = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"group {b}, branch {g}: the reward is {rewards[b, g]}; rewards must be finite ({int(bad.sum())} of"
            f" {int(group_sizes.sum())} are not). Check the reward function on this response"
        )


def group_advantages(
    rewards: np.ndarray, group_sizes: np.ndarray, scale: str = "std", eps: float = 1e-4, baseline: str = "group"
) -> np.ndarray:
    """Advantages, float32 [B, G]: (r - baseline) / (std + eps), by default with the moments of the row's own group.

    Source: DeepSeekMath (arXiv 2402.03300), 4.1.2, outcome supervision; `scale="none"` leaves out the division
    (Dr. GRPO, arXiv 2503.20783, sec. 3.2). The std is the sample one, ddof = 1, as in TRL, which also adds 1e-4.
    A group of equal rewards gets exactly 0 from its own mean, and so does a group of one. Padding branches (beyond
    group_sizes) are ignored and get 0.

    Args:
        rewards: [B, G], any real dtype; computed in float64.
        group_sizes: int [B].
        scale: "std" or "none".
        eps: added to the std.
        baseline: "group": the group's mean; "leave_one_out": the mean of the group's others (RLOO, arXiv 2402.14740,
            eq. 7), which asks for two responses at least; "batch": the mean, and the std, of the whole batch; "none":
            0, only with scale "none".

    Raises:
        ValueError: NaN or infinite reward (named by group and branch), unknown scale or baseline, shapes that
            disagree, a group of one under "leave_one_out", baseline "none" with a scale, a negative eps.
    """
    for name, value, valid in (("scale", scale, SCALES), ("baseline", baseline, BASELINES)):
        if value not in valid:
            raise ValueError(f"{name} {value!r} is unknown; valid: {', '.join(valid)}")
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    if baseline == "none" and scale == "std":
        raise ValueError(
            'baseline "none" does not go with scale "std": equal rewards would be divided by 0 + eps; take scale "none"'
        )
    check_rewards(rewards, group_sizes)
    exists = _exists(rewards, np.asarray(group_sizes))
    rewards = np.where(exists, np.asarray(rewards, np.float64), 0.0)
    sizes = np.asarray(group_sizes)[:, None]
    if baseline == "leave_one_out" and np.any(sizes == 1):
        raise ValueError(
            f"group {int(np.argmax(sizes[:, 0] == 1))} has one response, but its baseline is the mean of the others:"
            ' sample two or more (rl.num_generations), or take baseline "batch"'
        )
    if baseline == "batch":
        deviations, std = _moments(rewards.reshape(1, -1), exists.reshape(1, -1), sizes.sum(keepdims=True))
        deviations = deviations.reshape(rewards.shape)
    else:
        deviations, std = _moments(rewards, exists, sizes)
    if baseline == "leave_one_out":
        deviations = deviations * sizes / np.maximum(sizes - 1, 1)
    if baseline == "none":
        deviations = rewards
    if scale == "std":
        deviations = np.divide(deviations, std + eps, out=np.zeros_like(deviations), where=deviations != 0)
    return deviations.astype(np.float32)


def _moments(rewards: np.ndarray, exists: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Deviations from a row's mean, exactly 0 where all of it is equal, and its std, ddof = 1."""
    mean = rewards.sum(axis=1, keepdims=True) / np.maximum(sizes, 1)
    deviations = np.where(exists, rewards - mean, 0.0)
    # The rounding error of the mean must not turn equal rewards into a signal.
    first = np.take_along_axis(rewards, exists.argmax(axis=1)[:, None], axis=1)
    equal = np.all(np.where(exists, rewards == first, True), axis=1, keepdims=True)
    deviations = np.where(equal, 0.0, deviations)
    return deviations, np.sqrt((deviations**2).sum(axis=1, keepdims=True) / np.maximum(sizes - 1, 1))


def overlong_penalty(lengths: np.ndarray, max_length: int, buffer: int) -> np.ndarray:
    """What DAPO adds to the rewards: 0 up to max_length - buffer tokens, from there linearly down to -1 at max_length.

    Source: DAPO (arXiv 2503.14476) eq. 13, where max_length is 20480 and buffer 4096: Tunix's defaults. TRL's
    `get_soft_overlong_punishment` has none, and neither has this. lengths: int, any shape. Raises ValueError for a
    buffer that is not between 1 and max_length.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"overlong_penalty: buffer must be between 1 and max_length {max_length}, got {buffer}")
    check_arrays("overlong_penalty", {"lengths": (np.asarray(lengths), "...", REAL)})
    return np.clip((max_length - buffer - np.asarray(lengths, np.float64)) / buffer, -1.0, 0.0)


def _exists(rewards: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    return np.arange(np.shape(rewards)[1]) < group_sizes[:, None]
