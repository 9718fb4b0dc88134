"""The tails of some branches of one group: forward to log-probs against the group's state, and backward.

A tail's inputs are the last prompt token and the response without its last token; its labels are the response.
"""

import jax.numpy as jnp
from flax import struct

from lsfuse.model.blocks import Tokens, saved_names
from lsfuse.model.config import ModelConfig
from lsfuse.model.logprobs import HeadSaved, token_logprobs, token_logprobs_backward
from lsfuse.model.state import PrefixState
from lsfuse.model.transformer import Context, embed, embed_backward, make_tokens, run_blocks, run_blocks_backward
from lsfuse.replay.batch import Batch
from lsfuse.types import Array, Params


@struct.dataclass
class TailSaved:
    """What a tail's backward needs. x: [g, R, D] after the last block, the device's own positions."""

    kept: dict[str, dict[str, Array]]
    x: Array
    head: HeadSaved


def tail_inputs(batch: Batch, config: ModelConfig, dtype) -> tuple[Array, Array, Array, Tokens]:
    """ids, labels, validity [g, R] and tokens of a branch slice [1, g, ...]; R made up to a multiple of the devices."""
    labels = batch.completion_ids[0]
    labels = jnp.pad(labels, ((0, 0), (0, -labels.shape[1] % config.shards.num_tokens)))
    lengths = jnp.where(batch.branch_mask[0], batch.completion_lengths[0], 0)
    last = jnp.maximum(batch.prompt_lengths[0] - 1, 0)
    first = jnp.broadcast_to(batch.prompt_ids[0, last], (labels.shape[0], 1))
    ids = jnp.concatenate([first, labels[:, :-1]], 1)
    valid = jnp.arange(labels.shape[1]) < lengths[:, None]
    tokens = make_tokens(config, last, labels.shape[1], lengths, dtype)
    return ids, jnp.where(valid, labels, 0), valid, tokens


def head_logps(
    params: Params, config: ModelConfig, x: Array, labels: Array, valid: Array, temperature: float
) -> tuple[Array, Array, HeadSaved]:
    """(per_token_logps, entropies) [1, g, R] of x [g, R, D] after the last block, the device's own positions; zero
    where not `valid`."""
    x = config.shards.gather_tokens(x, 1)
    logps, entropies, head = token_logprobs(params, config, x.reshape(-1, x.shape[-1]), labels.reshape(-1), temperature)
    logps, entropies = (jnp.where(valid, y.reshape(valid.shape), 0)[None] for y in (logps, entropies))
    return logps, entropies, head


def tails_forward(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    context: Context,
    temperature: float,
    policy: str | None,
    own_at: Array | None = None,
) -> tuple[Array, Array, TailSaved | None]:
    """(per_token_logps, entropies) [1, g, R] of a branch slice [1, g, ...], zero where there is no token.

    policy: remat policy of what is saved for the backward; None saves nothing.
    own_at: where in the state these tokens' own keys and values already stand (g = 1); None computes them.
    """
    ids, labels, valid, tokens = tail_inputs(batch, config, params["embed_tokens"].dtype)
    keep = () if policy is None else ("x", *saved_names(policy))
    if own_at is not None:
        keep = tuple(name for name in keep if name not in ("k", "v"))
    x, kept = run_blocks(params, config, embed(params, config, ids, valid), tokens, context, keep, own_at=own_at)
    logps, entropies, head = head_logps(params, config, x, labels, valid, temperature)
    size = batch.completion_ids.shape[2]
    return logps[..., :size], entropies[..., :size], None if policy is None else TailSaved(kept, x, head)


def tails_backward(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    context: Context,
    temperature: float,
    saved: TailSaved,
    dlogps: Array,
    dentropies: Array,
    grads: Params,
    dstate: PrefixState | None,
    own_at: Array | None = None,
    dkv: PrefixState | None = None,
) -> tuple[Params, PrefixState | None]:
    """Adds the tails' gradients to `grads` and the cotangents of the prefix to `dstate`, in place.

    own_at as in `tails_forward`; dkv: cotangents that later tokens have left for these tokens' own keys and values.
    """
    ids, labels, valid, tokens = tail_inputs(batch, config, params["embed_tokens"].dtype)
    extra = ((0, 0), (0, valid.shape[1] - dlogps.shape[2]))
    dlogps, dentropies = (
        jnp.where(valid, jnp.pad(d[0].astype(saved.head.lse.dtype), extra), 0).reshape(-1) for d in (dlogps, dentropies)
    )
    x = config.shards.gather_tokens(saved.x, 1).reshape(-1, saved.x.shape[-1])
    dx, grads = token_logprobs_backward(
        params, config, x, labels.reshape(-1), saved.head, dlogps, dentropies, grads, temperature
    )
    dx = config.shards.own_tokens(dx.reshape(*valid.shape, -1), 1)
    dx, grads, dstate = run_blocks_backward(
        params, config, dx, saved.kept, tokens, context, grads, dstate, own_at=own_at, dkv=dkv
    )
    return embed_backward(grads, config, ids, valid, dx), dstate
