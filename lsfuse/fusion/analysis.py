"""Where FFNs are independent of each other, and what blocks and attentions are worth.

Block j's contribution is h_j = f_j(X) - X. The dependency of j on i < j is the cosine distance between h_j as it is and
h̃_j^i, its contribution when block i is left out (FFN Fusion, arXiv 2503.18908, sec. 3). For the FFNs of an
attention-free stretch the analysis is run on the model whose attention is removed there.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from lsfuse.checks import check_arrays, check_same_shape
from lsfuse.fusion.forward import embed_texts, kl_divergence, over_chunks, run_from
from lsfuse.fusion.planner import Choice
from lsfuse.fusion.store import Rows
from lsfuse.fusion.surgery import cut, remove_attention, remove_ffn
from lsfuse.fusion.texts import Texts, check_texts
from lsfuse.fusion.tree import Transform, check_floating, check_no_group_cut, check_spans, widened
from lsfuse.model.blocks import at_block, block_forward
from lsfuse.model.config import ModelConfig
from lsfuse.model.layers import ffn_activation, ffn_boundaries
from lsfuse.model.params import unstack_blocks
from lsfuse.model.stream import start_stream, through_block
from lsfuse.model.transformer import block_params, make_tokens
from lsfuse.types import Array, Params

PARTS = ("attention", "ffn", "block")
Replacement = tuple[int, int, Transform | None]


@dataclasses.dataclass(frozen=True)
class Dependency:
    """mean, p95: float64 [L, L], over tokens; entry (i, j) for i < j, 0 elsewhere. relative: [L], mean ‖h‖ / ‖X‖.
    influence: [L], mean 1 - cos(X_in, X_out). consecutive: [L - 1], mean cosine distance of h_j and h_{j + 1}."""

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
) -> Dependency:
    """The dependency matrix, and what falls out of the same passes.

    One pass a batch, and for every block i one more from i + 1 on: about L / 2 forward passes. Load the parameters in
    float32: a contribution is the difference of two residual streams, of which bfloat16 would leave mostly rounding.

    Args:
        blocks: rows to compute, all by default; others stay 0.
        batch_size: texts at a time.
        folder: where rows are kept as they are found; a call that was interrupted goes on from them.

    Raises: ValueError for blocks out of range or in parallel, a folder of another model, other texts or batch size.
    """
    check_texts("dependency", texts, config, params)
    count = config.num_blocks
    rows = sorted(range(count) if blocks is None else {int(b) for b in blocks})
    if rows and not 0 <= rows[0] <= rows[-1] < count:
        raise ValueError(f"dependency: blocks {rows} are out of range; the model has blocks 0 to {count - 1}")
    for i in rows:
        check_no_group_cut("dependency", config, i, i)
    found: dict[tuple[int, int], list[np.ndarray]] = {(i, j): [] for i in rows for j in range(i + 1, count)}
    statistics: list[np.ndarray] = []
    keep = None if folder is None else Rows(folder, config, params, texts, batch_size=batch_size)
    passes = -(-len(texts) // batch_size) * len(rows)
    with tqdm.tqdm(total=passes, desc="dependency", disable=None if progress else True, unit="pass") as bar:
        for b, (ids, lengths) in enumerate(texts.batches(batch_size)):
            valid = (np.arange(ids.shape[1]) < lengths[:, None]).reshape(-1)
            whole = functools.partial(_outputs, config, params, jnp.asarray(ids), jnp.asarray(lengths))
            outputs = functools.cache(whole)  # not run at all where every row is there

            def statistic(outputs=outputs, valid=valid):
                return np.asarray(_statistics(outputs()))[:, valid]

            statistics.append(_kept(keep, f"dependency-{b}-statistics", statistic))
            for i in rows:

                def row(i=i, outputs=outputs, lengths=lengths, valid=valid):
                    distances = _distances(config, params, outputs(), jnp.asarray(lengths), jnp.int32(i))
                    return np.asarray(distances)[i + 1 :, valid]

                for j, values in enumerate(_kept(keep, f"dependency-{b}-{i}", row), start=i + 1):
                    found[i, j].append(values)
                bar.update()
    mean, p95 = np.zeros((count, count)), np.zeros((count, count))
    for (i, j), parts in found.items():
        values = np.concatenate(parts).astype(np.float64)
        mean[i, j], p95[i, j] = values.mean(), np.quantile(values, 0.95)
    relative, influence, consecutive = np.concatenate(statistics, 1).astype(np.float64).mean(1).reshape(3, count)
    return Dependency(mean, p95, relative, influence, consecutive[:-1])


def _kept(keep: Rows | None, name: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Row `name` from its file, or computed and put there."""
    found = None if keep is None else keep.get(name)
    if found is None:
        found = compute()
        if keep is not None:
            keep.put(name, found)
    return found


