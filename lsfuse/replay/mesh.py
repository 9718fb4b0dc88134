"""The engine over a device mesh: which axes split what, and the `shard_map` around a step.

    data            groups
    context, fsdp   token positions of every chunk and tail, the prefix state, and (together) parameters and gradients
    tensor          heads, FFN channels, with `context` and `fsdp` also the vocabulary

Axes may be absent or of size 1. Batches are copied to every device: they are small, and any device can then run any
group. One device is the same code.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lsfuse.model.config import ModelConfig, check_divides, device_config, param_shapes
from lsfuse.model.shards import Shards, param_specs
from lsfuse.replay.geometry import Options
from lsfuse.types import MESH_AXES, AnyMesh, Params


def make_shards(mesh: AnyMesh) -> Shards:
    """Raises ValueError for an axis that has no meaning here."""
    if unknown := [name for name in mesh.axis_names if name not in MESH_AXES]:
        raise ValueError(f"mesh has an axis {unknown[0]!r}; axes may be {', '.join(MESH_AXES)}")

    def several(*names: str) -> tuple[tuple[str, ...], int]:
        used = tuple(name for name in names if mesh.shape.get(name, 1) > 1)
        count = 1
        for name in used:
            count *= mesh.shape[name]
        return used, count

    (data, num_data), (tokens, num_tokens), (tensor, num_tensor) = (
        several("data"),
        several("context", "fsdp"),
        several("tensor"),
    )
    return Shards(tokens, tensor, data, num_tokens, num_tensor, num_data)


def param_shardings(model: ModelConfig, mesh: AnyMesh) -> dict[str, Any]:
    """NamedSharding of every parameter, as `replay.value_and_grad(..., mesh=mesh)` takes parameters and returns their
    gradients: for `jax.device_put`, for checkpoints, for an optimizer's moments.

    Raises: ValueError, naming sizes that would do, where the model does not divide by the mesh.
    """
    shards = make_shards(mesh)
    device_config(model, shards)
    specs = param_specs(shards, param_shapes(model))
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))


def one_device(model: ModelConfig, options: Options) -> ModelConfig:
    """The model as a single device has it."""
    if options.compute_dtype is None and options.state_dtype is None:
        return model
    return device_config(model, Shards(), options.compute_dtype, options.state_dtype)


def on_mesh(
    step: Callable[[ModelConfig, Params, Any], Any],
    model: ModelConfig,
    mesh: AnyMesh,
    options: Options,
    outputs: Any,
    split_groups: bool = False,
) -> Callable[[Params, Any], Any]:
    """`step(model, params, batch)` on every device of a mesh, with the device's part of model and parameters.

    outputs: PartitionSpecs of what it returns, as a function of the parameters' specs.
    split_groups: whether a device gets its own groups of the batch (a tree of arrays [B, ...]) instead of all.
    """
    shards = make_shards(mesh)
    local = device_config(model, shards, options.compute_dtype, options.state_dtype)
    if options.prefix != "prompt" and shards.tokens:
        raise ValueError(
            f'prefix="{options.prefix}" runs on meshes that split groups and heads only; the mesh has'
            f" {shards.num_tokens} devices along context and fsdp"
        )
    specs, shardings = param_specs(shards, param_shapes(model)), param_shardings(model, mesh)

    batch_spec = PartitionSpec(shards.data or None) if split_groups else PartitionSpec()

    def f(params: Params, batch: Any):
        groups = jax.tree.leaves(batch)[0].shape[0]
        check_divides("data", shards.num_data, {"the number of groups in the batch": groups})
        run = jax.shard_map(
            lambda params, batch: step(local, params, batch),
            mesh=mesh,
            in_specs=(specs, batch_spec),
            out_specs=outputs(specs),
            check_vma=False,
        )
        if any(kind == AxisType.Explicit for kind in mesh.axis_types):  # what `jax.make_mesh` makes
            params, batch = jax.reshard(params, shardings), jax.reshard(batch, NamedSharding(mesh, batch_spec))
        return run(params, batch)

    return f
