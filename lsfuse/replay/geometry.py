"""Sizes that a config fixes: chunks, branch batches and buffers. Lengths inside them are data."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from lsfuse.model.attention import Stripes
from lsfuse.model.blocks import saved_names
from lsfuse.replay.batch import Batch
from lsfuse.types import Array

PREFIX_ACTIVATIONS = ("auto", "recompute", "keep")
PREFIXES = ("prompt", "longest_common")
DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Options:
    """The replay options, checked. prefix_grad: "exact", "stop" or an int n ≥ 1; see `replay.value_and_grad`."""

    prefix_grad: str | int = "exact"
    chunk_size: int = 512
    branch_batch: int | None = None
    remat_policy: str = "everything_saveable"
    prefix_activations: str = "auto"
    memory_budget: int | None = None
    temperature: float = 1.0
    prefix: str = "prompt"
    response_buckets: tuple[int, ...] = ()
    compute_dtype: str | None = None
    state_dtype: str | None = None
    cotangent_dtype: str | None = None

    def __post_init__(self):
        n = self.prefix_grad
        if isinstance(n, bool) or not (n in ("exact", "stop") or (isinstance(n, int) and n >= 1)):
            raise ValueError(f'prefix_grad must be "exact", "stop" or an int of at least 1, got {n!r}')
        if not isinstance(self.chunk_size, int) or self.chunk_size < 1:
            raise ValueError(f"chunk_size must be an int, at least 1 token, got {self.chunk_size!r}")
        if self.branch_batch is not None and (not isinstance(self.branch_batch, int) or self.branch_batch < 1):
            raise ValueError(
                f"branch_batch must be an int, at least 1 branch, or None to choose; got {self.branch_batch!r}"
            )
        if self.memory_budget is not None and not (isinstance(self.memory_budget, int) and self.memory_budget >= 0):
            raise ValueError(f"memory_budget must be an int of bytes, at least 0, or None; got {self.memory_budget!r}")
        if self.prefix_activations not in PREFIX_ACTIVATIONS:
            raise ValueError(
                f"prefix_activations must be one of {', '.join(PREFIX_ACTIVATIONS)}, got {self.prefix_activations!r}"
            )
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        if self.prefix not in PREFIXES:
            raise ValueError(f"prefix must be one of {', '.join(PREFIXES)}, got {self.prefix!r}")
        sizes = self.response_buckets
        if not (isinstance(sizes, tuple) and all(isinstance(n, int) and n >= 1 for n in sizes)):
            raise ValueError(f"response_buckets must be a tuple of padded lengths of at least 1 token, got {sizes!r}")
        for name in ("compute_dtype", "state_dtype", "cotangent_dtype"):
            if getattr(self, name) not in (None, *DTYPES):
                raise ValueError(f"{name} must be one of {', '.join(DTYPES)}, or None; got {getattr(self, name)!r}")
        saved_names(self.remat_policy)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Static sizes, in tokens unless said otherwise.

    prompt: P. response: R. branches: G padded to a multiple of `branch_batch` branches.
    chunk: of the constant part of the prefix. grad_chunk: of its differentiable part.
    grad_tokens: prefix tokens that can carry gradient outside the tails (0: none; P - 1: all).
    state: room in the prefix state. cotangent: room for the cotangents of its differentiable part, `trunk` excluded.
    trunk: room for the trunk (`replay.trunk`) in both; 0 if prefix is "prompt".
    buckets: padded lengths that tails may run at, ascending, R the last.
    """

    prompt: int
    response: int
    branches: int
    branch_batch: int
    chunk: int
    grad_chunk: int
    grad_tokens: int
    state: int
    cotangent: int
    trunk: int
    buckets: tuple[int, ...]

    @property
    def cotangent_room(self) -> int:
        """Token positions of the buffer of cotangents: the prefix's differentiable part, and the trunk."""
        return self.cotangent + self.trunk

    @property
    def exact(self) -> bool:
        """Whether the whole prefix is differentiable, whatever the lengths."""
        return self.grad_tokens >= self.prompt - 1

    @property
    def one_chunk(self) -> bool:
        """Whether the prefix runs as one chunk at most, before which nothing stands."""
        return (self.exact or not self.grad_tokens) and self.prompt - 1 <= self.chunk


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def default_branch_batch(branches: int, response: int, chunk_size: int) -> int:
    """As many branches at once as make up about a chunk's tokens, in batches of even size."""
    batches = -(-branches // max(1, min(branches, chunk_size // max(response, 1))))
    return -(-branches // batches)


def make_geometry(options: Options, prompt: int, branches: int, response: int, devices: int = 1) -> Geometry:
    """Sizes for groups of up to `branches` responses of up to `response` tokens to prompts of up to `prompt`.

    devices: that a chunk's tokens are split over; it divides the sizes of chunks and buffers.
    """
    prefix = prompt - 1
    n = options.prefix_grad
    grad_tokens = min(n - 1, prefix) if isinstance(n, int) else prefix if n == "exact" else 0
    chunk = _round_up(min(options.chunk_size, max(prefix, 1)), devices)
    grad_chunk = _round_up(min(options.chunk_size, max(grad_tokens, 1)), devices)
    # A stretch that starts anywhere needs room for the padding of its last chunk.
    slack = grad_chunk if 0 < grad_tokens < prefix else 0
    batch = options.branch_batch or default_branch_batch(branches, response, options.chunk_size)
    batch = min(batch, branches)
    state = _round_up(max(prefix, 1), chunk) + slack
    if devices > 1 and slack:  # the first devices may have a chunk's share more of the constants than the others
        state += chunk
    cotangent = _round_up(grad_tokens, grad_chunk) if grad_tokens else 0
    trunk = response if options.prefix == "longest_common" else 0
    if trunk:
        state = max(state, prefix + trunk, prefix - grad_tokens + cotangent + trunk)
    return Geometry(
        prompt=prompt,
        response=response,
        branches=_round_up(branches, batch),
        branch_batch=batch,
        chunk=chunk,
        grad_chunk=grad_chunk,
        grad_tokens=grad_tokens,
        state=state,
        cotangent=cotangent,
        trunk=trunk,
        buckets=(*sorted({n for n in options.response_buckets if n < response}), response),
    )


def prefix_bounds(geometry: Geometry, prompt_length: Array) -> tuple[Array, Array]:
    """(first differentiable position, end) of the prefix x[0 : P - 1] of one prompt."""
    end = jnp.maximum(prompt_length - 1, 0)
    if geometry.exact:
        return jnp.zeros_like(end), end
    return jnp.maximum(end - geometry.grad_tokens, 0), end


def make_stripes(geometry: Geometry, prompt_length: Array) -> Stripes:
    """Where the prefix of one prompt lies."""
    return Stripes(prefix_bounds(geometry, prompt_length)[0], geometry.chunk, geometry.grad_chunk)


def pad_batch(batch: Batch, geometry: Geometry) -> Batch:
    """Pads branches to whole branch batches, and clears what the mask holds in padding."""
    batch = batch.replace(completion_mask=batch.loss_mask)
    extra = geometry.branches - batch.completion_ids.shape[1]
    if not extra:
        return batch
    shared = {name: getattr(batch, name) for name in ("prompt_ids", "prompt_lengths", "group_sizes")}
    padded = jax.tree.map(
        lambda x: jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2)),
        batch.replace(prompt_ids=None, prompt_lengths=None, group_sizes=None),
    )
    return padded.replace(**shared)


def group_slice(batch: Batch, b: Array | int) -> Batch:
    """Group b alone, [1, ...]."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, b, 1, 0), batch)


def branch_slice(group: Batch, first: Array | int, count: int) -> Batch:
    """`count` branches of a group [1, ...] from `first` on."""
    shared = {name: getattr(group, name) for name in ("prompt_ids", "prompt_lengths")}
    sizes = jnp.clip(group.group_sizes - first, 0, count)
    part = jax.tree.map(
        lambda x: lax.dynamic_slice_in_dim(x, first, count, 1),
        group.replace(prompt_ids=None, prompt_lengths=None, group_sizes=None),
    )
    return part.replace(**shared, group_sizes=sizes)


def first_tokens(branches: Batch, count: int) -> Batch:
    """A branch slice [1, g, ...] with responses padded to `count` tokens, of which the tails need only the ids."""
    if count == branches.completion_ids.shape[2]:
        return branches
    return branches.replace(completion_ids=branches.completion_ids[:, :, :count])
