"""The stack of blocks, run by run: forward, backward, and a differentiable forward for everyday use.

A run's blocks execute in one loop that reads its stacked parameters, and the prefix state, at the loop's index: neither
is ever sliced out or copied. The backward is a hand-written reverse loop that adds parameter gradients and the
cotangents of the prefix state into its carry, in place.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from lsfuse.checks import check_arrays
from lsfuse.kernels.layout import row_major
from lsfuse.model.attention import Before, Stripes
from lsfuse.model.blocks import Tokens, at_block, block_backward, block_forward, saved_names
from lsfuse.model.config import ModelConfig
from lsfuse.model.layers import cast_here, rms_norm, softcap
from lsfuse.model.params import check_params, is_quantized
from lsfuse.model.rope import rope_tables
from lsfuse.model.state import PrefixState, read_state
from lsfuse.model.stream import (
    block_input_backward,
    end_backward,
    end_stream,
    stands_beside,
    start_stream,
    through_block,
)
from lsfuse.types import Array, Params


@struct.dataclass
class Context:
    """The prefix that tokens run against: the first `length` positions of `state`; None where none can come before
    them, so that no code for one is compiled.

    constant: how many of them are constants, to the backward; None if the whole prefix is differentiable.
    stripes: which of them this device has; None: all.
    """

    state: PrefixState
    length: Array | None
    constant: Array | None = None
    stripes: Stripes | None = None

    def before(self, run: str, layer: Array) -> Before | None:
        if self.length is None or run not in self.state.k:
            return None
        return Before(self.state.k[run], self.state.v[run], layer, self.length, self.constant, self.stripes)


def no_prefix() -> Context:
    """For rows that stand alone."""
    return Context(PrefixState({}, {}), None)


def make_tokens(config: ModelConfig, first: Array | int, count: int, lengths: Array, dtype) -> Tokens:
    """`count` tokens a row at positions `first` …, of which the device has its own; lengths [B] of them all valid."""
    rope_dtype = jnp.promote_types(dtype, jnp.float32)
    own = config.shards.own(count)
    positions = first + config.shards.first(own) + jnp.arange(own)
    return Tokens(rope_tables(config, positions, rope_dtype), lengths)


def embed(params: Params, config: ModelConfig, ids: Array, valid: Array) -> Array:
    """Scaled rows of the embedding [..., D]; zero where not `valid`, whatever the id there. On several devices: of the
    device's own positions."""
    table = jnp.asarray(params["embed_tokens"])  # a numpy array cannot be indexed by a tracer
    ids, here = _own_words(config, ids, valid, table)
    x = cast_here(jnp.where(here[..., None], table[ids], 0), config.compute_dtype or table.dtype)
    return _scaled(config, config.shards.scatter_tokens(config.shards.sum_tensor(x), x.ndim - 2))


def _own_words(config: ModelConfig, ids: Array, valid: Array, table: Array) -> tuple[Array, Array]:
    """(rows of the device's table, 0 where the id is another device's; where it is its own)."""
    if not config.shards.vocabulary:
        return jnp.where(valid, ids, 0), valid
    ids = ids - config.shards.first_word(table.shape[0])
    here = valid & (ids >= 0) & (ids < table.shape[0])
    return jnp.where(here, ids, 0), here


def _scaled(config: ModelConfig, x: Array) -> Array:
    return x if config.embed_scale == 1 else x * jnp.asarray(config.embed_scale, x.dtype)


def embed_backward(grads: Params, config: ModelConfig, ids: Array, valid: Array, dx: Array) -> Params:
    """Adds dx [..., D], of the device's own positions, to the gradients of the embedding's rows."""
    table = grads["embed_tokens"]
    ids, here = _own_words(config, ids, valid, table)
    dx = config.shards.gather_tokens(_scaled(config, dx), dx.ndim - 2)
    return {**grads, "embed_tokens": table.at[ids].add(jnp.where(here[..., None], dx, 0).astype(table.dtype))}


