"""What is fixed, and checked, before the first stage of a fusion runs; and its dry run."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from lsfuse import data, fusion, io
from lsfuse.fusion.describe import on_shapes
from lsfuse.fusion.distil import Model
from lsfuse.fusion.texts import Texts
from lsfuse.model import ModelConfig, abstract_params
from lsfuse.model.params import check_trainable
from lsfuse.train import build
from lsfuse.train import workdir as files
from lsfuse.train.config import resolve_config
from lsfuse.train.distil import DistilSetup, describe_stages, set_up_distillation, surgery
from lsfuse.train.distil_data import TextWindows, check_positions, read_text
from lsfuse.train.fuse_schema import STAGES

# Stage -> those whose results it reads; "warm_start" and "distil" count where the config has any training for them,
# "time" where it has repeats.
NEEDS = {
    "warm_start": (),
    "analyse": ("warm_start",),
    "plan": ("warm_start", "analyse"),
    "fuse": ("warm_start", "plan"),
    "evaluate": ("warm_start", "fuse"),
    "time": ("warm_start", "fuse"),
    "distil": ("warm_start", "fuse"),
    "export": ("warm_start", "fuse", "distil"),
    "report": ("warm_start", "plan", "evaluate"),
}


@dataclasses.dataclass(frozen=True)
class FuseSetup:
    """stages: that this session runs, in order. work: that the config has work for. text: all of it; windows: the same
    without the held-out characters. analysed, held_out: windows for the analysis and the tables; prompts: [count,
    prompt], of which greedy continuations are compared. load: the parent, before any training."""

    config: ConfigDict
    saved: dict[str, Any]
    stages: tuple[str, ...]
    work: tuple[str, ...]
    text: str
    held_out_characters: tuple[int, int] | None
    windows: TextWindows
    tokenizer: Any
    parent: ModelConfig
    load: Callable[[], Model]
    analysed: Texts
    held_out: Texts
    prompts: Texts

    def training(self, phase: str) -> dict[str, Any]:
        """The config of the distillation loop for "warm_start" or "distil"."""
        config = self.config.to_dict()
        shared = {name: config[name] for name in ("seed", "dtype", "remat_policy", "eval", "probe", "checkpoint")}
        held_out = {"data": {"held_out": self.held_out_characters}}
        return {**shared, **held_out, **{name: config[phase][name] for name in ("stages", "optimizer")}}

    @property
    def explicit(self) -> bool:
        """Whether the config itself says all that is done to the model."""
        return bool(self.config.plan.remove_attention and self.config.plan.fuse_ffn)


def set_up_fusion(
    config: ConfigDict | Mapping[str, Any],
    workdir: str | pathlib.Path | None = None,
    *,
    parent: Model | None = None,
    tokenizer: Any = None,
    resume: bool = False,
) -> FuseSetup:
    """Resolves and checks everything; reads files, writes none. Arguments as in `fuse`."""
    given = config.to_dict() if isinstance(config, ConfigDict) else dict(config)
    config = resolve_config({"program": "fuse", **given})
    if workdir is not None:
        files.check_workdir(pathlib.Path(workdir), None, resume)
    text, tokenizer = _text(config, parent, tokenizer)
    held_out = config.data.held_out or _last_sentences(config, text)
    windows = TextWindows(text, tokenizer, held_out)
    model, load = _parent(config, tokenizer, parent)
    facts = {"passed": ["parent"] if parent else [], "text_sha256": windows.sha256}
    # Which of the stages a session runs says nothing about what they leave.
    saved = json.loads(json.dumps({**config.to_dict(), **facts, "stages": ()}))
    asked = {"warm_start": config.warm_start.stages, "distil": config.distil.stages, "time": config.time.repeats}
    work = tuple(s for s in STAGES if asked.get(s, True))
    setup = FuseSetup(
        config=config,
        saved=saved,
        stages=tuple(s for s in work if not config.stages or s in config.stages),
        work=work,
        text=text,
        held_out_characters=held_out,
        windows=windows,
        tokenizer=tokenizer,
        parent=model,
        load=load,
        analysed=_analysed(config, windows),
        held_out=windows.held_out_windows(config.eval.window, config.eval.count, "eval"),
        prompts=windows.held_out_windows(config.generate.prompt, config.generate.count, "generate"),
    )
    _check(setup)
    if workdir is not None:
        files.check_workdir(pathlib.Path(workdir), saved, resume)
        check_inputs(setup, pathlib.Path(workdir))
    return setup


def _text(config: ConfigDict, parent: Model | None, tokenizer: Any) -> tuple[str, Any]:
    path, count = config.data.path, config.data.sentences
    if (path is None) == (count is None):
        which = "both set; take one" if path else "not set; name a text file, or let sentences be generated"
        raise ValueError(f"config.data.path and config.data.sentences are {which}")
    if count is not None and config.data.held_out is not None:
        raise ValueError("config.data.held_out is of a text file; generated sentences hold their last twentieth out")
    if parent is not None and tokenizer is None:
        raise ValueError("a parent that is passed needs a tokenizer passed with it")
    if parent is None and config.model.path is None and not config.warm_start.stages:
        raise ValueError("config.model.path is not set; name a checkpoint, or train a model first (warm_start.stages)")
    tokenizer = tokenizer or build.make_tokenizer(config)
    if tokenizer is None and path is not None:
        raise ValueError("config.model.path is not set: a model of random parameters reads generated sentences only")
    text = read_text(path) if path is not None else data.sentences(count, config.seed)
    return text, tokenizer or data.sentence_tokenizer()


def _last_sentences(config: ConfigDict, text: str) -> tuple[int, int] | None:
    """The last twentieth of generated text, as characters, from the beginning of a sentence: half a word has no token.
    None for a file's, where any beginning will do."""
    return None if config.data.sentences is None else (text.rfind("\n", 0, len(text) - len(text) // 20) + 1, len(text))


def _parent(config: ConfigDict, tokenizer: Any, parent: Model | None) -> tuple[ModelConfig, Callable[[], Model]]:
    """The parent's config, and a function that loads it."""
    if parent is not None:
        check_trainable(parent[1])
        io.check_vocab(tokenizer, parent[0])
        return parent[0], lambda: parent
    model, load_params = build.make_model(config, tokenizer)
    return model, lambda: (model, load_params())


def _analysed(config: ConfigDict, windows: TextWindows) -> Texts:
    """Windows of the text outside the held-out characters, drawn from all over it."""
    window, count = config.analysis.window, config.analysis.count
    try:
        size = windows.size(window)
    except ValueError as error:
        raise ValueError(f"config.analysis.window: {error}") from None
    if size < count:
        raise ValueError(f"config.analysis.count: the text has {size} windows of {window} tokens, not {count}")
    ids, _ = windows.batch(window, count, config.seed, 0)
    return Texts(ids, np.full(count, window, np.int32))


def _check(setup: FuseSetup) -> None:
    """Whatever can be known of later stages before any work."""
    config, model = setup.config, setup.parent
    for stage in config.stages:
        if stage not in setup.work:
            lacking = "time.repeats is 0" if stage == "time" else f"{stage}.stages is empty"
            raise ValueError(f'config.stages has "{stage}", but config.{lacking}: there is nothing to do')
    for name, size in (
        ("analysis.window", config.analysis.window),
        ("eval.window", config.eval.window),
        ("probe.context", config.probe.context or 0),
        ("generate.prompt and generate.tokens", config.generate.prompt + config.generate.tokens),
        ("time.context and time.steps", config.time.context + config.time.steps if "time" in setup.stages else 0),
    ):
        check_positions(name, size, model)
    child = child_of(setup, likely_plan(setup))
    shapes = model, abstract_params(model, jnp.dtype(config.dtype))
    for phase, changes in (("warm_start", {}), ("distil", {"child": child})):
        if phase not in setup.work:
            continue
        try:
            training(setup, phase, parent=shapes, **changes)
        except ValueError as error:
            raise ValueError(f"config.{phase}: {str(error).removeprefix('config.')}") from None


def training(setup: FuseSetup, phase: str, *, parent: Model, child: Model | None = None) -> DistilSetup:
    """The set-up of a phase's training. Raises what it raises."""
    passed = {"tokenizer": setup.tokenizer, "text": setup.text}
    return set_up_distillation(setup.training(phase), parent=parent, child=child, **passed)


def likely_plan(setup: FuseSetup) -> dict[str, Any]:
    """The config's plan, or, where the analysis is to find it, one of its kind: enough to check the rest by.

    Raises: ValueError, naming the field, for blocks that are not there.
    """
    plan, model = setup.config.plan, setup.parent
    removed = plan.remove_attention
    if not removed:
        scores = np.array([0.0 if block.has_attention else np.nan for block in model.blocks])
        try:
            removed = fusion.cheapest_run(scores, plan.num_attentions)
        except ValueError as error:
            raise ValueError(f"config.plan.num_attentions: {error}") from None
    try:
        free = fusion.remove_attention(removed)
        spans = plan.fuse_ffn or fusion.fusion_spans(on_shapes(free, model)[0], min_members=1)
    except ValueError as error:
        raise ValueError(f"config.plan.remove_attention {removed!r}: {error}") from None
    return {"remove_attention": tuple(removed), "fuse_ffn": tuple(spans), "norm": plan.norm}


def child_of(setup: FuseSetup, plan: Mapping[str, Any]) -> Model:
    """What a plan makes of the parent, as config and shapes. Raises: ValueError, naming the blocks, if it cannot."""
    shapes = abstract_params(setup.parent, jnp.dtype(setup.config.dtype))
    try:
        return on_shapes(surgery(ConfigDict(dict(plan))), setup.parent, shapes)
    except ValueError as error:
        raise ValueError(f"config.plan: {error}") from None


RESULTS = {
    "warm_start": "parent/summary.json",
    "analyse": "analysis.json",
    "plan": "plan.json",
    "fuse": "fused.json",
    "evaluate": "table.json",
    "time": "time.json",
    "distil": "distilled.json",
    "export": "export.json",
}


def check_inputs(setup: FuseSetup, workdir: pathlib.Path) -> None:
    """Raises ValueError for a stage whose inputs neither lie in `workdir` nor are made by this session."""
    for stage in setup.stages:
        for needed in NEEDS[stage]:
            if needed in setup.work and needed not in setup.stages and not (workdir / RESULTS[needed]).is_file():
                raise ValueError(
                    f'stage "{stage}" reads {RESULTS[needed]} of stage "{needed}", which {workdir} lacks; add'
                    f' "{needed}" to config.stages'
                )


def describe_fusion(config: ConfigDict | Mapping[str, Any]) -> str:
    """Text for people: the resolved config, what each stage does, and, if the config gives the plan, blocks before and
    after. Nothing is run or written."""
    setup = set_up_fusion(config)
    model, plan = setup.parent, setup.config.plan
    lines = [json.dumps(setup.saved, indent=2), "", f"stages: {', '.join(setup.stages)}"]
    analysed, blocks = setup.analysed, model.num_blocks
    lines.append(
        f"analyse: {analysed.num_tokens:,} tokens; {2 * blocks} passes from a block to the end for the scores of"
        f" {blocks} attentions and the dependencies of {blocks} blocks, and one for each block of the"
        " attention-free stretch, to the stretch's end"
    )
    found = likely_plan(setup)
    likely = child_of(setup, found)
    said = f"attention of {list(found['remove_attention'])} removed, FFNs {list(found['fuse_ffn'])} fused"
    rule = f"by the rule, {plan.num_attentions} attentions in a row and spans of M at most {plan.threshold}"
    lines.append(f"plan: {said if setup.explicit else rule}")
    lines.append(f"evaluate: {setup.held_out.num_tokens:,} tokens; {len(setup.prompts)} continuations")
    if "time" in setup.stages:
        fields = setup.config.time
        lines.append(
            f"time: {fields.repeats} rounds of {fields.steps} tokens for {fields.batch} sequences, {fields.context}"
            " tokens each, decoded by three models"
        )
    shapes = model, abstract_params(model, jnp.dtype(setup.config.dtype))
    for phase, child in (("warm_start", None), ("distil", likely)):
        if phase in setup.stages:
            kind = "" if setup.explicit or child is None else " (of a plan of that kind)"
            told = describe_stages(training(setup, phase, parent=shapes, child=child))
            lines += [f"{phase}: {line}{kind}" for line in told]
    if setup.explicit:
        lines += ["", fusion.dry_run(surgery(ConfigDict(found)), model, shapes[1])]
    return "\n".join(lines)
