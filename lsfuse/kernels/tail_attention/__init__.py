"""Attention of a group's tails over one shared prefix, and its backward."""

from lsfuse.kernels.tail_attention.api import Prefix, Rule, backward, forward
from lsfuse.kernels.tail_attention.reference import merge

__all__ = ["Prefix", "Rule", "backward", "forward", "merge"]