def block_params(params: Params, config: ModelConfig, run: str, layer: Array | int) -> dict[str, Array]:
    """One block's leaves out of its run, gathered from the devices that have parts of them."""
    leaves = jax.tree.map(lambda v: row_major(lax.dynamic_index_in_dim(v, layer, 0)), dict(params["runs"][run]))
    leaves = jax.tree.map(lambda v: v[0], leaves)
    if config.compute_dtype is not None:
        leaves = {
            n: v if is_quantized(v) or v.ndim < 2 else cast_here(v, config.compute_dtype) for n, v in leaves.items()
        }
    return config.shards.gather_block(leaves)


def add_block_grads(
    grads: dict[str, Array], config: ModelConfig, layer: Array | int, dp: dict[str, Array]
) -> dict[str, Array]:
    """Adds one block's gradients to its run's stacked ones, in place; to each device its part."""
    dp = config.shards.scatter_block(dp)

    def add(total, new):
        old = lax.dynamic_index_in_dim(total, layer, 0, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, old + new.astype(total.dtype), layer, 0)

    return {**grads, **{name: add(grads[name], new) for name, new in dp.items()}}


def _read_block(buffer: Array, layer: Array, chunk: Array | None) -> Array:
    """Entry `layer` of [blocks, ...], or entry (chunk, layer) of [chunks, blocks, ...]."""
    if chunk is None:
        return lax.dynamic_index_in_dim(buffer, layer, 0, keepdims=False)
    start = (chunk, layer, *(0,) * (buffer.ndim - 2))
    return lax.dynamic_slice(buffer, [jnp.asarray(i, jnp.int32) for i in start], (1, 1, *buffer.shape[2:]))[0, 0]


def _segments(config: ModelConfig, upto: int | None):
    """(run, block, how many of the run's blocks) for the blocks before `upto` (None: all)."""
    first = 0
    for r, (block, n) in enumerate(config.runs):
        count = n if upto is None else min(max(upto - first, 0), n)
        first += n
        if count:
            yield str(r), block, count


def run_blocks(
    params: Params,
    config: ModelConfig,
    x: Array,
    tokens: Tokens,
    context: Context,
    keep: tuple[str, ...] = (),
    upto: int | None = None,
    own_at: Array | None = None,
) -> tuple[Array, dict[str, dict[str, Array]]]:
    """Runs blocks 0 … upto - 1 (all by default) on x [B, T, D] against a prefix.

    keep: piece boundaries to return, by run and name, each stacked [blocks, ...]; "x" is a block's input.
    own_at: where in the state these tokens' own keys and values already stand (B = 1); None computes them.

    Returns: (what block `upto` reads: the stream after the blocks, unless it stands beside the last; what was kept).
    """
    kept = {}
    stream = start_stream(config, x)
    for run, block, count in _segments(config, upto):

        @jax.named_scope(f"run_{run}")
        def body(stream, layer, run=run, block=block):
            known = None
            if own_at is not None and block.has_attention:
                own = read_state(context.state, run, layer, own_at, stream.x.shape[1])
                known = {name: y.astype(stream.x.dtype) for name, y in zip("kv", own, strict=True)}
            before, here = context.before(run, layer), at_block(config, int(run), layer, tokens)

            def one(x):
                p = block_params(params, config, run, layer)
                y, saved = block_forward(config, block, p, x, here, before, known)
                return y, {name: saved[name] for name in keep if name in saved}

            return through_block(config, int(run), layer, stream, one)

        stream, kept[run] = lax.scan(body, stream, jnp.arange(count))
    return end_stream(config, stream, upto), kept


