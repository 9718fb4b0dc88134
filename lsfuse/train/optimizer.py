"""The optimizer of a config: schedule, clipping, factory, and what of the parameters is trained."""

import re
from typing import Any

import jax
import optax

from lsfuse.io.checkpoint_manifest import leaf_names
from lsfuse.train.optimizer_names import from_factory


def make_schedule(config: Any, steps: int, where: str = "optimizer") -> optax.Schedule:
    """Learning rate as a function of the update's number (int32), from a config's `optimizer` fields.

    where: what errors call these fields, such as "config.rl.optimizer".

    Linear warmup from 0 over warmup_steps, then constant, or falling to 0 at `steps` (linear, cosine).

    Raises: ValueError if the warmup is longer than the run.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if warmup > max(steps, 1):
        raise ValueError(f"{where}.warmup_steps is {warmup}, but the run has only {steps} updates")
    rest = max(steps - warmup, 1)
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, 0.0, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest),
    }[config.schedule]()
    if not warmup:
        return after
    # The first update already moves: its rate is peak / (warmup + 1), not 0.
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, after], [warmup])


def make_optimizer(config: Any, steps: int, where: str = "optimizer") -> optax.GradientTransformation:
    """The optax chain of a config's `optimizer` fields for a run of `steps` updates; `where` as for `make_schedule`.

    name: a factory of optax or optax.contrib that a plain step serves (`optimizer_names`), or
    "package.module:function"; it gets the fields that its signature has, by name. sgd's momentum is b1; adafactor's
    updates are scaled by the learning rate alone. optax's factories that take norms of leaves see every block's by
    itself; so does muon, which orthogonalises the kernels of blocks. One's own sees runs stacked, as they are.

    With `trainable`, leaves whose path it does not match keep every bit, have no optimizer state, and are left out of
    the gradient's norm that is clipped.
    """
    schedule = make_schedule(config, steps, where)
    parts = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    if config.name == "adafactor":
        decay = {"weight_decay_rate": config.weight_decay or None, "weight_decay_mask": decayed}
        parts.append(optax.adafactor(schedule, multiply_by_parameter_scale=False, clipping_threshold=None, **decay))
    elif config.name == "sgd":
        parts.append(optax.sgd(schedule, momentum=config.b1 or None))
    else:
        fields = {name: config[name] for name in ("b1", "b2", "eps", "weight_decay")}
        fixed = config.learning_rate if config.schedule == "constant" and not config.warmup_steps else None
        fields["learning_rate"] = schedule
        parts.append(from_factory(f"{where}.name", config.name, fields, decayed, fixed))
    chain = optax.chain(*parts)
    if config.trainable is None:
        return chain
    names = {True: "trained", False: "frozen"}

    def labels(params: Any) -> Any:
        return jax.tree.map(names.__getitem__, trained(config.trainable, params, where))

    return optax.partition({"trained": chain, "frozen": optax.set_to_zero()}, labels)


def trained(pattern: str, params: Any, where: str = "optimizer") -> Any:
    """A tree of bools: leaves whose path ("runs/0/q_proj") the regular expression is found in.

    Raises: ValueError if it is none, or found in no path.
    """
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{where}.trainable {pattern!r} is not a regular expression: {error}") from None
    names = leaf_names(params)
    found = [regex.search(name) is not None for name in names]
    if not any(found):
        raise ValueError(f"{where}.trainable {pattern!r} is found in no parameter; they are {', '.join(names)}")
    return jax.tree.unflatten(jax.tree.structure(params), found)


def decayed(params: Any) -> Any:
    """A tree of bools: weight decay acts on matrices, not on norms and biases."""

    def matrix(path: tuple, leaf: Any) -> bool:
        name = next(str(key.key) for key in reversed(path) if hasattr(key, "key"))  # below it, blocks by number
        return not (name.endswith("norm") or name.endswith("bias"))

    return jax.tree_util.tree_map_with_path(matrix, params)
