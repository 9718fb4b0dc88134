"""The baseline: every response with its own copy of the prompt, G·(P + R) token positions a group.

A fair one: the same blocked attention, saved boundaries, chunked head over response tokens only, and in-place
accumulation as the replay engine; rows run `branch_batch` at a time, so that memory does not grow with G.
"""

import jax
import jax.numpy as jnp
from jax import lax

from lsfuse.model.blocks import saved_names
from lsfuse.model.config import ModelConfig
from lsfuse.model.logprobs import token_logprobs, token_logprobs_backward
from lsfuse.model.params import check_params
from lsfuse.model.state import PrefixState
from lsfuse.model.transformer import Context, embed, embed_backward, make_tokens, run_blocks, run_blocks_backward
from lsfuse.replay.batch import Batch
from lsfuse.replay.geometry import Options
from lsfuse.replay.objective import Mean, Objective, ObjectiveFn, as_objective
from lsfuse.types import Array, Params


def _rows(batch: Batch) -> tuple[Array, Array, Array, Array]:
    """ids [B·G, P + R], row lengths, prompt lengths [B·G], completion ids [B·G, R]. Padding at the end only."""
    groups, branches, response = batch.completion_ids.shape
    prompt = batch.prompt_ids.shape[1]
    rows = groups * branches
    prompt_lengths = jnp.repeat(batch.prompt_lengths, branches)
    lengths = jnp.where(batch.branch_mask, batch.completion_lengths, 0).reshape(rows)
    completions = batch.completion_ids.reshape(rows, response)
    both = jnp.concatenate([jnp.repeat(batch.prompt_ids, branches, 0), completions], 1)
    at = jnp.arange(prompt + response)
    source = jnp.where(at < prompt_lengths[:, None], at, at + prompt - prompt_lengths[:, None])
    ids = jnp.take_along_axis(both, jnp.minimum(source, prompt + response - 1), 1)
    # The last response token predicts nothing: it is a label and no input.
    inputs = jnp.where(lengths > 0, prompt_lengths + lengths - 1, 0)
    return ids, inputs, prompt_lengths, completions