def run_blocks_backward(
    params: Params,
    config: ModelConfig,
    dx: Array,
    kept: dict[str, dict[str, Array]],
    tokens: Tokens,
    context: Context,
    grads: Params,
    dstate: PrefixState | None,
    upto: int | None = None,
    own_at: Array | None = None,
    dkv: PrefixState | None = None,
    kept_at: Array | None = None,
) -> tuple[Array, Params, PrefixState | None]:
    """Backward of `run_blocks` from what it kept ("x" and a policy's names).

    dstate: cotangents of the differentiable positions of the prefix, added to in place; None if there are none.
    dkv: cotangents that later tokens have left for these tokens' own keys and values (prefix chunks).
    kept_at: index into a leading axis of everything in `kept` (one entry a chunk), which is thus read a block at a
        time and never copied out; None where there is no such axis.

    Returns: (cotangent of the input, grads, dstate).
    """
    d = end_backward(config, dx, upto)
    for run, block, count in reversed(list(_segments(config, upto))):
        dprefix = (dstate.k[run], dstate.v[run]) if dstate is not None and block.has_attention else None

        @jax.named_scope(f"run_{run}")
        def body(carry, layer, run=run, block=block):
            d, run_grads, dprefix = carry
            saved = {name: _read_block(buffer, layer, kept_at) for name, buffer in kept[run].items()}
            own = None
            if block.has_attention and own_at is not None:
                k, v = read_state(context.state, run, layer, own_at, d.x.shape[1])
                saved = {**saved, "k": k.astype(d.x.dtype), "v": v.astype(d.x.dtype)}
                own = None if dkv is None else read_state(dkv, run, layer, jnp.int32(0), d.x.shape[1])
            dinput, dp, dprefix = block_backward(
                config,
                block,
                block_params(params, config, run, layer),
                d.x,
                saved,
                at_block(config, int(run), layer, tokens),
                context.before(run, layer),
                dprefix,
                own,
            )
            d = block_input_backward(d, stands_beside(config, int(run), layer), dinput)
            return (d, add_block_grads(run_grads, config, layer, dp), dprefix), None

        carry = (d, grads["runs"][run], dprefix)
        (d, run_grads, dprefix), _ = lax.scan(body, carry, jnp.arange(count), reverse=True)
        grads = {**grads, "runs": {**grads["runs"], run: run_grads}}
        if dstate is not None and dprefix is not None:
            dstate = PrefixState({**dstate.k, run: dprefix[0]}, {**dstate.v, run: dprefix[1]})
    return d.x, grads, dstate


# --- a whole sequence, for everyday use -----------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 4))
def _rows(params: Params, config: ModelConfig, x: Array, lengths: Array, policy: str) -> Array:
    return _rows_fwd(params, config, x, lengths, policy)[0]


def _rows_fwd(params, config, x, lengths, policy):
    tokens = make_tokens(config, 0, x.shape[1], lengths, x.dtype)
    x, kept = run_blocks(params, config, x, tokens, no_prefix(), ("x", *saved_names(policy)))
    return x, (params, kept, lengths)


def _rows_bwd(config, policy, residuals, dy):
    params, kept, lengths = residuals
    tokens = make_tokens(config, 0, dy.shape[1], lengths, dy.dtype)
    grads = jax.tree.map(jnp.zeros_like, params)
    dx, grads, _ = run_blocks_backward(params, config, dy, kept, tokens, no_prefix(), grads, None)
    return grads, dx, None


_rows.defvjp(_rows_fwd, _rows_bwd)


def forward(
    params: Params,
    config: ModelConfig,
    ids: Array,
    lengths: Array | None = None,
    remat_policy: str = "everything_saveable",
) -> Array:
    """Hidden states after the final norm, differentiable in `params`; attention in tiles, nothing of size S × S.

    Args: ids int32 [B, T]; lengths int32 [B] valid tokens of each row (all by default).
    Returns: [B, T, D] in the parameters' dtype; rows beyond a length are meaningless but finite.

    Raises: ValueError for arrays of other shapes or kinds, parameters that do not fit `config`, an unknown policy.
    """
    check_params(config, params)
    check_arrays("model.forward", {"ids": (ids, "B T", int), "lengths": (lengths, "B", int)})
    lengths = jnp.full(ids.shape[0], ids.shape[1]) if lengths is None else lengths
    valid = jnp.arange(ids.shape[1]) < lengths[:, None]
    x = embed(params, config, ids, valid)
    blocks = {"runs": params["runs"]}
    return rms_norm(config, _rows(blocks, config, x, lengths, remat_policy), params["norm"])


def logits(params: Params, config: ModelConfig, hidden: Array) -> Array:
    """[..., V] in float32 or wider, from hidden states after the final norm. For small inputs: nothing is chunked.

    Raises: ValueError for hidden states of another width or kind.
    """
    check_arrays("model.logits", {"hidden": (hidden, "... D", float)}, {"D": (config.hidden_size, "the config")})
    head = params["lm_head"] if "lm_head" in params else params["embed_tokens"].T
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    products = jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=wide)
    return softcap(products, config.final_logit_softcapping)
