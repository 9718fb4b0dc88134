"""Decoder-only language models as pure functions on parameter trees."""

from lsfuse.model.blocks import REMAT_POLICIES
from lsfuse.model.config import (
    BlockConfig,
    ModelConfig,
    RopeScaling,
    block_param_shapes,
    locate_block,
    param_shapes,
    replace_blocks,
    uniform_blocks,
)
from lsfuse.model.logprobs import token_logprobs
from lsfuse.model.params import (
    abstract_params,
    check_params,
    count_params,
    init_params,
    stack_blocks,
    unstack_blocks,
)
from lsfuse.model.state import PrefixState, init_state
from lsfuse.model.transformer import forward, logits

__all__ = [
    "REMAT_POLICIES",
    "BlockConfig",
    "ModelConfig",
    "PrefixState",
    "RopeScaling",
    "abstract_params",
    "block_param_shapes",
    "check_params",
    "count_params",
    "forward",
    "init_params",
    "init_state",
    "locate_block",
    "logits",
    "param_shapes",
    "replace_blocks",
    "stack_blocks",
    "token_logprobs",
    "uniform_blocks",
    "unstack_blocks",
]
