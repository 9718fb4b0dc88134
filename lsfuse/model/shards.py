"""How one device's part relates to the whole, inside a `shard_map`: the collectives that the model's functions use.

Token positions are split over the axes `tokens`: of T positions that run together, each of the n devices has T / n in a
row. Over the same axes go the parameters: a block's kernels along the side that meets the residual stream, so that a
device gathers one block at a time. Heads, FFN channels and their kernels' other side are split over `tensor`; embedding
and head along the vocabulary, over both. One device is the same code, without any collective.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from lsfuse.types import Array

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc_in")  # (stream, heads or channels)
ROWS = ("o_proj", "down_proj", "fc_out")  # (heads or channels, stream)
# Gains that act before a projection whose outputs are split over `tensor`: each device sees its share of the gradient.
SHARED_GAINS = ("q_norm", "k_norm")


@dataclasses.dataclass(frozen=True)
class Shards:
    """Names and numbers of devices of the mesh axes. tokens, tensor: () where there is one device.

    data: axes over which groups are split; parameters are copies there.
    """

    tokens: tuple[str, ...] = ()
    tensor: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    num_tokens: int = 1
    num_tensor: int = 1
    num_data: int = 1

    # --- token positions ---

    def first(self, own: int) -> Array | int:
        """Where this device's `own` positions begin."""
        return lax.axis_index(self.tokens) * own if self.tokens else 0

    def own(self, count: int) -> int:
        """This device's share of `count` positions, which the number of devices divides."""
        assert count % self.num_tokens == 0, (count, self.num_tokens)
        return count // self.num_tokens

    def gather_tokens(self, x: Array, axis: int) -> Array:
        return lax.all_gather(x, self.tokens, axis=axis, tiled=True) if self.tokens else x

    def scatter_tokens(self, x: Array, axis: int) -> Array:
        """Sum over the devices, of which each gets its own positions."""
        return lax.psum_scatter(x, self.tokens, scatter_dimension=axis, tiled=True) if self.tokens else x

    def own_tokens(self, x: Array, axis: int) -> Array:
        """This device's positions of an array that all have."""
        if not self.tokens:
            return x
        own = self.own(x.shape[axis])
        return lax.dynamic_slice_in_dim(x, self.first(own), own, axis)

    def striped(self, position: Array, chunk: int) -> Array:
        """How many of the first `position` positions are this device's, if they run in chunks of `chunk`."""
        if not self.tokens:
            return position
        own = self.own(chunk)
        position = jnp.maximum(position, 0)
        return position // chunk * own + jnp.clip(position % chunk - self.first(own), 0, own)

    # --- heads and channels ---

    def sum_tensor(self, x: Any) -> Any:
        return lax.psum(x, self.tensor) if self.tensor else x

    def once(self, params: dict[str, Array], names: tuple[str, ...]) -> dict[str, Array]:
        """`params` with the biases `names` on the first device of `tensor` only: outputs are summed over it."""
        if not self.tensor:
            return params
        first = lax.axis_index(self.tensor) == 0
        return {**params, **{name: jnp.where(first, params[name], 0) for name in names if name in params}}

    def sum_gains(self, grads: dict[str, Array], norm: str) -> dict[str, Array]:
        """Whole gradients of the gains before projections whose outputs are split."""
        mine = {name: g for name, g in grads.items() if name == norm or name in SHARED_GAINS}
        return {**grads, **self.sum_tensor(mine)} if mine else grads

    # --- parameters ---

    def gather_block(self, params: Mapping[str, Array]) -> dict[str, Array]:
        """One block's kernels from the devices' parts."""
        if not self.tokens:
            return dict(params)
        return {
            name: p if (side := _stream_side(name)) is None else lax.all_gather(p, self.tokens, axis=side, tiled=True)
            for name, p in params.items()
        }

    def scatter_block(self, grads: Mapping[str, Array]) -> dict[str, Array]:
        """This device's part of one block's gradients, each device having its own tokens'. What is not split stays a
        part of the sum, which `whole_grads` makes at the end."""
        if not self.tokens:
            return dict(grads)
        return {
            name: g if (side := _stream_side(name)) is None else self.scatter_tokens(g, side)
            for name, g in grads.items()
        }

    def whole_grads(self, grads: dict[str, Any]) -> dict[str, Any]:
        """Gradients at the end of a step: sums over the devices that have worked on others' tokens or groups."""
        if self.tokens:
            runs = {
                run: {n: lax.psum(g, self.tokens) if _stream_side(n) is None else g for n, g in leaves.items()}
                for run, leaves in grads["runs"].items()
            }
            grads = {**grads, "runs": runs}
        return self.sum_data(grads)

    # --- groups and the vocabulary ---

    def sum_data(self, x: Any) -> Any:
        return lax.psum(x, self.data) if self.data else x

    def gather_data(self, x: Array) -> Array:
        """All groups, from the devices that have some each."""
        return lax.all_gather(x, self.data, axis=0, tiled=True) if self.data else x

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return (*self.tokens, *self.tensor)

    def first_word(self, own: int) -> Array | int:
        """The first of the `own` vocabulary entries of this device."""
        return lax.axis_index(self.vocabulary) * own if self.vocabulary else 0

    def sum_vocabulary(self, x: Any) -> Any:
        return lax.psum(x, self.vocabulary) if self.vocabulary else x

    def max_vocabulary(self, x: Array) -> Array:
        return lax.pmax(x, self.vocabulary) if self.vocabulary else x

    def gather_vocabulary(self, x: Array) -> Array:
        """Logits [..., V] from the devices' entries."""
        return lax.all_gather(x, self.vocabulary, axis=x.ndim - 1, tiled=True) if self.vocabulary else x

    def agree(self, x: Array) -> Array:
        """The first device's integers, on all that work on the same groups."""
        if not self.vocabulary:
            return x
        return lax.psum(jnp.where(lax.axis_index(self.vocabulary) == 0, x, 0), self.vocabulary)


