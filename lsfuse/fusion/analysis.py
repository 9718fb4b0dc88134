"""Where FFNs are independent of each other, and what blocks and attentions are worth.

Block j's contribution is h_j = f_j(X) - X. The dependency of j on i < j is the cosine distance between h_j as it is and
h̃_j^i, its contribution when block i is left out (FFN Fusion, arXiv 2503.18908, sec. 3). For the FFNs of an
attention-free stretch the analysis is run on the model whose attention is removed there.
"""

import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from lsfuse.fusion.forward import embed_texts, kl_divergence, over_chunks, run_from
from lsfuse.fusion.surgery import remove_attention, remove_ffn
from lsfuse.fusion.texts import Texts
from lsfuse.model.config import ModelConfig
from lsfuse.model.params import unstack_blocks
from lsfuse.types import Array, Params

PARTS = ("attention", "ffn", "block")


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
    one is."""
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
) -> Dependency:
    """The dependency matrix, and what falls out of the same passes.

    One pass a batch, and for every block i one more from i + 1 on: about L / 2 forward passes.

    Args:
        blocks: rows to compute, all by default; others stay 0.
        batch_size: texts at a time.
    """
    count = config.num_blocks
    rows = sorted(range(count) if blocks is None else {int(b) for b in blocks})
    if rows and not 0 <= rows[0] <= rows[-1] < count:
        raise ValueError(f"dependency: blocks {rows} are out of range; the model has blocks 0 to {count - 1}")
    found: dict[tuple[int, int], list[np.ndarray]] = {(i, j): [] for i in rows for j in range(i + 1, count)}
    statistics: list[np.ndarray] = []
    passes = -(-len(texts) // batch_size) * len(rows)
    with tqdm.tqdm(total=passes, desc="dependency", disable=None if progress else True, unit="pass") as bar:
        for ids, lengths in texts.batches(batch_size):
            valid = (np.arange(ids.shape[1]) < lengths[:, None]).reshape(-1)
            outputs = _outputs(config, params, jnp.asarray(ids), jnp.asarray(lengths))
            statistics.append(np.asarray(_statistics(outputs))[:, valid])
            for i in rows:
                distances = np.asarray(_distances(config, params, outputs, jnp.asarray(lengths), jnp.int32(i)))
                for j in range(i + 1, count):
                    found[i, j].append(distances[j][valid])
                bar.update()
    mean, p95 = np.zeros((count, count)), np.zeros((count, count))
    for (i, j), parts in found.items():
        values = np.concatenate(parts).astype(np.float64)
        mean[i, j], p95[i, j] = values.mean(), np.quantile(values, 0.95)
    relative, influence, consecutive = np.concatenate(statistics, 1).astype(np.float64).mean(1).reshape(3, count)
    return Dependency(mean, p95, relative, influence, consecutive[:-1])


@functools.partial(jax.jit, static_argnums=0)
def _outputs(config: ModelConfig, params: Params, ids: Array, lengths: Array) -> Array:
    """[L + 1, B, T, D]: the embedding, and every block's output."""
    x = embed_texts(params, ids, lengths)
    return jnp.concatenate([x[None], run_from(params, config, x, lengths, 0)[1]])


@jax.jit
def _statistics(outputs: Array) -> Array:
    """[3 · L, tokens]: ‖h‖ / ‖X‖, 1 - cos(X_in, X_out), distance of consecutive contributions (0 for the last)."""
    before, after = outputs[:-1], outputs[1:]
    h = after - before
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
    distance = cosine_distance(outputs[1:] - outputs[:-1], changed - before)
    return distance.reshape(config.num_blocks, -1)


def _at(x: Array, i: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def removal_scores(
    config: ModelConfig,
    params: Params,
    texts: Texts,
    part: str = "attention",
    batch_size: int = 1,
    progress: bool = False,
) -> np.ndarray:
    """KL(model ‖ model without one block's part), nats a token, float64 [L]; NaN for blocks that do not have it.

    part: "attention", "ffn" or "block". The pass restarts at the block, so that all scores cost about L / 2 passes.
    """
    if part not in PARTS:
        raise ValueError(f"removal_scores: part {part!r} is unknown; valid: {', '.join(PARTS)}")
    total, tokens = np.zeros(config.num_blocks), 0
    having = [
        i
        for i, b in enumerate(config.blocks)
        if {"attention": b.has_attention, "ffn": b.has_ffn, "block": True}[part]
    ]
    # One block alone is a model of its own; alike blocks share its compiled program.
    alone = {i: _part_removed(config, params, i, part) for i in having}
    passes = -(-len(texts) // batch_size) * len(having)
    with tqdm.tqdm(total=passes, desc=f"without {part}", disable=None if progress else True, unit="pass") as bar:
        for ids, lengths in texts.batches(batch_size):
            valid = (np.arange(ids.shape[1]) < lengths[:, None]).reshape(-1)
            outputs = _outputs(config, params, jnp.asarray(ids), jnp.asarray(lengths))
            tokens += int(valid.sum())
            for i in having:
                one, leaves = alone[i]
                kl = _kl_without(config, one, params, leaves, outputs, jnp.asarray(lengths), jnp.int32(i))
                total[i] += np.asarray(kl, np.float64)[valid].sum()
                bar.update()
    scores = np.full(config.num_blocks, np.nan)
    scores[having] = total[having] / tokens
    return scores


def _part_removed(config: ModelConfig, params: Params, i: int, part: str):
    """(config, params) of block i alone without `part`; None in place of a config for no block at all."""
    if part == "block":
        return None, {}
    leaves = unstack_blocks(config, params)[i]
    one = dataclasses.replace(config, blocks=(config.blocks[i],), sources=(), transforms=())
    alone = {**{k: v for k, v in params.items() if k != "runs"}, "runs": {"0": {n: v[None] for n, v in leaves.items()}}}
    one, alone = (remove_attention if part == "attention" else remove_ffn)([0])(one, alone)
    return dataclasses.replace(one, sources=(), transforms=()), alone["runs"]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _kl_without(config, one, params, leaves, outputs, lengths, i) -> Array:
    """KL a token [B · T]."""
    x = _at(outputs, i)
    if one is not None:
        x = run_from({"runs": leaves}, one, x, lengths, 0)[0]
    x = run_from(params, config, x, lengths, i + 1)[0]
    flat = [y.reshape(-1, y.shape[-1]) for y in (outputs[-1], x)]
    return over_chunks((params, params), (config, config), flat, kl_divergence)
