"""Past one device: meshes, and where a run's arrays lie on them.

mesh         a mesh from its axes' sizes, checked against devices and model
placement    shardings of parameters and optimizer state
"""

from lsfuse.scale.mesh import abstract_mesh, check_mesh, make_mesh
from lsfuse.scale.placement import place, state_shardings

__all__ = ["abstract_mesh", "check_mesh", "make_mesh", "place", "state_shardings"]
