"""Where a run's arrays lie: parameters as `replay.param_shardings` says, what an optimizer keeps of each beside it."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from lsfuse.io.checkpoint_manifest import leaf_names
from lsfuse.model import ModelConfig, abstract_params
from lsfuse.replay import param_shardings
from lsfuse.types import AnyMesh, Params


def state_shardings(model: ModelConfig, mesh: AnyMesh, state: Any) -> Any:
    """NamedSharding of every leaf of `state`, an optimizer's state or a tree that holds parameters.

    A leaf whose path ends in a parameter's ("0/mu/runs/0/q_proj") and that has its shape lies as the parameter does;
    all others (counts, factored moments) are copied to every device.

    state: a tree of arrays or `jax.ShapeDtypeStruct`s.
    """
    params = abstract_params(model)
    shardings = zip(jax.tree.leaves(params), jax.tree.leaves(param_shardings(model, mesh)), strict=True)
    known = dict(zip(leaf_names(params), shardings, strict=True))
    copied = NamedSharding(mesh, PartitionSpec())

    def of(name: str, leaf: Any) -> NamedSharding:
        parts = name.split("/")
        for i in range(len(parts)):  # the longest ending first: "runs/0/norm" before "norm"
            if (found := known.get("/".join(parts[i:]))) is not None:
                param, sharding = found
                return sharding if leaf.shape == param.shape else copied
        return copied

    leaves, treedef = jax.tree.flatten(state)
    return jax.tree.unflatten(treedef, [of(n, x) for n, x in zip(leaf_names(state), leaves, strict=True)])


def place(params: Params, model: ModelConfig, mesh: AnyMesh | None) -> Params:
    """Parameters, the same in every process, on the mesh; as they are without one."""
    return params if mesh is None else jax.device_put(params, param_shardings(model, mesh))
