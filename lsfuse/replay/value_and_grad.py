"""`replay.value_and_grad` and `replay.per_token_logps`: the engine's public face."""

import functools
from collections.abc import Callable

from jax.sharding import PartitionSpec

from lsfuse.model.config import ModelConfig
from lsfuse.model.params import check_params
from lsfuse.replay.batch import Batch
from lsfuse.replay.check import check_shapes
from lsfuse.replay.engine import Engine, GradFn, grad_function
from lsfuse.replay.geometry import Options
from lsfuse.replay.mesh import on_mesh, one_device
from lsfuse.replay.objective import Objective, ObjectiveFn, as_objective
from lsfuse.types import AnyMesh, Array, Params


def value_and_grad(
    objective: Objective | ObjectiveFn,
    model: ModelConfig,
    *,
    prefix_grad: str | int = "exact",
    chunk_size: int = 512,
    branch_batch: int | None = None,
    remat_policy: str = "everything_saveable",
    prefix_activations: str = "auto",
    memory_budget: int | None = None,
    temperature: float = 1.0,
    prefix: str = "prompt",
    response_buckets: tuple[int, ...] = (),
    compute_dtype: str | None = None,
    state_dtype: str | None = None,
    cotangent_dtype: str | None = None,
    mesh: AnyMesh | None = None,
) -> GradFn:
    """Value and gradient of an objective of per-token log-probs, the prompt of each group run once.

    Args:
      objective: (per_token_logps [B, G, R], entropies [B, G, R], batch) -> (loss, metrics), or an `Objective` that
        says what it couples: "branch" and "group" need one pass over a group, "batch" a scoring pass first.
      model: the model's config.
      prefix_grad: "exact", the dense gradient; an int n, gradient through the last n prompt tokens (the last one
        inside every tail) while K/V before them are constants; "stop" is n = 1 (LongStraw, arXiv 2607.14952).
      chunk_size: prompt tokens run at a time. Bounds the memory of the prompt's activations.
      branch_batch: branches run at a time; by default about a chunk's worth of tokens.
      remat_policy: what a chunk or a branch batch saves for its backward, by JAX's names.
      prefix_activations: "keep" those of the differentiable prompt tokens from the capture, "recompute" them chunk by
        chunk, or "auto": keep if they fit into `memory_budget` bytes (default: half of the device's memory).
      temperature: divides the logits, before log-probs and entropies.
      prefix: what a group's branches share: the "prompt", or also what all its responses begin with
        ("longest_common"), found anew in every batch; its log-probs and their gradient count once for every branch.
        Response tokens carry gradient in every mode: `prefix_grad` counts prompt tokens.
      response_buckets: padded lengths below R at which branches run where none of them (without what they share) is
        longer. Each is compiled; without any, all tails cost R tokens, whatever their lengths.
      compute_dtype: of activations and of the kernels in products, "bfloat16" beside float32 parameters; None: the
        parameters'. Gradients are accumulated in float32 or wider either way.
      state_dtype: of the prefix state; None: `compute_dtype`. Keys and values are rounded where they are made, so that
        all tokens see the same ones.
      cotangent_dtype: of the prefix state's cotangents, into which every branch and chunk adds; None: float32 or wider.
      mesh: devices to run on, its axes any of data, context, fsdp, tensor (see `replay.mesh`); None: where the arrays
        are. Parameters and gradients are split as `replay.param_shardings` says, the batch is copied to all.

    Returns: f(params, batch) -> ((loss, metrics), grads); grads have the parameters' structure and dtypes and are
    accumulated in float32 or wider. Pure; wrap it in `jax.jit`.

    Raises: ValueError for an option out of range, parameters that do not fit `model`, and, when it is traced, fields of
    the batch of other shapes or kinds, or an objective that does not return a scalar and a dict.
    """
    options = Options(
        prefix_grad,
        chunk_size,
        branch_batch,
        remat_policy,
        prefix_activations,
        memory_budget,
        temperature,
        prefix,
        response_buckets,
        compute_dtype,
        state_dtype,
        cotangent_dtype,
    )
    return grad_function(as_objective(objective), model, options, mesh=mesh)


def per_token_logps(
    model: ModelConfig,
    *,
    chunk_size: int = 512,
    branch_batch: int | None = None,
    temperature: float = 1.0,
    prefix: str = "prompt",
    response_buckets: tuple[int, ...] = (),
    compute_dtype: str | None = None,
    state_dtype: str | None = None,
    mesh: AnyMesh | None = None,
) -> Callable[[Params, Batch], tuple[Array, Array]]:
    """Scoring pass: f(params, batch) -> (per_token_logps, entropies) [B, G, R], no gradient, each prompt run once.

    float32 (float64 if the parameters are); zero where there is no token. Costs P + G·R forward tokens a group.
    Options as of `value_and_grad`.
    """
    options = Options(
        "stop",
        chunk_size,
        branch_batch,
        temperature=temperature,
        prefix=prefix,
        response_buckets=response_buckets,
        compute_dtype=compute_dtype,
        state_dtype=state_dtype,
    )

    def score(local: ModelConfig, params: Params, batch: Batch):
        logps, entropies = Engine(params, local, options, batch).score()
        branches = batch.completion_ids.shape[1]
        return logps[:, :branches], entropies[:, :branches]

    run: Callable[[Params, Batch], tuple[Array, Array]] = functools.partial(score, one_device(model, options))
    if mesh is not None:
        run = on_mesh(score, model, mesh, options, lambda _: PartitionSpec())

    def f(params: Params, batch: Batch):
        check_params(model, params)
        check_shapes(batch)
        return run(params, batch)

    return f
