"""Parameter trees: initialisation, checking, counting, and going between runs and a per-block list."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from lsfuse.checks import check_key, is_kind
from lsfuse.model.config import BlockConfig, ModelConfig, block_param_shapes, param_shapes
from lsfuse.types import Array, Params


def init_params(config: ModelConfig, key: Array, dtype=jnp.float32) -> Params:
    """Random parameters: normal with standard deviation 1/sqrt(fan in), output projections divided by sqrt(2 · blocks)
    (GPT-2), embeddings 0.02, or 1/sqrt(D) where they are the head too; gains one (less `norm_offset`), biases zero."""
    check_key("init_params", key)
    shapes = traverse_util.flatten_dict(param_shapes(config), sep="/")

    def leaf(i: int, path: str, shape: tuple[int, ...]) -> Array:
        name = path.split("/")[-1]
        if name.endswith("norm"):
            return jnp.full(shape, 1 - config.norm_offset, dtype)
        if name.endswith("bias"):
            return jnp.zeros(shape, dtype)
        std = shape[-2] ** -0.5
        if name == "embed_tokens":
            std = config.hidden_size**-0.5 if config.tie_word_embeddings else 0.02
        if name in ("o_proj", "linear_attn", "down_proj", "fc_out"):
            std /= math.sqrt(2 * config.num_blocks)
        return (std * jax.random.normal(jax.random.fold_in(key, i), shape, jnp.float32)).astype(dtype)

    leaves = {path: leaf(i, path, shapes[path]) for i, path in enumerate(sorted(shapes))}
    return with_all_runs(config, traverse_util.unflatten_dict(leaves, sep="/"))


def abstract_params(config: ModelConfig, dtype=jnp.float32) -> Params:
    """The tree as `jax.ShapeDtypeStruct`s."""
    shapes = param_shapes(config)
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), shapes, is_leaf=lambda s: isinstance(s, tuple))


def with_all_runs(config: ModelConfig, params: Params) -> Params:
    """`params` with a place for every run: blocks with neither attention nor FFN have no leaf that would make one."""
    runs = params.get("runs", {})
    return {**params, "runs": {str(r): runs.get(str(r), {}) for r in range(len(config.runs))}}


def check_params(config: ModelConfig, params: Params) -> None:
    """Raises ValueError if a leaf is missing, unexpected, of another shape than `config` says, or no floating array."""
    anything: Any = params
    if not isinstance(anything, Mapping):
        kind = type(anything).__name__
        raise ValueError(f"parameters must be nested dicts of arrays, got {kind}; mind the arguments' order")
    expected = traverse_util.flatten_dict(param_shapes(config), sep="/")
    given = traverse_util.flatten_dict(params, sep="/")
    if missing := sorted(expected.keys() - given.keys()):
        raise ValueError(f"parameters lack {', '.join(missing)}, which the model's config asks for")
    if extra := sorted(given.keys() - expected.keys()):
        raise ValueError(f"parameters have {', '.join(extra)}, which the model's config does not know")
    for path, shape in expected.items():
        if not hasattr(given[path], "shape"):
            raise ValueError(f"parameter {path} must be an array of shape {shape}, got {type(given[path]).__name__}")
        if tuple(given[path].shape) != shape:
            raise ValueError(f"parameter {path} has shape {tuple(given[path].shape)}, the config says {shape}")
        if not (is_quantized(given[path]) or is_kind(given[path], float)):
            raise ValueError(
                f"parameter {path} of shape {shape} has dtype {given[path].dtype}; parameters must be floating-point"
                " numbers: cast them, or load the model that is not quantised"
            )


def is_quantized(leaf: Any) -> bool:
    """Whether a kernel is a `qwix.QArray`: int8 values and scales (`lsfuse.fusion.quantize`)."""
    return hasattr(leaf, "qvalue")


def check_trainable(params: Params) -> None:
    """Raises ValueError if there are quantised kernels, through which no gradient goes."""
    for path, leaf in traverse_util.flatten_dict(params, sep="/").items():
        if is_quantized(leaf):
            raise ValueError(f"parameter {path} is quantised; such a model can be run, but neither trained nor saved")


def count_params(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in traverse_util.flatten_dict(param_shapes(config)).values())


def unstack_blocks(config: ModelConfig, params: Params, blocks: range | None = None) -> list[dict[str, Array]]:
    """One dict of leaves per block (of `blocks`, all by default), in order. Raises ValueError where parameters do not
    fit `config`."""
    check_params(config, params)
    places = [(str(r), i) for r, (_, n) in enumerate(config.runs) for i in range(n)]
    return [
        {name: jax.tree.map(lambda x, i=i: x[i], leaf) for name, leaf in params["runs"][run].items()}
        for run, i in (places if blocks is None else places[blocks.start : blocks.stop])
    ]


def stack_blocks(config: ModelConfig, blocks: Sequence[dict[str, Array]]) -> dict[str, dict[str, Array]]:
    """The tree's "runs" from one dict of leaves per block. Raises ValueError where a block does not fit `config`."""
    if len(blocks) != config.num_blocks:
        raise ValueError(f"{len(blocks)} blocks of parameters for a config of {config.num_blocks} blocks")
    for i, (block, leaves) in enumerate(zip(config.blocks, blocks, strict=True)):
        _check_block(config, i, block, leaves)
    runs: dict[str, dict[str, Array]] = {}
    start = 0
    for r, (_, n) in enumerate(config.runs):
        members = blocks[start : start + n]
        for name in members[0]:
            if len({is_quantized(leaves[name]) for leaves in members}) > 1:
                raise ValueError(f"blocks {start} to {start + n - 1}: {name} is quantised in some of them only")
        runs[str(r)] = {
            name: jax.tree.map(lambda *parts: jnp.stack(parts), *(leaves[name] for leaves in members))
            for name in members[0]
        }
        start += n
    return runs


def _check_block(config: ModelConfig, index: int, block: BlockConfig, leaves: dict[str, Array]) -> None:
    expected = block_param_shapes(config, block)
    found = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
    if expected != found:
        differ = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))
        rows = ", ".join(f"{n}: {found.get(n, 'absent')} (config: {expected.get(n, 'absent')})" for n in differ)
        raise ValueError(f"block {index} does not fit its config: {rows}")
