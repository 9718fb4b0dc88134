"""What all transforms share: naming blocks, checking spans, and putting a model together again from its blocks."""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from lsfuse.model.config import BlockConfig, ModelConfig, block_param_shapes, ffn_norm
from lsfuse.model.layers import FFN_IN, FFN_NORM, FFN_OUT
from lsfuse.model.params import check_params, is_quantized, stack_blocks
from lsfuse.types import Array, Params

Leaves = dict[str, Array]
Transform = Callable[[ModelConfig, Params], tuple[ModelConfig, Params]]


def on_shapes_first(transform: Transform) -> Transform:
    """The same transform, gone through on shapes before any weight is touched, so that what cannot be done (by a later
    part of a chain, to a later block) raises before any work. Shapes and tracers are taken as they come."""

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        if not any(isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            try:
                jax.eval_shape(lambda params: transform(config, params)[1], params)
            except jax.errors.JAXTypeError:  # a transform of one's own that reads values: no shape tells what it does
                pass
        return transform(config, params)

    return apply


def block_sources(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Of which blocks of the original model each block is made."""
    return config.sources or tuple((i,) for i in range(config.num_blocks))


def span_list(name: str, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans as ints. Raises ValueError for what is no list of pairs, a single pair among others."""
    try:
        given = list(spans)
        return [(operator.index(first), operator.index(last)) for first, last in given]
    except (TypeError, ValueError):
        raise ValueError(f"{name}: spans must be a list of pairs such as [(6, 8)], got {spans!r}") from None


def check_spans(name: str, spans: Sequence[tuple[int, int]], config: ModelConfig) -> list[tuple[int, int]]:
    """The spans in order. Raises ValueError where they overlap, descend or run out of range."""
    ordered = sorted(spans)
    for first, last in ordered:
        if first > last:
            raise ValueError(f"{name}: span {first}-{last} descends; spans are (first, last), inclusive")
        if first < 0 or last >= config.num_blocks:
            raise ValueError(f"{name}: span {first}-{last} is out of range; the model has {config.num_blocks} blocks")
    for (a, b), (c, d) in zip(ordered, ordered[1:], strict=False):
        if c <= b:
            raise ValueError(f"{name}: spans {a}-{b} and {c}-{d} overlap")
    return ordered


def check_no_group_cut(name: str, config: ModelConfig, first: int, last: int) -> None:
    """Raises ValueError if the span begins or ends inside a group of parallel blocks."""
    for i in (first, last + 1):
        if i < config.num_blocks and config.blocks[i].beside:
            raise ValueError(
                f"{name}: span {first}-{last}: blocks {i - 1} and {i} run in parallel, and the span would part them"
            )


def check_range(name: str, blocks: Sequence[int], config: ModelConfig) -> None:
    for i in blocks:
        if not 0 <= i < config.num_blocks:
            raise ValueError(f"{name}: block {i} is out of range; the model has blocks 0 to {config.num_blocks - 1}")


def block_indices(name: str, blocks: Iterable[int]) -> tuple[int, ...]:
    """Blocks as ints, in order. Raises ValueError for what is no list of whole numbers, and for a block named twice."""
    try:
        chosen = tuple(operator.index(b) for b in blocks)
    except TypeError:
        raise ValueError(f"{name}: blocks must be a list of block numbers such as [6, 7], got {blocks!r}") from None
    if len(set(chosen)) < len(chosen):
        twice = next(b for b in chosen if chosen.count(b) > 1)
        raise ValueError(f"{name}: block {twice} is named twice")
    return tuple(sorted(chosen))


def rebuild(config, params, blocks, leaves, sources, note: str) -> tuple[ModelConfig, Params]:
    notes = (*config.transforms, note) if note else config.transforms
    new = dataclasses.replace(config, blocks=tuple(blocks), sources=tuple(sources), transforms=notes)
    params = {**params, "runs": stack_blocks(new, leaves)}
    check_params(new, params)
    return new, params


def check_floating(name: str, index: int, leaves: Leaves) -> None:
    """Raises ValueError if block `index` has quantised kernels, which no transform can compute with."""
    for leaf, value in leaves.items():
        if is_quantized(value):
            raise ValueError(
                f"{name}: {leaf} of block {index} is quantised, with a scale to each output channel; transform first,"
                " then quantise"
            )


def leaves_of(config: ModelConfig, block: BlockConfig, leaves: Leaves) -> Leaves:
    """Those of the leaves that `block` has."""
    return {n: leaves[n] for n in block_param_shapes(config, block)}


def ffn_names(config: ModelConfig) -> set[str]:
    """Leaves that belong to a block's FFN."""
    return {ffn_norm(config), *FFN_IN, *FFN_OUT, *((FFN_NORM,) if config.post_norms else ())}


def widened(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def block_ranges(blocks: Sequence[int]) -> str:
    """0, 2-5 for (0, 2, 3, 4, 5)."""
    runs: list[list[int]] = []
    for b in blocks:
        if runs and b == runs[-1][1] + 1:
            runs[-1][1] = b
        else:
            runs.append([b, b])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
