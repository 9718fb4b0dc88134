"""DPO: preference pairs, the objective that couples two branches of a group."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lsfuse.replay.batch import Batch
from lsfuse.replay.objective import Objective, masked_mean
from lsfuse.rl.objectives import common
from lsfuse.types import Array

LOSS_TYPES = ("sigmoid", "ipo")


def dpo(
    beta: float = 0.1, label_smoothing: float = 0.0, loss_type: str = "sigmoid", reference_free: bool = False
) -> Objective:
    """Mean over pairs of -log σ(beta · [(log π - log π_ref)(chosen) - (log π - log π_ref)(rejected)]).

    Source: DPO (arXiv 2305.18290) eq. 7; a response's log-prob is the sum over its loss tokens.

    Args, with the defaults of TRL and Tunix beside them:
        beta: 0.1 (both the same).
        label_smoothing: 0 (both the same); the probability ε that a preference is the wrong way round: the loss is
            -(1 - ε) log σ(margin) - ε log σ(-margin) (Mitchell, "A note on DPO with noisy preferences", 2023, eq. 3).
            TRL smooths in its loss type "robust" only, which is another one.
        loss_type: "sigmoid" (both the same), or "ipo": (h - 1 / (2 beta))², h the difference of the two *mean*
            log-ratios a token, as TRL does on its authors' word (IPO, arXiv 2310.12036, eq. 17); Tunix has none.
        reference_free: False; True leaves π_ref out (TRL had it until 0.24; Tunix: with no reference model).

    Branches 0, 2, … of a group are chosen, 1, 3, … their rejected partners. Needs ref_per_token_logps unless
    reference_free. A pair whose responses both have no loss token does not count. An odd group size raises where it is
    known (outside `jit`); inside, the branch without a partner is left out.

    Metrics, means over pairs: "accuracy" (chosen reward above rejected), "margin", "reward/chosen",
    "reward/rejected" (beta · log-ratio to the reference); "entropy" over loss tokens.
    """
    common.check_beta("dpo", beta)
    if beta == 0:
        raise ValueError("dpo: beta must be positive; at 0 the loss is constant")
    common.check_choice("loss_type", loss_type, LOSS_TYPES)
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"dpo: label_smoothing must be in [0, 0.5), got {label_smoothing}; at 0.5 no order is left")
    if loss_type == "ipo" and label_smoothing:
        raise ValueError(f'dpo: label_smoothing {label_smoothing} goes with loss_type "sigmoid", not "ipo"')

    def prepare(batch: Batch) -> Batch:
        common.require(batch, "dpo", () if reference_free else ("ref_per_token_logps",))
        if not isinstance(batch.group_sizes, jax.core.Tracer):
            odd = np.flatnonzero(np.asarray(batch.group_sizes) % 2)
            if odd.size:
                raise ValueError(
                    f"dpo reads pairs of branches (0 chosen, 1 rejected, …), but group {int(odd[0])} has"
                    f" {int(batch.group_sizes[odd[0]])} branches; group sizes must be even"
                )
        if batch.loss_weights is not None:
            return batch
        pairs = _pairs(batch)
        weights = pairs / jnp.maximum(jnp.sum(pairs), 1)
        return dataclasses.replace(batch, loss_weights=_spread(weights, batch))

    def loss_fn(per_token_logps: Array, entropies: Array, batch: Batch) -> tuple[Array, dict]:
        mask = batch.loss_mask
        delta = jnp.where(mask, per_token_logps, 0.0)
        if not reference_free:
            reference = common.field_of(batch, "ref_per_token_logps")
            delta = delta - jnp.where(mask, reference, 0.0).astype(delta.dtype)
        total = jnp.sum(delta, axis=-1)
        if loss_type == "ipo":
            total = total / jnp.maximum(jnp.sum(mask, axis=-1), 1).astype(total.dtype)
        chosen, rejected = _split(beta * total)
        margin = chosen - rejected
        pairs = _pairs(batch)
        weights, _ = _split(common.field_of(batch, "loss_weights")[..., 0])
        if loss_type == "ipo":
            losses = (margin / beta - 0.5 / beta) ** 2
        else:
            wrong = label_smoothing * jax.nn.log_sigmoid(-margin) if label_smoothing else 0.0
            losses = -(1 - label_smoothing) * jax.nn.log_sigmoid(margin) - wrong
        loss = jnp.sum(weights.astype(margin.dtype) * losses)
        metrics = {
            "accuracy": masked_mean((margin > 0).astype(margin.dtype), pairs),
            "margin": masked_mean(margin, pairs),
            "reward/chosen": masked_mean(chosen, pairs),
            "reward/rejected": masked_mean(rejected, pairs),
            "entropy": masked_mean(entropies, mask),
        }
        return loss, metrics

    return Objective(loss_fn, "group", prepare, "dpo")


def _split(values: Array) -> tuple[Array, Array]:
    """[B, G] -> chosen and rejected, [B, G // 2] each."""
    even = values.shape[1] // 2 * 2
    return values[:, 0:even:2], values[:, 1:even:2]


def _pairs(batch: Batch) -> Array:
    """Default float dtype, [B, G // 2]: 1 where both branches exist and at least one has a loss token."""
    chosen, rejected = _split(jnp.any(batch.loss_mask, axis=-1))
    both_exist = jnp.logical_and(*_split(batch.branch_mask))
    return (both_exist & (chosen | rejected)).astype(jnp.result_type(float))


def _spread(weights: Array, batch: Batch) -> Array:
    """Pair weights [B, G // 2] as loss_weights [B, G, R]: both branches of a pair carry the pair's weight."""
    shape = batch.completion_ids.shape
    per_branch = jnp.zeros(shape[:2], weights.dtype).at[:, : 2 * weights.shape[1]].set(jnp.repeat(weights, 2, axis=1))
    return jnp.broadcast_to(per_branch[..., None], shape)