class _Rows:
    """Forward and backward of `count` rows at a time."""

    def __init__(self, params, model, options, batch):
        self.params, self.model, self.options = params, model, options
        self.shape = batch.completion_ids.shape
        self.count = min(options.branch_batch or 1, self.shape[0] * self.shape[1])
        pad = -(self.shape[0] * self.shape[1]) % self.count
        self.ids, self.lengths, self.prompts, self.labels = (
            jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)) for x in _rows(batch)
        )
        self.total = self.ids.shape[0]
        self.wide = jnp.promote_types(params["embed_tokens"].dtype, jnp.float32)

    def _some(self, i):
        ids, lengths, prompts, labels = (
            lax.dynamic_slice_in_dim(x, i * self.count, self.count, 0)
            for x in (self.ids, self.lengths, self.prompts, self.labels)
        )
        valid = jnp.arange(ids.shape[1]) < lengths[:, None]
        predicted = jnp.maximum(prompts - 1, 0)[:, None] + jnp.arange(self.shape[2])
        here = predicted < lengths[:, None]
        tokens = make_tokens(self.model, 0, ids.shape[1], lengths, self.params["embed_tokens"].dtype)
        return ids, valid, tokens, jnp.minimum(predicted, ids.shape[1] - 1), here, jnp.where(here, labels, 0)

    def _forward(self, i, keep):
        ids, valid, tokens, predicted, here, labels = self._some(i)
        context = Context(PrefixState({}, {}), jnp.int32(0))
        x, kept = run_blocks(self.params, self.model, embed(self.params, ids, valid), tokens, context, keep)
        picked = jnp.take_along_axis(x, predicted[..., None], 1).reshape(-1, x.shape[-1])
        logps, entropies, head = token_logprobs(
            self.params, self.model, picked, labels.reshape(-1), self.options.temperature
        )
        logps, entropies = (jnp.where(here, y.reshape(here.shape), 0) for y in (logps, entropies))
        return logps, entropies, (kept, x, picked, head)

    def score(self) -> tuple[Array, Array]:
        """(per_token_logps, entropies) [B, G, R]."""

        def some(i, out):
            new = self._forward(i, ())[:2]
            return tuple(
                lax.dynamic_update_slice_in_dim(o, x, i * self.count, 0) for o, x in zip(out, new, strict=True)
            )

        zeros = jnp.zeros((self.total, self.shape[2]), self.wide)
        out = lax.fori_loop(0, self.total // self.count, some, (zeros, zeros))
        return tuple(x[: self.shape[0] * self.shape[1]].reshape(self.shape) for x in out)

    def backward(self, cotangents) -> Params:
        """Gradients from the cotangents [B, G, R] of log-probs and entropies."""
        pad = self.total - self.shape[0] * self.shape[1]
        cotangents = tuple(jnp.pad(c.reshape(-1, self.shape[2]), ((0, pad), (0, 0))) for c in cotangents)
        keep = ("x", *saved_names(self.options.remat_policy))

        def some(i, grads):
            _, _, (kept, x, picked, head) = self._forward(i, keep)
            ids, valid, tokens, predicted, here, labels = self._some(i)
            dlogps, dentropies = (
                jnp.where(here, lax.dynamic_slice_in_dim(c, i * self.count, self.count, 0), 0).reshape(-1)
                for c in cotangents
            )
            dpicked, grads = token_logprobs_backward(
                self.params,
                self.model,
                picked,
                labels.reshape(-1),
                head,
                dlogps,
                dentropies,
                grads,
                self.options.temperature,
            )
            dpicked = jnp.where(here[..., None], dpicked.reshape(*here.shape, -1), 0)
            dx = jnp.zeros_like(x).at[jnp.arange(self.count)[:, None], predicted].add(dpicked)
            context = Context(PrefixState({}, {}), jnp.int32(0))
            dx, grads, _ = run_blocks_backward(self.params, self.model, dx, kept, tokens, context, grads, None)
            return embed_backward(grads, ids, valid, dx)

        grads = jax.tree.map(lambda p: jnp.zeros(p.shape, self.wide), self.params)
        return lax.fori_loop(0, self.total // self.count, some, grads)


def dense_value_and_grad(
    objective: Objective | ObjectiveFn,
    model: ModelConfig,
    *,
    prefix_grad: str | int = "exact",
    chunk_size: int = 512,
    branch_batch: int | None = 1,
    remat_policy: str = "everything_saveable",
    prefix_activations: str = "auto",
    memory_budget: int | None = None,
    temperature: float = 1.0,
):
    """`replay.value_and_grad` without sharing: same signature and result, every row run from its first token.

    branch_batch rows run at a time (1 by default). chunk_size, prefix_activations and memory_budget have nothing to
    act on. Costs 3·G·(P + R) forward tokens a group (4 with remat_policy="nothing_saveable"), plus G·(P + R) for
    objectives that are not declared per branch.

    Raises: ValueError for prefix_grad other than "exact".
    """
    if prefix_grad != "exact":
        raise ValueError(
            f'dense_value_and_grad computes the exact gradient only; prefix_grad must be "exact", got {prefix_grad!r}'
        )
    objective = as_objective(objective)
    options = Options(
        prefix_grad, chunk_size, branch_batch, remat_policy, prefix_activations, memory_budget, temperature
    )

    def f(params: Params, batch: Batch):
        check_params(model, params)
        if objective.prepare is not None:
            batch = objective.prepare(batch)
        clean = batch.replace(completion_mask=batch.loss_mask)
        rows = _Rows(params, model, options, clean)
        loss, pull, metrics = jax.vjp(lambda a, b: objective(a, b, clean), *rows.score(), has_aux=True)
        grads = rows.backward(pull(jnp.ones_like(loss)))
        metrics = {k: m.compute() if isinstance(m, Mean) else m for k, m in metrics.items()}
        return (loss, metrics), jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)

    return f
