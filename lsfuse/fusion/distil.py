"""Recovering what surgery cost: which blocks of child and parent correspond, and the losses between them.

Block-wise (Puzzle, arXiv 2411.19146, "blockwise local distillation"): every replaced span of blocks reads the parent's
activation where the span starts and learns the parent's activation where it ends. Global (FFN Fusion, arXiv
2503.18908, and Puzzle): hidden states of corresponding blocks by their cosine, and the distribution of the next token.

The teacher is the parent laid out so that whatever the child has not changed is the child's own array, held once.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from lsfuse.fusion.forward import embed_texts, token_measures
from lsfuse.fusion.surgery import cut
from lsfuse.fusion.tree import block_sources
from lsfuse.model.blocks import at_block, block_backward, block_forward, saved_names
from lsfuse.model.config import BlockConfig, ModelConfig, locate_block
from lsfuse.model.head_loss import cross_entropy, kl_to
from lsfuse.model.transformer import make_tokens
from lsfuse.types import Array, Params

POLICY = "everything_saveable"
Model = tuple[ModelConfig, Params]
Metrics = dict[str, Array]


# --- which blocks correspond ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Span:
    """Blocks child[0] … child[1] stand for the parent's parent[0] … parent[1], all inclusive. replaced: not one
    block of the same description on either side."""

    child: tuple[int, int]
    parent: tuple[int, int]
    replaced: bool


def match_blocks(child: ModelConfig, parent: ModelConfig) -> tuple[Span, ...]:
    """The smallest spans of the two that correspond, by `sources`; together they cover every block of both.

    A fused block corresponds to all of its members, so that it ends where the parent's last member does. Blocks that
    were taken out belong to the block behind them, at the end to the last. Blocks whose order was changed are one span.

    Raises: ValueError if the child is not made of this parent, or does not say of what and has another number of
        blocks, if vocabulary or hidden size differ, or if blocks of either stand beside each other.
    """
    for config in (child, parent):
        _check_in_turn(config)
    for name in ("vocab_size", "hidden_size"):
        mine, theirs = getattr(child, name), getattr(parent, name)
        if mine != theirs:
            raise ValueError(f"the parent's {name} is {theirs}, the child's {mine}: it cannot be this child's teacher")
    if not child.sources and child.num_blocks != parent.num_blocks:
        raise ValueError(
            f"the child has {child.num_blocks} blocks, the parent {parent.num_blocks}, and the child's config does not"
            " say of which blocks of the parent each is made (sources): it cannot be matched; make it from the parent"
            " again, or export it with its sources"
        )
    where = {source: i for i, sources in enumerate(block_sources(parent)) for source in sources}
    members = []
    for i, sources in enumerate(child.sources or block_sources(parent)):
        if not sources or not where.keys() >= set(sources):
            raise ValueError(
                f"block {i} of the child is made of blocks {list(sources)}, which the parent of {parent.num_blocks}"
                " blocks does not have: it is not made of this parent"
            )
        members.append([where[s] for s in sources])
    spans: list[Span] = []
    first, parent_first, top = 0, 0, -1
    for i, mine in enumerate(members):
        top = max(top, *mine)
        later = [m for other in members[i + 1 :] for m in other]
        if later and min(later) <= top:
            continue
        last = top if later else parent.num_blocks - 1
        alike = first == i and parent_first == last and child.blocks[i] == parent.blocks[last]
        spans.append(Span((first, i), (parent_first, last), not alike))
        first, parent_first = i + 1, last + 1
    return tuple(spans)


# --- the teacher ------------------------------------------------------------------------------------------------------


@struct.dataclass
class Teacher:
    """The parent, cut into pieces. config: of the whole; configs, runs: of each piece, in order; rest: the embedding,
    final norm and head. leading: so many of the child's first runs are, to the bit, the first so many pieces."""

    config: ModelConfig = struct.field(pytree_node=False)
    configs: tuple[ModelConfig, ...] = struct.field(pytree_node=False)
    leading: int = struct.field(pytree_node=False)
    runs: tuple[Params, ...]
    rest: Params


