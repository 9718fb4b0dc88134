"""Combinations of fields that no run could use: refused before any work, not at the step that would meet them."""

from typing import Any

from ml_collections import ConfigDict

from lsfuse import data, scale
from lsfuse.model import ModelConfig
from lsfuse.train.build import Stage, advantage_options
from lsfuse.types import AnyMesh


def check_objective(config: ConfigDict, task: Any) -> None:
    """Raises ValueError if the config's objective, or its baseline, cannot be computed from the groups of `task`."""
    name, options = config.rl.objective.name, advantage_options(config)
    offline = not hasattr(task, "example")
    if name == "dpo":
        if not offline:
            raise ValueError(
                'config.rl.objective.name is "dpo", which reads pairs (chosen, rejected) of groups sampled elsewhere:'
                f' set config.task.name to "groups"; {type(task).__name__} samples responses that are no pairs'
            )
        odd = next((i for i, size in _sizes(task) if size % 2), None)
        if odd is not None:
            raise ValueError(
                f'{_where(task, odd)}: config.rl.objective.name "dpo" reads pairs (chosen, rejected, …), but the group'
                f" has {task[odd].size} responses; group sizes must be even"
            )
    if name == "nll" and not offline:
        raise ValueError(
            'config.rl.objective.name is "nll", which raises the likelihood of given responses: set config.task.name to'
            f' "groups", or train on supervised targets by config.warm_start; {type(task).__name__} samples responses'
            " of the model itself, good and bad alike"
        )
    if name in ("dpo", "nll"):
        return
    if options["baseline"] == "none" and options["scale"] == "std":
        raise ValueError(
            'config.rl.advantage_baseline "none" does not go with advantage_scale "std" (equal rewards would be divided'
            ' by nothing); set config.rl.advantage_scale to "none"'
        )
    if not offline:
        return
    if task[0].rewards is None and task[0].advantages is None:
        raise ValueError(f'{_where(task, 0)}: config.rl.objective.name "{name}" needs rewards, and the group has none')
    one = next((i for i, size in _sizes(task) if size == 1), None)
    if one is not None and options["baseline"] == "leave_one_out":
        raise ValueError(
            f'{_where(task, one)}: the group has one response, but the baseline "leave_one_out" of "{name}" is the mean'
            ' of the others; leave the group out, or set config.rl.advantage_baseline to "batch"'
        )
    if options["baseline"] == "group" and task[0].advantages is None and all(size == 1 for _, size in _sizes(task)):
        raise ValueError(
            f'{_where(task, 0)}: this group and all others have one response, but the baseline "group" of "{name}" is'
            ' the mean of a group: every advantage would be 0; set config.rl.advantage_baseline to "batch"'
        )


def check_groups(config: ConfigDict, task: Any) -> None:
    """Raises ValueError for groups sampled elsewhere that do not fit the run, and for fields that act on sampling."""
    fields, offline = config.rl, not hasattr(task, "example")
    if offline:
        if not len(task):
            raise ValueError("there are no groups to train on")
        if isinstance(task, data.Groups):
            task.check_alike()
            names = ("max_prompt", "max_response", "num_generations")
            for name, needed in zip(names, task.largest, strict=True):
                if needed > fields[name]:
                    raise ValueError(f"config.rl.{name} is {fields[name]}, but the groups of {task} need {needed}")
        for name in ("dynamic_sampling", "overlong_buffer"):
            if fields[name]:
                raise ValueError(f"config.rl.{name} is {fields[name]}, but groups sampled elsewhere are not sampled")
    if fields.dynamic_sampling and fields.num_generations == 1:
        raise ValueError(
            f"config.rl.dynamic_sampling is {fields.dynamic_sampling}, but a group of num_generations 1 never has"
            " rewards that differ; take two or more"
        )
    if (buffer := fields.overlong_buffer) is not None and buffer > fields.max_response:
        raise ValueError(f"config.rl.overlong_buffer {buffer} exceeds config.rl.max_response {fields.max_response}")


