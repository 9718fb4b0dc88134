"""What blocks, attentions and replacements are worth: KL(model ‖ model with some blocks replaced)."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from lsfuse.fusion.forward import block_outputs, kl_divergence, over_chunks, run_from
from lsfuse.fusion.planner import Choice, check_plan
from lsfuse.fusion.store import Rows, kept, sha256_of_model
from lsfuse.fusion.surgery import cut, remove_attention, remove_ffn
from lsfuse.fusion.texts import Texts, check_texts
from lsfuse.fusion.tree import Transform, check_no_group_cut, check_spans
from lsfuse.model.config import ModelConfig
from lsfuse.types import Array, Params

PARTS = ("attention", "ffn", "block")
Replacement = tuple[int, int, Transform | None]


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

    folder: where each KL is kept as it is found, under `name` and a SHA-256 of the span and of what replaces it, config
        and weights: a row is found again by replacements of any order and number, and never by another one.

    Every pass restarts at the span's first block. Alike spans share a compiled program.
    """
    edits = [[r] for r in replacements]
    return _scores("replacement_scores", config, params, texts, edits, batch_size, progress, name, folder)


def plan_scores(
    config: ModelConfig,
    params: Params,
    texts: Texts,
    plans: Sequence[Sequence[Choice]],
    batch_size: int = 1,
    progress: bool = False,
    folder: str | os.PathLike | None = None,
) -> np.ndarray:
    """KL(model ‖ model that a plan makes of it), nats a token, float64 [len(plans)]: of whole plans, which the sums of
    their choices' scores only estimate. Alike choices share a compiled program, and no plan needs one of its own.

    folder: as `replacement_scores`'s.

    Raises: ValueError as `apply_plan`.
    """
    for plan in plans:
        check_plan("plan_scores", plan, config)
    edits = [[(c.first, c.last, c.transform) for c in plan if c.transform is not None] for plan in plans]
    return _scores("plan_scores", config, params, texts, edits, batch_size, progress, "plans", folder)


def _scores(
    where: str,
    config: ModelConfig,
    params: Params,
    texts: Texts,
    edits: Sequence[Sequence[Replacement]],
    batch_size: int,
    progress: bool,
    name: str,
    folder: str | os.PathLike | None,
) -> np.ndarray:
    """KL of each edit, a set of replacements."""
    check_texts(where, texts, config, params, batch_size)

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

    keep = None if folder is None else Rows(folder, config, params, texts, batch_size=batch_size)
    # Of what replaces a span, not of its name: two transforms may share a name, and leave blocks of one shape.
    made = functools.cache(lambda *r: "removed" if r[2] is None else sha256_of_model(*replaced(params, *r)))
    label = name.replace(" ", "_")

    def key(edit: Sequence[Replacement]) -> str:
        parts = sorted(f"{first}-{last} {made(first, last, transform)}" for first, last, transform in edit)
        return hashlib.sha256("; ".join(parts).encode()).hexdigest()[:32]

    keys = [key(edit) if keep is not None else "" for edit in edits]
    total, tokens = np.zeros(len(edits)), 0
    passes = -(-len(texts) // batch_size) * len(edits)
    with tqdm.tqdm(total=passes, desc=name, disable=None if progress else True, unit="pass") as bar:
        for b, (ids, lengths) in enumerate(texts.batches(batch_size)):
            valid = (np.arange(ids.shape[1]) < lengths[:, None]).reshape(-1)
            whole = functools.partial(block_outputs, config, params, jnp.asarray(ids), jnp.asarray(lengths))
            outputs = functools.cache(whole)  # not run at all where every row is there
            tokens += int(valid.sum())
            for n, edit in enumerate(edits):

                def row(edit=edit, outputs=outputs, lengths=lengths, valid=valid):
                    return np.asarray(kl(edit, outputs(), jnp.asarray(lengths)), np.float64)[valid].sum()

                total[n] += kept(keep, f"{label}-{b}-{keys[n]}", row)
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
    check_texts("removal_scores", texts, config, params, batch_size)
    has = {"attention": lambda b: b.has_mixer, "ffn": lambda b: b.has_ffn, "block": lambda b: True}[part]
    remove = {"attention": remove_attention([0]), "ffn": remove_ffn([0]), "block": None}[part]
    having = [i for i, b in enumerate(config.blocks) if has(b)]
    scores = np.full(config.num_blocks, np.nan)
    replacements = [(i, i, remove) for i in having]
    name = f"without {part}"
    scores[having] = replacement_scores(config, params, texts, replacements, batch_size, progress, name, folder)
    return scores
