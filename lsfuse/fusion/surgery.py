"""Weight-tree transforms: pure functions (config, params) -> (config, params), built by factories, combined by `chain`.

Blocks are named by their index in the model that a transform is given. What became of which block stays in the config:
`config.sources` says of which blocks of the original model a block is made, `config.transforms` what was done.

    surgery = fusion.chain(
        fusion.remove_attention(range(6, 10)),
        fusion.fuse_ffn([(6, 8)]))  # inclusive; 9, the run's last FFN, stays
    config2, params2 = surgery(config, params)

Every illegal request raises before any weight is touched, naming block and reason, also if it is the last of a chain.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from lsfuse.fusion.tree import (
    Leaves,
    Transform,
    block_indices,
    block_ranges,
    block_sources,
    check_floating,
    check_no_group_cut,
    check_range,
    check_spans,
    leaves_of,
    on_shapes_first,
    rebuild,
    span_list,
    widened,
)
from lsfuse.model.config import BlockConfig, ModelConfig
from lsfuse.model.layers import FFN_IN
from lsfuse.model.params import stack_blocks, unstack_blocks
from lsfuse.types import Array, Params


def chain(*transforms: Transform) -> Transform:
    """One after the other. Indices of a later transform refer to what the earlier ones leave. All are gone through on
    shapes before the first touches a weight."""

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        for transform in transforms:
            config, params = transform(config, params)
        return config, params

    return on_shapes_first(apply)


def remove_attention(blocks: Iterable[int]) -> Transform:
    """Blocks lose their attention: y = x + FFN(x). A block without FFN becomes empty, and stays.

    Raises: ValueError for a block out of range, given twice, or without attention.
    """
    chosen = block_indices("remove_attention", blocks)

    def change(config: ModelConfig, index: int, block: BlockConfig, leaves: Leaves) -> tuple[BlockConfig, Leaves]:
        if not block.has_mixer:
            raise ValueError(f"remove_attention: block {index} has no attention")
        block = _without_attention(block, "none", parallel=False)
        return block, leaves_of(config, block, leaves)

    return _each("remove_attention", chosen, change)


def linear_attention(blocks: Iterable[int]) -> Transform:
    """Attention becomes the linear map W_V W_O [D, D] of each token: what it does if a token sees only itself.

    Source: Puzzle (arXiv 2411.19146), the "linear" choice. The product is taken in float32 or wider and rounded once;
    where several query heads share a kv head, their rows of W_O are added. Biases become b_V W_O + b_O. The block keeps
    its norms, and needs no keys and values.

    Raises: ValueError for a block out of range, given twice, or without attention.
    """
    chosen = block_indices("linear_attention", blocks)

    def change(config: ModelConfig, index: int, block: BlockConfig, leaves: Leaves) -> tuple[BlockConfig, Leaves]:
        if not block.has_attention:
            raise ValueError(f"linear_attention: block {index} has no attention")
        check_floating("linear_attention", index, leaves)
        kv, head = block.num_kv_heads, config.head_dim
        out = widened(leaves["o_proj"]).reshape(kv, -1, head, config.hidden_size).sum(1).reshape(kv * head, -1)
        value = widened(leaves["v_proj"])
        new = {**leaves, "linear_attn": (value @ out).astype(leaves["v_proj"].dtype)}
        if config.qkv_bias or config.o_bias:
            bias = widened(leaves["v_proj_bias"]) @ out if config.qkv_bias else jnp.zeros(out.shape[1], out.dtype)
            if config.o_bias:
                bias = bias + widened(leaves["o_proj_bias"])
            new["linear_attn_bias"] = bias.astype(leaves["v_proj"].dtype)
        block = _without_attention(block, "linear_map")
        return block, leaves_of(config, block, new)

    return _each("linear_attention", chosen, change)


def _without_attention(block: BlockConfig, attention: str, **changes: Any) -> BlockConfig:
    return dataclasses.replace(block, attention=attention, num_kv_heads=1, window=None, local_rope=False, **changes)


def remove_ffn(blocks: Iterable[int]) -> Transform:
    """Blocks lose their FFN. Raises: ValueError as `remove_attention`."""
    chosen = block_indices("remove_ffn", blocks)

    def change(config: ModelConfig, index: int, block: BlockConfig, leaves: Leaves) -> tuple[BlockConfig, Leaves]:
        if not block.has_ffn:
            raise ValueError(f"remove_ffn: block {index} has no FFN")
        block = dataclasses.replace(block, ffn_width=0, parallel=False, ffn="gated")
        return block, leaves_of(config, block, leaves)

    return _each("remove_ffn", chosen, change)


def remove_blocks(blocks: Iterable[int]) -> Transform:
    """Blocks go, and those behind them move up; of blocks in parallel the others stay so. Raises: ValueError if none
    would be left."""
    chosen = block_indices("remove_blocks", blocks)

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        check_range("remove_blocks", chosen, config)
        if len(chosen) == config.num_blocks:
            raise ValueError(f"remove_blocks: all {config.num_blocks} blocks are named; a model needs at least one")
        kept = [i for i in range(config.num_blocks) if i not in chosen]
        parts, sources = unstack_blocks(config, params), block_sources(config)
        blocks = [config.blocks[kept[0]]]
        for before, i in zip(kept, kept[1:], strict=False):
            together = all(b.beside for b in config.blocks[before + 1 : i + 1])
            blocks.append(dataclasses.replace(config.blocks[i], beside=together))
        blocks[0] = dataclasses.replace(blocks[0], beside=False)
        return rebuild(
            config,
            params,
            blocks,
            [parts[i] for i in kept],
            [sources[i] for i in kept],
            f"remove_blocks({block_ranges(chosen)})",
        )

    return apply


def reduce_kv_heads(num_kv_heads: int, blocks: Iterable[int] | None = None) -> Transform:
    """Fewer kv heads, each the mean of those that it replaces (GQA, arXiv 2305.13245, sec. 2.1). blocks: all with
    attention by default.

    Raises: ValueError where the number does not divide a block's.
    """
    chosen = None if blocks is None else block_indices("reduce_kv_heads", blocks)

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        mine = chosen
        if mine is None:
            mine = tuple(i for i, b in enumerate(config.blocks) if b.has_attention)

        def change(config: ModelConfig, index: int, block: BlockConfig, leaves: Leaves) -> tuple[BlockConfig, Leaves]:
            if not block.has_attention:
                raise ValueError(f"reduce_kv_heads: block {index} has no attention")
            if num_kv_heads < 1 or block.num_kv_heads % num_kv_heads:
                raise ValueError(
                    f"reduce_kv_heads: {num_kv_heads} does not divide block {index}'s {block.num_kv_heads} kv heads"
                )

            check_floating("reduce_kv_heads", index, leaves)

            def pool(leaf: Array) -> Array:
                rest = leaf.shape[:-1]
                heads = leaf.reshape(*rest, num_kv_heads, block.num_kv_heads // num_kv_heads, config.head_dim)
                return widened(heads).mean(-2).reshape(*rest, -1).astype(leaf.dtype)

            names = [n for n in ("k_proj", "v_proj", "k_proj_bias", "v_proj_bias") if n in leaves]
            pooled = {n: pool(leaves[n]) for n in names}
            return dataclasses.replace(block, num_kv_heads=num_kv_heads), leaves | pooled

        return _each(f"reduce_kv_heads({num_kv_heads})", mine, change)(config, params)

    return apply


def prune_ffn(
    keep: float | dict[int, int], importance: Sequence[np.ndarray | None], blocks: Iterable[int] | None = None
) -> Transform:
    """Keeps the most important channels of FFNs, in their order.

    keep: the share kept in (0, 1], rounded to the nearest whole channel, at least one; or block -> channels.
    importance: one array [F] a block (None where there is no FFN); `ffn_importance` makes them.
    blocks: all with an FFN by default; those of `keep` if that is a dict.

    Raises: ValueError for importances of another model, a share out of range, more channels than there are.
    """
    if not isinstance(keep, dict) and not 0 < keep <= 1:
        raise ValueError(f"prune_ffn: keep must be in (0, 1], got {keep}")
    chosen = None if blocks is None else block_indices("prune_ffn", blocks)

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        if len(importance) != config.num_blocks:
            raise ValueError(f"prune_ffn: importances of {len(importance)} blocks for a model of {config.num_blocks}")
        mine = chosen
        if mine is None:
            mine = tuple(sorted(keep)) if isinstance(keep, dict) else _with_ffn(config)

        def change(config: ModelConfig, index: int, block: BlockConfig, leaves: Leaves) -> tuple[BlockConfig, Leaves]:
            scores, width = importance[index], block.ffn_width
            if not width or scores is None or np.shape(scores) != (width,):
                shape = None if scores is None else np.shape(scores)
                raise ValueError(f"prune_ffn: importance of block {index} has shape {shape}, its FFN width {width}")
            count = keep[index] if isinstance(keep, dict) else max(1, round(keep * width))
            if not 1 <= count <= width:
                raise ValueError(f"prune_ffn: block {index} has {width} channels, {count} cannot be kept")
            check_floating("prune_ffn", index, leaves)
            channels = np.sort(np.argsort(-np.asarray(scores, np.float64), kind="stable")[:count])
            new = {n: leaves[n][..., channels] for n in FFN_IN if n in leaves}
            new |= {n: leaves[n][channels] for n in ("down_proj", "fc_out") if n in leaves}
            return dataclasses.replace(block, ffn_width=count), leaves | new

        return _each(f"prune_ffn({keep if not isinstance(keep, dict) else 'widths'})", mine, change)(config, params)

    return apply


def cut(config: ModelConfig, params: Params, first: int, last: int) -> tuple[ModelConfig, Params]:
    """Blocks first … last, inclusive, as a model of their own, with the embedding and head of the whole."""
    one = dataclasses.replace(config, blocks=config.blocks[first : last + 1], sources=(), transforms=())
    return one, {**params, "runs": stack_blocks(one, unstack_blocks(config, params, range(first, last + 1)))}


def replace_spans(replacements: Iterable[tuple[int, int, Transform | None]]) -> Transform:
    """Every span (first, last), inclusive, becomes what its transform makes of it, taken as a model of its own (its
    block 0 is block `first`); None removes it. Indices are those of the model before any replacement. A span may not
    part blocks that run in parallel."""
    listed = list(replacements)
    spans = span_list("replace_spans", [(a, b) for a, b, _ in listed])
    given = [(a, b, t) for (a, b), (_, _, t) in zip(spans, listed, strict=True)]

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        for first, last in check_spans("replace_spans", [(a, b) for a, b, _ in given], config):
            check_no_group_cut("replace_spans", config, first, last)
        sources, notes, at = block_sources(config), [], 0
        pieces: list[tuple[int, int, tuple[ModelConfig, list[Leaves]] | None]] = []
        for first, last, transform in sorted(given, key=lambda g: g[0]):
            pieces.append((at, first - 1, None))
            if transform is not None:
                new, new_params = transform(*cut(config, params, first, last))
                pieces.append((first, last, (new, unstack_blocks(new, new_params))))
                notes += [f"{first}-{last}: {note}" for note in new.transforms]
            else:
                notes.append(f"{first}-{last}: removed")
            at = last + 1
        pieces.append((at, config.num_blocks - 1, None))
        parts = unstack_blocks(config, params)
        blocks: list[BlockConfig] = []
        leaves: list[Leaves] = []
        origin: list[tuple[int, ...]] = []
        for first, last, made in pieces:
            if made is None:
                blocks += config.blocks[first : last + 1]
                leaves += parts[first : last + 1]
                origin += sources[first : last + 1]
            else:
                blocks += made[0].blocks
                leaves += made[1]
                origin += [tuple(s for i in of for s in sources[first + i]) for of in block_sources(made[0])]
        if not blocks:
            raise ValueError("replace_spans: no block would be left; a model needs at least one")
        return rebuild(config, params, blocks, leaves, origin, "; ".join(notes))

    return on_shapes_first(apply)


def _each(name: str, chosen: tuple[int, ...], change) -> Transform:
    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        check_range(name.partition("(")[0], chosen, config)
        blocks, leaves = list(config.blocks), unstack_blocks(config, params)
        for i in chosen:
            blocks[i], leaves[i] = change(config, i, blocks[i], leaves[i])
        return rebuild(config, params, blocks, leaves, block_sources(config), f"{name} on {block_ranges(chosen)}")

    return on_shapes_first(apply)


def _with_ffn(config: ModelConfig) -> tuple[int, ...]:
    return tuple(i for i, b in enumerate(config.blocks) if b.has_ffn)
