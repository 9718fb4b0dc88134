"""How far a model is from the one it was made of: perplexity, KL, agreement of the likeliest token, greedy text."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from lsfuse.fusion.forward import embed_texts, over_chunks, run_from, token_measures
from lsfuse.fusion.texts import Texts, check_texts
from lsfuse.model.config import ModelConfig
from lsfuse.model.head_loss import check_vocabularies
from lsfuse.types import Array, Params

Model = tuple[ModelConfig, Params]


def evaluate(
    child: Model, texts: Texts, parent: Model | None = None, batch_size: int = 1, progress: bool = False
) -> dict[str, float]:
    """Means over the texts' tokens.

    Args:
        child, parent: (config, params); without parent only its own perplexity.
        batch_size: texts at a time.

    Returns:
        "perplexity" over all tokens but each text's first; with a parent also "parent_perplexity", "kl" (nats a
        token, KL(parent ‖ child), over all positions) and "top1" (share of positions with the same likeliest token).

    Raises: ValueError if the two have unlike vocabularies, or no text has two tokens.
    """
    models = (child,) if parent is None else (child, parent)
    for config, params in models:
        check_texts("evaluate", texts, config, params, batch_size)
    if parent is not None:
        check_vocabularies(child[0], parent[0])
    if texts.lengths.max() < 2:
        raise ValueError("perplexity needs a text of at least two tokens")
    configs, all_params = zip(*models, strict=True)
    sums: dict[str, float] = {}
    batches = list(texts.batches(batch_size))
    for ids, lengths in tqdm.tqdm(batches, desc="evaluate", disable=None if progress else True, unit="batch"):
        for name, value in _sums(configs, all_params, jnp.asarray(ids), jnp.asarray(lengths)).items():
            sums[name] = sums.get(name, 0.0) + float(value)
    out = {"perplexity": float(np.exp(sums["nll0"] / sums["predictions"]))}
    if parent is not None:
        out["parent_perplexity"] = float(np.exp(sums["nll1"] / sums["predictions"]))
        out |= {"kl": sums["kl"] / sums["positions"], "top1": sums["top1"] / sums["positions"]}
    return out


@functools.partial(jax.jit, static_argnums=0)
def _sums(configs: tuple[ModelConfig, ...], params: Any, ids: Array, lengths: Array) -> dict[str, Array]:
    hidden = [final_hidden(p, c, ids, lengths) for c, p in zip(configs, params, strict=True)]
    tokens = token_measures(params, configs, hidden, ids)
    positions = jnp.arange(ids.shape[1])
    exists = (positions < lengths[:, None]).reshape(-1)
    predicts = (positions < lengths[:, None] - 1).reshape(-1)
    sums = {k: jnp.sum(jnp.where(predicts if k.startswith("nll") else exists, v, 0.0)) for k, v in tokens.items()}
    return {**sums, "predictions": predicts.sum(), "positions": exists.sum()}


def greedy_agreement(child: Model, texts: Texts, start: int) -> np.ndarray:
    """int64 [N]: how many tokens of each text, from position `start` on, the child too would write, taking the
    likeliest each time, before its first other one. All texts are one batch.

    If the texts go on as a parent's greedy generation does, that is where the child's first differs: up to there both
    read the same, so that one forward pass of the child tells, and it needs not generate.

    Raises: ValueError unless start leaves a token before and behind it in every text.
    """
    config, params = child
    check_texts("greedy_agreement", texts, config, params)
    if not 1 <= start < texts.lengths.min():
        raise ValueError(
            f"greedy_agreement: start {start} must be at least 1 and less than the shortest text's"
            f" {texts.lengths.min()} tokens"
        )
    likeliest = np.asarray(_likeliest(config, params, jnp.asarray(texts.ids), jnp.asarray(texts.lengths)))
    exists = np.arange(start, texts.ids.shape[1]) < texts.lengths[:, None]
    same = (likeliest[:, start - 1 : -1] == texts.ids[:, start:]) & exists
    return np.cumprod(same, 1).sum(1)


@functools.partial(jax.jit, static_argnums=0)
def _likeliest(config: ModelConfig, params: Params, ids: Array, lengths: Array) -> Array:
    """[B, T]: the likeliest token behind every position."""
    hidden = final_hidden(params, config, ids, lengths)
    return over_chunks((params,), (config,), (hidden,), lambda x: x.argmax(-1)).reshape(ids.shape)


def final_hidden(params: Params, config: ModelConfig, ids: Array, lengths: Array) -> Array:
    """[B · T, D] after the last block."""
    x = embed_texts(params, config, ids, lengths)
    return run_from(params, config, x, lengths, 0)[0].reshape(-1, config.hidden_size)
