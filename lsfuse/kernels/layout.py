"""How arrays lie in memory, where the compiler must not choose."""

from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from lsfuse.types import Array


def row_major(x: Array) -> Array:
    """`x` laid out with its last axis fastest on a TPU; as it is elsewhere.

    A prefix state is written and read a few tokens at a time. Left alone, the TPU's compiler gives such a stretch the
    layout its next product likes, and then the whole buffer with it: copies of the largest arrays there are.
    """
    layout = Layout(major_to_minor=tuple(range(x.ndim)))
    return lax.platform_dependent(x, tpu=lambda x: with_layout_constraint(x, layout), default=lambda x: x)
