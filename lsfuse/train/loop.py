"""The run: an optional supervised phase, group RL, evaluations, checkpoints, and what is left behind at the end.

All randomness is a function of (seed, step), the data position is one integer, and files are cut back to the
checkpoint on resume. So a run that is killed at any moment and resumed computes the same bits as one that is not.
"""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from lsfuse import io, replay, scale
from lsfuse.io.checkpoint import Checkpoints
from lsfuse.io.checkpoint_manifest import CheckpointError
from lsfuse.model import ModelConfig
from lsfuse.replay.objective import ObjectiveFn
from lsfuse.train import build, checks
from lsfuse.train import workdir as files
from lsfuse.train.config import resolve_config, today_s_fields
from lsfuse.train.measure import compare
from lsfuse.train.memory import release_freed_memory
from lsfuse.train.metadata import write_run_files
from lsfuse.train.phases import EVAL_STREAM, GroupRL, State, WarmStart, abstract_state, init_state
from lsfuse.train.profile import Profiler
from lsfuse.train.progress import Progress
from lsfuse.train.report import format_summary, parameter_change, summarize, write_report
from lsfuse.train.rollout import evaluate
from lsfuse.train.tensorboard import Events, require_tensorboard
from lsfuse.types import AnyMesh, Params

RewardFn = Callable[[Mapping[str, Any], str], float]


