"""The first part of the answer that all branches of a group share, run once between the prompt and the tails.

With prefix="longest_common" the c tokens that all responses of a group begin with are a *trunk*: a branch of its own,
whose inputs are the last prompt token and the first c - 1 of them, and whose labels are the c tokens. Its K/V follow
the prompt's in the state, and tails begin after it. The trunk carries gradient in every mode, with the cotangents of
its log-probs summed over the branches, and recomputes its activations for the backward, as a prefix chunk does.
"""

import jax.numpy as jnp
from flax import struct
from jax import lax

from lsfuse.model.config import ModelConfig
from lsfuse.model.state import PrefixState, read_positions, write_state
from lsfuse.model.transformer import Context, embed, run_blocks
from lsfuse.replay.batch import Batch
from lsfuse.replay.geometry import branch_slice
from lsfuse.replay.tails import head_logps, tail_inputs, tails_backward, tails_forward
from lsfuse.types import Array, Params


class Trunk(struct.PyTreeNode):
    """count: int32 scalar, c. node: the trunk as a branch [1, 1, ...]. tails: the group [1, G, ...] without it: the
    prompt is longer by c, the responses shorter. logps, entropies: of the trunk's tokens, [1, 1, R]."""

    count: Array
    node: Batch
    tails: Batch
    logps: Array
    entropies: Array

    def join(self, part: Batch, logps: Array, entropies: Array) -> tuple[Array, Array]:
        """[1, g, R] of whole responses from those of their tails."""
        shared = jnp.arange(logps.shape[2]) < self.count
        pairs = ((self.logps, logps), (self.entropies, entropies))
        logps, entropies = (jnp.where(shared, own, _later(tails, self.count)) for own, tails in pairs)
        return jnp.where(part.token_mask, logps, 0), jnp.where(part.token_mask, entropies, 0)

    def divide(self, part: Batch, cotangent: Array) -> tuple[Array, Array]:
        """Transpose of `join`: the trunk's cotangent [1, 1, R], summed over branches, and the tails' [1, g, R]."""
        cotangent = jnp.where(part.token_mask, cotangent, 0)
        shared = jnp.arange(cotangent.shape[2]) < self.count
        return jnp.sum(jnp.where(shared, cotangent, 0), 1, keepdims=True), _earlier(cotangent, self.count)


def _earlier(x: Array, count: Array) -> Array:
    """x [1, g, R] without its first `count` entries, zeros after."""
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, x.shape[2])))
    return lax.dynamic_slice_in_dim(padded, count, x.shape[2], 2)


def _later(x: Array, count: Array) -> Array:
    """x [1, g, R] after `count` zeros."""
    padded = jnp.pad(x, ((0, 0), (0, 0), (x.shape[2], 0)))
    return lax.dynamic_slice_in_dim(padded, x.shape[2] - count, x.shape[2], 2)


def common_length(group: Batch) -> Array:
    """int32 scalar: how many tokens all responses of a group [1, G, ...] begin with. Empty responses do not count."""
    ids, lengths = group.completion_ids[0], group.completion_lengths[0]
    counts = group.branch_mask[0] & (lengths > 0)
    same = (ids == ids[jnp.argmax(counts)]) & (jnp.arange(ids.shape[1]) < lengths[:, None])
    agree = jnp.all(same | ~counts[:, None], 0)
    return jnp.where(counts.any(), jnp.sum(jnp.cumprod(agree.astype(jnp.int32))), 0).astype(jnp.int32)


def divide_group(group: Batch) -> Trunk:
    """The trunk of a group [1, G, ...], its log-probs still to come."""
    ids, lengths = group.completion_ids, group.completion_lengths
    count = common_length(group)
    first = jnp.argmax(group.branch_mask[0] & (lengths[0] > 0))
    plain = Batch(group.prompt_ids, group.prompt_lengths, ids, lengths, jnp.ones(ids.shape, bool), group.group_sizes)
    node = branch_slice(plain, first, 1)
    node = node.replace(completion_lengths=jnp.reshape(count, (1, 1)), group_sizes=jnp.ones_like(group.group_sizes))
    room = jnp.pad(group.prompt_ids, ((0, 0), (0, ids.shape[2])))
    longer = lax.dynamic_update_slice_in_dim(room, node.completion_ids[:, 0], group.prompt_lengths[0], 1)
    tails = plain.replace(
        prompt_ids=longer,
        prompt_lengths=group.prompt_lengths + count,
        completion_ids=_earlier(ids, count),
        completion_lengths=jnp.maximum(lengths - count, 0),
    )
    zeros = jnp.zeros((1, 1, ids.shape[2]))
    return Trunk(count, node, tails, zeros, zeros)


def trunk_capture(
    params: Params, config: ModelConfig, node: Batch, state: PrefixState, at: Array, temperature: float
) -> tuple[PrefixState, Array, Array]:
    """Runs the trunk against the first `at` positions of the state and writes its keys and values behind them.

    Returns: (state, per_token_logps, entropies), the latter [1, 1, R].
    """
    ids, labels, valid, tokens = tail_inputs(node, config, params["embed_tokens"].dtype)
    x, kept = run_blocks(params, config, embed(params, config, ids, valid), tokens, Context(state, at), ("k", "v"))
    for run, saved in kept.items():
        if run in state.k:
            state = write_state(state, run, 0, saved["k"][:, :, 0], saved["v"][:, :, 0], at)
    logps, entropies, _ = head_logps(params, config, x, labels, valid, temperature)
    return state, logps, entropies


def trunk_backward(
    params: Params,
    config: ModelConfig,
    node: Batch,
    context: Context,
    temperature: float,
    policy: str,
    dlogps: Array,
    dentropies: Array,
    grads: Params,
    dstate: PrefixState | None,
    down_at: Array,
) -> tuple[Params, PrefixState | None]:
    """Backward of the trunk: from its log-probs and entropies, [1, 1, R], and from what the tails left for its keys and
    values.

    context: the prompt's state, whose next positions hold the trunk's own keys and values. down_at: where in `dstate`
    their cotangents stand; they are zeroed, for the prompt's last chunk reads beyond its own end.
    """
    at, size = context.length, node.completion_ids.shape[2]
    dkv = None if dstate is None else read_positions(dstate, down_at, size)
    _, _, saved = tails_forward(params, config, node, context, temperature, policy, own_at=at)
    assert saved is not None  # there is a policy
    args = (params, config, node, context, temperature, saved, dlogps, dentropies, grads, dstate)
    grads, dstate = tails_backward(*args, own_at=at, dkv=dkv)
    if dstate is not None:
        dstate = _cleared(dstate, down_at, size)
    return grads, dstate


def _cleared(state: PrefixState, at: Array, count: int) -> PrefixState:
    def clear(buffer):
        zeros = jnp.zeros((*buffer.shape[:2], count, buffer.shape[3]), buffer.dtype)
        return lax.dynamic_update_slice_in_dim(buffer, zeros, at, 2)

    return PrefixState({r: clear(x) for r, x in state.k.items()}, {r: clear(x) for r, x in state.v.items()})
