"""Weight-tree transforms: pure functions (config, params) -> (config, params), built by factories, combined by `chain`.

Blocks are named by their index in the model that a transform is given. What became of which block stays in the config:
`config.sources` says of which blocks of the original model a block is made, `config.transforms` what was done.

    surgery = fusion.chain(
        fusion.remove_attention(range(6, 10)),
        fusion.fuse_ffn([(6, 8)]))  # inclusive; 9, the run's last FFN, stays
    config2, params2 = surgery(config, params)

Every illegal request raises before any array is touched, naming block and reason.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from lsfuse.model.config import BlockConfig, ModelConfig
from lsfuse.model.layers import ATTENTION_IN, ATTENTION_OUT, FFN_IN, FFN_OUT
from lsfuse.model.params import check_params, stack_blocks, unstack_blocks
from lsfuse.types import Array, Params

Leaves = dict[str, Array]
Transform = Callable[[ModelConfig, Params], tuple[ModelConfig, Params]]

_ATTENTION = (*ATTENTION_IN, *ATTENTION_OUT)
_FFN = (*FFN_IN, *FFN_OUT)
NORMS = ("fold", "last")


def chain(*transforms: Transform) -> Transform:
    """One after the other. Indices of a later transform refer to what the earlier ones leave."""

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        for transform in transforms:
            config, params = transform(config, params)
        return config, params

    return apply


def remove_attention(blocks: Iterable[int]) -> Transform:
    """Blocks lose their attention: y = x + FFN(x). A block without FFN becomes empty, and stays.

    Raises: ValueError for a block out of range, given twice, or without attention.
    """
    chosen = _indices("remove_attention", blocks)

    def change(index: int, block: BlockConfig, leaves: Leaves) -> tuple[BlockConfig, Leaves]:
        if not block.has_attention:
            raise ValueError(f"remove_attention: block {index} has no attention")
        block = dataclasses.replace(block, attention="none", num_kv_heads=1, parallel=False)
        return block, _without(leaves, _ATTENTION)

    return _each("remove_attention", chosen, change)


def remove_ffn(blocks: Iterable[int]) -> Transform:
    """Blocks lose their FFN. Raises: ValueError as `remove_attention`."""
    chosen = _indices("remove_ffn", blocks)

    def change(index: int, block: BlockConfig, leaves: Leaves) -> tuple[BlockConfig, Leaves]:
        if not block.has_ffn:
            raise ValueError(f"remove_ffn: block {index} has no FFN")
        return dataclasses.replace(block, ffn_width=0, parallel=False), _without(leaves, _FFN)

    return _each("remove_ffn", chosen, change)


def remove_blocks(blocks: Iterable[int]) -> Transform:
    """Blocks go, and those behind them move up. Raises: ValueError if none would be left."""
    chosen = _indices("remove_blocks", blocks)

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        _check_range("remove_blocks", chosen, config)
        if len(chosen) == config.num_blocks:
            raise ValueError(f"remove_blocks: all {config.num_blocks} blocks are named; a model needs at least one")
        kept = [i for i in range(config.num_blocks) if i not in chosen]
        parts, sources = unstack_blocks(config, params), block_sources(config)
        return _rebuild(
            config,
            params,
            [config.blocks[i] for i in kept],
            [parts[i] for i in kept],
            [sources[i] for i in kept],
            f"remove_blocks({_text(chosen)})",
        )

    return apply


def reduce_kv_heads(num_kv_heads: int, blocks: Iterable[int] | None = None) -> Transform:
    """Fewer kv heads, each the mean of those that it replaces (GQA, arXiv 2305.13245, sec. 2.1). blocks: all with
    attention by default.

    Raises: ValueError where the number does not divide a block's.
    """
    chosen = None if blocks is None else _indices("reduce_kv_heads", blocks)

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        mine = chosen
        if mine is None:
            mine = tuple(i for i, b in enumerate(config.blocks) if b.has_attention)

        def change(index: int, block: BlockConfig, leaves: Leaves) -> tuple[BlockConfig, Leaves]:
            if not block.has_attention:
                raise ValueError(f"reduce_kv_heads: block {index} has no attention")
            if num_kv_heads < 1 or block.num_kv_heads % num_kv_heads:
                raise ValueError(
                    f"reduce_kv_heads: {num_kv_heads} does not divide block {index}'s {block.num_kv_heads} kv heads"
                )

            def pool(leaf: Array) -> Array:
                rest = leaf.shape[:-1]
                heads = leaf.reshape(*rest, num_kv_heads, block.num_kv_heads // num_kv_heads, config.head_dim)
                return _wide(heads).mean(-2).reshape(*rest, -1).astype(leaf.dtype)

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
    chosen = None if blocks is None else _indices("prune_ffn", blocks)

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        if len(importance) != config.num_blocks:
            raise ValueError(f"prune_ffn: importances of {len(importance)} blocks for a model of {config.num_blocks}")
        mine = chosen
        if mine is None:
            mine = tuple(sorted(keep)) if isinstance(keep, dict) else _with_ffn(config)

        def change(index: int, block: BlockConfig, leaves: Leaves) -> tuple[BlockConfig, Leaves]:
            scores, width = importance[index], block.ffn_width
            if not width or scores is None or np.shape(scores) != (width,):
                shape = None if scores is None else np.shape(scores)
                raise ValueError(f"prune_ffn: importance of block {index} has shape {shape}, its FFN width {width}")
            count = keep[index] if isinstance(keep, dict) else max(1, round(keep * width))
            if not 1 <= count <= width:
                raise ValueError(f"prune_ffn: block {index} has {width} channels, {count} cannot be kept")
            channels = np.sort(np.argsort(-np.asarray(scores, np.float64), kind="stable")[:count])
            new = {n: leaves[n][..., channels] for n in (*FFN_IN[1:],) if n in leaves}
            new["down_proj"] = leaves["down_proj"][channels]
            return dataclasses.replace(block, ffn_width=count), leaves | new

        return _each(f"prune_ffn({keep if not isinstance(keep, dict) else 'widths'})", mine, change)(config, params)

    return apply


def fuse_ffn(spans: Iterable[tuple[int, int]], norm: str = "fold") -> Transform:
    """The FFNs of every span (first, last), inclusive, become one wide FFN: gates ‖ gates, ups ‖ ups, downs stacked.

    Source: FFN Fusion (arXiv 2503.18908), sec. 3. The wide layer is exactly the sum of its members, all reading the
    residual stream at the span's start; that they read it there, and not one after another, is the approximation.
    norm: "fold": each member's RMSNorm gain is multiplied into its gate and up kernels, in float32 and rounded once,
    which is exact; "last": all share the gain of the span's last member (the paper's). The first member may keep its
    attention, which runs before the sum.

    Raises: ValueError for spans that overlap, descend or run out of range, a member without FFN, one after the first
    that has attention, a first member whose attention and FFN are parallel.
    """
    given = [(int(a), int(b)) for a, b in spans]
    if norm not in NORMS:
        raise ValueError(f"fuse_ffn: norm {norm!r} is unknown; valid: {', '.join(NORMS)}")

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        ordered = check_spans("fuse_ffn", given, config)
        for first, last in ordered:
            _check_members("fuse_ffn", config, first, last)
        parts, sources = unstack_blocks(config, params), block_sources(config)
        starts = dict(ordered)
        blocks: list[BlockConfig] = []
        leaves: list[Leaves] = []
        origin: list[tuple[int, ...]] = []
        i = 0
        while i < config.num_blocks:
            last = starts.get(i, i)
            width = sum(b.ffn_width for b in config.blocks[i : last + 1])
            blocks.append(dataclasses.replace(config.blocks[i], ffn_width=width) if last > i else config.blocks[i])
            leaves.append(wide_ffn(parts[i : last + 1], norm) if last > i else parts[i])
            origin.append(tuple(s for part in sources[i : last + 1] for s in part))
            i = last + 1
        note = ", ".join(f"{a}-{b}" for a, b in ordered)
        return _rebuild(config, params, blocks, leaves, origin, f"fuse_ffn({note}; norm={norm})")

    return apply


def wide_ffn(members: Sequence[Leaves], norm: str = "fold") -> Leaves:
    """The leaves of one block from those of a span's: FFNs joined, everything else the first's."""
    gain = "post_attention_layernorm"
    joined = {n: v for n, v in members[0].items() if n not in _FFN}
    kernels = [dict(m) for m in members]
    if norm == "fold":
        for m in kernels:
            for name in ("gate_proj", "up_proj"):
                m[name] = (_wide(m[name]) * _wide(m[gain])[:, None]).astype(m[name].dtype)
        joined[gain] = jnp.ones_like(members[0][gain])
    else:
        joined[gain] = members[-1][gain]
    for name in ("gate_proj", "up_proj", "gate_proj_bias", "up_proj_bias"):
        if name in kernels[0]:
            joined[name] = jnp.concatenate([m[name] for m in kernels], -1)
    joined["down_proj"] = jnp.concatenate([m["down_proj"] for m in kernels], 0)
    if "down_proj_bias" in kernels[0]:
        total = jnp.stack([_wide(m["down_proj_bias"]) for m in kernels]).sum(0)
        joined["down_proj_bias"] = total.astype(kernels[0]["down_proj_bias"].dtype)
    return joined


def reverse(spans: Iterable[tuple[int, int]]) -> Transform:
    """The FFNs of every span in the opposite order: the control whose cost predicts that of fusing.

    Raises: ValueError as `fuse_ffn`.
    """
    given = [(int(a), int(b)) for a, b in spans]

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        ordered = check_spans("reverse", given, config)
        for first, last in ordered:
            _check_members("reverse", config, first, last)
        parts, sources = unstack_blocks(config, params), block_sources(config)
        blocks, leaves, origin = list(config.blocks), list(parts), list(sources)
        for first, last in ordered:
            for i in range(first, last + 1):
                other = parts[first + last - i]
                leaves[i] = _without(parts[i], _FFN) | {n: v for n, v in other.items() if n in _FFN}
                blocks[i] = dataclasses.replace(blocks[i], ffn_width=config.blocks[first + last - i].ffn_width)
                origin[i] = sources[first + last - i]
        note = ", ".join(f"{a}-{b}" for a, b in ordered)
        return _rebuild(config, params, blocks, leaves, origin, f"reverse({note})")

    return apply


def cut(config: ModelConfig, params: Params, first: int, last: int) -> tuple[ModelConfig, Params]:
    """Blocks first … last, inclusive, as a model of their own, with the embedding and head of the whole."""
    one = dataclasses.replace(config, blocks=config.blocks[first : last + 1], sources=(), transforms=())
    return one, {**params, "runs": stack_blocks(one, unstack_blocks(config, params)[first : last + 1])}


def replace_spans(replacements: Iterable[tuple[int, int, Transform | None]]) -> Transform:
    """Every span (first, last), inclusive, becomes what its transform makes of it, taken as a model of its own (its
    block 0 is block `first`); None removes it. Indices are those of the model before any replacement."""
    given = [(int(a), int(b), t) for a, b, t in replacements]

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        check_spans("replace_spans", [(a, b) for a, b, _ in given], config)
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
        return _rebuild(config, params, blocks, leaves, origin, "; ".join(notes))

    return apply


# --- checks and rebuilding --------------------------------------------------------------------------------------------


def block_sources(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Of which blocks of the original model each block is made."""
    return config.sources or tuple((i,) for i in range(config.num_blocks))


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


