"""Responses to prompts: every prompt prefilled once, all branches of its group decoded against the shared state."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from lsfuse.checks import check_arrays, check_key
from lsfuse.model import ModelConfig, check_params
from lsfuse.replay.geometry import Options
from lsfuse.replay.mesh import on_mesh, one_device
from lsfuse.rl.decode import copies, decode, prefill, shared_attention, shared_caches
from lsfuse.types import AnyMesh, Array, Params


class Samples(NamedTuple):
    """G responses to each of B prompts.

    completion_ids: int32 [B, G, R], zero beyond a length.
    completion_lengths: int32 [B, G]; the stop token, where there is one, is counted.
    per_token_logps: [B, G, R] float32 (float64 if the parameters are), zero beyond a length. Of the tempered
        distribution over the whole vocabulary: `replay.per_token_logps` at the same temperature gives the same numbers
        to rounding, also with top_p < 1 (they are not renormalised over the nucleus), so that the first ratio is 1. At
        temperature 0, those of temperature 1.
    """

    completion_ids: Array
    completion_lengths: Array
    per_token_logps: Array


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Compiled once per shape of the prompts: lengths and parameters are data. See `make_sampler`."""

    model: ModelConfig
    num_generations: int
    max_tokens: int
    temperature: float
    top_p: float
    stop_ids: tuple[int, ...]
    chunk_size: int
    compute_dtype: str | None = None
    state_dtype: str | None = None
    mesh: AnyMesh | None = None

    def __post_init__(self):
        for name in ("num_generations", "max_tokens", "chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampler: {name} must be at least 1, got {getattr(self, name)}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"sampler: temperature must be 0 (take the likeliest token) or positive, got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampler: top_p must be above 0 and at most 1 (off), got {self.top_p}")
        for token in self.stop_ids:
            if not 0 <= token < self.model.vocab_size:
                raise ValueError(
                    f"sampler: stop id {token} is out of range; the model's vocabulary has ids 0 to"
                    f" {self.model.vocab_size - 1}. Is it another model's tokenizer?"
                )

    def __call__(self, params: Params, prompt_ids: Any, prompt_lengths: Any, key: Array) -> Samples:
        """prompt_ids [B, P] and prompt_lengths [B], integers; a length of 0 is a group that does not exist.

        Raises: ValueError before any work if prompts do not fit (shapes, ids, or the model's context), or parameters.
        """
        check_params(self.model, params)
        self._check_prompts(prompt_ids, prompt_lengths)
        check_key("sampler", key)
        return self.jitted(params, prompt_ids, prompt_lengths, key)

    @functools.cached_property
    def jitted(self):
        """The compiled function, which trusts its prompts."""
        return jax.jit(self._run)

    def _run(self, params: Params, prompt_ids: Array, prompt_lengths: Array, key: Array) -> Samples:
        check_params(self.model, params)
        prompt_ids, prompt_lengths = (jnp.asarray(x, jnp.int32) for x in (prompt_ids, prompt_lengths))
        prompts = prompt_ids, prompt_lengths, branch_keys(key, prompt_ids.shape[0], self.num_generations)
        if self.mesh is None:
            return self._decode(one_device(self.model, self._options), params, prompts)
        run = on_mesh(self._decode, self.model, self.mesh, self._options, lambda _: PartitionSpec(), split_groups=True)
        return run(params, prompts)

    @property
    def _options(self) -> Options:
        return Options("stop", self.chunk_size, compute_dtype=self.compute_dtype, state_dtype=self.state_dtype)

    def _decode(self, config: ModelConfig, params: Params, prompts: tuple[Array, Array, Array]) -> Samples:
        """On one device: its groups' prompts, lengths and keys [B, G]; what comes back is of all groups."""
        prompt_ids, prompt_lengths, keys = prompts
        prefilled = prefill(params, config, prompt_ids, prompt_lengths, self.chunk_size)
        dtype = config.compute_dtype or params["embed_tokens"].dtype
        caches = shared_caches(config, keys.shape[0], keys.shape[1], self.max_tokens, dtype)
        out = decode(
            params,
            copies(config),
            prefilled,
            shared_attention(prefilled, config.shards),
            caches,
            keys,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop_ids=self.stop_ids,
        )
        return Samples(*(config.shards.gather_data(x) for x in out))

    def _check_prompts(self, prompt_ids: Any, prompt_lengths: Any) -> None:
        shape, lengths_shape = np.shape(prompt_ids), np.shape(prompt_lengths)
        if len(shape) != 2 or 0 in shape or lengths_shape != shape[:1]:
            raise ValueError(
                f"sampler: prompt_ids must be [B, P] and prompt_lengths [B], got {list(shape)} and"
                f" {list(lengths_shape)}"
            )
        if hasattr(prompt_ids, "dtype") and hasattr(prompt_lengths, "dtype"):
            given = {"prompt_ids": (prompt_ids, "B P", int), "prompt_lengths": (prompt_lengths, "B", int)}
            check_arrays("sampler", given)
        if isinstance(prompt_ids, jax.core.Tracer) or isinstance(prompt_lengths, jax.core.Tracer):
            return
        ids, lengths = np.asarray(prompt_ids), np.asarray(prompt_lengths)
        context, vocab = self.model.max_position_embeddings, self.model.vocab_size
        for b, length in enumerate(lengths.tolist()):
            if not 0 <= length <= shape[1]:
                raise ValueError(f"sampler: prompt {b} has length {length}, but prompt_ids has room for {shape[1]}")
            if length and length + self.max_tokens > context:
                raise ValueError(
                    f"sampler: prompt {b} of {length} tokens and max_tokens={self.max_tokens} make"
                    f" {length + self.max_tokens}, but the model's context (max_position_embeddings) is {context};"
                    " shorten the prompt or lower max_tokens"
                )
        bad = ((ids < 0) | (ids >= vocab)) & (np.arange(shape[1]) < lengths[:, None])
        if bad.any():
            b, t = np.argwhere(bad)[0]
            raise ValueError(
                f"sampler: prompt {b} has id {ids[b, t]} at position {t}, but the model's vocabulary has ids 0 to"
                f" {vocab - 1}; do tokenizer and model belong together?"
            )


def branch_keys(key: Array, groups: int, branches: int) -> Array:
    """A PRNG key for every branch, [B, G]: fold_in of the group's index, then the branch's."""
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    return jax.vmap(fold, (0, None))(fold(key, jnp.arange(groups)), jnp.arange(branches))


def make_sampler(
    model: ModelConfig,
    *,
    num_generations: int,
    max_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop_ids: Sequence[int] = (),
    chunk_size: int = 512,
    compute_dtype: str | None = None,
    state_dtype: str | None = None,
    mesh: AnyMesh | None = None,
) -> Sampler:
    """A function (params, prompt_ids [B, P], prompt_lengths [B], key) -> `Samples`.

    Args:
      num_generations: branches G of each group.
      max_tokens: longest response R; a branch ends there, or with a stop token.
      temperature: divides the logits; 0 takes the likeliest token.
      top_p: draws from the fewest tokens whose tempered probabilities add up to top_p (nucleus, arXiv 1904.09751).
      stop_ids: tokens that end a response and belong to it.
      chunk_size: prompt tokens prefilled at a time.
      compute_dtype, state_dtype: as of `replay.value_and_grad`; own keys and values are of compute_dtype.
      mesh: devices to run on, as of `replay.value_and_grad`: groups are split over its data axis, prefixes striped over
        context and fsdp, the samples are copied to all.

    A step's randomness comes from the key folded with group index, branch index and step: a branch's tokens depend
    neither on G nor on the other groups (beyond rounding of the logits, whose products run over all rows at once), and
    the same key on the same shapes gives the same bits.

    Memory beyond the parameters: the state of all B prompts at once, 2 · B · L · K · P · H elements, each branch's own
    keys and values, 2 · B · G · L · K · R · H, and one step's logits B · G · V. For less, pass fewer prompts at a time.

    Raises: ValueError for an option out of range.
    """
    stop_ids = tuple(int(token) for token in stop_ids)
    sampling = (num_generations, max_tokens, float(temperature), float(top_p), stop_ids, chunk_size)
    return _cached(model, *sampling, compute_dtype, state_dtype, mesh)


# Equal requests share one compiled function.
_cached = functools.lru_cache(maxsize=64)(Sampler)


def sample(
    params: Params,
    model: ModelConfig,
    prompt_ids: Any,
    prompt_lengths: Any,
    *,
    num_generations: int,
    max_tokens: int,
    key: Array,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop_ids: Sequence[int] = (),
    chunk_size: int = 512,
) -> Samples:
    """G responses to every prompt; the arguments are those of `make_sampler` and of the function it returns."""
    sampler = make_sampler(
        model,
        num_generations=num_generations,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        stop_ids=stop_ids,
        chunk_size=chunk_size,
    )
    return sampler(params, prompt_ids, prompt_lengths, key)