@functools.partial(jax.jit, static_argnums=0)
def _outputs(config: ModelConfig, params: Params, ids: Array, lengths: Array) -> Array:
    """[L + 1, B, T, D]: the embedding, and every block's output."""
    x = embed_texts(params, config, ids, lengths)
    return jnp.concatenate([x[None], run_from(params, config, x, lengths, 0)[1]])


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
def _distances(config: ModelConfig, params: Params, outputs: Array, lengths: Array, i: Array) -> Array:
    """[L, tokens]: per token, how far every later block's contribution is from its own when block i is left out."""
    x = _at(outputs, i)
    changed = run_from(params, config, x, lengths, i + 1)[1]
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


def replacement_scores(
    config: ModelConfig,
    params: Params,
    texts: Texts,
    replacements: Sequence[Replacement],
    batch_size: int = 1,
    progress: bool = False,
    name: str = "replacements",
    folder: str | os.PathLike | None = None,
) -> np.ndarray:
    """KL(model ‖ model with one span replaced), nats a token, float64 [len(replacements)].

    replacements: (first, last, transform): what the transform makes of the blocks first … last, inclusive, taken as a
        model of their own (its block 0 is block `first`); None leaves them out.

    folder: where each KL is kept as it is found, under `name` and its place in `replacements`; give replacements
        that are not the same another name.

    Every pass restarts at the span's first block. Alike spans share a compiled program.
    """
    label = name.replace(" ", "_")
    keep = None if folder is None else Rows(folder, config, params, texts, batch_size=batch_size)
    rows = [f"{label}-{{}}-{n}-{first}-{last}" for n, (first, last, _) in enumerate(replacements)]
    edits = [[r] for r in replacements]
    return _scores("replacement_scores", config, params, texts, edits, batch_size, progress, name, keep, rows)


def plan_scores(
    config: ModelConfig,
    params: Params,
    texts: Texts,
    plans: Sequence[Sequence[Choice]],
    batch_size: int = 1,
    progress: bool = False,
) -> np.ndarray:
    """KL(model ‖ model that a plan makes of it), nats a token, float64 [len(plans)]: of whole plans, which the sums of
    their choices' scores only estimate. Alike choices share a compiled program, and no plan needs one of its own.

    Raises: ValueError as `apply_plan`.
    """
    edits = [[(c.first, c.last, c.transform) for c in plan if c.transform is not None] for plan in plans]
    return _scores("plan_scores", config, params, texts, edits, batch_size, progress, "plans")


