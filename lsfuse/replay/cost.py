"""FLOPs and token positions of a training step, by formula, from the tiles that are executed.

A product of [m, k] and [k, n] counts 2·m·k·n; elementwise work is not counted. Padding that is run is counted. The
compiler's own figure counts the body of a loop once, so it can check these formulas only on sizes without loops.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from lsfuse.kernels.tail_attention import reference as tiles
from lsfuse.model.blocks import saved_names
from lsfuse.model.config import BlockConfig, ModelConfig
from lsfuse.model.layers import ffn_boundaries
from lsfuse.model.logprobs import slab_width
from lsfuse.replay.geometry import Geometry, Options


@dataclasses.dataclass(frozen=True)
class Cost:
    """linear: projections and FFNs; attention: scores and values; head: logits. All in FLOPs.

    forward_tokens: token positions run through the blocks, forward passes only, padding excluded.
    """

    linear: float = 0.0
    attention: float = 0.0
    head: float = 0.0
    forward_tokens: int = 0

    @property
    def flops(self) -> float:
        return self.linear + self.attention + self.head

    def __add__(self, other: "Cost") -> "Cost":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Cost(*(a + b for a, b in pairs))

    def __mul__(self, n: int) -> "Cost":
        return Cost(*(n * x for x in dataclasses.astuple(self)))


def _attention_in(model: ModelConfig, block: BlockConfig) -> int:
    return 2 * model.hidden_size * model.head_dim * (model.num_heads + 2 * block.num_kv_heads)


def _keys_values(model: ModelConfig, block: BlockConfig) -> int:
    return 4 * model.hidden_size * model.head_dim * block.num_kv_heads


def _attention_out(model: ModelConfig) -> int:
    return 2 * model.hidden_size * model.head_dim * model.num_heads


def _ffn_in(model: ModelConfig, block: BlockConfig) -> int:
    return 2 * model.hidden_size * block.ffn_width * len(ffn_boundaries(block))


def _ffn(model: ModelConfig, block: BlockConfig) -> int:
    return _ffn_in(model, block) + 2 * model.hidden_size * block.ffn_width


def _linear_map(model: ModelConfig, block: BlockConfig) -> int:
    return 2 * model.hidden_size**2 if block.has_linear_map else 0


def block_flops(model: ModelConfig, block: BlockConfig) -> int:
    """Forward FLOPs of one token through one block's projections and FFN."""
    attention = _attention_in(model, block) + _attention_out(model) if block.has_attention else 0
    return attention + _linear_map(model, block) + _ffn(model, block)


def _recomputed(model: ModelConfig, block: BlockConfig, policy: str) -> int:
    """Forward FLOPs of one token that a block's backward runs again under `policy`."""
    names = saved_names(policy)
    again = 0
    if block.has_attention:
        again += 0 if "q" in names else _attention_in(model, block)
        again += 0 if "mid" in names else _attention_out(model)
    again += 0 if "mid" in names else _linear_map(model, block)
    # gate and up; the down projection's output is not needed, but by a norm that follows it.
    if "gate" in names:
        return again
    return again + (_ffn(model, block) if model.post_norms else _ffn_in(model, block))


class _Prefix(NamedTuple):
    """Keys first … last - 1 of a prefix, in a buffer of `room`, for queries from position `at` on."""

    first: int
    last: int
    room: int
    at: int


