"""Optimizer factories: optax's by name, one's own by "package.module:function"; what is passed to them, and a check."""

import difflib
import functools
import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

# Factories that a plain training step does not serve, and why.
_UNFIT = {
    "lbfgs": "its line search asks for the loss function at every update",
    "sophia": "it asks for the loss function at every update",
    "noisy_sgd": "it asks for a seed of its own",
    "schedule_free_sgd": "its parameters must be read through optax.contrib.schedule_free_eval_params",
    "schedule_free_adamw": "its parameters must be read through optax.contrib.schedule_free_eval_params",
}
# These scale an update by norms of its leaf, which must be one block's and not a whole run's.
_BY_LEAF = ("lamb", "lars", "fromage", "novograd", "sm3", "galore")


@functools.cache
def optimizer_names() -> tuple[str, ...]:
    """Names of the factories of `optax` and `optax.contrib` that need nothing but a learning rate, in order."""
    found = {}
    for module in (optax.contrib, optax):
        for name, thing in vars(module).items():
            made = isinstance(thing, types.FunctionType | functools.partial)  # nadam is a partial
            if not made or name.startswith(("_", "scale_by")) or name in _UNFIT:
                continue
            parameters = inspect.signature(thing).parameters
            needed = {n for n, p in parameters.items() if p.default is p.empty and n != "learning_rate"}
            if "learning_rate" in parameters and not needed:
                found[name] = thing
    return tuple(sorted(found))


def check_name(field: str, name: str) -> None:
    """Raises ValueError unless `name` is one of `optimizer_names()`, or "module:function" of a function there is."""
    if ":" in name:
        _import(field, name)
    elif name in _UNFIT:
        raise ValueError(f'{field} "{name}" cannot be used by name: {_UNFIT[name]}; {_OWN}')
    elif name not in optimizer_names():
        near = difflib.get_close_matches(name, optimizer_names(), 1, 0.5)
        hint = f'did you mean "{near[0]}"?' if near else f"valid: {', '.join(optimizer_names())}."
        raise ValueError(f"{field} {name!r} is no optimizer of optax; {hint} {_OWN}")


_OWN = 'One of your own is "package.module:function", called with those of learning_rate, b1, … that it has'


def _import(field: str, path: str) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{field} {path!r}: the module cannot be imported ({error}); is its folder in PYTHONPATH?"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, [n for n in vars(module) if callable(getattr(module, n))], 1, 0.5)
        hint = f'; did you mean "{module_name}:{near[0]}"?' if near else ""
        raise ValueError(f"{field} {path!r}: {module_name} has no function {name!r}{hint}")
    return function


def from_factory(
    field: str, name: str, fields: Mapping[str, Any], decayed: Callable[[Any], Any], fixed_rate: float | None
) -> optax.GradientTransformation:
    """The optimizer that the factory of that name makes.

    Args:
        field: the config's field, for messages.
        fields: learning_rate (a schedule), b1, b2, eps, weight_decay: each is passed where the factory's signature has
            it; None leaves the factory its own default.
        decayed: params -> a tree of bools, what weight decay acts on; passed as `mask` or `weight_decay_mask`.
        fixed_rate: the learning rate where it is the same in every step, which is all that some factories take.

    Raises: ValueError for an unknown name, or a factory that cannot be called so.
    """
    check_name(field, name)
    factory = _import(field, name) if ":" in name else getattr(optax, name, None) or getattr(optax.contrib, name)
    parameters = inspect.signature(factory).parameters
    passed = {k: v for k, v in fields.items() if k in parameters and v is not None}
    if "learning_rate" not in passed:
        raise ValueError(f"{field} {name!r}: the function takes no learning_rate, which is the schedule of the config")
    if parameters["learning_rate"].annotation in (float, jax.typing.ArrayLike):
        if fixed_rate is None:
            raise ValueError(f'{field} "{name}" takes one learning rate only: schedule "constant" and warmup_steps 0')
        passed["learning_rate"] = fixed_rate
    if "weight_decay" in passed:
        passed |= {k: decayed for k in ("mask", "weight_decay_mask") if k in parameters}
    if name == "muon":  # by default it takes two-dimensional leaves alone: not the stacked ones, but the embedding
        passed["muon_weight_dimension_numbers"] = _block_matrices
    try:
        optimizer = factory(**passed)
    except TypeError as error:
        raise ValueError(f"{field} {name!r} was called with {', '.join(passed)}: {error}") from error
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(
            f"{field} {name!r} must return an optax.GradientTransformation, got {type(optimizer).__name__}"
        )
    return by_block(optimizer) if name in _BY_LEAF else optimizer


def _block_matrices(params: Any) -> Any:
    """What Muon orthogonalises: the kernels of blocks, each block's by itself; the rest is left to its Adam."""

    def numbers(path: tuple, x: Any) -> Any:
        return optax.contrib.MuonDimensionNumbers(1, 2) if path[0].key == "runs" and x.ndim == 3 else None

    return jax.tree_util.tree_map_with_path(numbers, params)


def by_block(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` on trees whose runs are taken apart into blocks, so that a leaf is one block's."""
    inner = optax.with_extra_args_support(inner)

    def split(tree: Any) -> Any:
        return None if tree is None else {**tree, "runs": jax.tree.map(lambda x: tuple(x), tree["runs"])}

    def join(tree: Any) -> Any:
        stack = functools.partial(jax.tree.map, jnp.stack, is_leaf=lambda x: type(x) is tuple)
        return {**tree, "runs": stack(tree["runs"])}

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = inner.update(split(updates), state, split(params), **extra)
        return join(updates), state

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(split(params)), update)


def check_optimizer(where: str, optimizer: optax.GradientTransformation, params: Any) -> None:
    """Raises ValueError if the optimizer cannot take a step from gradients, parameters and loss. params: abstract."""

    def step(params: Any) -> Any:
        updates, state = optax.with_extra_args_support(optimizer).update(
            params, optimizer.init(params), params, value=jnp.float32(0)
        )
        return updates

    try:
        updates = jax.eval_shape(step, params)
        chex.assert_trees_all_equal_shapes(updates, params)
    except Exception as error:
        raise ValueError(
            f"{where} cannot take a step from gradients, parameters and the loss: {' '.join(str(error).split())[:300]}"
        ) from error
