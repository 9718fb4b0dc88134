"""Where FFNs are independent of each other, and what their channels are worth.

Block j's contribution is h_j = f_j(X) - X. The dependency of j on i < j is the cosine distance between h_j as it is and
h̃_j^i, its contribution when block i is left out (FFN Fusion, arXiv 2503.18908, sec. 3). For the FFNs of an
attention-free stretch the analysis is run on the model whose attention is removed there.
"""

import dataclasses
import functools
import os
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from lsfuse.checks import check_arrays, check_same_shape
from lsfuse.fusion.forward import block_outputs, embed_texts, run_from
from lsfuse.fusion.store import Rows, kept
from lsfuse.fusion.texts import Texts, check_texts
from lsfuse.fusion.tree import (
    block_indices,
    check_floating,
    check_no_group_cut,
    check_spans,
    span_list,
    widened,
)
from lsfuse.model.blocks import at_block, block_forward
from lsfuse.model.config import ModelConfig
from lsfuse.model.layers import ffn_activation, ffn_boundaries
from lsfuse.model.params import unstack_blocks
from lsfuse.model.stream import start_stream, through_block
from lsfuse.model.transformer import block_params, make_tokens
from lsfuse.types import Array, Params


@dataclasses.dataclass(frozen=True)
class Dependency:
    """mean, p95: float64 [L, L], over tokens; entry (i, j) for i < j, NaN where it was not computed, 0 for i >= j.
    relative: [L], mean ‖h‖ / ‖X‖. influence: [L], mean 1 - cos(X_in, X_out). consecutive: [L - 1], mean cosine distance
    of h_j and h_{j + 1}."""

    mean: np.ndarray
    p95: np.ndarray
    relative: np.ndarray
    influence: np.ndarray
    consecutive: np.ndarray


def cosine_distance(a: Array, b: Array) -> Array:
    """½‖â - b̂‖² of vectors [..., D], in float32 or wider: 1 - cos without its cancellation. 0 if both are zero, 1 if
    one is. Raises: ValueError unless both have one shape."""
    check_same_shape("cosine_distance", {"a": a, "b": b})
    check_arrays("cosine_distance", {"a": (a, "... D", float), "b": (b, "... D", float)})
    a, b = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (a, b))
    zeros, units = [], []
    for x in (a, b):
        largest = jnp.max(jnp.abs(x), -1, keepdims=True)
        scaled = x / jnp.where(largest == 0, 1.0, largest)  # its square neither overflows nor vanishes
        norm = jnp.sqrt(jnp.sum(scaled * scaled, -1, keepdims=True))
        zeros.append(largest[..., 0] == 0)
        units.append(scaled / jnp.where(norm == 0, 1.0, norm))
    distance = 0.5 * jnp.sum((units[0] - units[1]) ** 2, -1)
    return jnp.where(zeros[0] & zeros[1], 0.0, jnp.where(zeros[0] | zeros[1], 1.0, distance))


