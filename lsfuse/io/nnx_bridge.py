"""Parameters out of, and back into, the state of a flax nnx model of Llama shape.

A leaf is matched by its path ("layers/0/attn/q_proj/kernel") and brought to the axes of the parameter tree. Axes are
merged, split and moved, and blocks stacked; no number is touched, so that a round trip keeps every bit, and gradients
go the same way as parameters. Pure: it may run inside `jax.jit`.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from lsfuse.io.nnx_names import AXES, DEFAULT_RENAME, layouts
from lsfuse.model.config import ModelConfig, block_param_shapes, param_shapes
from lsfuse.model.params import check_params, with_all_runs
from lsfuse.types import Array, Params

# Regular expression of a whole path -> "embed_tokens", "norm", "lm_head", r"blocks/\1/q_proj" (one block's leaf),
# "blocks/q_proj" (all blocks stacked), any of these with a layout ("blocks/q_proj", "L N D H"), or None (left out).
Rename = Mapping[str, str | tuple[str, str] | None]

_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a leaf of the nnx model goes. block: None outside blocks, -1 for all blocks stacked. layout: its axes, as
    `nnx_names.layouts`. sizes: of the axes' letters."""

    path: tuple
    name: str
    block: int | None
    layout: str
    sizes: Mapping[str, int]

    @property
    def axes(self) -> list[str]:
        """Letters of the axes in the parameter tree's order."""
        return ["L"] * (self.block == -1) + AXES[self.name].split()

    def ours(self, x: Array) -> Array:
        """Merged as in the parameter tree: (in, out) kernels, vectors, a leading axis of blocks if stacked."""
        order = [letter for token in self.layout.split() for letter in token]
        x = x.reshape([self.sizes[a] for a in order]).transpose([order.index(a) for a in self.axes])
        stacked = [self.sizes["L"]] * (self.block == -1)
        return x.reshape(*stacked, *_merged(self.name, self.sizes))

    def theirs(self, x: Array) -> Array:
        """The inverse of `ours`."""
        tokens = self.layout.split()
        x = x.reshape([self.sizes[a] for a in self.axes])
        x = x.transpose([self.axes.index(letter) for token in tokens for letter in token])
        return x.reshape(_shape(self.layout, self.sizes))


def from_nnx(model: Any, config: ModelConfig, rename: Rename | None = None) -> Params:
    """The parameter tree that `config` describes, from an nnx model's parameters.

    Args:
        model: an `nnx.Module`, its `nnx.State`, or nested dicts of arrays. Of variables only `nnx.Param`s are read.
            Blocks in a list or stacked on a leading axis (`nnx.vmap`, `nnx.scan`).
        config: of the model; fixes every shape.
        rename: regular expressions of whole paths, tried before the default ones, which know the names of Hugging Face
            and of usual nnx code (`q_proj`, `wq`; `kernel` and `w` are (in, out), or split by heads as [D, N, H],
            [N, D, H] and [N, H, D]; `weight` is (out, in)). See `Rename`; axes in a layout are D model, N query heads,
            K kv heads, H head dim, F ffn, V vocab, merged ones written together: "D NH"; and L blocks, the leading
            one where it is not named.

    Returns: as `param_shapes(config)` says, dtypes as they are.

    Raises: ValueError for a leaf that no rule knows, a parameter that no leaf gives or two do, a shape that does not
    fit (path and both shapes are named) or fits two layouts, blocks of unlike dtypes that would be stacked.
    """
    flat = _flat(model)
    leaves: dict[str, Array] = {}
    blocks: dict[str, list[Array]] = {}
    runs = [str(r) for r, (_, n) in enumerate(config.runs) for _ in range(n)]
    for place in sorted(_places(flat, config, rename), key=lambda p: p.block or 0):
        x = place.ours(_value(place.path, flat[place.path]))
        if place.block is None:
            leaves[place.name] = x
        elif place.block < 0:
            leaves[f"runs/0/{place.name}"] = x
        else:
            blocks.setdefault(f"runs/{runs[place.block]}/{place.name}", []).append(x)
    for path, parts in blocks.items():
        leaves[path] = _stack(path, parts)
    params = with_all_runs(config, traverse_util.unflatten_dict(leaves, sep="/"))
    check_params(config, params)
    return params


