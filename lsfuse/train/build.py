"""From a resolved config to the objects of a run: task, model, parameters, objective."""

import contextlib
import dataclasses
import inspect
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from lsfuse import data, io, rl
from lsfuse.model import ModelConfig, abstract_params, init_params, uniform_blocks
from lsfuse.replay import Objective, choose_prefix_activations
from lsfuse.replay import Options as ReplayOptions
from lsfuse.train.optimizer import trained
from lsfuse.train.optimizer_names import check_optimizer
from lsfuse.types import Params


def make_tokenizer(config: ConfigDict) -> Any | None:
    """The checkpoint's tokenizer, or None without one."""
    if (path := config.model.path) is None:
        return None
    with _naming_path(path):
        return io.Tokenizer.load(path)


@contextlib.contextmanager
def _naming_path(path: str) -> Iterator[None]:
    """Errors about a checkpoint's files say which field gave the folder."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        kind = next(k for k in (FileNotFoundError, OSError, ImportError, ValueError) if isinstance(error, k))
        raise kind(f"config.model.path {path!r}: {error}") from error


def make_task(config: ConfigDict, tokenizer: Any | None) -> Any:
    """The task of the config; for "groups", the groups themselves. Reads and checks all of its files.

    Raises: ValueError or FileNotFoundError naming the field, for files that are not given, not there or not right.
    """
    name, fields = config.task.name, config.task[config.task.name]
    if name == "retrieval":
        return data.RetrievalTask(**fields, seed=config.seed)
    if name == "dataset":
        return _dataset(config, tokenizer)
    if tokenizer is None:
        raise ValueError(f'task "{name}" needs a tokenizer: set config.model.path to a checkpoint')
    if name == "reasoning_gym":
        if fields.dataset is None:
            raise ValueError("config.task.reasoning_gym.dataset is not set; give a name such as chain_sum")
        try:
            given = {**fields, "options": dict(fields.options)}
        except (TypeError, ValueError):
            raise ValueError(
                f"config.task.reasoning_gym.options must be ((name, value), …), got {fields.options!r}"
            ) from None
        return data.ReasoningGymTask(**given, tokenizer=tokenizer, seed=config.seed)
    for field in [f for f in fields if f.endswith("path")]:
        if fields[field] is None:
            raise ValueError(f"config.task.{name}.{field} is not set; give the path of a jsonl file")
        if not pathlib.Path(fields[field]).is_file():
            raise FileNotFoundError(f"config.task.{name}.{field}: there is no file {fields[field]}")
    if name == "gsm8k":
        return data.Gsm8kTask(**fields, tokenizer=tokenizer, max_prompt_length=config.rl.max_prompt)
    return data.JsonlGroups(
        fields.path,
        tokenizer,
        append_stop=fields.append_stop,
        max_prompt=config.rl.max_prompt,
        max_response=config.rl.max_response,
    )


def _dataset(config: ConfigDict, tokenizer: Any | None) -> Any:
    fields, gsm8k = config.task.dataset, config.task.gsm8k
    if fields.name is None:
        raise ValueError("config.task.dataset.name is not set; give gsm8k, retrieval, prompts/NAME or groups/NAME")
    return data.open_dataset(
        **fields,
        tokenizer=tokenizer,
        max_prompt=config.rl.max_prompt,
        max_response=config.rl.max_response,
        append_stop=config.task.groups.append_stop,
        **{k: v for k, v in gsm8k.items() if not k.endswith("path")},
    )


def make_model(config: ConfigDict, tokenizer: Any) -> tuple[ModelConfig, Callable[[], Params]]:
    """The model, and a function that makes its first parameters: the checkpoint's, or random ones from the seed.

    Raises: ValueError if the tokenizer has more ids than the model.
    """
    dtype, path = jnp.dtype(config.dtype), config.model.path
    if path is not None:
        with _naming_path(path):
            model = io.check_hf(path)
            if tokenizer is not None:
                io.check_vocab(tokenizer, model)
        return model, lambda: io.load_hf(path, dtype=dtype)[1]
    if tokenizer is None:
        raise ValueError(
            "a model of random parameters takes its vocabulary from the task's tokenizer, and there is none"
        )
    model = random_model(config, tokenizer)
    io.check_vocab(tokenizer, model)
    key = jax.random.fold_in(jax.random.key(config.seed), 0)
    return model, lambda: jax.jit(init_params, static_argnums=(0, 2))(model, key, dtype)


def random_model(config: ConfigDict, tokenizer: Any) -> ModelConfig:
    """The model of the config's shapes, for the tokenizer's vocabulary."""
    m = config.model
    return ModelConfig(
        vocab_size=m.vocab_size or tokenizer.vocab_size,
        hidden_size=m.hidden_size,
        num_heads=m.num_heads,
        head_dim=m.head_dim,
        blocks=uniform_blocks(m.num_blocks, m.num_kv_heads, m.ffn_width),
        max_position_embeddings=m.max_position_embeddings,
        rope_theta=m.rope_theta,
        qk_norm=m.qk_norm,
        tie_word_embeddings=m.tie_word_embeddings,
        eos_token_ids=tuple(tokenizer.stop_ids),
        pad_token_id=tokenizer.pad_id,
    )


def make_objective(config: ConfigDict) -> Objective:
    """The config's objective; fields that are None take the factory's defaults.

    Raises: ValueError if a field is set that the objective does not have.
    """
    fields = config.rl.objective
    factory = getattr(rl, fields.name)
    known = inspect.signature(factory).parameters
    given = {k: v for k, v in fields.items() if k != "name" and v is not None}
    for field in given:
        if field not in known:
            raise ValueError(
                f'config.rl.objective.{field} is set, but objective "{fields.name}" has'
                + (f" only {', '.join(known)}" if known else " no settings")
            )
    return factory(**given)


def needs_reference(config: ConfigDict) -> bool:
    """Whether the objective reads log-probs of a reference policy, the one RL starts from."""
    fields = config.rl.objective
    return not fields.reference_free if fields.name == "dpo" else bool(fields.beta)


_ADVANTAGES = {"dr_grpo": ("group", "none"), "rloo": ("leave_one_out", "none"), "reinforce": ("batch", "none")}


def advantage_options(config: ConfigDict) -> dict[str, Any]:
    """Keyword arguments of `rl.group_advantages`; "auto" is what the objective's source does."""
    baseline, scale = _ADVANTAGES.get(config.rl.objective.name, ("group", "std"))
    if config.rl.advantage_baseline != "auto":
        baseline = config.rl.advantage_baseline
    if config.rl.advantage_scale != "auto":
        scale = config.rl.advantage_scale
    return {"baseline": baseline, "scale": scale}


