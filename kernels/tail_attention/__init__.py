"""Attention of a group's tails over one shared prefix, and its backward."""

from lsfuse.kernels.tail_attention.api import Prefix, backward, forward
from lsfuse.kernels.tail_attention.reference import merge

__all__ = ["Prefix", "backward", "forward", "merge"]