def make_teacher(parent: Model, child: Model) -> Teacher:
    """The parent as the child's teacher. Leaves in which the two agree bit for bit are the child's arrays; whatever
    else the teacher needs is its own, so that the parent's arrays may be dropped.

    A stacked leaf is shared where all blocks of the child's run, and nothing else, hold it unchanged.

    Raises: ValueError as `match_blocks`.
    """
    (config, params), (child_config, child_params) = parent, child
    pieces = _pieces(child_config, config)
    configs: list[ModelConfig] = []
    runs: list[Params] = []
    leading, alike = 0, True
    for first, last, run in pieces:
        piece, own = cut(dataclasses.replace(config, sources=(), transforms=()), params, first, last)
        leaves = own["runs"]
        if run is not None:
            theirs = child_params["runs"][str(run)]
            leaves = {"0": {name: _shared(leaf, theirs.get(name)) for name, leaf in leaves["0"].items()}}
            same = all(leaf is theirs.get(name) for name, leaf in leaves["0"].items())
            alike = alike and same and child_config.members(run) == piece.blocks and run == len(configs)
        else:
            alike = False
        leading += alike
        configs.append(piece)
        runs.append(leaves)
    rest = {name: _shared(leaf, child_params.get(name)) for name, leaf in params.items() if name != "runs"}
    if rest["embed_tokens"] is not child_params["embed_tokens"]:
        leading = 0
    return Teacher(config=config, configs=tuple(configs), leading=leading, runs=tuple(runs), rest=rest)


def _pieces(child: ModelConfig, parent: ModelConfig) -> list[tuple[int, int, int | None]]:
    """(first, last) blocks of the parent, and the run of the child that holds exactly their successors, if one does."""
    single = {
        s.child[0]: s.parent[0]
        for s in match_blocks(child, parent)
        if s.child[0] == s.child[1] and s.parent[0] == s.parent[1]
    }
    found: list[tuple[int, int, int | None]] = []
    start = 0
    for run, (_, count) in enumerate(child.runs):
        blocks = [single[i] for i in range(start, start + count) if i in single]
        start += count
        if len(blocks) < count:
            continue
        first, last = blocks[0], blocks[-1]
        # Of one structure on the parent's side too, or they could not be stacked there.
        if last - first == count - 1 and len({b.structure for b in parent.blocks[first : last + 1]}) == 1:
            found.append((first, last, run))
    pieces: list[tuple[int, int, int | None]] = []
    at = 0
    for piece in found:
        if piece[0] > at:
            pieces.append((at, piece[0] - 1, None))
        pieces.append(piece)
        at = piece[1] + 1
    return [*pieces, (at, parent.num_blocks - 1, None)] if at < parent.num_blocks else pieces


def _shared(mine: Array, theirs: Array | None) -> Array:
    if theirs is None or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return mine
    return theirs if jnp.array_equal(mine, theirs) else mine


def teacher_outputs(teacher: Teacher, ids: Array, lengths: Array, count: int | None = None) -> Array:
    """[1 + blocks, B, T, D]: the embedding and every block's output, of at least the first `count` blocks (None: all).
    Constant to differentiation."""
    x = embed_texts(teacher.rest, teacher.config, ids, lengths)
    outputs, done = [x[None]], 0
    for config, runs in zip(teacher.configs, teacher.runs, strict=True):
        if count is not None and done >= count:
            break
        x, more = run_blocks(runs, config, x, lengths)
        outputs += more
        done += config.num_blocks
    return lax.stop_gradient(jnp.concatenate(outputs))


# --- the child's forward pass, differentiable at every block's output -------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _block(config, block, policy, p, x, tokens):
    return block_forward(config, block, p, x, tokens, None)[0]


def _block_fwd(config, block, policy, p, x, tokens):
    y, saved = block_forward(config, block, p, x, tokens, None)
    kept = {name: saved[name] for name in ("x", *saved_names(policy)) if name in saved}
    return y, (p, kept, tokens)


