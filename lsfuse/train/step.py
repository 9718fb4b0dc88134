"""One gradient step as a pure, jitted function."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lsfuse import replay, scale
from lsfuse.model import ModelConfig
from lsfuse.replay.objective import ObjectiveFn
from lsfuse.types import AnyMesh, Array, Params

# (params, opt_state, batch) -> (params, opt_state, metrics); the first two are donated.
UpdateFn = Callable[[Params, Any, replay.Batch], tuple[Params, Any, dict[str, Array]]]


def make_update(
    objective: replay.Objective | ObjectiveFn,
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    dense: bool = False,
    mesh: AnyMesh | None = None,
    **options: Any,
) -> UpdateFn:
    """A jitted step: loss and gradient by branch replay (or by its dense twin), then the optimizer.

    Parameters and optimizer state are donated: use only what is returned. Lengths are data, so one compilation serves
    every batch of equal padded shapes. metrics: "loss", "grad_norm", "update_norm", "param_norm" (all global, float32
    or wider) and the objective's.

    mesh: devices to run on, for the replayed step; what is returned lies there as `replay.param_shardings` and
        `scale.state_shardings` say.
    options: of `replay.value_and_grad`.
    """
    if dense:
        assert mesh is None, "the dense step runs on one device"
        grad_fn = replay.dense_value_and_grad(objective, model, **options)
    else:
        grad_fn = replay.value_and_grad(objective, model, mesh=mesh, **options)

    step = optax.with_extra_args_support(optimizer).update

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Params, opt_state: Any, batch: replay.Batch) -> tuple[Params, Any, dict[str, Array]]:
        (loss, metrics), grads = grad_fn(params, batch)
        updates, opt_state = step(grads, opt_state, params, value=loss)  # the loss, for those that read it (momo)
        new = optax.apply_updates(params, updates)
        if mesh is not None:
            lie = scale.state_shardings(model, mesh, (new, opt_state))
            new, opt_state = jax.lax.with_sharding_constraint((new, opt_state), lie)
        norms = {"grad_norm": grads, "update_norm": updates, "param_norm": new}
        return new, opt_state, {"loss": loss, **{k: _norm(v) for k, v in norms.items()}, **metrics}

    return update


def _norm(tree: Any) -> Array:
    squares = (jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))) for x in jax.tree.leaves(tree))
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def to_host(metrics: dict[str, Array], where: str) -> dict[str, float]:
    """Metrics as floats. Raises FloatingPointError, naming step and metric, where loss or gradient is not finite."""
    host = {name: float(value) for name, value in jax.device_get(metrics).items()}
    for name in ("loss", "grad_norm"):
        if not jnp.isfinite(host[name]):
            raise FloatingPointError(
                f"{where}: {name} is {host[name]}. A smaller learning rate, or clipping (optimizer.clip_norm), is the"
                " usual cure; the last checkpoint is from before"
            )
    return host
