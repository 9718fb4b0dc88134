"""Distillation and fine-tuning of a model that surgery has changed, in stages.

Every stage has its own context, batch, steps, learning rate and loss, and a fresh optimizer. As in `loop`, the order of
the text is a function of (seed, position) and files are cut back to the checkpoint, so that a killed run goes on to the
same bits.
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
from ml_collections import ConfigDict

from lsfuse import fusion, io
from lsfuse.fusion.describe import on_shapes
from lsfuse.fusion.distil import Model, Span, Teacher, make_teacher, match_blocks
from lsfuse.fusion.texts import Texts
from lsfuse.io.checkpoint import Checkpoints
from lsfuse.model import ModelConfig, abstract_params, count_params
from lsfuse.model.params import check_trainable
from lsfuse.train import workdir as files
from lsfuse.train.config import checked, resolve_config, today_s_fields
from lsfuse.train.distil_data import TextWindows, check_positions, evaluate, full, probe, read_text
from lsfuse.train.distil_report import format_distillation, summarize_distillation, write_distillation_report
from lsfuse.train.distil_schema import STAGE
from lsfuse.train.distil_step import Flat, first_trained_run, flatten, make_stage_update, trained_names, unflatten
from lsfuse.train.loop import Result
from lsfuse.train.metadata import write_run_files
from lsfuse.train.optimizer import make_optimizer, make_schedule
from lsfuse.train.progress import Progress
from lsfuse.train.step import to_host
from lsfuse.types import Params


@dataclasses.dataclass(frozen=True)
class Stage:
    """fields: of the config's entry, complete. names: paths of the trained leaves. first_run: of the child, see
    `distil_loss`, before the teacher has its say."""

    index: int
    fields: ConfigDict
    optimizer_fields: ConfigDict
    names: tuple[str, ...]
    first_run: int

    @property
    def label(self) -> str:
        return f"stage {self.index} ({self.fields.loss}, {self.fields.context} tokens)"

    def optimizer(self):
        return make_optimizer(self.optimizer_fields, self.fields.steps)


@dataclasses.dataclass(frozen=True)
class DistilSetup:
    """Everything that is fixed before the first step."""

    config: ConfigDict
    saved: dict[str, Any]
    text: TextWindows
    tokenizer: Any
    model: ModelConfig
    parent: ModelConfig
    load: Callable[[], tuple[Model, Model]]
    stages: tuple[Stage, ...]
    spans: tuple[Span, ...]
    held_out: Texts
    probe: Texts | None

    @property
    def needs_teacher(self) -> bool:
        return any(stage.fields.loss != "lm" for stage in self.stages)


def surgery(fields: Any) -> fusion.Transform:
    """The transform of a config's `surgery` fields; the identity where none is set."""
    parts = []
    if fields.remove_attention:
        parts.append(fusion.remove_attention(fields.remove_attention))
    if fields.fuse_ffn:
        parts.append(fusion.fuse_ffn(fields.fuse_ffn, fields.norm))
    return fusion.chain(*parts) if parts else lambda config, params: (config, params)


def set_up_distillation(
    config: ConfigDict | Mapping[str, Any],
    workdir: str | pathlib.Path | None = None,
    *,
    parent: Model | None = None,
    child: Model | None = None,
    tokenizer: Any = None,
    text: str | None = None,
    resume: bool = False,
) -> DistilSetup:
    """Resolves and checks everything; reads files, writes none. Arguments as in `distil`."""
    config = resolve_config({"program": "distil", **_plain(config)})
    if workdir is not None:
        files.check_workdir(pathlib.Path(workdir), None, resume)
    for field, value in (("model.path", config.model.path or parent), ("data.path", config.data.path or text)):
        if value is None:
            raise ValueError(f"config.{field} is not set")
    if text is not None and config.data.path is not None:
        raise ValueError(f"the text is given twice: config.data.path is {config.data.path}, and a text is passed")
    for passed_in in (parent, child):
        if passed_in is not None:
            check_trainable(passed_in[1])
    if tokenizer is None:
        if config.model.path is None:
            raise ValueError("a parent that is passed needs a tokenizer passed with it")
        tokenizer = io.Tokenizer.load(config.model.path)
    parent_config = parent[0] if parent else io.check_hf(config.model.path)
    io.check_vocab(tokenizer, parent_config)
    model, load = _models(config, parent_config, parent, child)
    spans = tuple(s for s in match_blocks(model, parent_config) if s.replaced)
    windows = TextWindows(read_text(config.data.path) if text is None else text, tokenizer, config.data.held_out)
    stages = _stages(config, model, spans, windows)
    for field, size in (("eval.window", config.eval.window), ("probe.context", config.probe.context)):
        if size is not None:
            check_positions(field, size, model)
    held_out = windows.held_out_windows(config.eval.window, config.eval.count, "eval")
    context = config.probe.context or max(stage.fields.context for stage in stages)
    probed = windows.held_out_windows(context, config.probe.count, "probe") if config.probe.count else None
    given = (("parent", parent), ("child", child), ("text", text))
    passed = [name for name, value in given if value is not None]
    facts = {"passed": passed, "text_sha256": windows.sha256}
    saved = json.loads(json.dumps({**config.to_dict(), **facts, "stages": [s.fields.to_dict() for s in stages]}))
    if workdir is not None:
        files.check_workdir(pathlib.Path(workdir), saved, resume)
    return DistilSetup(config, saved, windows, tokenizer, model, parent_config, load, stages, spans, held_out, probed)