def _block_bwd(config, block, policy, residuals, dy):
    p, kept, tokens = residuals
    dx, dp, _ = block_backward(config, block, p, dy, kept, tokens, None, None)
    return {name: dp[name].astype(leaf.dtype) for name, leaf in p.items()}, dx, None


_block.defvjp(_block_fwd, _block_bwd)


def run_blocks(
    runs: Params, config: ModelConfig, x: Array, lengths: Array, first_run: int = 0, policy: str = POLICY
) -> tuple[Array, list[Array]]:
    """Runs `first_run` … on x [B, T, D]. Returns: (x after the last block, outputs of every block, [blocks of the run,
    B, T, D] a run). Raises: ValueError for blocks that stand beside each other."""
    _check_in_turn(config)
    tokens = make_tokens(config, 0, x.shape[1], lengths, x.dtype)
    outputs = []
    for r, (block, count) in list(enumerate(config.runs))[first_run:]:

        def body(x, layer, r=r, block=block):
            p, index = layer
            y = _block(config, block, policy, p, x, at_block(config, r, index, tokens))
            return y, y

        x, ys = lax.scan(body, x, (runs[str(r)], jnp.arange(count)))
        outputs.append(ys)
    return x, outputs


def _check_in_turn(config: ModelConfig) -> None:
    beside = [i for i, block in enumerate(config.blocks) if block.beside]
    if beside:
        raise ValueError(
            f"block {beside[0]} stands beside block {beside[0] - 1} (parallel_blocks); distillation and its losses run"
            " blocks one after another: distil first, or fuse the FFNs of attention-free blocks, which is the same"
        )


def _one_block(params: Params, config: ModelConfig, index: int, x: Array, lengths: Array, policy: str) -> Array:
    run, layer = locate_block(config, index)
    tokens = at_block(config, run, layer, make_tokens(config, 0, x.shape[1], lengths, x.dtype))
    block: BlockConfig = config.runs[run][0]
    leaves = {name: leaf[layer] for name, leaf in params["runs"][str(run)].items()}
    return _block(config, block, policy, leaves, x, tokens)


# --- losses -----------------------------------------------------------------------------------------------------------


def blockwise_loss(
    params: Params,
    config: ModelConfig,
    teacher: Teacher,
    ids: Array,
    lengths: Array,
    spans: Sequence[Span] | None = None,
    policy: str = POLICY,
) -> tuple[Array, Metrics]:
    """Σ over spans of Σ ‖o_child - o_parent‖² / Σ ‖o_parent‖², the inner sums over all valid tokens of the batch.

    Source: Puzzle (arXiv 2411.19146), MSE(o_p, o_c) / MSE(o_p, 0). o is the residual stream behind the span; the
    child's span reads the parent's stream before it, so that spans do not see each other and one pass over the parent
    serves them all. Sums are in float32 or wider.

    Args: ids int32 [B, T]; lengths int32 [B]; spans: of `match_blocks`, the replaced ones by default.
    Returns: (scalar, {"mse/<first>-<last>": that span's share, blocks of the parent}).
    """
    if spans is None:
        spans = [s for s in match_blocks(config, teacher.config) if s.replaced]
    outputs = teacher_outputs(teacher, ids, lengths, max((s.parent[1] + 1 for s in spans), default=0))
    valid = (jnp.arange(ids.shape[1]) < lengths[:, None])[..., None]
    metrics: Metrics = {}
    for span in spans:
        x, goal = outputs[span.parent[0]], _wide(outputs[span.parent[1] + 1])
        for i in range(span.child[0], span.child[1] + 1):
            x = _one_block(params, config, i, x, lengths, policy)
        missed = jnp.sum(jnp.where(valid, (_wide(x) - goal) ** 2, 0.0))
        metrics[f"mse/{span.parent[0]}-{span.parent[1]}"] = missed / jnp.sum(jnp.where(valid, goal**2, 0.0))
    return sum(metrics.values(), jnp.float32(0.0)), metrics