def _visible(model: ModelConfig, block: BlockConfig, count: int, rows: int, prefix: _Prefix) -> int:
    """(query, key) pairs of the prefix tiles that `count` rows of `rows` queries run over."""
    if prefix.last <= prefix.first:
        return 0
    tile = min(tiles.TILE, prefix.room)
    upper = -(-(prefix.last - prefix.first) // tile)
    if block.window is None:
        return count * rows * tile * upper
    group = model.num_heads // block.num_kv_heads
    total = count * rows * group
    per_tile = -(-total // -(-total // tiles.ROWS))
    pairs = 0
    for begin in range(0, total, per_tile):
        end = min(begin + per_tile, total)
        lowest, highest = (i // group for i in (begin, end - 1))
        query = lowest % rows if lowest // rows == highest // rows else 0
        lower = max(prefix.at + query - block.window + 1 - prefix.first, 0) // tile
        pairs += (end - begin) * tile * max(upper - lower, 0)
    return pairs // group


def _own(rows: int, length: int, window: int | None = None) -> int:
    """(query, key) pairs of the causal tiles of one row of `rows` positions, `length` of them valid."""
    tile = tiles.own_tile(rows)
    if rows == tile:
        return rows * rows
    count = 0
    for i in range(-(-rows // tile)):
        lower = 0 if window is None else max(i * tile - window + 1, 0) // tile
        count += max(-(-min((i + 1) * tile, length) // tile) - lower, 0)
    return count * tile * tile


def _pair_flops(model: ModelConfig) -> int:
    """FLOPs of one product over one (row, key) pair, all query heads."""
    return 2 * model.num_heads * model.head_dim


def _tail_cost(
    model: ModelConfig,
    rows: int,
    count: int,
    own_length: int,
    prefix: int,
    room: int,
    policy: str,
    predicted: int,
    *,
    backward: bool,
    constant: int = 0,
    cotangent_room: int = 1,
) -> Cost:
    """`count` rows of `rows` positions, all blocks, and the head over `predicted` positions a row. The first `constant`
    keys of the prefix get no cotangent: two products of the backward less."""
    linear = attention = 0.0
    again = "o" not in saved_names(policy)
    for block in model.blocks:
        linear += count * rows * block_flops(model, block) * (3 if backward else 1)
        if backward:
            linear += count * rows * _recomputed(model, block, policy)
        if block.has_attention:
            own = count * _own(rows, own_length, block.window)
            seen = own + _visible(model, block, count, rows, _Prefix(0, prefix, room, prefix))
            products = (2 + 2 * again * backward) * seen
            if backward:
                products += 3 * _visible(model, block, count, rows, _Prefix(0, constant, room, prefix))
                differentiable = _Prefix(constant, prefix, cotangent_room, prefix)
                products += 5 * (own + _visible(model, block, count, rows, differentiable))
            attention += products * _pair_flops(model)
    width = slab_width(count * predicted, model.vocab_size)
    slabs = -(-model.vocab_size // width)
    head = 2.0 * count * predicted * model.hidden_size * width * slabs * (4 if backward else 1)
    return Cost(linear, attention, head, count * own_length)


def _prefix_chunk(model: ModelConfig, size: int, at: int, valid: int, room: int) -> Cost:
    """Capture of one chunk: blocks before the last with attention, and that one's keys and values."""
    last = model.last_attention_block
    linear = size * _keys_values(model, model.blocks[last])
    attention = 0
    for block in model.blocks[:last]:
        linear += size * block_flops(model, block)
        if block.has_attention:
            pairs = _visible(model, block, 1, size, _Prefix(0, at, room, at)) + _own(size, valid, block.window)
            attention += pairs * 2 * _pair_flops(model)
    return Cost(linear, attention, 0.0, valid)


def _chunk_backward(
    model: ModelConfig,
    size: int,
    at: int,
    valid: int,
    constant: int,
    geometry: Geometry,
    options: Options,
    keep: bool,
) -> Cost:
    """Backward of one chunk, and its recomputation unless its activations were kept."""
    last, policy = model.last_attention_block, options.remat_policy
    linear = 2 * size * _keys_values(model, model.blocks[last])
    attention = 0
    again = "o" not in saved_names(policy)
    for block in model.blocks[:last]:
        own = _own(size, valid, block.window)
        forward = own + _visible(model, block, 1, size, _Prefix(0, at, geometry.state, at))
        products = 3 * _visible(model, block, 1, size, _Prefix(0, constant, geometry.state, at))  # these keys get none
        products += 5 * (own + _visible(model, block, 1, size, _Prefix(constant, at, geometry.cotangent_room, at)))
        linear += size * (2 * block_flops(model, block) + _recomputed(model, block, policy))
        if block.has_attention:
            attention += (products + 2 * again * forward) * _pair_flops(model)
            if "q" not in saved_names(policy):
                linear -= size * _keys_values(model, block)  # its keys and values are in the state
        if not keep:
            linear += size * (block_flops(model, block) - (block.has_attention and _keys_values(model, block)))
            attention += 2 * forward * _pair_flops(model) * block.has_attention
    return Cost(linear, attention, 0.0, 0 if keep else valid)


def group_cost(
    model: ModelConfig,
    options: Options,
    geometry: Geometry,
    prompt_length: int,
    completion_lengths: Sequence[int],
    *,
    keep: bool,
    passes: str = "one",
    common: int = 0,
) -> Cost:
    """One group's step under replay. keep: whether the prefix's activations are kept. passes: "one" for objectives
    declared per branch, "two" for those that need log-probs first, "apart" if the passes over several groups are apart,
    each with a capture of its own, "score" for the scoring pass alone. common: tokens that all responses begin with,
    where `geometry` has room for a trunk."""
    if passes == "apart":
        args = (model, options, geometry, prompt_length, completion_lengths)
        score, gradient = (group_cost(*args, keep=keep, passes=p, common=common) for p in ("score", "one"))
        return score + gradient
    end = max(prompt_length - 1, 0)
    constant = 0 if geometry.exact else max(end - geometry.grad_tokens, 0)
    cost = Cost()
    chunks = [(at, geometry.chunk) for at in range(0, constant if geometry.grad_tokens else end, geometry.chunk)]
    grad_chunks = [(at, geometry.grad_chunk) for at in range(constant, end, geometry.grad_chunk)]
    if not geometry.grad_tokens:
        grad_chunks = []
    if model.last_attention_block >= 0:
        for at, size in chunks + grad_chunks:
            cost += _prefix_chunk(model, size, at, min(size, end - at), geometry.state)
        for at, size in grad_chunks if passes != "score" else ():
            valid = min(size, end - at)
            cost += _chunk_backward(model, size, at, valid, constant, geometry, options, keep)

    def tails(count: int, longest: int, prefix: int, backward: bool) -> Cost:
        rows = next(n for n in geometry.buckets if longest <= n)
        args = (model, rows, count, longest, prefix, geometry.state, options.remat_policy, rows)
        return _tail_cost(*args, backward=backward, constant=constant, cotangent_room=geometry.cotangent_room)

    if common:
        cost += tails(1, common, end, False)
        if passes != "score":
            cost += tails(1, common, end, True)
            rows = next(n for n in geometry.buckets if common <= n)  # its keys and values are in the state by then
            again = 1 + ("q" not in saved_names(options.remat_policy))
            cost += Cost(-again * rows * sum(_keys_values(model, b) for b in model.blocks if b.has_attention))
    lengths = [max(n - common, 0) for n in completion_lengths]
    for first in range(0, len(lengths), geometry.branch_batch):
        longest = max(lengths[first : first + geometry.branch_batch], default=0)
        if passes != "one":
            cost += tails(geometry.branch_batch, longest, end + common, False)
        if passes != "score":
            cost += tails(geometry.branch_batch, longest, end + common, True)
    real = sum(lengths) * (2 if passes == "two" else 1) + common * (1 if passes == "score" else 2)
    positions = sum(min(s, end - at) for at, s in chunks + grad_chunks)
    again = 0 if keep or passes == "score" else sum(min(s, end - at) for at, s in grad_chunks)
    return dataclasses.replace(cost, forward_tokens=positions + again + real)


def dense_group_cost(
    model: ModelConfig,
    options: Options,
    prompt: int,
    response: int,
    prompt_length: int,
    completion_lengths: Sequence[int],
    *,
    passes: str = "one",
) -> Cost:
    """One group's step under `dense_value_and_grad`, rows padded to `prompt` + `response`."""
    count, rows, cost = min(options.branch_batch or 1, len(completion_lengths)), prompt + response, Cost()
    for first in range(0, len(completion_lengths), count):
        longest = max(completion_lengths[first : first + count], default=0)
        length = prompt_length + longest - 1 if longest else 0
        args = (model, rows, count, length, 0, 1, options.remat_policy, response)
        if passes != "one":
            cost += _tail_cost(*args, backward=False)
        cost += _tail_cost(*args, backward=True)
    real = sum(prompt_length + n - 1 for n in completion_lengths if n) * (1 if passes == "one" else 2)
    return dataclasses.replace(cost, forward_tokens=real)