@dataclasses.dataclass(frozen=True)
class Copies(Shards):
    """Tokens that all devices along `tokens` have, as the rows of a step of decoding: parameters are gathered as ever,
    positions are not split, and what devices have made of their share of the vocabulary or of a prefix is summed."""

    def first(self, own: int) -> Array | int:
        return 0

    def own(self, count: int) -> int:
        return count

    def gather_tokens(self, x: Array, axis: int) -> Array:
        return x

    def scatter_tokens(self, x: Array, axis: int) -> Array:
        return lax.psum(x, self.tokens) if self.tokens else x

    def own_tokens(self, x: Array, axis: int) -> Array:
        return x


def _stream_side(name: str) -> int | None:
    """The axis of a block's leaf that is split over `tokens`: the one of the residual stream; None: it is not."""
    return 0 if name in COLUMNS or name == "linear_attn" else 1 if name in ROWS else None


def param_specs(shards: Shards, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """PartitionSpec of every leaf of a tree of `model.param_shapes`."""
    tokens, tensor = shards.tokens or None, shards.tensor or None

    def block(name: str) -> PartitionSpec:
        if name in COLUMNS:
            return PartitionSpec(None, tokens, tensor)
        if name in ROWS:
            return PartitionSpec(None, tensor, tokens)
        if name == "linear_attn":
            return PartitionSpec(None, tokens)
        if name.removesuffix("_bias") in COLUMNS:
            return PartitionSpec(None, tensor)
        return PartitionSpec()

    words = shards.vocabulary or None
    specs = {"embed_tokens": PartitionSpec(words), "lm_head": PartitionSpec(None, words), "norm": PartitionSpec()}
    runs = {run: {name: block(name) for name in leaves} for run, leaves in shapes["runs"].items()}
    return {name: runs if name == "runs" else specs[name] for name in shapes}