def to_nnx(params: Params, model: Any, config: ModelConfig, rename: Rename | None = None) -> nnx.State:
    """The inverse of `from_nnx`: parameters, or gradients of `replay.value_and_grad`, as a state of `model`'s paths.

    Args:
        params: as `param_shapes(config)` says.
        model, rename: as given to `from_nnx`. The model's values are not read: it may be abstract (`nnx.eval_shape`).

    Returns: an `nnx.State` of the leaves that `from_nnx` reads, types and metadata of the variables kept, dtypes those
    of `params`. `nnx.update(model, state)` puts parameters in; `nnx.Optimizer.update(model, state)` takes gradients.

    Raises: ValueError as `from_nnx`, and for parameters that do not fit `config`.
    """
    check_params(config, params)
    flat, found = _flat(model), {}
    positions = [(str(r), i) for r, (_, n) in enumerate(config.runs) for i in range(n)]
    for place in _places(flat, config, rename):
        if place.block is None:
            x = params[place.name]
        elif place.block < 0:
            x = params["runs"]["0"][place.name]
        else:
            run, i = positions[place.block]
            x = params["runs"][run][place.name][i]
        leaf, x = flat[place.path], place.theirs(x)
        found[place.path] = leaf.copy(value=x) if isinstance(leaf, nnx.Variable) else x
    return nnx.from_flat_state(found)


def _flat(model: Any) -> dict[tuple, Any]:
    """Path -> nnx.Param, or array, of everything that can be a parameter."""
    if isinstance(model, nnx.Module):
        state = nnx.state(model)
    elif isinstance(model, nnx.State):
        state = model
    elif isinstance(model, Mapping):
        state = nnx.State(model)
    else:
        raise ValueError(f"expected an nnx.Module, an nnx.State or nested dicts of arrays, got {type(model).__name__}")
    flat = {path: leaf for path, leaf in nnx.to_flat_state(state)}
    return {path: x for path, x in flat.items() if not isinstance(x, nnx.Variable) or isinstance(x, nnx.Param)}


def _array(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _value(path: tuple, leaf: Any) -> Array:
    x = _array(leaf)
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"nnx leaf {_name(path)} is abstract ({type(x).__name__}); initialise the model first")
    if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        raise ValueError(f"nnx leaf {_name(path)} is {x.dtype}, which needs jax.config.update('jax_enable_x64', True)")
    return x


def _stack(path: str, parts: list[Array]) -> Array:
    dtypes = {str(x.dtype) for x in parts}
    if len(dtypes) > 1:
        raise ValueError(
            f"the blocks' {path.split('/')[-1]} are of dtypes {', '.join(sorted(dtypes))}; blocks are stacked, so cast"
            " them to one dtype first"
        )
    return jnp.stack(parts)


def _name(path: tuple) -> str:
    return "/".join(map(str, path))


def _merged(name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of a block's leaf in the parameter tree: heads are one axis with their dim."""
    letters = AXES[name]
    return _shape(letters.replace("N H", "NH").replace("K H", "KH"), sizes)


def _shape(layout: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[letter] for letter in token) for token in layout.split())


def _places(flat: Mapping[tuple, Any], config: ModelConfig, rename: Rename | None) -> list[_Place]:
    """A place for every leaf that is a parameter of the model; every parameter once."""
    rules = [(_compiled(pattern), target) for pattern, target in (rename or {}).items()] + list(DEFAULT_RENAME)
    places, unknown = [], []
    for path in flat:
        matches = ((rule.fullmatch(_name(path)), target) for rule, target in rules)
        match, target = next(((m, t) for m, t in matches if m), (None, ""))
        if match is None:
            unknown.append(_name(path))
        elif target is not None:
            name, layout = (target, None) if isinstance(target, str) else target
            places.append(_place(path, flat[path], match.expand(name).replace("//", "/"), layout, config))
    given: dict[str, tuple] = {}
    for place in places:
        for name in _parameters(place, config):
            if name in given:
                raise ValueError(f"nnx leaves {_name(given[name])} and {_name(place.path)} both give {name}")
            given[name] = place.path
    missing = [name for name in _expected(config) if name not in given]
    if missing or unknown:
        tied = " (is the head tied? then the config needs tie_word_embeddings=True)" if "lm_head" in missing else ""
        parts = [f"no leaf gives {_listed(missing)}{tied}"] * bool(missing)
        parts += [f"no rule knows {_listed(unknown)}"] * bool(unknown)
        raise ValueError(
            f"the nnx model does not fit the config: {'; '.join(parts)}. Say what leaves are with rename={{regular"
            " expression of a path: r'blocks/\\1/q_proj'}, or None for one that is no parameter of the model"
        )
    return places