def _check_members(name: str, config: ModelConfig, first: int, last: int) -> None:
    for i in range(first, last + 1):
        block = config.blocks[i]
        if not block.has_ffn:
            raise ValueError(f"{name}: span {first}-{last}: block {i} has no FFN")
        if i > first and block.has_attention:
            raise ValueError(
                f"{name}: span {first}-{last}: block {i} has attention, which only the first member may keep; remove it"
                " with remove_attention"
            )
        if i == first and last > first and block.has_attention and block.parallel:
            raise ValueError(
                f"{name}: span {first}-{last}: attention and FFN of block {i} run in parallel, so that its FFN and the"
                " others' read different inputs"
            )


def _indices(name: str, blocks: Iterable[int]) -> tuple[int, ...]:
    chosen = tuple(int(b) for b in blocks)
    if len(set(chosen)) < len(chosen):
        twice = next(b for b in chosen if chosen.count(b) > 1)
        raise ValueError(f"{name}: block {twice} is named twice")
    return tuple(sorted(chosen))


def _check_range(name: str, blocks: Sequence[int], config: ModelConfig) -> None:
    for i in blocks:
        if not 0 <= i < config.num_blocks:
            raise ValueError(f"{name}: block {i} is out of range; the model has blocks 0 to {config.num_blocks - 1}")


