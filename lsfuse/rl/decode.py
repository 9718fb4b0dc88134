"""Decoding a batch of groups: prompts are prefilled once, then all branches of all groups go forward step by step.

One step runs the model's own blocks on the B·G rows together, so every parameter is read once per step. Attention runs
group by group: the branches of a group read one prefix state, and each its own keys and values of the tokens so far.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from lsfuse.kernels import tail_attention
from lsfuse.model.attention import Before, Stripes, share
from lsfuse.model.blocks import Tokens, at_block, block_forward
from lsfuse.model.config import DeviceConfig, ModelConfig
from lsfuse.model.layers import ATTENTION_IN, attention_in, rms_norm, subset
from lsfuse.model.rope import rope_tables
from lsfuse.model.shards import Copies, Shards
from lsfuse.model.state import PrefixState
from lsfuse.model.stream import start_stream, through_block
from lsfuse.model.transformer import embed, logits
from lsfuse.replay.geometry import Options, make_geometry, make_stripes
from lsfuse.replay.prefix import capture
from lsfuse.rl.draw import draw_tokens
from lsfuse.rl.kernels_in_run import decode_params
from lsfuse.types import Array, Params

OWN_TILE = 128  # own keys read at a time
ONE_DEVICE = Shards()

# Keys and values of a run's blocks, [L, B, K, G, S, H] each.
Cache = tuple[Array, Array]


@struct.dataclass
class Row:
    """What attention needs of a step. step: int32 scalar. busy: bool [B], groups in which a branch goes on.

    rule: how scores are made in the block at hand; `decode_step` fills it in.
    """

    step: Array
    busy: Array
    rule: tail_attention.Rule = tail_attention.Rule()


# (run, layer, q [K, 1, B·G, g, H], k and v [K, 1, B·G, H] of this step, cache, row) -> (o like q, cache)
Attend = Callable[[str, Array, Array, Array, Array, Cache, Row], tuple[Array, Cache]]


@struct.dataclass
class Prefilled:
    """The prompts of B groups, run up to their last token, which is the first input of every branch.

    state: by run [B · L, K, S, H], group by group. stripes: which positions of it this device has, a start for each
    group. lengths: int32 [B], valid positions on all devices. last: int32 [B]. exists: bool [B], false for a group that
    is only padding.
    """

    state: PrefixState
    stripes: Stripes
    lengths: Array
    last: Array
    exists: Array


def prefill(
    params: Params, config: ModelConfig, prompt_ids: Array, prompt_lengths: Array, chunk_size: int
) -> Prefilled:
    """Args: prompt_ids int32 [B, P]; prompt_lengths int32 [B], 0 for padding."""
    groups, size = prompt_ids.shape
    geometry = make_geometry(Options("stop", chunk_size), size, 1, 1, config.shards.num_tokens)
    padded = jnp.pad(prompt_ids, ((0, 0), (0, max(geometry.state - size, 0))))
    states = lax.map(lambda xs: capture(params, config, xs[0], xs[1], geometry)[0], (padded, prompt_lengths))
    state = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), states)
    lengths = jnp.maximum(prompt_lengths - 1, 0)
    last = prompt_ids[jnp.arange(groups), lengths]
    return Prefilled(state, make_stripes(geometry, prompt_lengths), lengths, last, prompt_lengths > 0)


def init_caches(config: ModelConfig, groups: int, branches: int, size: int, dtype) -> dict[str, Cache]:
    """Room for `size` tokens of every branch, in every run with attention."""
    shapes = {
        str(r): (n, groups, block.num_kv_heads, branches, size, config.head_dim)
        for r, (block, n) in enumerate(config.runs)
        if block.has_attention
    }
    return {r: (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for r, shape in shapes.items()}


def shared_caches(config: ModelConfig, groups: int, branches: int, max_tokens: int, dtype) -> dict[str, Cache]:
    """Caches for `shared_attention`: room for the branches' own tokens alone."""
    tile = min(max_tokens, OWN_TILE)
    return init_caches(config, groups, branches, -(-max_tokens // tile) * tile, dtype)


def write_cache(cache: Cache, layer: Array, k: Array, v: Array, position: Array) -> Cache:
    """Puts keys and values [K, 1, B·G, H] of one block at `position` of every branch."""

    def put(buffer, new):
        _, groups, heads, branches, _, head_dim = buffer.shape
        new = new.reshape(heads, groups, branches, 1, head_dim).swapaxes(0, 1)[None]
        return lax.dynamic_update_slice(buffer, new.astype(buffer.dtype), _corner(layer, 0, 0, 0, position, 0))

    return put(cache[0], k), put(cache[1], v)


def _corner(*index) -> tuple[Array, ...]:
    return tuple(jnp.asarray(i, jnp.int32) for i in index)


def shared_attention(prefilled: Prefilled, shards: Shards = ONE_DEVICE) -> Attend:
    """Attention of every branch to its group's one prefix and to its own cache; neither is copied, only tiles are.

    shards: along its tokens every device has a stripe of the prefixes, and a copy of the caches, which counts once.
    """
    state, lengths = prefilled.state, prefilled.lengths
    groups = lengths.shape[0]

    def attend(run, layer, q, k, v, cache, row):
        cache = write_cache(cache, layer, k, v, row.step)
        heads, branches, size, head_dim = cache[0].shape[2:]
        tile = min(size, OWN_TILE)
        layers = state.k[run].shape[0] // groups
        queries = jnp.moveaxis(q.reshape(heads, groups, branches, 1, *q.shape[3:]), 1, 0)

        def own(b, j, prefix):
            part = (1, 1, heads, branches, tile, head_dim)
            kt, vt = (lax.dynamic_slice(x, _corner(layer, b, 0, 0, j * tile, 0), part)[0, 0] for x in cache)
            valid = jnp.clip(row.step + 1 - j * tile, 0, tile)
            valid = jnp.full(branches, jnp.where(shards.first(1) == 0, valid, 0))
            return tail_attention.forward(
                queries[b], kt, vt, valid, prefix, own_offset=row.step - j * tile, rule=row.rule
            )

        def group(b):
            # A group whose branches have all stopped reads nothing of its prefix.
            length = jnp.where(row.busy[b], lengths[b], 0)
            stripes = jax.tree.map(lambda start: start[b], prefilled.stripes)
            before = Before(state.k[run], state.v[run], b * layers + layer, length, stripes=stripes)
            o, lse = own(b, 0, before.prefix(shards, 1, row.rule.window, row.step))
            if size > tile:

                def join(j, so_far):
                    return tail_attention.merge(*so_far, *own(b, j, None))

                first: Array | int = 1
                if row.rule.window is not None:  # own tiles that the window has left behind
                    first = jnp.maximum((row.step + 1 - row.rule.window) // tile, 1)
                o, lse = lax.fori_loop(first, row.step // tile + 1, join, (o.astype(lse.dtype), lse))
            if shards.tokens:
                o = lax.psum(share(shards, o, lse)[0], shards.tokens)
            return o.astype(q.dtype)

        o = group(0)[None] if groups == 1 else lax.map(group, jnp.arange(groups))
        return jnp.moveaxis(o, 0, 1).reshape(q.shape), cache

    return attend


def copies(config: ModelConfig) -> ModelConfig:
    """The model of a device on which all rows of a step stand, whatever its shards split."""
    if not config.shards.tokens:
        return config
    assert isinstance(config, DeviceConfig)
    return dataclasses.replace(config, shards=Copies(**dataclasses.asdict(config.shards)))


def decode_step(
    params: Params,
    config: ModelConfig,
    ids: Array,
    valid: Array,
    positions: Array,
    attend: Attend,
    caches: dict[str, Cache],
    row: Row,
) -> tuple[Array, dict[str, Cache]]:
    """Logits [rows, V] after one token of every row: ids, positions int32 [rows], valid bool [rows]; and the caches.

    The rows stand where the model's pieces have tokens: each piece treats tokens alike but for their positions.
    """
    x = embed(params, config, ids, valid)[None]
    stream = start_stream(config, x)
    rope = rope_tables(config, positions, jnp.promote_types(x.dtype, jnp.float32))
    tokens = Tokens(rope, jnp.full(1, ids.shape[0], jnp.int32))
    for r, (block, count) in enumerate(config.runs):
        run = str(r)

        def body(carry, layer, run=run, block=block):
            stream, cache = carry
            p = decode_params(params, config, run, layer, ids.shape[0])
            here = at_block(config, int(run), layer, tokens)

            def one(x):
                known, new = None, cache
                if block.has_attention:
                    q, k, v = attention_in(config, subset(p, ATTENTION_IN), x, here.rope)
                    o, new = attend(run, layer, q, k, v, cache, Row(row.step, row.busy, here.rule))
                    known = {"q": q, "k": k, "v": v, "o": o, "lse": o}
                return block_forward(config, block, p, x, here, None, known)[0], new

            return through_block(config, int(run), layer, stream, one), None

        (stream, cache), _ = lax.scan(body, (stream, caches.get(run)), jnp.arange(count))
        if cache is not None:
            caches = {**caches, run: cache}
    out = logits(params, config, rms_norm(config, stream.x[0], params["norm"]))
    return config.shards.gather_vocabulary(out), caches


def decode(
    params: Params,
    config: ModelConfig,
    prefilled: Prefilled,
    attend: Attend,
    caches: dict[str, Cache],
    keys: Array,
    *,
    max_tokens: int,
    temperature: float,
    top_p: float,
    stop_ids: tuple[int, ...],
    steps: Array | int | None = None,
) -> tuple[Array, Array, Array]:
    """Runs steps until every branch has stopped, `max_tokens` at most (`steps`, if given: data, not more than that).

    keys: one PRNG key per branch, [B, G]; step t of a branch draws with fold_in(key, t).
    config: on several devices, its shards those of `copies`.

    Returns: (completion_ids int32 [B, G, R], completion_lengths int32 [B, G], per_token_logps [B, G, R]).
    """
    groups, branches = keys.shape[:2]
    rows = groups * branches
    keys = keys.reshape(rows, *keys.shape[2:])
    stop = jnp.asarray(stop_ids, jnp.int32)
    first_position = jnp.repeat(prefilled.lengths, branches)
    wide = jnp.promote_types(params["embed_tokens"].dtype, jnp.float32)
    steps = max_tokens if steps is None else steps

    def going(carry):
        return (carry[0] < steps) & ~jnp.all(carry[1])

    def step(carry):
        t, done, last, ids, lengths, logps, caches = carry
        row = Row(t, ~done.reshape(groups, branches).all(1))
        out, caches = decode_step(params, config, last, ~done, first_position + t, attend, caches, row)
        token, logp = draw_tokens(out, jax.vmap(jax.random.fold_in, (0, None))(keys, t), temperature, top_p)
        token, logp = jnp.where(done, 0, config.shards.agree(token)), jnp.where(done, 0, logp)
        ids, logps = (lax.dynamic_update_slice(x, y[:, None], _corner(0, t)) for x, y in ((ids, token), (logps, logp)))
        lengths = lengths + ~done
        done = done | jnp.any(token[:, None] == stop, -1)
        return t + 1, done, token, ids, lengths, logps, caches

    carry = (
        jnp.int32(0),
        jnp.repeat(~prefilled.exists, branches),
        jnp.repeat(prefilled.last, branches),
        jnp.zeros((rows, max_tokens), jnp.int32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, max_tokens), wide),
        caches,
    )
    _, _, _, ids, lengths, logps, _ = lax.while_loop(going, step, carry)
    shape = (groups, branches)
    return ids.reshape(*shape, -1), lengths.reshape(shape), logps.reshape(*shape, -1)
