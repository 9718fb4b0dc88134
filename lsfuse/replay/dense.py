"""The baseline: every response with its own copy of the prompt, G·(P + R) token positions a group.

A fair one: the same passes, blocked attention, saved boundaries, chunked head over response tokens only and in-place
accumulation as the replay engine; rows run `branch_batch` at a time, so that memory does not grow with G.
"""

from typing import Any

import jax.numpy as jnp

from lsfuse.model.blocks import saved_names
from lsfuse.model.config import ModelConfig
from lsfuse.model.logprobs import token_logprobs, token_logprobs_backward
from lsfuse.model.state import PrefixState
from lsfuse.model.transformer import (
    Context,
    embed,
    embed_backward,
    make_tokens,
    no_prefix,
    run_blocks,
    run_blocks_backward,
)
from lsfuse.replay.batch import Batch
from lsfuse.replay.engine import Branches, GradFn, grad_function
from lsfuse.replay.geometry import Options
from lsfuse.replay.objective import Objective, ObjectiveFn, as_objective
from lsfuse.replay.tails import TailSaved
from lsfuse.types import Array, Params


def _inputs(batch: Batch, config: ModelConfig, dtype):
    """Rows of a branch slice [1, g, ...]: ids [g, P + R], validity, tokens, and of the R response tokens the positions
    that predict them, validity and labels [g, R]. Prompt and response adjoin; padding is at the end only."""
    labels = batch.completion_ids[0]
    branches, response = labels.shape
    prompt, length = batch.prompt_ids[0], batch.prompt_lengths[0]
    responses = jnp.where(batch.branch_mask[0], batch.completion_lengths[0], 0)
    both = jnp.concatenate([jnp.broadcast_to(prompt, (branches, prompt.shape[0])), labels], 1)
    at = jnp.arange(both.shape[1])
    source = jnp.where(at < length, at, jnp.minimum(at + prompt.shape[0] - length, both.shape[1] - 1))
    # The last response token predicts nothing: it is a label and no input.
    lengths = jnp.where(responses > 0, length + responses - 1, 0)
    tokens = make_tokens(config, 0, both.shape[1], lengths, dtype)
    predicted = jnp.minimum(jnp.maximum(length - 1, 0) + jnp.arange(response), both.shape[1] - 1)
    here = jnp.arange(response) < responses[:, None]
    return both[:, source], at < lengths[:, None], tokens, predicted, here, jnp.where(here, labels, 0)


def rows_forward(
    params: Params, config: ModelConfig, batch: Batch, context: Context, temperature: float, policy: str | None
) -> tuple[Array, Array, TailSaved | None]:
    """`tails_forward` with the prompt in every row; `context` is not read."""
    ids, valid, tokens, predicted, here, labels = _inputs(batch, config, params["embed_tokens"].dtype)
    keep = () if policy is None else ("x", *saved_names(policy))
    x, kept = run_blocks(params, config, embed(params, config, ids, valid), tokens, no_prefix(), keep)
    x = x[:, predicted]
    logps, entropies, head = token_logprobs(params, config, x.reshape(-1, x.shape[-1]), labels.reshape(-1), temperature)
    logps, entropies = (jnp.where(here, y.reshape(here.shape), 0)[None] for y in (logps, entropies))
    return logps, entropies, None if policy is None else TailSaved(kept, x, head)


def rows_backward(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    context: Context,
    temperature: float,
    saved: TailSaved,
    dlogps: Array,
    dentropies: Array,
    grads: Params,
    dstate: PrefixState | None,
) -> tuple[Params, PrefixState | None]:
    """`tails_backward` with the prompt in every row; there is no prefix state to leave cotangents for."""
    ids, valid, tokens, predicted, here, labels = _inputs(batch, config, params["embed_tokens"].dtype)
    dlogps, dentropies = (
        jnp.where(here, d[0].astype(saved.head.lse.dtype), 0).reshape(-1) for d in (dlogps, dentropies)
    )
    x = saved.x.reshape(-1, saved.x.shape[-1])
    dx, grads = token_logprobs_backward(
        params, config, x, labels.reshape(-1), saved.head, dlogps, dentropies, grads, temperature
    )
    dx = jnp.where(here[..., None], dx.reshape(saved.x.shape), 0)
    dx = jnp.zeros((*ids.shape, dx.shape[-1]), dx.dtype).at[:, predicted].add(dx)
    dx, grads, _ = run_blocks_backward(params, config, dx, saved.kept, tokens, no_prefix(), grads, None)
    return embed_backward(grads, config, ids, valid, dx), dstate


def dense_value_and_grad(
    objective: Objective | ObjectiveFn,
    model: ModelConfig,
    *,
    prefix_grad: str | int = "exact",
    branch_batch: int | None = 1,
    **options: Any,
) -> GradFn:
    """`replay.value_and_grad` without sharing: same arguments and result, every row run from its first token.

    branch_batch rows run at a time (1 by default). Of the other options remat_policy and temperature act; chunk_size,
    prefix_activations, memory_budget, prefix and response_buckets are checked, and have nothing to act on. Costs
    3·G·(P + R) forward tokens a group (4 with remat_policy="nothing_saveable"), plus G·(P + R) for objectives that are
    not declared per branch.

    Raises: ValueError for prefix_grad other than "exact".
    """
    if prefix_grad != "exact":
        raise ValueError(
            f'dense_value_and_grad computes the exact gradient only; prefix_grad must be "exact", got {prefix_grad!r}'
        )
    checked = Options(prefix_grad, branch_batch=branch_batch or 1, **options)
    return grad_function(as_objective(objective), model, checked, Branches(rows_forward, rows_backward, shared=False))
