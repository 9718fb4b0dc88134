"""Blocks, or the two parts of a block, that run in parallel instead of one after the other.

These change what reads what, and no parameter. The sums are exact; that a part no longer sees what ran before it is the
approximation.
"""

import dataclasses
from collections.abc import Iterable

from lsfuse.fusion.tree import (
    Transform,
    block_indices,
    block_ranges,
    block_sources,
    check_no_group_cut,
    check_range,
    check_spans,
    rebuild,
    span_list,
)
from lsfuse.model.config import ModelConfig
from lsfuse.model.params import unstack_blocks
from lsfuse.types import Params


def parallel_blocks(spans: Iterable[tuple[int, int]]) -> Transform:
    """The whole blocks of every span (first, last), inclusive, read the residual stream at the span's start, and their
    contributions are added: y = x + Σ (f_i(x) - x).

    Source: FFN Fusion (arXiv 2503.18908), sec. 6; pairs of blocks: arXiv 2502.02790. Attentions stay attentions, each
    with its own keys and values, so that nothing is joined: on one device the members run one after the other.

    Raises: ValueError for spans that overlap, descend or run out of range, or touch blocks that are parallel already.
    """
    given = span_list("parallel_blocks", spans)

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        ordered = check_spans("parallel_blocks", given, config)
        for first, last in ordered:
            check_no_group_cut("parallel_blocks", config, first, last)
        inside = {i for first, last in ordered for i in range(first + 1, last + 1)}
        blocks = [dataclasses.replace(b, beside=b.beside or i in inside) for i, b in enumerate(config.blocks)]
        note = f"parallel_blocks({', '.join(f'{a}-{b}' for a, b in ordered)})"
        return rebuild(config, params, blocks, unstack_blocks(config, params), block_sources(config), note)

    return apply


def parallel_parts(blocks: Iterable[int]) -> Transform:
    """Attention and FFN of every block read the block's input and are added: y = x + Attention(x) + FFN(x), each by way
    of its own norm.

    Raises: ValueError for a block out of range, given twice, or lacking either part.
    """
    chosen = block_indices("parallel_parts", blocks)

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        check_range("parallel_parts", chosen, config)
        new = list(config.blocks)
        for i in chosen:
            if not (new[i].has_mixer and new[i].has_ffn):
                lacking = "FFN" if new[i].has_mixer else "attention"
                raise ValueError(f"parallel_parts: block {i} has no {lacking} that could run beside the other part")
            new[i] = dataclasses.replace(new[i], parallel=True)
        note = f"parallel_parts on {block_ranges(chosen)}"
        return rebuild(config, params, new, unstack_blocks(config, params), block_sources(config), note)

    return apply
