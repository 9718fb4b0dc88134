"""What a run would cost, from formulas: memory, FLOPs and token positions of one RL step. Nothing is run or written."""

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from lsfuse import replay
from lsfuse.model import abstract_params, count_params
from lsfuse.replay.memory import kept_bytes_per_token
from lsfuse.train.build import replay_options
from lsfuse.train.loop import Setup, set_up
from lsfuse.train.measure import passes_of, step_cost


def full_batch(config: ConfigDict) -> replay.Batch:
    """A batch in which every prompt and response has its full length; ids are 0."""
    fields = config.rl
    groups, branches, prompt, response = (
        fields.num_prompts,
        fields.num_generations,
        fields.max_prompt,
        fields.max_response,
    )
    return replay.Batch(
        prompt_ids=np.zeros((groups, prompt), np.int32),
        prompt_lengths=np.full(groups, prompt, np.int32),
        completion_ids=np.zeros((groups, branches, response), np.int32),
        completion_lengths=np.full((groups, branches), response, np.int32),
        completion_mask=np.ones((groups, branches, response), np.int32),
        group_sizes=np.full(groups, branches, np.int32),
    )


def memory(setup: Setup) -> dict[str, int]:
    """Bytes of the parts of one gradient step that grow with the model or the prompt, by formula."""
    config, model = setup.config, setup.model
    dtype = jnp.dtype(config.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    options = replay.Options(**replay_options(config))
    shape = (config.rl.max_prompt, config.rl.num_generations, config.rl.max_response)
    geometry = replay.make_geometry(options, *shape)
    count, params = count_params(model), abstract_params(model, dtype)
    opt_state = jax.eval_shape(setup.rl.optimizer.init, params)
    tail = kept_bytes_per_token(model, options.remat_policy, dtype, with_kv=True)
    parts = {
        "parameters": count * dtype.itemsize,
        "gradients": count * wide.itemsize,
        "optimizer state": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(opt_state)),
        "reference parameters": count * dtype.itemsize * setup.reference,
        "prefix state": geometry.state * replay.state_bytes_per_token(model, dtype),
        "its cotangent": geometry.cotangent_room * replay.state_bytes_per_token(model, wide),
        "kept prefix activations": replay.kept_bytes(model, options.remat_policy, geometry, dtype)
        * (config.replay.prefix_activations == "keep"),
        "one chunk of the prefix": geometry.grad_chunk * kept_bytes_per_token(model, options.remat_policy, dtype),
        "one batch of branches": geometry.branch_batch * geometry.response * tail,
    }
    return {name: int(size) for name, size in parts.items() if size}


def costs(setup: Setup) -> Mapping[str, replay.cost.Cost]:
    """Replay and dense cost of one gradient step at full lengths."""
    config, batch = setup.config, full_batch(setup.config)
    passes = passes_of(replay.as_objective(setup.rl.objective), batch.prompt_ids.shape[0])
    options = replay.Options(**replay_options(config))
    dense = replay.Options(remat_policy=options.remat_policy, branch_batch=1)
    dtype = jnp.dtype(config.dtype)
    mine = step_cost(setup.model, config.replay.prefix_grad, options, batch, dtype, passes)
    return {"replay": mine, "dense": step_cost(setup.model, "dense", dense, batch, dtype, passes)}


def dry_run(config: ConfigDict | Mapping[str, Any], **given: Any) -> str:
    """Text for people: the resolved config and what one step at full lengths costs. given: as in `run`."""
    setup = set_up(config, **given, abstract=True)
    fields = setup.config.rl
    mine, dense = costs(setup).values()
    parts = memory(setup)
    lines = [
        "resolved config",
        json.dumps(setup.saved, indent=2),
        "",
        f"mesh: {_mesh(setup)}",
        f"model: {count_params(setup.model):,} parameters in {setup.model.num_blocks} blocks, {setup.config.dtype}",
        f"one RL step: {fields.num_prompts} prompts of up to {fields.max_prompt} tokens,"
        f" {fields.num_generations} responses of up to {fields.max_response} each, {fields.num_iterations} update(s)",
        "",
        f"{'one gradient step at full lengths':<36}{'replay':>14}{'dense':>14}{'dense/replay':>14}",
        _row("token positions, forward passes", mine.forward_tokens, dense.forward_tokens, ","),
        _row("TFLOPs, forward and backward", mine.flops / 1e12, dense.flops / 1e12, ".4g"),
        "",
        "memory of a gradient step, by formula",
        *(f"  {name:<34}{size / 1e6:>12,.1f} MB" for name, size in parts.items()),
        f"  {'sum':<34}{sum(parts.values()) / 1e6:>12,.1f} MB",
    ]
    return "\n".join(lines)


def _mesh(setup: Setup) -> str:
    if setup.mesh is None:
        return "one device"
    return ", ".join(f"{name} {size}" for name, size in setup.mesh.shape.items() if size > 1)


def _row(name: str, mine: float, dense: float, form: str) -> str:
    return f"  {name:<34}{mine:>14{form}}{dense:>14{form}}{dense / mine:>14.2f}"
