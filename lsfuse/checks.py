"""Checks of arrays where they enter the package: what is wrong, both shapes, what to do.

Only shapes and dtypes are looked at, so a check works on tracers, on `jax.ShapeDtypeStruct`s and on numpy arrays, takes
place when a function is traced, and costs nothing when it runs. `chex` decides; the words are ours.
"""

from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

# Kinds of numbers besides `int` and `float`: a mask, and what may be any of the three.
BOOL, REAL = "bool", "real"
_WORDS = {int: "integers", float: "floating-point numbers", BOOL: "booleans", REAL: "real numbers"}
_CASTS = {int: "jnp.int32", float: "jnp.float32", BOOL: "bool", REAL: "jnp.float32"}

# Argument -> (array or None, its axes, kind): ("B T D", float). "..." stands for any axes, or none.
Given = Mapping[str, tuple[Any, str, Any]]


def check_arrays(where: str, given: Given, sizes: Mapping[str, tuple[int, str]] | None = None) -> None:
    """Raises ValueError for the first array whose shape or dtype is not what its axes and kind say.

    where: the function, which begins the message.
    given: what is None is passed over. A letter has one size throughout, the first array's that has it.
    sizes: letter -> (its size, what says so).
    """
    known = dict(sizes or {})
    for name, (x, axes, kind) in given.items():
        if x is None:
            continue
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise ValueError(
                f"{where}: {name} must be an array of axes {_list(axes)}, got {type(x).__name__}; make it one with"
                " jnp.asarray"
            )
        letters, shape = axes.split(), tuple(x.shape)
        expected = [... if a == "..." else known[a][0] if a in known else None for a in letters]
        if not _holds(chex.assert_shape, x, expected):
            raise ValueError(_misshapen(where, name, shape, letters, known))
        if not is_kind(x, kind):
            raise ValueError(
                f"{where}: {name} is of dtype {x.dtype}, shape {shape}; it must hold {_WORDS[kind]}: take"
                f" {name}.astype({_CASTS[kind]}) if that is what it means"
            )
        for at, letter in enumerate(letters):
            if letter == "...":
                break
            known.setdefault(letter, (shape[at], name))


def check_same_shape(where: str, arrays: Mapping[str, Any]) -> None:
    """Raises ValueError unless all arrays have the first one's shape."""
    (first, x), *rest = arrays.items()
    for name, y in rest:
        if not _holds(chex.assert_shape, y, tuple(jnp.shape(x))):
            raise ValueError(
                f"{where}: {name} has shape {tuple(jnp.shape(y))}, but {first} {tuple(jnp.shape(x))}; they must be"
                " alike, one number a token each"
            )


def check_broadcastable(where: str, name: str, x: Any, like: str, y: Any) -> None:
    """Raises ValueError if `x` (an argument `name`) cannot be broadcast to the shape of `y` (`like`)."""
    if not _holds(chex.assert_is_broadcastable, jnp.shape(x), jnp.shape(y)):
        raise ValueError(
            f"{where}: {name} has shape {jnp.shape(x)}, which cannot be broadcast to {like} {jnp.shape(y)}; give it"
            " that shape, or axes of 1"
        )


def check_key(where: str, key: Any) -> None:
    """Raises ValueError unless `key` is one PRNG key, typed (`jax.random.key`) or raw (`jax.random.PRNGKey`)."""
    dtype, shape = getattr(key, "dtype", None), tuple(jnp.shape(key)) if hasattr(key, "shape") else None
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (typed and shape == ()) and not (dtype == jnp.uint32 and shape is not None and len(shape) == 1):
        found = type(key).__name__ if dtype is None else f"{dtype} of shape {shape}"
        raise ValueError(f"{where}: key must be one PRNG key, got {found}; make one with jax.random.key(seed)")


def is_kind(x: Any, kind: Any) -> bool:
    """Whether the array holds numbers of the kind."""
    if kind is BOOL:
        return x.dtype == bool
    if kind is REAL:
        return x.dtype == bool or is_kind(x, int) or is_kind(x, float)
    return _holds(chex.assert_type, x, kind)


def _holds(assertion: Callable[..., None], *args: Any) -> bool:
    try:
        assertion(*args)
    except AssertionError:
        return False
    return True


def _list(axes: str) -> str:
    return f"[{', '.join(axes.split())}]"


def _misshapen(where: str, name: str, shape: tuple[int, ...], letters: list[str], known: dict) -> str:
    wanted = ", ".join("..." if a == "..." else str(known[a][0]) if a in known else "any" for a in letters)
    wanted += "," * (len(letters) == 1)
    text = f"{where}: {name} has shape {shape}; it must be {_list(' '.join(letters))}"
    if any(a in known for a in letters):
        text += f" = ({wanted})"
    if because := [f"{a} is {n} by {source}" for a, (n, source) in known.items() if a in letters]:
        text += f", where {' and '.join(because)}"
    missing = len(letters) - len(shape)
    if "..." in letters or not missing:
        return text + "; pad, cut or transpose it to that"
    if missing > 0:
        return text + f"; {'an axis is' if missing == 1 else f'{missing} axes are'} missing: {name}[None] adds one"
    return text + f"; it has {'an axis' if missing == -1 else f'{-missing} axes'} too many: {name}[0] takes one away"