def check_correction(config: ConfigDict, task: Any) -> None:
    """Raises ValueError for an importance correction of nothing, or by nothing, and for updates without a ratio."""
    fields = config.rl
    ratioless = ("dpo", "nll", "reinforce", "rloo")
    if fields.old_logps == "none" and fields.num_iterations > 1 and fields.objective.name not in ratioless:
        raise ValueError(
            f'config.rl.old_logps is "none", but config.rl.num_iterations is {fields.num_iterations}: from the second'
            f' update on a batch "{fields.objective.name}" needs the log-probs of the policy that sampled it; take'
            ' "auto", "sampler" or "score"'
        )
    if (level := fields.importance_correction) == "none":
        return
    name = fields.objective.name
    where = f'config.rl.importance_correction is "{level}", but'
    if fields.old_logps == "none":
        raise ValueError(f'{where} config.rl.old_logps is "none", so that there is no ratio to correct; take "auto"')
    if name in ("dpo", "nll"):
        raise ValueError(f'{where} it weights advantages, and objective "{name}" has none')
    if name == "gspo" and level == "token":
        raise ValueError(f'{where} objective "gspo" takes one weight a response; set it to "sequence"')
    if not fields.importance_cap > 0:
        raise ValueError(f"{where} config.rl.importance_cap, the largest weight, is {fields.importance_cap}")
    if not hasattr(task, "example") and task[0].old_per_token_logps is None:
        raise ValueError(
            f"{where} the groups have no old_logps, the log-probs of the engine that sampled them ({_where(task, 0)})"
        )


def check_mesh(config: ConfigDict, model: ModelConfig, mesh: AnyMesh | None) -> None:
    """Raises ValueError for a mesh that does not divide the model or a step's groups, and for what runs on none."""
    if mesh is None:
        return
    groups = {"config.rl.num_prompts": config.rl.num_prompts}
    if config.warm_start.stages:
        sizes = {f"config.warm_start.stages[{i}]: num_prompts": s[1] for i, s in enumerate(config.warm_start.stages)}
        groups |= sizes
    elif config.warm_start.steps:
        groups["config.warm_start.num_prompts"] = config.warm_start.num_prompts
    scale.check_mesh(model, mesh, groups)
    tokens = mesh.shape["context"] * mesh.shape["fsdp"]
    if config.replay.prefix != "prompt" and tokens > 1:
        raise ValueError(
            f'config.replay.prefix is "{config.replay.prefix}", which runs on meshes that split groups and heads only,'
            f" but config.mesh.context x fsdp is {tokens}; take \"prompt\", or data and tensor"
        )
    if config.report.compare_dense:
        raise ValueError(
            "config.report.compare_dense measures one device, but config.mesh has several; set it to False, or the mesh"
            " to 1"
        )


def check_warm_start(config: ConfigDict, task: Any, stages: list[Stage]) -> None:
    """Raises ValueError if the task has no supervised targets, or they are longer than config.warm_start allows."""
    if stages and not hasattr(task, "example"):
        raise ValueError(
            "config.warm_start.steps or stages ask for a warm start, but groups sampled elsewhere have no supervised"
            ' targets; objective "nll" trains on their responses'
        )
    for stage in stages:
        if hasattr(stage.task, "max_supervised_length"):
            longest = stage.task.max_supervised_length()
        else:
            longest = len(data.sft_group(stage.task, "train", 0).completion_ids[0])
        if longest > stage.max_response:
            raise ValueError(
                f"config.warm_start.max_response is {config.warm_start.max_response}, but a supervised target has"
                f" {longest} tokens"
            )


def _sizes(task: Any) -> Any:
    """(index, responses) of every group."""
    return enumerate(task.group_sizes if isinstance(task, data.Groups) else (group.size for group in task))


def _where(task: Any, index: int) -> str:
    return task[index].name or f"group {index}"