def check_group_size(config: ConfigDict) -> None:
    """Raises ValueError for an objective whose baseline is made of a group's responses, and groups of one."""
    name, baseline = config.rl.objective.name, advantage_options(config)["baseline"]
    needs_advantages = name not in ("dpo", "nll")
    if needs_advantages and baseline in ("leave_one_out", "group") and config.rl.num_generations == 1:
        raise ValueError(
            f'config.rl.num_generations is 1, but the baseline "{baseline}" of "{name}" is made of a group\'s'
            ' responses: take two or more, or set config.rl.advantage_baseline to "batch" or "none"'
        )


def replay_options(config: ConfigDict, **more: Any) -> dict[str, Any]:
    """The keyword arguments of `replay.value_and_grad`, checked."""
    options = {**config.replay.to_dict(), **more}
    ReplayOptions(**options)
    return options


def resolve_prefix_activations(config: ConfigDict, model: ModelConfig) -> str:
    """ "keep" or "recompute": decided once and stored with the run, so that a resume computes the same bits."""
    options = ReplayOptions(**replay_options(config))
    shape = (config.rl.max_prompt, config.rl.num_generations, config.rl.max_response)
    return choose_prefix_activations(model, options, *shape, jnp.dtype(config.dtype))


def check_sizes(config: ConfigDict, model: ModelConfig, task: Any) -> None:
    """Raises ValueError if prompts and responses do not fit the model's context or the run's fixed shapes."""
    context = model.max_position_embeddings
    if config.rl.max_prompt + config.rl.max_response > context:
        raise ValueError(
            f"config.rl.max_prompt {config.rl.max_prompt} + max_response {config.rl.max_response} exceed the model's"
            f" context of {context} positions"
        )
    if useless := [n for n in config.replay.response_buckets if n >= config.rl.max_response]:
        raise ValueError(
            f"config.replay.response_buckets has {useless[0]}, which is not below config.rl.max_response"
            f" {config.rl.max_response}; leave it out, {config.rl.max_response} is always there"
        )
    if isinstance(task, data.RetrievalTask):
        if task.prompt_length > config.rl.max_prompt:
            raise ValueError(
                f"config.task.retrieval.prompt_length {task.prompt_length} exceeds config.rl.max_prompt"
                f" {config.rl.max_prompt}"
            )
        if task.answer_length + 1 > config.rl.max_response:
            raise ValueError(
                f"config.rl.max_response {config.rl.max_response} is too short for the {task.answer_length + 1} tokens"
                " of an answer and its stop"
            )
    for stage in warm_start_stages(config, task):
        if stage.max_prompt + stage.max_response > context:
            raise ValueError(
                f"config.warm_start.stages or steps: prompts of {stage.max_prompt} and targets of {stage.max_response}"
                f" tokens exceed the model's context of {context} positions"
            )


