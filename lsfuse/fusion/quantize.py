"""Kernels of blocks in int8, by qwix: the last step of a surgery, for evaluation and generation."""

import jax.numpy as jnp

from lsfuse.fusion.tree import Transform, block_sources, check_floating, on_shapes_first, rebuild, widened
from lsfuse.model.config import ModelConfig
from lsfuse.model.params import unstack_blocks
from lsfuse.types import Params


def quantize() -> Transform:
    """Every kernel of every block becomes int8 with one float32 scale (float64 for such weights) an output channel,
    symmetric, by the largest absolute value. Weight-only: a product is taken with the kernel scaled back and rounded to
    the activations' dtype. Embedding, head, norms and biases stay as they are.

    What comes out evaluates and generates. It is not trained, exported, or joined by further transforms: a sum of
    channels has no common scale, so fuse first, then quantise.

    Raises: ValueError, naming the block, if weights are quantised already.
    """

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        import qwix

        blocks = []
        for i, leaves in enumerate(unstack_blocks(config, params)):
            check_floating("quantize", i, leaves)
            small = {
                name: qwix.quantize(widened(jnp.asarray(x)), jnp.int8, channelwise_axes=(1,)) if x.ndim == 2 else x
                for name, x in leaves.items()
            }
            blocks.append(small)
        return rebuild(config, params, config.blocks, blocks, block_sources(config), "quantize(int8)")

    return on_shapes_first(apply)
