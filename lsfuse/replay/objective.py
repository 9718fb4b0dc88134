"""What the engine differentiates: a function of per-token log-probs and entropies.

An objective is any callable `(per_token_logps, entropies, batch) -> (loss, metrics)` on arrays [B, G, R]. A plain
callable is taken to couple everything in the batch, which costs a scoring pass first. `Objective` says when less is
coupled, so that the engine can do with one pass, and how global denominators are fixed before any branch is run.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import struct

from lsfuse.checks import check_arrays, check_broadcastable
from lsfuse.replay.batch import Batch
from lsfuse.types import Array

COUPLINGS = ("branch", "group", "batch")


@struct.dataclass
class Mean:
    """A metric as a sum and its weight, so that parts of a batch add up to the same mean in any split."""

    total: Array
    weight: Array

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    def compute(self) -> Array:
        return jnp.where(self.weight == 0, 0.0, self.total / jnp.where(self.weight == 0, 1.0, self.weight))


def masked_mean(values: Array, mask: Array) -> Mean:
    """Mean of `values` where `mask` is true; values elsewhere may be anything, NaN included.

    Raises: ValueError for a mask that cannot be broadcast to the values.
    """
    check_broadcastable("masked_mean", "mask", mask, "values", values)
    mask = jnp.broadcast_to(mask, values.shape)
    return Mean(jnp.sum(jnp.where(mask != 0, values * mask, 0.0)), jnp.sum(mask.astype(values.dtype)))


ObjectiveFn = Callable[[Array, Array, Batch], tuple[Array, dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Objective:
    """An objective and what it couples.

    fn: (per_token_logps [B, G, R], entropies [B, G, R], batch) -> (loss, metrics). Metrics are `Mean`s or scalars;
        scalars of parts of a batch are added.
    coupling: "branch" if the loss is a sum over branches, "group" if it is a sum over groups, "batch" otherwise. For
        "branch" and "group" the engine calls `fn` on slices of the batch ([1, g, R] or [1, G, R]) and adds up, so every
        normaliser must come from `prepare`.
    prepare: batch -> batch, called once on the whole batch before any part of it is run; sets `loss_weights`.
    """

    fn: ObjectiveFn
    coupling: str = "batch"
    prepare: Callable[[Batch], Batch] | None = None
    name: str = ""

    def __post_init__(self):
        if self.coupling not in COUPLINGS:
            raise ValueError(f"Objective.coupling must be one of {', '.join(COUPLINGS)}, got {self.coupling!r}")

    def __call__(self, per_token_logps: Array, entropies: Array, batch: Batch):
        given: dict[str, tuple[Any, str, Any]] = {"completion_ids": (batch.completion_ids, "B G R", int)}
        given |= {"per_token_logps": (per_token_logps, "B G R", float), "entropies": (entropies, "B G R", float)}
        check_arrays(self.name or "objective", given)
        return self.fn(per_token_logps, entropies, batch)


def as_objective(objective: "Objective | ObjectiveFn") -> Objective:
    if isinstance(objective, Objective):
        return objective
    if not callable(objective):
        raise TypeError(f"objective must be an Objective or a callable, got {type(objective).__name__}")
    name = getattr(objective, "__name__", "")
    if getattr(objective, "__annotations__", {}).get("return") in (Objective, "Objective"):
        raise TypeError(f"{name} makes an objective and is none: pass {name}()")
    return Objective(objective, name=name)
