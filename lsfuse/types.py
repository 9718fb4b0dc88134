"""Array aliases, mesh axis names and the dimension glossary shared by every package.

Dimension letters, used as suffixes inside the maths (`q_BTNH`) and in docstrings:

    B batch (groups)    G branches of a group   P prefix (prompt)   R response
    T tail              S key length            L layers            D model
    F ffn hidden        N query heads           K kv heads          H head dim
    V vocabulary        C chunk
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

Array = jax.Array | np.ndarray

# A nested dict of arrays: {"embed_tokens": [V, D], "runs": {"0": {...}}, "norm": [D], "lm_head": [D, V]}.
Params = Mapping[str, Any]

# Mesh axes: groups, the prefix sequence (striped), parameter shards, heads / hidden / vocabulary.
MESH_AXES = ("data", "context", "fsdp", "tensor")

# Of devices, or of none: what is traced, checked or counted needs no devices.
AnyMesh = Mesh | AbstractMesh
