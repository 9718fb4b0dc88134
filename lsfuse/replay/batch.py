"""A batch of groups: one shared prompt and G responses each, right-padded to shapes that the config fixes."""

from typing import Any

import jax.numpy as jnp
from flax import struct

from lsfuse.types import Array


class Batch(struct.PyTreeNode):
    """B groups of up to G branches. Lengths are data; padding may hold anything.

    prompt_ids: int32 [B, P], tokens at 0 … prompt_lengths - 1.
    prompt_lengths: int32 [B]; at least 1, or 0 for a group that is only padding.
    completion_ids: int32 [B, G, R].
    completion_lengths: int32 [B, G]; 0 is an empty response.
    completion_mask: [B, G, R], non-zero where the token carries loss. Tokens of mask 0 inside the length stay context.
    group_sizes: int32 [B], branches that exist; branches beyond are padding.
    advantages: float32 [B, G] (or [B, G, R]).
    old_per_token_logps, ref_per_token_logps: float32 [B, G, R], or None where the objective needs none.
    rewards: float32 [B, G] or None. DPO reads pairs from neighbours: branches 0, 2, … chosen, 1, 3, … rejected.
    loss_weights: float32 [B, G, R] or None; set by an objective's `prepare`, so that loss = Σ weight · per-token loss.
    extras: arrays [B, G, …] of the user's own, sliced along with the rest.
    """

    prompt_ids: Array
    prompt_lengths: Array
    completion_ids: Array
    completion_lengths: Array
    completion_mask: Array
    group_sizes: Array
    advantages: Array | None = None
    old_per_token_logps: Array | None = None
    ref_per_token_logps: Array | None = None
    rewards: Array | None = None
    loss_weights: Array | None = None
    extras: dict[str, Any] = struct.field(default_factory=dict)

    @property
    def branch_mask(self) -> Array:
        """bool [B, G]: branches that exist."""
        return jnp.arange(self.completion_ids.shape[1]) < self.group_sizes[:, None]

    @property
    def token_mask(self) -> Array:
        """bool [B, G, R]: response tokens that exist, whether or not they carry loss."""
        positions = jnp.arange(self.completion_ids.shape[2])
        return (positions < self.completion_lengths[..., None]) & self.branch_mask[..., None]

    @property
    def loss_mask(self) -> Array:
        """bool [B, G, R]: response tokens that carry loss."""
        return (self.completion_mask != 0) & self.token_mask
