"""One stage's update as a pure, jitted function, and what of the child it trains."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from lsfuse.fusion.distil import Span, Teacher, blockwise_loss, distil_loss, lm_loss
from lsfuse.model import ModelConfig, locate_block
from lsfuse.types import Array, Params

Flat = dict[str, Array]
# (trained, opt_state, frozen, teacher, ids, lengths) -> (trained, opt_state, metrics); the first two are donated.
StageUpdate = Callable[[Flat, Any, Flat, Teacher | None, Array, Array], tuple[Flat, Any, dict[str, Array]]]


def flatten(params: Params) -> Flat:
    """Path ("runs/0/q_proj") -> leaf."""
    return traverse_util.flatten_dict(dict(params), sep="/")


def unflatten(flat: Flat, config: ModelConfig) -> Params:
    """The tree again; runs without leaves have a place in it."""
    params = traverse_util.unflatten_dict(flat, sep="/")
    runs = params.get("runs", {})
    return {**params, "runs": {str(r): runs.get(str(r), {}) for r in range(len(config.runs))}}


def trained_names(
    params: Any, config: ModelConfig, loss: str, trainable: str | None, spans: tuple[Span, ...]
) -> list[str]:
    """Paths of the leaves that a stage trains. spans: the replaced ones, to which "blockwise" is confined.

    Raises: ValueError if there is none.
    """
    names = list(flatten(params))
    if loss == "blockwise":
        runs = {locate_block(config, i)[0] for s in spans for i in range(s.child[0], s.child[1] + 1)}
        if not runs:
            raise ValueError('loss "blockwise" trains replaced blocks, but every block of the child is the parent\'s')
        names = [n for n in names if n.split("/")[0] == "runs" and int(n.split("/")[1]) in runs]
    if trainable is not None:
        try:
            chosen = [n for n in names if re.search(trainable, n)]
        except re.error as error:
            raise ValueError(f"trainable {trainable!r} is not a regular expression: {error}") from None
        if not chosen:
            raise ValueError(f"trainable {trainable!r} is found in no parameter; they are {', '.join(names)}")
        names = chosen
    return names


def first_trained_run(names: list[str], config: ModelConfig) -> int:
    """Runs before it, and the embedding, are not among the names; 0 if the embedding is."""
    if "embed_tokens" in names:
        return 0
    return min((int(n.split("/")[1]) for n in names if n.startswith("runs/")), default=len(config.runs) - 1)


def make_stage_update(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    loss: str,
    *,
    spans: tuple[Span, ...] = (),
    first_run: int = 0,
    cosine_weight: float = 1.0,
    policy: str = "everything_saveable",
) -> StageUpdate:
    """A jitted update of a stage's trained leaves.

    The teacher and the frozen leaves, which are often the same arrays, are read and not donated. Gradients are made for
    the trained leaves alone. metrics: "loss", "grad_norm", "update_norm" and the loss's own.

    loss, spans, first_run, cosine_weight: as in `lsfuse.fusion.distil`.
    """
    layers = _layer_masks(config, spans) if loss == "blockwise" else {}

    def objective(trained: Flat, frozen: Flat, teacher: Teacher | None, ids: Array, lengths: Array):
        params = unflatten({**frozen, **trained}, config)
        if loss == "lm":
            return lm_loss(params, config, ids, lengths, policy)
        assert teacher is not None
        if loss == "blockwise":
            return blockwise_loss(params, config, teacher, ids, lengths, spans, policy)
        return distil_loss(params, config, teacher, ids, lengths, cosine_weight, first_run, policy)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(trained, opt_state, frozen, teacher, ids, lengths):
        grad_fn = jax.value_and_grad(objective, has_aux=True)
        (value, metrics), grads = grad_fn(trained, frozen, teacher, ids, lengths)
        updates, opt_state = optimizer.update(grads, opt_state, trained)
        # Neighbours in a replaced block's run have no gradient; this keeps weight decay from them, too.
        updates = {n: _masked(u, layers.get(n.split("/")[1]) if "/" in n else None) for n, u in updates.items()}
        norms = {"grad_norm": optax.tree.norm(grads), "update_norm": optax.tree.norm(updates)}
        return optax.apply_updates(trained, updates), opt_state, {"loss": value, **norms, **metrics}

    return update


def _masked(update: Array, layers: np.ndarray | None) -> Array:
    if layers is None:
        return update
    return jnp.where(layers.reshape(-1, *(1,) * (update.ndim - 1)), update, 0)


def _layer_masks(config: ModelConfig, spans: tuple[Span, ...]) -> dict[str, np.ndarray]:
    """Run -> which of its blocks are replaced, bool [blocks]."""
    masks = {str(r): np.zeros(count, bool) for r, (_, count) in enumerate(config.runs)}
    for span in spans:
        for i in range(span.child[0], span.child[1] + 1):
            run, layer = locate_block(config, i)
            masks[str(run)][layer] = True
    return masks
