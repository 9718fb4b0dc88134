"""Rewards of a group to advantages, on the host, between sampling and the gradient step."""

import numpy as np

SCALES = ("std", "none")


def check_rewards(rewards: np.ndarray, group_sizes: np.ndarray) -> None:
    """Raises ValueError, naming group and branch, if a reward of an existing branch is NaN or infinite.

    rewards: [B, G]; group_sizes: [B]. Padding branches may hold anything.
    """
    rewards, group_sizes = np.asarray(rewards), np.asarray(group_sizes)
    if rewards.ndim != 2 or group_sizes.shape != rewards.shape[:1]:
        raise ValueError(
            f"rewards must be [B, G] and group_sizes [B], got shapes {rewards.shape} and {group_sizes.shape}"
        )
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


def group_advantages(rewards: np.ndarray, group_sizes: np.ndarray, scale: str = "std", eps: float = 1e-4) -> np.ndarray:
    """Group-relative advantages, float32 [B, G]: (r - mean) / (std + eps) with the moments of the row's own group.

    Source: DeepSeekMath (arXiv 2402.03300), 4.1.2, outcome supervision; `scale="none"` leaves out the division
    (Dr. GRPO, arXiv 2503.20783, sec. 3.2). The std is the sample one, ddof = 1, as in TRL, which also adds 1e-4.
    A group of one, and a group of equal rewards, gets exactly 0. Padding branches (beyond group_sizes) are ignored and
    get 0.

    Args:
        rewards: [B, G], any real dtype; computed in float64.
        group_sizes: int [B].
        scale: "std" or "none".
        eps: added to the std.

    Raises:
        ValueError: NaN or infinite reward (named by group and branch), unknown scale, shapes that disagree.
    """
    if scale not in SCALES:
        raise ValueError(f"scale {scale!r} is unknown; valid: {', '.join(SCALES)}")
    check_rewards(rewards, group_sizes)
    exists = _exists(rewards, np.asarray(group_sizes))
    rewards = np.where(exists, np.asarray(rewards, np.float64), 0.0)
    sizes = np.asarray(group_sizes)[:, None]
    mean = rewards.sum(axis=1, keepdims=True) / np.maximum(sizes, 1)
    deviations = np.where(exists, rewards - mean, 0.0)
    # The rounding error of the mean must not turn equal rewards into a signal.
    equal = np.all(np.where(exists, rewards == rewards[:, :1], True), axis=1, keepdims=True)
    deviations = np.where(equal, 0.0, deviations)
    if scale == "std":
        std = np.sqrt((deviations**2).sum(axis=1, keepdims=True) / np.maximum(sizes - 1, 1))
        deviations = deviations / (std + eps)
    return deviations.astype(np.float32)


def _exists(rewards: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    return np.arange(np.shape(rewards)[1]) < group_sizes[:, None]