@dataclasses.dataclass(frozen=True)
class Result:
    """params: trained. summary: as in summary.json. The rest is in `workdir`."""

    params: Params
    model: ModelConfig
    config: dict[str, Any]
    summary: dict[str, Any]
    workdir: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything that is fixed before the first step."""

    config: ConfigDict
    saved: dict[str, Any]
    task: Any
    tokenizer: Any
    model: ModelConfig
    load_params: Callable[[], Params]
    reward_fn: RewardFn | None
    warm_start: WarmStart | None
    rl: GroupRL
    reference: bool
    mesh: AnyMesh | None


def set_up(
    config: ConfigDict | Mapping[str, Any],
    workdir: str | pathlib.Path | None = None,
    *,
    task: Any = None,
    reward_fn: RewardFn | None = None,
    objective: replay.Objective | ObjectiveFn | None = None,
    optimizer: optax.GradientTransformation | None = None,
    resume: bool = False,
    abstract: bool = False,
) -> Setup:
    """Resolves and checks everything; reads files, writes none. Arguments as in `run`.

    abstract: for a description only, of a mesh that may have more devices than there are.
    """
    config = resolve_config(config)
    mesh = (scale.abstract_mesh if abstract else scale.make_mesh)(config.mesh)
    if workdir is not None:
        files.check_workdir(pathlib.Path(workdir), None, resume)
    passed = {"task": task, "reward_fn": reward_fn, "objective": objective, "optimizer": optimizer}
    passed = {k: _name(v) for k, v in passed.items() if v is not None}
    tokenizer = build.make_tokenizer(config) if task is None else getattr(task, "tokenizer", None)
    task = build.make_task(config, tokenizer) if task is None else task
    tokenizer = getattr(task, "tokenizer", None) or tokenizer
    model, load_params = build.make_model(config, tokenizer)
    build.check_sizes(config, model, task)
    build.check_trainable(config, model)
    checks.check_groups(config, task)
    checks.check_mesh(config, model, mesh)
    if objective is None:
        build.check_group_size(config)
        checks.check_objective(config, task)
        objective = build.make_objective(config)
    checks.check_correction(config, task)
    if workdir is not None and resume and config.replay.prefix_activations == "auto":
        before = files.saved_config(pathlib.Path(workdir)) or {}
        config.replay.prefix_activations = before.get("replay", {}).get("prefix_activations", "auto")
    config.replay.prefix_activations = build.resolve_prefix_activations(config, model)
    facts = {"passed": passed}
    if sha256 := getattr(task, "sha256", None):
        facts["data_sha256"] = dict(sha256)
    what = {k: v for k, v in config.to_dict().items() if k != "mesh"}  # where it runs is no part of what a run is
    saved = json.loads(json.dumps({**what, **facts}))
    if workdir is not None:
        files.check_workdir(pathlib.Path(workdir), saved, resume)
    reward_fn = reward_fn or getattr(task, "reward", None)
    stages = build.warm_start_stages(config, task)
    checks.check_warm_start(config, task, stages)
    warm_start = WarmStart(config, model, stages, mesh) if stages else None
    rl = GroupRL(config, model, task, reward_fn, objective, optimizer, mesh)
    optimizers = {"rl": rl.optimizer} | ({} if warm_start is None else {"warm_start": warm_start.optimizer})
    build.check_optimizers(config, model, optimizer, optimizers)
    reference = build.needs_reference(config)
    return Setup(config, saved, task, tokenizer, model, load_params, reward_fn, warm_start, rl, reference, mesh)


def run(
    config: ConfigDict | Mapping[str, Any],
    workdir: str | pathlib.Path,
    *,
    task: Any = None,
    reward_fn: RewardFn | None = None,
    objective: replay.Objective | ObjectiveFn | None = None,
    optimizer: optax.GradientTransformation | None = None,
    resume: bool = False,
    progress: bool = True,
    profile: bool = False,
    tensorboard: bool = False,
) -> Result:
    """Trains as `config` says and leaves everything in `workdir`.

    Args:
        config: from `default_config()`, `load_config(file)`, or a plain nested dict of the fields that differ.
        workdir: a directory that is empty or not there; with `resume`, one that holds a run of the same config (or
            nothing: then the run starts).
        task: a `data.Task`, or `data.JsonlGroups`, instead of the config's.
        reward_fn: (example, completion text) -> float, instead of the task's.
        objective: instead of the config's.
        optimizer: any optax transformation for the RL phase, instead of the config's; it holds its own learning rate.
        progress: show a progress bar and print evaluations.
        profile: trace two RL steps into workdir/profile and print the costliest operations.
        tensorboard: write what metrics.jsonl holds as TensorBoard events too, into workdir/tensorboard (extra
            `[tensorboard]`). It is no part of the config: a run may be resumed with or without it.

    Raises:
        ValueError, FileExistsError, FileNotFoundError: anything wrong with what was given, before any work.
        ImportError: a model named by a hub id, or `tensorboard`, without the extra that it needs.
        CheckpointError: a checkpoint cannot be written (the ones before are untouched) or none can be read.
        OSError: a full disk; what was saved is untouched, and `resume` goes on from it.
        FloatingPointError: loss or gradient is not finite.
    """
    if tensorboard:
        require_tensorboard()
    workdir = pathlib.Path(workdir).absolute()
    given = {"task": task, "reward_fn": reward_fn, "objective": objective, "optimizer": optimizer}
    setup = set_up(config, workdir, **given, resume=resume)
    with files.full_disk(workdir), files.locked(workdir):
        files.check_workdir(workdir, setup.saved, resume)  # nobody came in between
        write_run_files(workdir, setup.saved, setup.config.mesh.to_dict())
        with contextlib.ExitStack() as stack:
            metrics = stack.enter_context(files.JsonLines(workdir / "metrics.jsonl"))
            samples = stack.enter_context(files.JsonLines(workdir / "samples.jsonl"))
            events = stack.enter_context(Events(workdir / "tensorboard")) if tensorboard else None
            return _Run(setup, workdir, metrics, samples, progress, profile, events).run()


def _name(thing: Any) -> str:
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    own = getattr(thing, "name", "")
    return f"{kind.__module__}.{kind.__qualname__}" + (f" {own}" if isinstance(own, str) and own else "")


class _Run:
    """One session of a run."""

    def __init__(
        self,
        setup: Setup,
        workdir: pathlib.Path,
        metrics: files.JsonLines,
        samples: files.JsonLines,
        progress: bool,
        profile: bool,
        events: Events | None,
    ):
        self.setup, self.workdir, self.metrics, self.samples = setup, workdir, metrics, samples
        self.events = events
        self.config, self.model, self.mesh = setup.config, setup.model, setup.mesh
        self.key = jax.random.key(self.config.seed)
        defaults = today_s_fields(setup.saved)
        self.checkpoints = Checkpoints(workdir / "checkpoints", setup.saved, self.config.checkpoint.keep, defaults)
        self.start = Checkpoints(workdir / "start", setup.saved, 1, defaults)
        self.progress = Progress(progress)
        self.profiler = Profiler(workdir / "profile") if profile else None
        self.warm_start, self.rl = setup.warm_start, setup.rl
        self.best: dict[str, float] | None = None

    def run(self) -> Result:
        phase, done, state = self._restore()
        begins = phase == "start"
        if phase == "warm_start":
            assert self.warm_start is not None
            self._phase(self.warm_start, state, done)
            state, done, begins = self._begin_rl(state.params, state.position), 0, True
        if self.setup.reference:
            self.rl.ref_params = self.start_params()
        elif self.config.report.parameter_change and not begins:
            self.start_params()  # damage there is found now, not after the last step
        if begins:
            self._evaluate(state, 0)
            if self.warm_start is not None:
                self._save("rl", 0, state)
        self._phase(self.rl, state, done)
        return self._finish(state)

    # --- phases ---

    def _phase(self, phase: WarmStart | GroupRL, state: State, done: int) -> None:
        every, evaluations = self.config.checkpoint.every, self.config.eval.every if phase.name == "rl" else 0
        profiler = self.profiler if phase.name == "rl" else None
        begin = done
        with self.progress.phase(phase.name, begin, phase.steps) as bar:
            for step in range(begin, phase.steps):
                if profiler is not None:
                    profiler.before_step()
                metrics = phase.step(state, step)
                if step == begin:  # the phase's programs are compiled
                    release_freed_memory()
                if profiler is not None and (text := profiler.after_step(step + 1 == phase.steps)):
                    self.progress.line(text)
                self._record({"phase": phase.name, "step": step, **metrics})
                bar.update(metrics)
                done, last = step + 1, step + 1 == phase.steps
                if phase.name == "rl" and (last or (evaluations and done % evaluations == 0)):
                    self._evaluate(state, done)
                if (every and done % every == 0 and not (last and phase.name == "warm_start")) or (
                    last and phase.name == "rl"
                ):
                    self._save(phase.name, done, state)

    def _record(self, record: dict[str, Any]) -> None:
        self.metrics.write(record)
        if self.events is not None:
            self.events.write(record)

    def _begin_rl(self, params: Params, position: int) -> State:
        """State at RL step 0. Its parameters are the reference, and what the change is measured from."""
        if self.setup.reference or self.config.report.parameter_change:
            self.start.save(0, {"params": params})
        return init_state(params, self.model, self.rl.optimizer, position, self.mesh)

    def start_params(self) -> Params:
        """The parameters RL started from."""
        restored = self.start.restore({"params": self._abstract(self.rl)["params"]})
        if restored is None:
            raise CheckpointError(f"{self.start.directory} is gone; the run cannot be continued without it")
        return restored.state["params"]

    def _evaluate(self, state: State, done: int) -> None:
        task, fields = self.setup.task, self.config.eval
        if not hasattr(task, "example"):
            return
        start = time.perf_counter()
        assert self.setup.reward_fn is not None
        means, samples = evaluate(
            task,
            self.setup.reward_fn,
            self.rl.eval_sample,
            state.params,
            num_prompts=fields.num_prompts,
            batch_size=self.config.rl.num_prompts,
            max_prompt=self.config.rl.max_prompt,
            key=jax.random.fold_in(jax.random.fold_in(self.key, EVAL_STREAM), done),
            num_samples=fields.samples,
        )
        self.samples.write(*({"step": done, **sample} for sample in samples))
        if self.best is None or means["reward"] > self.best["reward"]:
            self.best = {"step": done, "reward": means["reward"]}
        record = {"phase": "eval", "step": done, **means, "time/step": time.perf_counter() - start}
        self._record(record)
        self.progress.line(f"held-out reward at RL step {done}: {means['reward']:.3f}")

    # --- checkpoints ---

    def _abstract(self, phase: WarmStart | GroupRL) -> dict[str, Any]:
        dtype, key = jnp.dtype(self.config.dtype), jax.random.key_data(self.key)
        return abstract_state(self.model, dtype, phase.optimizer, key, self.mesh)

    def _save(self, phase: str, done: int, state: State) -> None:
        step = done + (self.warm_start.steps if phase == "rl" and self.warm_start else 0)
        tree = {"params": state.params, "opt_state": state.opt_state, "key": jax.random.key_data(self.key)}
        sizes = {file.path.name: file.size() for file in (self.metrics, self.samples)}
        info = {"phase": phase, "done": done, "position": state.position, "best": self.best, "sizes": sizes}
        self.checkpoints.save(step, tree, info)

    def _restore(self) -> tuple[str, int, State]:
        """(phase, steps of it that are done, state): of the newest whole checkpoint, or of the beginning ("start" if
        that is the beginning of RL)."""

        def template(info: dict[str, Any]) -> dict[str, Any]:
            phase = self.warm_start if info["phase"] == "warm_start" else self.rl
            assert phase is not None
            return self._abstract(phase)

        restored = self.checkpoints.restore(template)
        sizes = restored.info["sizes"] if restored else {}
        for file in (self.metrics, self.samples):
            file.cut(sizes.get(file.path.name, 0))
        records = self.metrics.read()  # damage there is found now, not after the last step
        if self.events is not None:
            self.events.start(records)
        if restored is None:
            params = scale.place(self.setup.load_params(), self.model, self.mesh)
            if self.warm_start is None:
                return "start", 0, self._begin_rl(params, 0)
            return "warm_start", 0, init_state(params, self.model, self.warm_start.optimizer, 0, self.mesh)
        if not np.array_equal(restored.state["key"], jax.random.key_data(self.key)):
            raise CheckpointError(f"the checkpoint of step {restored.step} has the PRNG key of another seed")
        info, self.best = restored.info, restored.info["best"]
        self.progress.line(f"resumed from the checkpoint of step {restored.step} ({info['phase']} step {info['done']})")
        state = State(restored.state["params"], restored.state["opt_state"], info["position"])
        return info["phase"], info["done"], state

    # --- the end ---

    def _finish(self, state: State) -> Result:
        tokenizer = self.setup.tokenizer if hasattr(self.setup.tokenizer, "save") else None
        io.save_hf(self.workdir / "model", self.model, state.params, tokenizer)
        records = self.metrics.read()
        summary = summarize(records, self.best)
        if self.config.report.compare_dense:
            summary["replay_against_dense"] = self._compare(state)
        if self.config.report.parameter_change:
            summary["parameter_change"] = parameter_change(self.start_params(), state.params)
        write_report(self.workdir, records, summary)
        self.progress.line(format_summary(summary))
        self.progress.line(f"plots.png, summary.txt, metrics.jsonl, samples.jsonl and model/ are in {self.workdir}")
        return Result(state.params, self.model, self.setup.saved, summary, self.workdir)

    def _compare(self, state: State) -> dict[str, list[float]]:
        """(replay, dense) of one gradient step on a batch like those of the run."""
        mode = self.config.replay.prefix_grad
        options = build.replay_options(self.config, temperature=self.config.rl.temperature)
        del options["prefix_grad"]
        batch, objective = self.rl.batch(state), replay.as_objective(self.rl.objective)
        self.progress.line("timing one gradient step, replayed and dense; both are compiled first")
        dense, mine = compare(self.model, state.params, batch, objective, ("dense", mode), **options)
        clock = "CPU seconds" if jax.default_backend() == "cpu" else "seconds"
        fields = {"tokens": "token positions", "flops": "FLOPs", "seconds": clock, "temp_bytes": "temporary bytes"}
        table = {title: [getattr(mine, name), getattr(dense, name)] for name, title in fields.items()}
        if options["prefix_activations"] == "keep":  # what the trade of bytes for FLOPs costs
            table["of these: kept activations"] = [self._kept_bytes(batch, mode, options), 0]
        return table

    def _kept_bytes(self, batch: replay.Batch, mode: str | int, options: dict[str, Any]) -> int:
        chosen = replay.Options(prefix_grad=mode, **options)
        geometry = replay.make_geometry(chosen, batch.prompt_ids.shape[1], *batch.completion_ids.shape[1:])
        return replay.kept_bytes(self.model, chosen.remat_policy, geometry, jnp.dtype(self.config.dtype))