def _plain(config: ConfigDict | Mapping[str, Any]) -> dict[str, Any]:
    return config.to_dict() if isinstance(config, ConfigDict) else dict(config)


def _models(config: ConfigDict, parent_config: ModelConfig, parent: Model | None, child: Model | None):
    """(the child's config, a function that loads parent and child)."""
    dtype, transform, path = jnp.dtype(config.dtype), surgery(config.surgery), config.model.child
    if bool(path) + bool(child) + bool(config.surgery.remove_attention or config.surgery.fuse_ffn) > 1:
        raise ValueError("the child is given twice: take one of config.model.child, config.surgery and a child passed")
    if child is not None:
        model = child[0]
    elif path is not None:
        model = io.check_hf(path)
    else:
        try:
            model, _ = on_shapes(transform, parent_config, abstract_params(parent_config, dtype))
        except ValueError as error:
            raise ValueError(f"config.surgery: {error}") from None

    def load() -> tuple[Model, Model]:
        first = parent or io.load_hf(config.model.path, dtype)
        return first, child or (io.load_hf(path, dtype) if path is not None else transform(*first))

    return model, load


def _stages(config: ConfigDict, model: ModelConfig, spans: tuple[Span, ...], text: TextWindows) -> tuple[Stage, ...]:
    if not config.stages:
        raise ValueError("config.stages is empty; give at least one, for example ({'loss': 'distil', 'steps': 100},)")
    params = abstract_params(model, jnp.dtype(config.dtype))
    stages: list[Stage] = []
    ever: set[str] = set()
    for i, given in enumerate(config.stages):
        where = f"stages[{i}]"
        if not isinstance(given, Mapping) or (unknown := sorted(set(given) - set(STAGE))):
            what = f"has no field {unknown[0]!r}" if isinstance(given, Mapping) else f"must be a dict, got {given!r}"
            raise ValueError(f"config.{where} {what}; fields: {', '.join(STAGE)}")
        values = {k: checked(f"{where}.{k}", given.get(k, field.default), field) for k, field in STAGE.items()}
        fields = ConfigDict(values)
        check_positions(f"{where}.context", fields.context, model)
        optimizer = ConfigDict({**config.optimizer.to_dict(), "learning_rate": fields.learning_rate, "trainable": None})
        try:
            text.size(fields.context)
            make_schedule(optimizer, fields.steps)
            names = trained_names(params, model, fields.loss, fields.trainable, spans)
        except ValueError as error:
            raise ValueError(f"config.{where}: {error}") from None
        # What an earlier stage has trained is the teacher's no more.
        ever |= set(names)
        stages.append(Stage(i, fields, optimizer, tuple(names), first_trained_run(sorted(ever), model)))
    return tuple(stages)


