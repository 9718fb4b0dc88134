"""What each way of making a model smaller costs: the rows of a fusion's table."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from lsfuse import fusion, rl
from lsfuse.fusion.describe import block_parameters
from lsfuse.fusion.distil import Model
from lsfuse.fusion.texts import Texts
from lsfuse.model import ModelConfig, count_params
from lsfuse.replay import state_bytes_per_token
from lsfuse.train.distil import surgery

PARENT, DISTILLED = "parent", "fused and distilled"
COLUMNS = {
    "perplexity": "perplexity",
    "kl": "KL to the parent",
    "top1": "same likeliest token",
    "diverged": "greedy text that diverges",
    "agreed": "after so many tokens",
    "parameters": "parameters",
    "kv_bytes": "KV bytes per token",
}


def variants(
    parent: ModelConfig, child: ModelConfig, plan: Mapping[str, Any], importance: Callable[[], Any]
) -> dict[str, fusion.Transform]:
    """Name -> what makes it of the parent, but for the distilled one. child: the parent after the plan. importance: of
    the parent's FFN channels, called when it is needed."""
    removed, spans = tuple(plan["remove_attention"]), [(a, b) for a, b in plan["fuse_ffn"]]
    free, fused = fusion.remove_attention(removed), surgery(ConfigDict(dict(plan)))
    members = [i for a, b in spans for i in range(a, b + 1)]
    keep = widths_of_size(parent, count_params(child))
    return {
        PARENT: fusion.chain(),
        "attention removed": free,
        "fused, norms folded": fusion.chain(free, fusion.fuse_ffn(spans, "fold")),
        "fused, last norm": fusion.chain(free, fusion.fuse_ffn(spans, "last")),
        "reversed instead": fusion.chain(free, fusion.reverse(spans)),
        "same FFNs removed": fusion.chain(free, fusion.remove_ffn(members)),
        "pruned to as many parameters": lambda config, params: fusion.prune_ffn(keep, importance())(config, params),
        "int8": fusion.quantize(),
        "fused, int8": fusion.chain(fused, fusion.quantize()),
    }


def widths_of_size(config: ModelConfig, parameters: int) -> dict[int, int]:
    """Block -> channels its FFN keeps, alike shares of all, so that the model has about so many parameters."""
    widths = {i: block.ffn_width for i, block in enumerate(config.blocks) if block.has_ffn}
    channels = {i: _channel(config, i) for i in widths}
    surplus = count_params(config) - parameters
    share = 1 - surplus / sum(widths[i] * channels[i] for i in widths)
    return {i: min(width, max(1, round(share * width))) for i, width in widths.items()}


def _channel(config: ModelConfig, index: int) -> int:
    """Parameters of one channel of a block's FFN."""
    block = config.blocks[index]
    twice = dataclasses.replace(block, ffn_width=2 * block.ffn_width)
    return (block_parameters(config, twice) - block_parameters(config, block)) // block.ffn_width


def continued(parent: Model, prompts: Texts, tokens: int) -> np.ndarray:
    """int32 [N, prompt + tokens]: the prompts, and what the parent writes behind them, taking the likeliest token."""
    config, params = parent
    sampler = rl.make_sampler(config, num_generations=1, max_tokens=tokens, temperature=0.0)
    written = sampler(params, prompts.ids, prompts.lengths, jax.random.key(0)).completion_ids
    return np.concatenate([prompts.ids, np.asarray(written)[:, 0]], 1)


def measure(child: Model, parent: Model, held_out: Texts, greedy: np.ndarray, prompt: int, dtype: Any) -> dict:
    """One row: `COLUMNS`. greedy: `continued`, whose prompts have `prompt` tokens. "diverged": the share of
    continuations in which the child's differs from the parent's; "agreed": tokens alike before, on average."""
    found = fusion.evaluate(child, held_out, parent=parent)
    texts = Texts(greedy, np.full(len(greedy), greedy.shape[1], np.int32))
    agreed = fusion.greedy_agreement(child, texts, prompt)
    return {
        **{name: found[name] for name in ("perplexity", "kl", "top1")},
        "diverged": float(np.mean(agreed < greedy.shape[1] - prompt)),
        "agreed": float(np.mean(agreed)),
        "parameters": count_params(child[0]),
        "kv_bytes": state_bytes_per_token(child[0], jnp.dtype(dtype)),
    }