def _scores(
    where: str,
    config: ModelConfig,
    params: Params,
    texts: Texts,
    edits: Sequence[Sequence[Replacement]],
    batch_size: int,
    progress: bool,
    name: str,
    keep: Rows | None = None,
    rows: Sequence[str] = (),
) -> np.ndarray:
    """KL of each edit, a set of replacements. rows: the name of each edit's row in `keep`, {} its batch."""
    check_texts(where, texts, config, params)

    def replaced(params: Params, first: int, last: int, transform: Transform | None):
        if transform is None:
            return None, {}
        part, changed = transform(*cut(config, params, first, last))
        return dataclasses.replace(part, sources=(), transforms=()), changed["runs"]  # alike parts are equal

    tried: set[Any] = set()
    for edit in edits:  # what cannot be done raises before any work
        for first, last in check_spans(where, [(first, last) for first, last, _ in edit], config):
            check_no_group_cut(where, config, first, last)
        for first, last, transform in edit:
            alike = transform, config.blocks[first : last + 1]
            if alike not in tried:
                tried.add(alike)
                jax.eval_shape(lambda params, r=(first, last, transform): replaced(params, *r)[1], params)

    def kl(edit: Sequence[Replacement], outputs: Array, lengths: Array) -> Array:
        ordered = sorted(edit, key=lambda replacement: replacement[0])
        at = ordered[0][0] if ordered else config.num_blocks
        x = outputs[at]
        for first, last, transform in ordered:
            x = _stretch(config, params, x, lengths, jnp.int32(at), jnp.int32(first))
            part, runs = replaced(
                params, first, last, transform
            )  # made when it is needed: all at once would fill the memory
            if part is not None:
                x = _stretch(part, {"runs": runs}, x, lengths, jnp.int32(0), jnp.int32(part.num_blocks))
            at = last + 1
        x = _stretch(config, params, x, lengths, jnp.int32(at), jnp.int32(config.num_blocks))
        return _kl(config, params, outputs[-1], x)

    total, tokens = np.zeros(len(edits)), 0
    passes = -(-len(texts) // batch_size) * len(edits)
    with tqdm.tqdm(total=passes, desc=name, disable=None if progress else True, unit="pass") as bar:
        for b, (ids, lengths) in enumerate(texts.batches(batch_size)):
            valid = (np.arange(ids.shape[1]) < lengths[:, None]).reshape(-1)
            whole = functools.partial(_outputs, config, params, jnp.asarray(ids), jnp.asarray(lengths))
            outputs = functools.cache(whole)  # not run at all where every row is there
            tokens += int(valid.sum())
            for n, edit in enumerate(edits):

                def row(edit=edit, outputs=outputs, lengths=lengths, valid=valid):
                    return np.asarray(kl(edit, outputs(), jnp.asarray(lengths)), np.float64)[valid].sum()

                total[n] += _kept(keep, rows[n].format(b) if rows else "", row)
                bar.update()
    return total / tokens


@functools.partial(jax.jit, static_argnums=0)
def _stretch(config: ModelConfig, params: Params, x: Array, lengths: Array, first: Array, after: Array) -> Array:
    return run_from(params, config, x, lengths, first, after)[0]


@functools.partial(jax.jit, static_argnums=0)
def _kl(config: ModelConfig, params: Params, parent: Array, child: Array) -> Array:
    """KL a token [B · T] of what two models' last blocks put out, [B, T, D] each, by one head."""
    flat = [x.reshape(-1, x.shape[-1]) for x in (parent, child)]
    return over_chunks((params, params), (config, config), flat, kl_divergence)


def removal_scores(
    config: ModelConfig,
    params: Params,
    texts: Texts,
    part: str = "attention",
    batch_size: int = 1,
    progress: bool = False,
    folder: str | os.PathLike | None = None,
) -> np.ndarray:
    """KL(model ‖ model without one block's part), nats a token, float64 [L]; NaN for blocks that do not have it.

    part: "attention", "ffn" or "block". folder: as `dependency`'s.
    """
    if part not in PARTS:
        raise ValueError(f"removal_scores: part {part!r} is unknown; valid: {', '.join(PARTS)}")
    has = {"attention": lambda b: b.has_mixer, "ffn": lambda b: b.has_ffn, "block": lambda b: True}[part]
    remove = {"attention": remove_attention([0]), "ffn": remove_ffn([0]), "block": None}[part]
    having = [i for i, b in enumerate(config.blocks) if has(b)]
    scores = np.full(config.num_blocks, np.nan)
    replacements = [(i, i, remove) for i in having]
    name = f"without {part}"
    scores[having] = replacement_scores(config, params, texts, replacements, batch_size, progress, name, folder)
    return scores


def ffn_importance(
    config: ModelConfig, params: Params, texts: Texts, batch_size: int = 1, progress: bool = False
) -> list[np.ndarray | None]:
    """What every FFN channel contributes: mean |activation| over tokens · ‖its row of the last projection‖₂.

    Source: Puzzle (arXiv 2411.19146), "channel contribution". Returns: float64 [F] a block, None without FFN.
    """
    check_texts("ffn_importance", texts, config, params)
    totals: list[np.ndarray | None] = [np.zeros(b.ffn_width) if b.has_ffn else None for b in config.blocks]
    batches = list(texts.batches(batch_size))
    for ids, lengths in tqdm.tqdm(batches, desc="importance", disable=None if progress else True, unit="batch"):
        sums = _activation_sums(config, params, jnp.asarray(ids), jnp.asarray(lengths))
        for total, new in zip(totals, (s for run in sums for s in run), strict=True):
            if total is not None:
                total += np.asarray(new, np.float64)

    for i, leaves in enumerate(unstack_blocks(config, params)):
        check_floating("ffn_importance", i, leaves)

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
                x, saved = block_forward(config, block, block_params(params, str(r), layer), x, here, None)
                if not block.has_ffn:
                    return x, jnp.zeros(0)
                active = widened(ffn_activation(config, *(saved[name] for name in ffn_boundaries(block))))
                return x, jnp.sum(jnp.where(valid, jnp.abs(active), 0.0), (0, 1))

            return through_block(config, r, layer, stream, one)

        stream, found = jax.lax.scan(body, stream, jnp.arange(count))
        sums.append(found)
    return sums
