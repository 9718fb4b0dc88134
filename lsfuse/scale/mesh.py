"""A mesh from the sizes of its axes: `data`, `context`, `fsdp`, `tensor` (see `replay.mesh` for what each splits)."""

import math
from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from lsfuse.model import ModelConfig
from lsfuse.replay import param_shardings
from lsfuse.types import MESH_AXES, AnyMesh


def make_mesh(sizes: Mapping[str, int]) -> Mesh | None:
    """The first devices there are, as a mesh of these axes; None, a single device, where every size is 1.

    sizes: axis name -> number of devices; axes left out are of size 1.

    Raises: ValueError for an axis that is none, for a size below 1, for fewer devices than the mesh has, and, with
    several processes, for a mesh that leaves some of their devices out.
    """
    shape = _shape(sizes)
    count, there = math.prod(shape), jax.device_count()
    text = " x ".join(f"{name} {size}" for name, size in zip(MESH_AXES, shape, strict=True))
    if count > there:
        platform = jax.default_backend()
        cure = "take smaller axes"
        if platform == "cpu":
            cure += f", or set XLA_FLAGS=--xla_force_host_platform_device_count={count} for that many devices of a CPU"
        raise ValueError(f"a mesh of {text} has {count} devices, but there are {there} ({platform}); {cure}")
    if jax.process_count() > 1 and count != there:
        raise ValueError(
            f"a mesh of {text} has {count} devices, but the {jax.process_count()} processes have {there}: the mesh must"
            " hold all of them"
        )
    if count == 1:
        return None
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=jax.devices()[:count])


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh | None:
    """As `make_mesh`, without devices: to check and to count with where there are fewer."""
    shape = _shape(sizes)
    return None if math.prod(shape) == 1 else AbstractMesh(shape, MESH_AXES)


def check_mesh(model: ModelConfig, mesh: AnyMesh | None, groups: Mapping[str, int]) -> None:
    """Raises ValueError, naming sizes that would do, where the mesh divides neither the model nor a number of groups.

    groups: what a number of groups a step is called -> the number.
    """
    if mesh is None:
        return
    param_shardings(model, mesh)
    data = mesh.shape["data"]
    for name, count in groups.items():
        if count % data:
            near = sorted({max(count // data, 1) * data, (count // data + 1) * data})
            raise ValueError(
                f"{name} is {count}, but a mesh of {data} along data, which splits groups, needs a multiple of {data}:"
                f" take {' or '.join(map(str, near))}"
            )


def _shape(sizes: Mapping[str, int]) -> tuple[int, ...]:
    if unknown := set(sizes) - set(MESH_AXES):
        raise ValueError(f"a mesh has no axis {min(unknown)!r}; its axes are {', '.join(MESH_AXES)}")
    shape = tuple(sizes.get(name, 1) for name in MESH_AXES)
    if min(shape) < 1:
        raise ValueError(f"a mesh's sizes must be at least 1, got {dict(sizes)}")
    return shape