def check_trainable(config: ConfigDict, model: ModelConfig) -> None:
    """Raises ValueError if a phase's `optimizer.trainable` is no regular expression, or matches no parameter."""
    for phase in ("warm_start", "rl"):
        if (pattern := config[phase].optimizer.trainable) is not None:
            trained(pattern, abstract_params(model, jnp.dtype(config.dtype)), f"config.{phase}.optimizer")


def check_optimizers(config: ConfigDict, model: ModelConfig, given: Any, optimizers: Mapping[str, Any]) -> None:
    """Raises ValueError, before any work, for an optimizer that cannot take a step of this model's parameters.

    given: an optimizer passed by the caller, or None. optimizers: those of the phases there are, by the phase's name.
    """
    params = abstract_params(model, jnp.dtype(config.dtype))
    for phase, optimizer in optimizers.items():
        own = phase == "rl" and given is not None
        name = config[phase].optimizer.name
        if own or name not in ("adamw", "adam", "lion", "adafactor", "sgd"):  # which are known to
            check_optimizer("optimizer" if own else f"config.{phase}.optimizer.name {name!r}", optimizer, params)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Some supervised steps of equal shape. start: the first of them; max_prompt, max_response: padded sizes."""

    start: int
    steps: int
    num_prompts: int
    task: Any
    max_prompt: int
    max_response: int


def warm_start_stages(config: ConfigDict, task: Any) -> list[Stage]:
    """The curriculum of the warm start; a single stage without one; none if there is no warm start.

    Raises: ValueError for a stage that is not (steps, num_prompts, ((field, value), …)) with fields of the task.
    """
    fields, start = config.warm_start, 0
    stages: list[Stage] = []
    if not fields.stages:
        if not fields.steps:
            return []
        return [Stage(0, fields.steps, fields.num_prompts, task, config.rl.max_prompt, fields.max_response)]
    for i, stage in enumerate(fields.stages):
        try:
            steps, num_prompts, changes = stage
            mine = dataclasses.replace(task, **dict(changes))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"config.warm_start.stages[{i}] must be (steps, num_prompts, ((task field, value), …)) with fields of"
                f" {type(task).__name__}, got {stage!r} ({error})"
            ) from error
        if not (isinstance(steps, int) and isinstance(num_prompts, int) and steps >= 1 and num_prompts >= 1):
            raise ValueError(f"config.warm_start.stages[{i}]: steps and num_prompts must be at least 1, got {stage!r}")
        longest = fields.max_response
        if hasattr(mine, "max_supervised_length"):
            longest = min(longest, mine.max_supervised_length())
        max_prompt = getattr(mine, "prompt_length", config.rl.max_prompt)
        stages.append(Stage(start, steps, num_prompts, mine, max_prompt, longest))
        start += steps
    # Stages of as many prompts share one padded shape, and so one compilation.
    alike = {n: [s for s in stages if s.num_prompts == n] for n in {s.num_prompts for s in stages}}
    sizes = {n: {f: max(getattr(s, f) for s in a) for f in ("max_prompt", "max_response")} for n, a in alike.items()}
    return [dataclasses.replace(s, **sizes[s.num_prompts]) for s in stages]
