"""Branch replay and FFN fusion for language models, as pure functions on parameter trees.

`lsfuse.replay.value_and_grad` is a drop-in for `jax.value_and_grad` on a batch of groups whose branches share a prompt.
The packages, each importing only from those before it: types, checks, kernels, model, replay, fusion, rl,
data, io, train.
"""

__version__ = "0.1.0"
