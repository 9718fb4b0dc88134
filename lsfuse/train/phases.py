"""The two kinds of step a run is made of: supervised, and group RL. Each is a function of (state, step, position)."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from lsfuse import data, replay, rl, scale
from lsfuse.model import ModelConfig, abstract_params
from lsfuse.replay.objective import ObjectiveFn
from lsfuse.train.build import Stage, advantage_options, replay_options
from lsfuse.train.optimizer import make_optimizer, make_schedule
from lsfuse.train.rollout import Rollout, fill_up, roll_out
from lsfuse.train.step import UpdateFn, make_update, to_host
from lsfuse.types import AnyMesh, Array, Params

SAMPLE_STREAM, EVAL_STREAM = 1, 2
# How the policy computes: alike when it samples, is scored and is trained, so that ratios are 1 at the first update.
_ROUNDING = ("compute_dtype", "state_dtype")


class NoUsableGroupError(ValueError):
    """Dynamic sampling found no group whose rewards differ."""


@dataclasses.dataclass
class State:
    """What a step changes. position: examples of the training split consumed so far."""

    params: Params
    opt_state: Any
    position: int = 0


class WarmStart:
    """Supervised steps on the task's own targets. One response a prompt leaves nothing to share, so the gradient is the
    dense one, many rows at a time; on a mesh the replayed one, which is split."""

    name = "warm_start"

    def __init__(self, config: ConfigDict, model: ModelConfig, stages: list[Stage], mesh: AnyMesh | None = None):
        fields = config.warm_start
        self.stages, self.seed = stages, config.seed
        self.steps = sum(stage.steps for stage in stages)
        self.schedule = make_schedule(fields.optimizer, self.steps, "config.warm_start.optimizer")
        self.optimizer = make_optimizer(fields.optimizer, self.steps, "config.warm_start.optimizer")

        def update(rows: int) -> UpdateFn:
            if mesh is not None:
                options = {**replay_options(config), "prefix_grad": "exact", "prefix": "prompt", "response_buckets": ()}
                return make_update(rl.nll(), model, self.optimizer, mesh=mesh, **options)
            options = {k: config.replay[k] for k in ("remat_policy", *_ROUNDING)}
            return make_update(rl.nll(), model, self.optimizer, dense=True, branch_batch=rows, **options)

        self._updates = {rows: update(rows) for rows in {stage.num_prompts for stage in stages}}

    def step(self, state: State, step: int) -> dict[str, float]:
        """Changes `state`; returns metrics."""
        start = time.perf_counter()
        stage = next(s for s in reversed(self.stages) if s.start <= step)
        chosen = data.indices(stage.task.size("train"), self.seed, state.position, stage.num_prompts)
        batch = data.make_batch(
            [data.sft_group(stage.task, "train", int(i)) for i in chosen],
            max_prompt=stage.max_prompt,
            max_response=stage.max_response,
            num_groups=stage.num_prompts,
            num_branches=1,
            pad_id=stage.task.tokenizer.pad_id,
        )
        update = self._updates[stage.num_prompts]
        state.params, state.opt_state, metrics = update(state.params, state.opt_state, batch)
        state.position += stage.num_prompts
        host = to_host(metrics, f"warm-start step {step}")
        seconds = time.perf_counter() - start
        tokens = int(batch.prompt_lengths.sum() + batch.completion_lengths.sum())
        rate = {"learning_rate": float(self.schedule(step)), "tokens": tokens}
        return {**host, **rate, "time/step": seconds, "time/tokens_per_s": tokens / seconds}


class GroupRL:
    """Sample groups, score them, take `num_iterations` gradient steps on them. Or take groups sampled elsewhere."""

    name = "rl"

    def __init__(
        self,
        config: ConfigDict,
        model: ModelConfig,
        task: Any,
        reward_fn: Callable[[Mapping[str, Any], str], float] | None,
        objective: replay.Objective | ObjectiveFn,
        optimizer: optax.GradientTransformation | None = None,
        mesh: AnyMesh | None = None,
    ):
        fields = config.rl
        self.config, self.model, self.task, self.reward_fn = config, model, task, reward_fn
        self.objective = objective
        self.advantages = advantage_options(config)
        self.ref_params: Params | None = None  # set before the first step if the objective needs a reference
        self.steps, self.seed, self.iterations = fields.steps, config.seed, fields.num_iterations
        self.key = jax.random.fold_in(jax.random.key(config.seed), SAMPLE_STREAM)
        self.offline = not hasattr(task, "example")
        updates = fields.steps * fields.num_iterations
        self.schedule = None if optimizer else make_schedule(fields.optimizer, updates, "config.rl.optimizer")
        self.optimizer = optimizer or make_optimizer(fields.optimizer, updates, "config.rl.optimizer")
        options = replay_options(config, temperature=fields.temperature)
        self.update = make_update(objective, model, self.optimizer, mesh=mesh, **options)
        shared = ("chunk_size", "branch_batch", "temperature", "prefix", "response_buckets", *_ROUNDING)
        self.score = jax.jit(replay.per_token_logps(model, mesh=mesh, **{k: options[k] for k in shared}))
        self.old_logps = fields.old_logps
        if self.old_logps == "auto":
            self.old_logps = "none" if fields.num_iterations == 1 else "score" if self.offline else "sampler"
        if self.offline:
            if self.old_logps == "sampler":
                raise ValueError(
                    'config.rl.old_logps is "sampler", but groups sampled elsewhere have none; use "score"'
                )
            return
        samplers = {
            how: rl.make_sampler(
                model,
                num_generations=how[0],
                temperature=how[1],
                top_p=how[2],
                max_tokens=fields.max_response,
                stop_ids=task.tokenizer.stop_ids,
                chunk_size=config.replay.chunk_size,
                mesh=mesh,
                **{k: options[k] for k in _ROUNDING},
            )
            for how in {_how(fields), _how(config.eval)}  # one program if training and evaluation sample alike
        }
        self.sample, self.eval_sample = samplers[_how(fields)], samplers[_how(config.eval)]

    def step(self, state: State, step: int) -> dict[str, float]:
        """Changes `state`; returns metrics."""
        start = time.perf_counter()
        batch, metrics, used = self._offline(state) if self.offline else self._sampled(state, step)
        if not self.offline and self.config.rl.dynamic_sampling and not metrics["groups_with_spread"]:
            raise NoUsableGroupError(
                f"RL step {step}: none of {used} groups (config.rl.dynamic_sampling {self.config.rl.dynamic_sampling}"
                f" batches) has responses of unlike reward (the mean is {metrics['reward']:.3g}), so there is nothing"
                " to learn from; take easier or harder prompts, a graded reward, or more generations"
            )
        state.position += used
        sampled = time.perf_counter()
        batch = self._add_logps(state.params, batch)
        replay.check_batch(batch, self.model)
        for i in range(self.iterations):
            state.params, state.opt_state, device = self.update(state.params, state.opt_state, batch)
            update = step * self.iterations + i
            last = to_host(device, f"RL step {step}" + (f", iteration {i}" if self.iterations > 1 else ""))
        now = time.perf_counter()
        metrics |= last
        if self.schedule is not None:
            metrics["learning_rate"] = float(self.schedule(update))
        times = {"time/step": now - start, "time/sample": sampled - start, "time/update": now - sampled}
        return {**metrics, **times, "time/tokens_per_s": metrics["tokens"] / (now - start)}

    def batch(self, state: State) -> replay.Batch:
        """The batch a further step would train on; changes nothing."""
        batch = self._offline(state)[0] if self.offline else self._sampled(state, self.steps)[0]
        return self._add_logps(state.params, batch)

    def _sampled(self, state: State, step: int) -> tuple[replay.Batch, dict[str, float], int]:
        """(batch with advantages, metrics, how many examples were used up)."""
        fields, key = self.config.rl, jax.random.fold_in(self.key, step)
        out, used = self._roll_out(state, state.position, key), fields.num_prompts
        if fields.dynamic_sampling:
            for i in range(1, fields.dynamic_sampling):
                if out.spread.all():
                    break
                more = self._roll_out(state, state.position + used, jax.random.fold_in(key, i))
                out, used = fill_up(out, more), used + fields.num_prompts
        rewards = out.rewards
        if fields.overlong_buffer is not None:
            lengths = np.asarray(out.batch.completion_lengths)
            rewards = rewards + rl.overlong_penalty(lengths, fields.max_response, fields.overlong_buffer)
        advantages = rl.group_advantages(rewards, np.asarray(out.batch.group_sizes), **self.advantages)
        batch = out.batch.replace(advantages=advantages, old_per_token_logps=out.logps)
        return batch, {**out.metrics(), "examples": used}, used

    def _roll_out(self, state: State, position: int, key: Array) -> Rollout:
        fields = self.config.rl
        chosen = data.indices(self.task.size("train"), self.seed, position, fields.num_prompts)
        examples = [self.task.example("train", int(i)) for i in chosen]
        assert self.reward_fn is not None
        return roll_out(self.task, self.reward_fn, self.sample, state.params, examples, fields.max_prompt, key)

    def _offline(self, state: State) -> tuple[replay.Batch, dict[str, float], int]:
        fields = self.config.rl
        chosen = data.indices(len(self.task), self.seed, state.position, fields.num_prompts)
        batch = data.make_batch(
            [self.task[int(i)] for i in chosen],
            max_prompt=fields.max_prompt,
            max_response=fields.max_response,
            num_groups=fields.num_prompts,
            num_branches=fields.num_generations,
        )
        metrics: dict[str, float] = {"tokens": int(batch.prompt_lengths.sum() + batch.completion_lengths.sum())}
        if batch.rewards is not None:
            exists = np.arange(fields.num_generations) < batch.group_sizes[:, None]
            metrics["reward"] = float(batch.rewards[exists].mean())
            if batch.advantages is None:
                rewards, sizes = np.asarray(batch.rewards), np.asarray(batch.group_sizes)
                batch = batch.replace(advantages=rl.group_advantages(rewards, sizes, **self.advantages))
        return batch, metrics, fields.num_prompts

    def _add_logps(self, params: Params, batch: replay.Batch) -> replay.Batch:
        """Old log-probs as the config asks for, in place of the sampling engine's, and the reference's."""
        fields, theirs = self.config.rl, batch.old_per_token_logps
        correct = fields.importance_correction != "none"
        if correct and theirs is None:
            raise ValueError(
                f'config.rl.importance_correction is "{fields.importance_correction}", but the groups have no'
                " old_logps, the log-probs of the engine that sampled them"
            )
        if correct or (self.old_logps == "score" and (theirs is None or not self.offline)):
            batch = batch.replace(old_per_token_logps=self.score(params, batch)[0])
        if correct:
            batch = rl.correct_importance(batch, theirs, fields.importance_correction, fields.importance_cap)
        # "auto" may come to "none" for groups sampled elsewhere too: then the file's log-probs, if any, count.
        if fields.old_logps == "none" or (self.old_logps == "none" and not self.offline):
            batch = batch.replace(old_per_token_logps=None)
        if self.ref_params is not None and batch.ref_per_token_logps is None:
            batch = batch.replace(ref_per_token_logps=self.score(self.ref_params, batch)[0])
        return batch


def _how(fields: ConfigDict) -> tuple[int, float, float]:
    return fields.num_generations, fields.temperature, fields.top_p


def init_state(
    params: Params,
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    position: int,
    mesh: AnyMesh | None = None,
) -> State:
    lie = None if mesh is None else scale.state_shardings(model, mesh, jax.eval_shape(optimizer.init, params))
    return State(params, jax.jit(optimizer.init, out_shardings=lie)(params), position)


def abstract_state(
    model: ModelConfig, dtype: Any, optimizer: optax.GradientTransformation, key: Array, mesh: AnyMesh | None = None
) -> dict[str, Any]:
    """The tree a checkpoint holds, as `jax.ShapeDtypeStruct`s that say where each leaf goes on a mesh."""
    params = abstract_params(model, dtype)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    if mesh is not None:
        put = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        state = jax.tree.map(put, state, scale.state_shardings(model, mesh, state))
    return {**state, "key": jax.eval_shape(jnp.asarray, key)}