def _each(name: str, chosen: tuple[int, ...], change) -> Transform:
    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        _check_range(name.partition("(")[0], chosen, config)
        blocks, leaves = list(config.blocks), unstack_blocks(config, params)
        for i in chosen:
            blocks[i], leaves[i] = change(i, blocks[i], leaves[i])
        return _rebuild(config, params, blocks, leaves, block_sources(config), f"{name} on {_text(chosen)}")

    return apply


def _rebuild(config, params, blocks, leaves, sources, note: str) -> tuple[ModelConfig, Params]:
    notes = (*config.transforms, note) if note else config.transforms
    new = dataclasses.replace(config, blocks=tuple(blocks), sources=tuple(sources), transforms=notes)
    params = {**params, "runs": stack_blocks(new, leaves)}
    check_params(new, params)
    return new, params


def _with_ffn(config: ModelConfig) -> tuple[int, ...]:
    return tuple(i for i, b in enumerate(config.blocks) if b.has_ffn)


def _without(leaves: Leaves, names: Sequence[str]) -> Leaves:
    return {n: v for n, v in leaves.items() if n not in names}


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _text(blocks: Sequence[int]) -> str:
    """0, 2-5 for (0, 2, 3, 4, 5)."""
    runs: list[list[int]] = []
    for b in blocks:
        if runs and b == runs[-1][1] + 1:
            runs[-1][1] = b
        else:
            runs.append([b, b])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