def dependency(
    config: ModelConfig,
    params: Params,
    texts: Texts,
    blocks: Iterable[int] | None = None,
    batch_size: int = 1,
    progress: bool = False,
    folder: str | os.PathLike | None = None,
    regions: Iterable[tuple[int, int]] | None = None,
) -> Dependency:
    """The dependency matrix, and what falls out of the same passes.

    One pass a batch, and for every block i one more from i + 1 on: about L / 2 forward passes; of a region of m blocks,
    where each row's pass ends, m² / 2L. Load the parameters in float32: a contribution is the difference of two
    residual streams, of which bfloat16 would leave mostly rounding.

    Args:
        blocks: rows to compute, all by default.
        regions: spans (first, last), inclusive, instead of `blocks`: pairs inside of each, such as the FFNs of a
            stretch without attention (`attention_free_runs`).
        batch_size: texts at a time.
        folder: where rows are kept as they are found; a call that was interrupted goes on from them.

    Raises: ValueError for blocks or regions out of range, regions that overlap, both of the two, blocks in parallel, a
        folder of another model, other texts or batch size.
    """
    check_texts("dependency", texts, config, params, batch_size)
    count = config.num_blocks
    ends = _row_ends(config, blocks, regions)
    found: dict[tuple[int, int], list[np.ndarray]] = {(i, j): [] for i, end in ends.items() for j in range(i + 1, end)}
    statistics: list[np.ndarray] = []
    keep = None if folder is None else Rows(folder, config, params, texts, batch_size=batch_size)
    passes = -(-len(texts) // batch_size) * len(ends)
    with tqdm.tqdm(total=passes, desc="dependency", disable=None if progress else True, unit="pass") as bar:
        for b, (ids, lengths) in enumerate(texts.batches(batch_size)):
            valid = (np.arange(ids.shape[1]) < lengths[:, None]).reshape(-1)
            whole = functools.partial(block_outputs, config, params, jnp.asarray(ids), jnp.asarray(lengths))
            outputs = functools.cache(whole)  # not run at all where every row is there

            def statistic(outputs=outputs, valid=valid):
                return np.asarray(_statistics(outputs()))[:, valid]

            statistics.append(kept(keep, f"dependency-{b}-statistics", statistic))
            for i, end in ends.items():

                def row(i=i, end=end, outputs=outputs, lengths=lengths, valid=valid):
                    distances = _distances(
                        config, params, outputs(), jnp.asarray(lengths), jnp.int32(i), jnp.int32(end)
                    )
                    return np.asarray(distances)[i + 1 : end, valid]

                name = f"dependency-{b}-{i}" if end == count else f"dependency-{b}-{i}-to-{end - 1}"
                for j, values in enumerate(kept(keep, name, row), start=i + 1):
                    found[i, j].append(values)
                bar.update()
    mean, p95 = np.triu(np.full((2, count, count), np.nan), 1)
    for (i, j), parts in found.items():
        values = np.concatenate(parts).astype(np.float64)
        mean[i, j], p95[i, j] = values.mean(), np.quantile(values, 0.95)
    relative, influence, consecutive = np.concatenate(statistics, 1).astype(np.float64).mean(1).reshape(3, count)
    return Dependency(mean, p95, relative, influence, consecutive[:-1])


def _row_ends(
    config: ModelConfig, blocks: Iterable[int] | None, regions: Iterable[tuple[int, int]] | None
) -> dict[int, int]:
    """Row -> the block behind the last that it looks at. Raises ValueError as `dependency`."""
    count = config.num_blocks
    if regions is None:
        rows = tuple(range(count)) if blocks is None else block_indices("dependency", blocks)
        if rows and not 0 <= rows[0] <= rows[-1] < count:
            raise ValueError(f"dependency: blocks {list(rows)} are out of range; the model has blocks 0 to {count - 1}")
        ends = dict.fromkeys(rows, count)
    else:
        if blocks is not None:
            raise ValueError("dependency: blocks and regions are both given; take one")
        spans = check_spans("dependency", span_list("dependency", regions), config)
        for first, last in spans:
            check_no_group_cut("dependency", config, first, last)
        ends = {i: last + 1 for first, last in spans for i in range(first, last + 1)}
    for i in ends:
        check_no_group_cut("dependency", config, i, i)
    return ends


@jax.jit
def _statistics(outputs: Array) -> Array:
    """[3 · L, tokens]: ‖h‖ / ‖X‖, 1 - cos(X_in, X_out), distance of consecutive contributions (0 for the last)."""
    before, after = outputs[:-1], outputs[1:]
    h = _contribution(before, after)
    norm = lambda x: jnp.linalg.norm(x.astype(jnp.float32), axis=-1)  # noqa: E731
    relative = norm(h) / jnp.maximum(norm(before), 1e-30)
    consecutive = jnp.pad(cosine_distance(h[:-1], h[1:]), ((0, 1), (0, 0), (0, 0)))
    parts = (relative, cosine_distance(before, after), consecutive)
    return jnp.concatenate([p.reshape(len(before), -1) for p in parts])


@functools.partial(jax.jit, static_argnums=0)
def _distances(config: ModelConfig, params: Params, outputs: Array, lengths: Array, i: Array, end: Array) -> Array:
    """[L, tokens]: per token, how far the contributions of blocks i + 1 … end - 1 are from their own when block i is
    left out."""
    x = _at(outputs, i)
    changed = run_from(params, config, x, lengths, i + 1, end)[1]
    # What block j reads: the output before it, which for j = i + 1 is block i's own input.
    before = jnp.concatenate([x[None], changed[:-1]])
    later = jnp.arange(config.num_blocks) == i + 1
    before = jnp.where(later[:, None, None, None], x[None], before)
    distance = cosine_distance(_contribution(outputs[:-1], outputs[1:]), _contribution(before, changed))
    return distance.reshape(config.num_blocks, -1)


def _contribution(before: Array, after: Array) -> Array:
    """f(X) - X in float32 or wider, whatever dtype the residual stream has."""
    return widened(after) - widened(before)


def _at(x: Array, i: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def ffn_importance(
    config: ModelConfig,
    params: Params,
    texts: Texts,
    batch_size: int = 1,
    progress: bool = False,
    folder: str | os.PathLike | None = None,
) -> list[np.ndarray | None]:
    """What every FFN channel contributes: mean |activation| over tokens · ‖its row of the last projection‖₂.

    folder: as `dependency`'s.

    Source: Puzzle (arXiv 2411.19146), "channel contribution". Returns: float64 [F] a block, None without FFN.
    """
    check_texts("ffn_importance", texts, config, params, batch_size)
    for i, leaves in enumerate(unstack_blocks(config, params)):
        check_floating("ffn_importance", i, leaves)
    keep = None if folder is None else Rows(folder, config, params, texts, batch_size=batch_size)
    widths = [block.ffn_width for block in config.blocks]
    sums = np.zeros(sum(widths))  # of all blocks, one after the other
    batches = list(texts.batches(batch_size))
    for b, (ids, lengths) in enumerate(
        tqdm.tqdm(batches, desc="importance", disable=None if progress else True, unit="batch")
    ):

        def row(ids=ids, lengths=lengths):
            found = _activation_sums(config, params, jnp.asarray(ids), jnp.asarray(lengths))
            return np.concatenate([np.asarray(run, np.float64).reshape(-1) for run in found])

        sums += kept(keep, f"importance-{b}", row)
    each = np.split(sums, np.cumsum(widths)[:-1])
    totals = [total if width else None for total, width in zip(each, widths, strict=True)]

    def weighed(total: np.ndarray | None, leaves: dict[str, Array]) -> np.ndarray | None:
        if total is None:
            return None
        last = leaves["fc_out"] if "fc_out" in leaves else leaves["down_proj"]
        rows = np.linalg.norm(np.asarray(last).astype(np.float64), axis=1)
        return total / texts.num_tokens * rows

    return [weighed(t, p) for t, p in zip(totals, unstack_blocks(config, params), strict=True)]


@functools.partial(jax.jit, static_argnums=0)
def _activation_sums(config: ModelConfig, params: Params, ids: Array, lengths: Array) -> list[Array]:
    """Σ |activation| over tokens, [blocks of a run, F] a run ([blocks, 0] without FFN)."""
    tokens = make_tokens(config, 0, ids.shape[1], lengths, params["embed_tokens"].dtype)
    valid = (jnp.arange(ids.shape[1]) < lengths[:, None])[..., None]
    stream, sums = start_stream(config, embed_texts(params, config, ids, lengths)), []
    for r, (block, count) in enumerate(config.runs):

        def body(stream, layer, r=r, block=block):
            here = at_block(config, r, layer, tokens)

            def one(x):
                x, saved = block_forward(config, block, block_params(params, config, str(r), layer), x, here, None)
                if not block.has_ffn:
                    return x, jnp.zeros(0)
                active = widened(ffn_activation(config, *(saved[name] for name in ffn_boundaries(block))))
                return x, jnp.sum(jnp.where(valid, jnp.abs(active), 0.0), (0, 1))

            return through_block(config, r, layer, stream, one)

        stream, found = jax.lax.scan(body, stream, jnp.arange(count))
        sums.append(found)
    return sums
