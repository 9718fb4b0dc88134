"""Runs of FFNs as one wide FFN, and their reversal as a control."""

import dataclasses
from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from lsfuse.fusion.tree import (
    Leaves,
    Transform,
    block_sources,
    check_floating,
    check_no_group_cut,
    check_spans,
    ffn_names,
    on_shapes_first,
    rebuild,
    span_list,
    widened,
)
from lsfuse.model.config import BlockConfig, ModelConfig, ffn_norm
from lsfuse.model.layers import FFN_IN
from lsfuse.model.params import unstack_blocks
from lsfuse.types import Params

NORMS = ("fold", "last")


def fuse_ffn(spans: Iterable[tuple[int, int]], norm: str = "fold") -> Transform:
    """The FFNs of every span (first, last), inclusive, become one wide FFN: gates ‖ gates, ups ‖ ups, downs stacked.

    Source: FFN Fusion (arXiv 2503.18908), sec. 3. The wide layer is exactly the sum of its members, all reading the
    residual stream at the span's start; that they read it there, and not one after another, is the approximation.
    norm: "fold": each member's RMSNorm gain is multiplied into its gate and up kernels, in float32 and rounded once,
    which is exact; "last": all share the gain of the span's last member (the paper's). The first member may keep its
    attention, which runs before the sum.

    Raises: ValueError for spans that overlap, descend or run out of range, a member without FFN, one after the first
    that has attention, a first member whose attention runs in parallel with its own or another FFN, blocks in parallel
    of which some are outside the span, quantised weights.
    """
    given = span_list("fuse_ffn", spans)
    if norm not in NORMS:
        raise ValueError(f"fuse_ffn: norm {norm!r} is unknown; valid: {', '.join(NORMS)}")

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        ordered = check_spans("fuse_ffn", given, config)
        for first, last in ordered:
            _check_members("fuse_ffn", config, first, last)
            _check_fusable(config, first, last)
        parts, sources = unstack_blocks(config, params), block_sources(config)
        for first, last in ordered:
            for i in range(first, last + 1):
                check_floating("fuse_ffn", i, parts[i])
        starts = dict(ordered)
        blocks: list[BlockConfig] = []
        leaves: list[Leaves] = []
        origin: list[tuple[int, ...]] = []
        i = 0
        while i < config.num_blocks:
            last = starts.get(i, i)
            width = sum(b.ffn_width for b in config.blocks[i : last + 1])
            blocks.append(dataclasses.replace(config.blocks[i], ffn_width=width) if last > i else config.blocks[i])
            leaves.append(wide_ffn(config, parts[i : last + 1], norm) if last > i else parts[i])
            origin.append(tuple(s for part in sources[i : last + 1] for s in part))
            i = last + 1
        note = ", ".join(f"{a}-{b}" for a, b in ordered)
        return rebuild(config, params, blocks, leaves, origin, f"fuse_ffn({note}; norm={norm})")

    return on_shapes_first(apply)


def wide_ffn(config: ModelConfig, members: Sequence[Leaves], norm: str = "fold") -> Leaves:
    """The leaves of one block from those of a span's: FFNs joined, everything else the first's."""
    gain, names = ffn_norm(config), ffn_names(config)
    joined = {n: v for n, v in members[0].items() if n not in names}
    kernels = [dict(m) for m in members]
    if norm == "fold":
        for m in kernels:
            scale = (widened(m[gain]) + config.norm_offset)[:, None]
            m |= {n: (widened(m[n]) * scale).astype(m[n].dtype) for n in ("gate_proj", "up_proj", "fc_in") if n in m}
        joined[gain] = jnp.full_like(members[0][gain], 1 - config.norm_offset)
    else:
        joined[gain] = members[-1][gain]
    joined |= {n: jnp.concatenate([m[n] for m in kernels], -1) for n in FFN_IN if n in kernels[0]}
    joined |= {n: jnp.concatenate([m[n] for m in kernels], 0) for n in ("down_proj", "fc_out") if n in kernels[0]}
    for n in ("down_proj_bias", "fc_out_bias"):
        if n in kernels[0]:
            joined[n] = jnp.stack([widened(m[n]) for m in kernels]).sum(0).astype(kernels[0][n].dtype)
    return joined


def reverse(spans: Iterable[tuple[int, int]]) -> Transform:
    """The FFNs of every span in the opposite order: the control whose cost predicts that of fusing.

    Raises: ValueError as `fuse_ffn`.
    """
    given = span_list("reverse", spans)

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        ordered = check_spans("reverse", given, config)
        for first, last in ordered:
            _check_members("reverse", config, first, last)
        parts, sources = unstack_blocks(config, params), block_sources(config)
        blocks, leaves, origin, names = list(config.blocks), list(parts), list(sources), ffn_names(config)
        for first, last in ordered:
            for i in range(first, last + 1):
                other = parts[first + last - i]
                own = {n: v for n, v in parts[i].items() if n not in names}
                leaves[i] = own | {n: v for n, v in other.items() if n in names}
                theirs = config.blocks[first + last - i]
                blocks[i] = dataclasses.replace(blocks[i], ffn_width=theirs.ffn_width, ffn=theirs.ffn)
                origin[i] = sources[first + last - i]
                if config.blocks[i].has_mixer:  # which stays
                    origin[i] = tuple(dict.fromkeys((*sources[i], *origin[i])))
        note = ", ".join(f"{a}-{b}" for a, b in ordered)
        return rebuild(config, params, blocks, leaves, origin, f"reverse({note})")

    return on_shapes_first(apply)


def _check_members(name: str, config: ModelConfig, first: int, last: int) -> None:
    if last > first:
        check_no_group_cut(name, config, first, last)
        if config.blocks[first].has_mixer and config.blocks[first + 1].beside:
            raise ValueError(
                f"{name}: span {first}-{last}: blocks {first} and {first + 1} run in parallel, so that the FFN of"
                f" {first + 1} does not read what the attention of {first} adds"
            )
    for i in range(first, last + 1):
        block = config.blocks[i]
        if not block.has_ffn:
            raise ValueError(f"{name}: span {first}-{last}: block {i} has no FFN")
        if i > first and block.has_mixer:
            raise ValueError(
                f"{name}: span {first}-{last}: block {i} has attention, which only the first member may keep; remove it"
                " with remove_attention"
            )
        if i == first and last > first and block.has_mixer and block.parallel:
            raise ValueError(
                f"{name}: span {first}-{last}: attention and FFN of block {i} run in parallel, so that its FFN and the"
                " others' read different inputs"
            )


def _check_fusable(config: ModelConfig, first: int, last: int) -> None:
    if last > first and config.post_norms:
        raise ValueError(
            f"fuse_ffn: span {first}-{last}: every FFN's output has a norm of its own (post_norms), and the sum of"
            " normed outputs is no norm of a sum; such FFNs cannot be joined"
        )
    kinds = [config.blocks[i].ffn for i in range(first, last + 1)]
    for i, kind in enumerate(kinds, start=first):
        if kind != kinds[0]:
            raise ValueError(f"fuse_ffn: span {first}-{last}: FFN of block {i} is {kind}, of block {first} {kinds[0]}")