def distil(
    config: ConfigDict | Mapping[str, Any],
    workdir: str | pathlib.Path,
    *,
    parent: Model | None = None,
    child: Model | None = None,
    tokenizer: Any = None,
    text: str | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Result:
    """Trains the child as `config` says and leaves everything in `workdir`: metrics.jsonl, checkpoints/, model/
    (Hugging Face layout), summary.json, summary.txt, plots.png.

    Args:
        config: from `default_config(DISTIL_SCHEMA)`, `load_config(file)`, or a plain nested dict of the fields that
            differ. `stages` says what is done; without surgery or child, "lm" is plain fine-tuning.
        workdir: a directory that is empty or not there; with `resume`, one that holds a run of the same config.
        parent, child: (config, params), instead of the config's; tokenizer: likewise (anything with `encode` and
            `vocab_size`).
        text: instead of the file that `data.path` names.

    Raises:
        ValueError, FileExistsError, FileNotFoundError: anything wrong with what was given, before any work.
        CheckpointError: a checkpoint cannot be written, or none can be read.
        OSError: a full disk; what was saved is untouched, and `resume` goes on from it.
        FloatingPointError: loss or gradient is not finite.
    """
    workdir = pathlib.Path(workdir).absolute()
    setup = set_up_distillation(
        config, workdir, parent=parent, child=child, tokenizer=tokenizer, text=text, resume=resume
    )
    del parent, child  # `setup` has them
    return run_distillation(setup, workdir, resume=resume, progress=progress)


def run_distillation(setup: DistilSetup, workdir: pathlib.Path, *, resume: bool, progress: bool) -> Result:
    """`distil` of what was set up. Of what `setup.load` returns it keeps only what is trained, or differs between
    teacher and student: whoever holds the parent besides holds it twice."""
    with files.full_disk(workdir), files.locked(workdir):
        files.check_workdir(workdir, setup.saved, resume)
        write_run_files(workdir, setup.saved)
        with contextlib.ExitStack() as stack:
            metrics = stack.enter_context(files.JsonLines(workdir / "metrics.jsonl"))
            return _Run(setup, workdir, metrics, Progress(progress)).run()


class _Run:
    """One session of a run."""

    def __init__(self, setup: DistilSetup, workdir: pathlib.Path, metrics: files.JsonLines, progress: Progress):
        self.setup, self.workdir, self.metrics, self.progress = setup, workdir, metrics, progress
        self.model = setup.model
        self.checkpoints = Checkpoints(
            workdir / "checkpoints", setup.saved, setup.config.checkpoint.keep, today_s_fields(setup.saved)
        )
        self.teacher: Teacher | None = None
        self.position = 0

    def run(self) -> Result:
        params, first, done, opt_state = self._restore()
        if opt_state is None:
            self._evaluate(params, 0, 0, last=True)
        held = [(params, opt_state)]
        del params, opt_state
        for stage in self.setup.stages[first:]:
            held.append((self._stage(stage, done, held), None))
            done = 0
        return self._finish(held.pop()[0])

    def _stage(self, stage: Stage, done: int, held: list[tuple[Params, Any]]) -> Params:
        """held: parameters and the optimizer's state. Popped, so that no frame holds them as they were before."""
        params, opt_state = held.pop()
        fields, config = stage.fields, self.setup.config
        optimizer, schedule = stage.optimizer(), make_schedule(stage.optimizer_fields, fields.steps)
        flat = flatten(params)
        # Copies: an update donates what it trains, and some of it is the teacher's as well.
        trained: Flat = {name: jnp.copy(flat[name]) for name in stage.names}
        frozen: Flat = {name: leaf for name, leaf in flat.items() if name not in trained}
        del flat, params
        opt_state = jax.jit(optimizer.init)(trained) if opt_state is None else opt_state
        update = make_stage_update(
            self.model,
            optimizer,
            fields.loss,
            spans=self.setup.spans,
            first_run=min(stage.first_run, self.teacher.leading if self.teacher else 0),
            cosine_weight=fields.cosine_weight,
            policy=config.remat_policy,
        )
        teacher = self.teacher if fields.loss != "lm" else None
        with self.progress.phase(stage.label, done, fields.steps) as bar:
            for step in range(done, fields.steps):
                start = time.perf_counter()
                ids, position = self.setup.text.batch(fields.context, fields.batch, config.seed, self.position)
                trained, opt_state, device = update(trained, opt_state, frozen, teacher, *full(ids))
                host = to_host(device, f"{stage.label}, step {step}")
                self.position, done = position, step + 1
                seconds = time.perf_counter() - start
                rate = {"learning_rate": float(schedule(step)), "tokens": ids.size}
                times = {"time/step": seconds, "time/tokens_per_s": ids.size / seconds}
                record = {"phase": fields.loss, "stage": stage.index, "step": step, **host, **rate, **times}
                self.metrics.write(record)
                bar.update(record)
                last, every = done == fields.steps, config.eval.every
                if last or (every and done % every == 0):
                    self._evaluate(unflatten({**frozen, **trained}, self.model), stage.index, done, last)
                if last or (config.checkpoint.every and done % config.checkpoint.every == 0):
                    self._save(stage, done, {**frozen, **trained}, opt_state)
        return unflatten({**frozen, **trained}, self.model)

    def _evaluate(self, params: Params, stage: int, done: int, last: bool) -> None:
        """On the held-out text; `last`: the probe, too."""
        start = time.perf_counter()
        found = evaluate(params, self.model, self.teacher, self.setup.held_out)
        if last and self.setup.probe is not None:
            found |= probe(params, self.model, self.setup.probe)
        record = {"phase": "eval", "stage": stage, "step": done, **found, "time/step": time.perf_counter() - start}
        self.metrics.write(record)
        shown = ", ".join(f"{name} {found[name]:.4f}" for name in ("kl", "perplexity") if name in found)
        self.progress.line(f"held out at stage {stage} step {done}: {shown}")

    def _save(self, stage: Stage, done: int, flat: Flat, opt_state: Any) -> None:
        before = sum(s.fields.steps for s in self.setup.stages[: stage.index])
        tree = {"params": unflatten(flat, self.model), "opt_state": opt_state}
        info = {"stage": stage.index, "done": done, "position": self.position, "size": self.metrics.size()}
        self.checkpoints.save(before + done, tree, info)

    def _restore(self) -> tuple[Params, int, int, Any]:
        """(params, stage, steps of it that are done, optimizer state; None at the very beginning)."""
        params = abstract_params(self.model, jnp.dtype(self.setup.config.dtype))

        def template(info: dict[str, Any]) -> dict[str, Any]:
            stage = self.setup.stages[info["stage"]]
            trained = {name: leaf for name, leaf in flatten(params).items() if name in stage.names}
            return {"params": params, "opt_state": jax.eval_shape(stage.optimizer().init, trained)}

        restored = self.checkpoints.restore(template)
        self.metrics.cut(restored.info["size"] if restored else 0)
        child = None if restored is None else (self.model, restored.state["params"])
        if child is None or self.setup.needs_teacher:
            parent, first = self.setup.load()
            child = child or first
            if self.setup.needs_teacher:
                self.teacher = make_teacher(parent, child)
        if restored is None:
            return child[1], 0, 0, None
        info, self.position = restored.info, restored.info["position"]
        self.progress.line(f"resumed from the checkpoint of stage {info['stage']} step {info['done']}")
        return child[1], info["stage"], info["done"], restored.state["opt_state"]

    def _finish(self, params: Params) -> Result:
        tokenizer = self.setup.tokenizer if hasattr(self.setup.tokenizer, "save") else None
        io.save_hf(self.workdir / "model", self.model, params, tokenizer)
        records = self.metrics.read()
        summary = summarize_distillation(records)
        write_distillation_report(self.workdir, records, summary)
        self.progress.line(format_distillation(summary))
        return Result(params, self.model, self.setup.saved, summary, self.workdir)


def describe_distillation(config: ConfigDict | Mapping[str, Any]) -> str:
    """Text for people: the resolved config and what every stage trains and reads. Nothing is run or written."""
    setup = set_up_distillation(config)
    lines = [json.dumps(setup.saved, indent=2), ""]
    lines.append(f"child: {count_params(setup.model):,} parameters in {setup.model.num_blocks} blocks")
    return "\n".join([*lines, *describe_stages(setup)])


def describe_stages(setup: DistilSetup) -> list[str]:
    """One line for people to every stage."""
    shapes = flatten(abstract_params(setup.model, jnp.dtype(setup.config.dtype)))
    sizes = [sum(shapes[name].size for name in stage.names) for stage in setup.stages]
    return [
        f"{s.label}: {s.fields.steps} steps of {s.fields.batch} windows, {size:,} parameters trained"
        for s, size in zip(setup.stages, sizes, strict=True)
    ]