def distil_loss(
    params: Params,
    config: ModelConfig,
    teacher: Teacher,
    ids: Array,
    lengths: Array,
    cosine_weight: float = 1.0,
    first_run: int = 0,
    policy: str = POLICY,
) -> tuple[Array, Metrics]:
    """cosine_weight · Σ over spans of mean (1 - cos(h_child, h_parent)) + mean KL(parent ‖ child), over valid tokens.

    Source: FFN Fusion (arXiv 2503.18908) and Puzzle (arXiv 2411.19146), without language-model loss. h is the residual
    stream where corresponding spans (`match_blocks`) end. 1 - cos is computed as ½‖â - b̂‖², in float32 or wider.

    first_run: the child's runs before it are not run; up to `teacher.leading` runs, none of them trained and the
        embedding neither, that is the same loss.

    Returns: (scalar, {"kl": nats a token, "cosine": the sum over spans}).
    """
    spans = match_blocks(config, teacher.config)
    if first_run > teacher.leading:
        raise ValueError(f"first_run is {first_run}, but only {teacher.leading} runs are the teacher's own")
    outputs = teacher_outputs(teacher, ids, lengths)
    skipped = sum(count for _, count in config.runs[:first_run])
    x = outputs[skipped] if first_run else embed_texts(params, config, ids, lengths)
    x, mine = run_blocks(params["runs"], config, x, lengths, first_run, policy)
    mean = _mean_weights(ids, lengths, x.dtype)
    ends = [(s.child[1] - skipped, s.parent[1] + 1) for s in spans if s.child[1] >= skipped]
    a, b = (np.array(side) for side in zip(*ends, strict=True))
    distances = 0.5 * jnp.sum((_unit(jnp.concatenate(mine)[a]) - _unit(outputs[b])) ** 2, -1)
    cosine = jnp.sum(distances * mean)
    flat = [y.reshape(-1, y.shape[-1]) for y in (x, outputs[-1])]
    kl = kl_to(params, config, flat[0], teacher.rest, teacher.config, flat[1], mean.reshape(-1))
    return cosine_weight * cosine + kl, {"kl": kl, "cosine": cosine}


def lm_loss(
    params: Params, config: ModelConfig, ids: Array, lengths: Array, policy: str = POLICY
) -> tuple[Array, Metrics]:
    """Mean of -log p(token) over all tokens but each row's first, nats. Returns: (scalar, {})."""
    x, _ = run_blocks(params["runs"], config, embed_texts(params, config, ids, lengths), lengths, 0, policy)
    weights = _mean_weights(ids, lengths - 1, x.dtype)
    x = x.reshape(-1, x.shape[-1])
    return cross_entropy(params, config, x, jnp.roll(ids, -1, 1).reshape(-1), weights.reshape(-1)), {}


def _mean_weights(ids: Array, lengths: Array, dtype) -> Array:
    """[B, T]: 1 / number of valid tokens on the first `lengths` of each row, 0 elsewhere."""
    valid = jnp.arange(ids.shape[1]) < lengths[:, None]
    return valid / jnp.maximum(jnp.sum(valid), 1).astype(jnp.promote_types(dtype, jnp.float32))


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _unit(x: Array) -> Array:
    x = _wide(x)
    return x * lax.rsqrt(jnp.maximum(jnp.sum(x * x, -1, keepdims=True), 1e-30))  # a zero row has no direction


# --- measuring --------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=1)
def token_scores(
    params: Params, config: ModelConfig, teacher: Teacher | None, ids: Array, lengths: Array
) -> dict[str, Array]:
    """Per token, [B, T]: "nll" of the next token (meaningless at a row's last); with a teacher "kl", KL(parent ‖ child)
    and "top1", whether both find the same token likeliest."""
    hidden = [run_blocks(params["runs"], config, embed_texts(params, config, ids, lengths), lengths)[0]]
    models = [(params, config)]
    if teacher is not None:
        hidden.append(teacher_outputs(teacher, ids, lengths)[-1])
        models.append((teacher.rest, teacher.config))

    flat = [h.reshape(-1, h.shape[-1]) for h in hidden]
    all_params, configs = zip(*models, strict=True)
    found = token_measures(all_params, configs, flat, ids)
    return {name.replace("nll0", "nll"): x.reshape(ids.shape) for name, x in found.items() if name != "nll1"}
