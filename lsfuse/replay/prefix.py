"""The prefix of one group: captured chunk by chunk into a state, and run backward in reverse, chunk by chunk.

The state is its own checkpoint: a chunk recomputes against the part of the state before it. Nothing beyond the last
block with attention is run, and of that block only keys and values.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from lsfuse.model.blocks import at_block, keys_values_backward, saved_names
from lsfuse.model.config import ModelConfig, locate_block
from lsfuse.model.layers import KEYS_VALUES, keys_values, subset
from lsfuse.model.state import PrefixState, init_state, read_positions, read_state, write_state
from lsfuse.model.transformer import (
    Context,
    add_block_grads,
    block_params,
    embed,
    embed_backward,
    make_tokens,
    run_blocks,
    run_blocks_backward,
)
from lsfuse.replay.geometry import Geometry, make_stripes, prefix_bounds
from lsfuse.types import Array, Params


@struct.dataclass
class Kept:
    """Activations of prefix chunks. blocks: by run and name, [chunks, blocks, ...]; last: the input of the last block
    with attention, [chunks, 1, C, D]."""

    blocks: dict[str, dict[str, Array]]
    last: Array


def kept_names(policy: str) -> tuple[str, ...]:
    """Piece boundaries kept of a prefix chunk; its keys and values are in the state."""
    return ("x", *(name for name in saved_names(policy) if name not in ("k", "v")))


def _chunk_inputs(params, config, ids, at, end, size):
    chunk_ids = lax.dynamic_slice_in_dim(jnp.pad(ids, (0, size)), at, size)
    count = jnp.clip(end - at, 0, size)
    valid = jnp.arange(size) < count
    x = embed(params, config, chunk_ids, valid)[None]
    return chunk_ids, valid, x, make_tokens(config, at, size, count[None], x.dtype)


def _capture_chunk(params, config, ids, state, at, end, size, names, first, stripes):
    """Runs one chunk, writes its keys and values; returns the state and the boundaries asked for. first: whether
    nothing ever stands before it."""
    own_at = stripes.own(config.shards, at)
    _, _, x, tokens = _chunk_inputs(params, config, ids, at, end, size)
    last = config.last_attention_block
    context = Context(state, None if first else at, stripes=stripes)
    x, kept = run_blocks(params, config, x, tokens, context, ("k", "v", *names), upto=last)
    for run, saved in kept.items():
        if run in state.k:
            state = write_state(state, run, 0, saved.pop("k")[:, :, 0], saved.pop("v")[:, :, 0], own_at)
    last_run, layer = locate_block(config, last)
    p = subset(block_params(params, config, str(last_run), layer), KEYS_VALUES)
    k, v = keys_values(config, p, x, at_block(config, last_run, layer, tokens).rope)
    return write_state(state, str(last_run), layer, k[None, :, 0], v[None, :, 0], own_at), Kept(kept, x)


def _chunks(count: Array, size: int) -> Array:
    return (jnp.maximum(count, 0) + size - 1) // size


def capture(
    params: Params,
    config: ModelConfig,
    prompt_ids: Array,
    prompt_length: Array,
    geometry: Geometry,
    state: PrefixState | None = None,
    keep: str | None = None,
) -> tuple[PrefixState, Kept | None]:
    """State of x[0 : P - 1] of one prompt.

    Args:
      prompt_ids: int32 [P]; prompt_length: int32 scalar.
      state: buffers to write into (what they hold does not matter); None makes new ones.
      keep: a remat policy whose boundaries are returned for the differentiable part; None returns none.
    """
    if state is None:
        dtype = config.state_dtype or config.compute_dtype or params["embed_tokens"].dtype
        state = init_state(config, geometry.state // config.shards.num_tokens, dtype)
    if config.last_attention_block < 0:
        return state, None
    start, end = prefix_bounds(geometry, prompt_length)
    stripes = make_stripes(geometry, prompt_length)
    constant_end = end if geometry.grad_tokens == 0 else start

    if not geometry.exact or geometry.grad_tokens == 0:

        @jax.named_scope("capture_constant")
        def constant(i, state):
            at = i * geometry.chunk
            size, first = geometry.chunk, geometry.one_chunk
            return _capture_chunk(params, config, prompt_ids, state, at, end, size, (), first, stripes)[0]

        state = lax.fori_loop(0, _chunks(constant_end, geometry.chunk), constant, state)
    if geometry.grad_tokens == 0:
        return state, None

    size = geometry.grad_chunk
    names = () if keep is None else kept_names(keep)

    @jax.named_scope("capture")
    def capture_one(state, at):
        return _capture_chunk(params, config, prompt_ids, state, at, end, size, names, geometry.one_chunk, stripes)

    def chunk(i, carry):
        state, buffers = carry
        state, kept = capture_one(state, start + i * size)
        if keep is not None:
            buffers = jax.tree.map(lambda b, new: lax.dynamic_update_index_in_dim(b, new, i, 0), buffers, kept)
        return state, buffers

    buffers = None
    if keep is not None:
        one = jax.eval_shape(lambda s: capture_one(s, start)[1], state)
        chunks = geometry.cotangent // size
        buffers = jax.tree.map(lambda x: jnp.zeros((chunks, *x.shape), x.dtype), one)
    return lax.fori_loop(0, _chunks(end - start, size), chunk, (state, buffers))


def prefix_backward(
    params: Params,
    config: ModelConfig,
    prompt_ids: Array,
    prompt_length: Array,
    geometry: Geometry,
    state: PrefixState,
    dstate: PrefixState,
    grads: Params,
    kept: Kept | None,
    policy: str,
) -> Params:
    """Pulls the state's cotangents back to the parameters, last chunk first.

    Recomputes each chunk against the state before it, or reads its activations from `kept`.
    """
    start, end = prefix_bounds(geometry, prompt_length)
    stripes, shards = make_stripes(geometry, prompt_length), config.shards
    size, last = geometry.grad_chunk, config.last_attention_block
    run, layer = locate_block(config, last)
    count = _chunks(end - start, size)

    @jax.named_scope("reverse")
    def chunk(i, carry):
        dstate, grads = carry
        i = count - 1 - i
        at = start + i * size
        own_at, down_at = stripes.own(shards, at), i * shards.own(size)
        ids, valid, x, tokens = _chunk_inputs(params, config, prompt_ids, at, end, size)
        context = Context(state, None if geometry.one_chunk else at, None if geometry.exact else start, stripes)
        if kept is None:
            x, saved = run_blocks(params, config, x, tokens, context, kept_names(policy), upto=last, own_at=own_at)
        else:
            x, saved = lax.dynamic_index_in_dim(kept.last, i, 0, keepdims=False), kept.blocks
        # Read before the loop over blocks, which depends on it: XLA then adds to the buffers without copying them.
        dkv = read_positions(dstate, down_at, shards.own(size))
        p = subset(block_params(params, config, str(run), layer), KEYS_VALUES)
        own = read_state(dkv, str(run), layer, jnp.int32(0), shards.own(size))
        dx, dp = keys_values_backward(config, p, x, at_block(config, run, layer, tokens), own)
        runs = {**grads["runs"], str(run): add_block_grads(grads["runs"][str(run)], config, layer, dp)}
        dx, grads, dstate = run_blocks_backward(
            params,
            config,
            dx,
            saved,
            tokens,
            context,
            {**grads, "runs": runs},
            dstate,
            upto=last,
            own_at=own_at,
            dkv=dkv,
            kept_at=None if kept is None else i,
        )
        return dstate, embed_backward(grads, config, ids, valid, dx[0])

    return lax.fori_loop(0, count, chunk, (dstate, grads))[1]