def _compiled(pattern: str) -> re.Pattern:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"rename: {pattern!r} is not a regular expression: {error}") from None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _expected(config: ModelConfig) -> Iterator[str]:
    yield from (name for name in param_shapes(config) if name != "runs")
    for i, block in enumerate(config.blocks):
        yield from (f"blocks/{i}/{name}" for name in block_param_shapes(config, block))


def _parameters(place: _Place, config: ModelConfig) -> list[str]:
    if place.block is None:
        return [place.name]
    which = range(config.num_blocks) if place.block < 0 else [place.block]
    return [f"blocks/{i}/{place.name}" for i in which]


def _place(path: tuple, leaf: Any, target: str, layout: str | None, config: ModelConfig) -> _Place:
    where, value = f"nnx leaf {_name(path)}", _array(leaf)
    if not hasattr(value, "shape"):
        raise ValueError(f"{where} holds no array but {type(value).__name__}; map it to None in rename to leave it out")
    match = re.fullmatch(r"(?:blocks/(?:(\d+)/)?)?([a-z_]+)", target)
    outside = ("embed_tokens", "norm", "lm_head")
    if match is None or match[2] not in AXES or (match[2] in outside) == target.startswith("blocks/"):
        raise ValueError(
            f"{where}: {target!r} is no place of a parameter; valid: {', '.join(outside)}, blocks/0/NAME and"
            f" blocks/NAME (stacked) with a NAME of {', '.join(n for n in AXES if n not in outside)}"
        )
    name, block = match[2], None
    if target.startswith("blocks/"):
        block = -1 if match[1] is None else int(match[1])
        if block >= config.num_blocks:
            raise ValueError(f"{where}: the config has blocks 0 to {config.num_blocks - 1}, so no {target}")
        if block < 0 and len(config.runs) > 1:
            raise ValueError(f"{where} stacks all blocks, but the config's differ in structure; they cannot be stacked")
    first = config.blocks[max(block or 0, 0)]
    sizes = {"V": config.vocab_size, "D": config.hidden_size, "N": config.num_heads, "H": config.head_dim}
    sizes |= {"K": first.num_kv_heads, "F": first.ffn_width, "L": config.num_blocks}
    if block is not None and name not in block_param_shapes(config, first):
        raise ValueError(f"{where} would be {target}, which the config does not have")
    if block is None and name not in param_shapes(config):
        raise ValueError(f"{where} would be {target}, but the config has tie_word_embeddings; map it to None in rename")
    shape, stacked = tuple(value.shape), "L " if block == -1 else ""
    if layout is not None and "L" not in layout:
        layout = stacked + layout
    letters = sorted(stacked.strip() + AXES[name].replace(" ", ""))
    if layout is not None and sorted(layout.replace(" ", "")) != letters:
        raise ValueError(f"{where}: layout {layout!r} must have each of the axes {' '.join(letters)} of {target} once")
    possible = [layout] if layout else [stacked + one for one in layouts(name)]
    fitting = [one for one in possible if _shape(one, sizes) == shape]
    hint = f"say which in rename, as {{{_name(path)!r}: ({target!r}, {possible[-1]!r})}}"
    if not fitting:
        wanted = " or ".join(f"[{one}] = {_shape(one, sizes)}" for one in possible)
        raise ValueError(f"{where} has shape {shape}, but {target} is {wanted} by the config; correct it, or {hint}")
    if len(fitting) > 1:
        raise ValueError(f"{where} has shape {shape}, which fits {' and '.join(fitting)}; {hint}")
    return _Place(path, name, block, fitting[0], sizes)
