"""Tiny models, ragged batches with poisoned padding, and small objectives for the tests.

Nothing here imports the model's or the engine's functions at import time; `engine` does so when called, and keeps one
jitted function per static configuration, because compiling is what these tests spend their time on.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from lsfuse.model.config import BlockConfig, ModelConfig, RopeScaling, param_shapes, uniform_blocks
from lsfuse.replay.batch import Batch
from lsfuse.replay.objective import Objective, masked_mean

# --- models -----------------------------------------------------------------------------------------------------------

TINY = ModelConfig(
    vocab_size=23, hidden_size=16, num_heads=4, head_dim=4, blocks=uniform_blocks(2, 2, 24), max_position_embeddings=64
)

# Every kind of block the design names: unequal widths and kv heads, no attention, no FFN, parallel; all biases.
MIXED = ModelConfig(
    vocab_size=29,
    hidden_size=12,
    num_heads=4,
    head_dim=6,
    blocks=(
        BlockConfig("full", 1, 20),
        BlockConfig("none", 1, 28),
        BlockConfig("full", 2, 16, parallel=True),
        BlockConfig("full", 4, 0),
    ),
    max_position_embeddings=64,
    rope_theta=100.0,
    rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32),
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    tie_word_embeddings=True,
    rms_norm_eps=1e-5,
)

# Attention in the middle only: prompt tokens need nothing of the last block, and the first block sees no state.
HOLLOW = dataclasses.replace(
    TINY,
    blocks=(
        BlockConfig("none", 1, 8),
        BlockConfig("full", 2, 24),
        BlockConfig("full", 2, 24),
        BlockConfig("none", 1, 12, parallel=True),
    ),
    rope_scaling=RopeScaling("linear", 2.5),
    hidden_act="gelu_tanh",
)


def tiny(**changes) -> ModelConfig:
    return dataclasses.replace(TINY, **changes)


def random_params(config: ModelConfig, seed: int = 0, dtype=np.float64) -> dict:
    """numpy parameters in which every leaf matters: gains away from 1, biases away from 0."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        name = path[-1].key
        if name.endswith("norm"):
            x = 1.0 - config.norm_offset + 0.4 * rng.standard_normal(shape)
        elif name.endswith("_bias"):
            x = 0.3 * rng.standard_normal(shape)
        elif name == "embed_tokens":
            x = 0.5 * rng.standard_normal(shape)
        else:
            x = 0.9 * rng.standard_normal(shape) / np.sqrt(shape[-2])
        return x.astype(dtype)

    shapes = param_shapes(config)
    return jax.tree_util.tree_map_with_path(leaf, shapes, is_leaf=lambda s: isinstance(s, tuple))


# --- batches ----------------------------------------------------------------------------------------------------------

# Buffers [B = 4, P = 11, G = 4, R = 6]: a full group with tool tokens, one response of one token and an empty one;
# a prompt of one token with a single branch; padding; a group in which one response carries no loss at all.
# Rows are 6, 12, 14 or 17 tokens long, because the oracle compiles once per length.
PROMPT_LENGTHS = (11, 1, 0, 8)
COMPLETION_LENGTHS = ((6, 3, 0, 1), (5,), (), (6, 4, 4))
ROW_LENGTHS = (6, 12, 14, 17)
SILENT = ((3, 2),)  # (group, branch) whose mask is all zero


def make_batch(
    config: ModelConfig,
    prompt_lengths=PROMPT_LENGTHS,
    completion_lengths=COMPLETION_LENGTHS,
    shape: tuple[int, int, int] | None = (11, 4, 6),
    seed: int = 0,
    silent=SILENT,
    tool_tokens: bool = True,
    poison: bool = True,
    dtype=np.float64,
) -> Batch:
    """A numpy batch with the given lengths in buffers (P, G, R).

    poison: padding holds out-of-range ids, lengths, NaN and infinities; so do log-probs at masked positions.
    tool_tokens: the middle of every response of four tokens or more carries no loss and stays context.
    """
    rng = np.random.default_rng(seed)
    n = len(prompt_lengths)
    sizes = np.asarray([len(group) for group in completion_lengths], np.int32)
    if shape is None:
        longest = max((r for group in completion_lengths for r in group), default=1)
        shape = (max(prompt_lengths), max(sizes), max(longest, 1))
    p, g, r = shape
    vocab = config.vocab_size
    bad_ids = np.asarray([-1, vocab, 2**31 - 1, -(2**31), 3 * vocab], np.int64)
    prompts = rng.choice(bad_ids, (n, p)) if poison else np.zeros((n, p), np.int64)
    completions = rng.choice(bad_ids, (n, g, r)) if poison else np.zeros((n, g, r), np.int64)
    lengths = rng.integers(-3, r + 4, (n, g)) if poison else np.zeros((n, g), np.int64)
    mask = rng.integers(0, 2, (n, g, r)) if poison else np.zeros((n, g, r), np.int64)
    makers = np.asarray([np.nan, np.inf, -np.inf, 1e30])
    old = rng.choice(makers, (n, g, r)) if poison else np.zeros((n, g, r))
    ref = rng.choice(makers, (n, g, r)) if poison else np.zeros((n, g, r))
    advantages = rng.choice(makers, (n, g)) if poison else np.zeros((n, g))
    rewards = rng.choice(makers, (n, g)) if poison else np.zeros((n, g))
    for b, group in enumerate(completion_lengths):
        prompts[b, : prompt_lengths[b]] = rng.integers(0, vocab, prompt_lengths[b])
        for i, length in enumerate(group):
            completions[b, i, :length] = rng.integers(0, vocab, length)
            lengths[b, i] = length
            own = np.ones(length, np.int64)
            if tool_tokens and length >= 4:
                own[1 : length - 1] = 0
                own[length // 2] = length >= 6
            if (b, i) in silent:
                own[:] = 0
            mask[b, i, :length] = own
            seen = np.arange(r) < length
            if poison:
                seen[:length] = own != 0
            typical = -np.log(vocab) + 0.3 * rng.standard_normal((2, r))
            old[b, i, seen], ref[b, i, seen] = typical[0, seen], typical[1, seen]
            advantages[b, i], rewards[b, i] = rng.standard_normal(2)
    return Batch(
        prompt_ids=prompts.astype(np.int32),
        prompt_lengths=np.asarray(prompt_lengths, np.int32),
        completion_ids=completions.astype(np.int32),
        completion_lengths=lengths.astype(np.int32),
        completion_mask=mask.astype(np.int32),
        group_sizes=sizes,
        advantages=advantages.astype(dtype),
        old_per_token_logps=old.astype(dtype),
        ref_per_token_logps=ref.astype(dtype),
        rewards=rewards.astype(dtype),
    )


def ragged_batch(
    config: ModelConfig, seed: int, shape=(11, 4, 6), groups: int = 4, rows=ROW_LENGTHS, dtype=np.float64
) -> Batch:
    """Random lengths in fixed buffers, prompt + response being one of `rows` (any if None) or the response empty."""
    rng = np.random.default_rng([seed, 17])
    prompt_lengths = tuple(int(p) for p in rng.integers(1, shape[0] + 1, groups))
    lengths, silent = [], []
    for b, p in enumerate(prompt_lengths):
        possible = [r for r in range(shape[2] + 1) if rows is None or r == 0 or p + r in rows]
        lengths.append(tuple(int(r) for r in rng.choice(possible, rng.integers(1, shape[1] + 1))))
        silent += [(b, g) for g in range(len(lengths[-1])) if rng.random() < 0.1]
    return make_batch(config, prompt_lengths, tuple(lengths), shape, seed, tuple(silent), dtype=dtype)


# --- objectives -------------------------------------------------------------------------------------------------------


def coupled(per_token_logps, entropies, batch):
    """Couples every token of the batch with every other, through log-probs and entropies."""
    mask = batch.loss_mask
    logps, entropies = jnp.where(mask, per_token_logps, 0.0), jnp.where(mask, entropies, 0.0)
    count = jnp.maximum(jnp.sum(mask), 1)
    wave = jnp.sin(jnp.arange(mask.size, dtype=logps.dtype)).reshape(mask.shape)
    a, e = jnp.sum((1 + 0.5 * wave) * logps) / count, jnp.sum((1 - 0.3 * wave) * entropies) / count
    sequence = jnp.sum(logps, axis=-1)
    spread = jnp.sum(jnp.where(batch.branch_mask, jnp.tanh(sequence - a), 0.0))
    loss = a**2 + 0.3 * e**2 + a * e + 0.1 * spread
    return loss, {"mean_logp": masked_mean(logps, mask), "a": a}


def _clipped(log_ratio, advantages, epsilon: float = 0.2):
    ratio = jnp.exp(log_ratio)
    return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - epsilon, 1 + epsilon) * advantages)


def _weights(batch: Batch) -> Batch:
    """Mean over responses that carry loss of the mean over their tokens."""
    mask = batch.loss_mask
    tokens = jnp.sum(mask, axis=-1)
    responses = jnp.maximum(jnp.sum(tokens > 0), 1)
    return batch.replace(loss_weights=jnp.where(mask, 1.0, 0.0) / jnp.maximum(tokens, 1)[..., None] / responses)


def _loss_tokens(batch: Batch):
    return jnp.where(batch.branch_mask, jnp.sum(batch.loss_mask, axis=-1), 0)


def _plain_grpo(per_token_logps, entropies, batch, beta=0.1, entropy=0.01):
    mask = batch.loss_mask
    logps = jnp.where(mask, per_token_logps, 0.0)
    old = jnp.where(mask, batch.old_per_token_logps, 0.0)
    ref = jnp.where(mask, batch.ref_per_token_logps, 0.0)
    advantages = jnp.where(batch.branch_mask, batch.advantages, 0.0)[..., None]
    losses = _clipped(logps - old, advantages) + beta * (jnp.exp(ref - logps) - (ref - logps) - 1)
    losses = losses + entropy * jnp.where(mask, entropies, 0.0)
    return jnp.sum(batch.loss_weights * jnp.where(mask, losses, 0.0)), {"kl": masked_mean(logps - ref, mask)}


def _plain_gspo(per_token_logps, entropies, batch):
    mask = batch.loss_mask
    tokens = _loss_tokens(batch)
    log_ratio = jnp.where(mask, per_token_logps - jnp.where(mask, batch.old_per_token_logps, 0.0), 0.0)
    sequence = jnp.sum(log_ratio, axis=-1) / jnp.maximum(tokens, 1)
    advantages = jnp.where(batch.branch_mask, batch.advantages, 0.0)
    losses = jnp.where(tokens > 0, _clipped(sequence, advantages), 0.0)
    return jnp.sum(jnp.sum(batch.loss_weights, axis=-1) * losses), {"entropy": masked_mean(entropies, mask)}


def _plain_dpo(per_token_logps, entropies, batch, beta=0.3):
    mask = batch.loss_mask
    gain = jnp.sum(jnp.where(mask, per_token_logps - jnp.where(mask, batch.ref_per_token_logps, 0.0), 0.0), axis=-1)
    pairs = gain.shape[1] // 2
    margin = gain[:, 0 : 2 * pairs : 2] - gain[:, 1 : 2 * pairs : 2]
    both = batch.branch_mask[:, 1 : 2 * pairs : 2]
    return jnp.sum(jnp.where(both, -jax.nn.log_sigmoid(beta * margin), 0.0)), {}


def _weighted(per_token_logps, entropies, batch):
    """Uses the user's own arrays [B, G, R] and [B, G], and advantages per token."""
    mask = batch.loss_mask
    weights = batch.extras["token"] * batch.extras["branch"][..., None] + batch.advantages
    return jnp.sum(jnp.where(mask, weights * (per_token_logps + 0.1 * entropies**2), 0.0)), {}


PLAIN_GRPO = Objective(_plain_grpo, coupling="branch", prepare=_weights, name="plain_grpo")
FIXED_GRPO = Objective(functools.partial(_plain_grpo, beta=0.0, entropy=0.0), coupling="branch", name="fixed_grpo")
PLAIN_GSPO = Objective(_plain_gspo, coupling="branch", prepare=_weights, name="plain_gspo")
PLAIN_DPO = Objective(_plain_dpo, coupling="group", name="plain_dpo")


def _log_ratio(per_token_logps, entropies, batch):
    """Metric: total distance from the old log-probs."""
    distance = jnp.where(batch.loss_mask, jnp.abs(per_token_logps - batch.old_per_token_logps), 0.0)
    return jnp.sum(jnp.where(batch.loss_mask, per_token_logps, 0.0)), {"distance": jnp.sum(distance)}


LOG_RATIO = Objective(_log_ratio, coupling="branch", name="log_ratio")
WEIGHTED = Objective(_weighted, coupling="branch", name="weighted")


@functools.cache
def objective(name: str):
    """By name: coupled, the plain ones of this file, and those of lsfuse.rl."""
    if name == "coupled":
        return coupled
    for own in (PLAIN_GRPO, PLAIN_GSPO, PLAIN_DPO, WEIGHTED, LOG_RATIO, FIXED_GRPO):
        if name == own.name:
            return own
    from lsfuse import rl

    return {"grpo": lambda: rl.grpo(beta=0.1), "gspo": rl.gspo, "dpo": lambda: rl.dpo(beta=0.3)}[name]()


# --- text -----------------------------------------------------------------------------------------------------------


class Bytes:
    """UTF-8 bytes as ids; 256 ends a response."""

    vocab_size, pad_id, stop_ids = 257, 0, (256,)

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(int(i) for i in ids if i < 256).decode(errors="replace")


# --- the engine, compiled once per static configuration ---------------------------------------------------------------


# Where bits are compared, machine code is made as in a run; conftest.py turns its optimisation off for the suite.
OPTIMIZED = {"xla_backend_optimization_level": 3}


def engine(name: str, config: ModelConfig, dense: bool = False, optimized: bool = False, **static):
    """Jitted value_and_grad of a named objective (see `objective`); static: the engine's keyword arguments.

    optimized: see OPTIMIZED.
    """
    static = {"prefix_grad": "exact", "temperature": 1.0, **static}
    return _engine(name, config, dense, optimized, frozenset(static.items()))


@functools.cache
def _engine(name, config, dense, optimized, static):
    from lsfuse import replay

    factory = replay.dense_value_and_grad if dense else replay.value_and_grad
    return jax.jit(factory(objective(name), config, **dict(static)), compiler_options=OPTIMIZED if optimized else None)


@functools.cache
def scorer(config: ModelConfig, optimized: bool = False, **static):
    from lsfuse import replay

    return jax.jit(replay.per_token_logps(config, **static), compiler_options=OPTIMIZED if optimized else None)


_ORACLE: dict = {}


def oracle_value_and_grad(key, name: str, config: ModelConfig, params, batch, prefix_grad="exact", temperature=1.0):
    """The oracle's answer, kept for the rest of the session; key: a name for `params` and `batch` together, or None:
    then it is not kept."""
    if key is None:
        return oracle.value_and_grad(objective(name), config, params, batch, prefix_grad, temperature)
    entry = (key, name, config, prefix_grad, temperature)
    if entry not in _ORACLE:
        _ORACLE[entry] = oracle.value_and_grad(objective(name), config, params, batch, prefix_grad, temperature)
    return _ORACLE[entry]


def check_step(
    name: str, config: ModelConfig, params, batch, key, *, tol=1e-12, prefix_grad="exact", temperature=1.0, **static
):
    """One engine step against the oracle: loss, metrics and every leaf. Returns the engine's answer."""
    step = engine(name, config, prefix_grad=prefix_grad, temperature=temperature, **static)
    (loss, metrics), grads = step(params, batch)
    (want, want_metrics), want_grads = oracle_value_and_grad(key, name, config, params, batch, prefix_grad, temperature)
    np.testing.assert_allclose(loss, want, rtol=tol, atol=tol)
    for metric, value in want_metrics.items():
        np.testing.assert_allclose(metrics[metric], value, rtol=tol, atol=tol, err_msg=metric)
    jax.tree.map(lambda grad, param: _same_dtype(grad, param), grads, params)
    oracle.assert_grads_close(grads, want_grads, tol)
    return (loss, metrics), grads


def _same_dtype(grad, param):
    assert grad.dtype == param.dtype, (grad.dtype, param.dtype)


def all_pairs(factors: dict[str, tuple], seed: int = 0, strength: int = 2) -> list[dict]:
    """Rows of a covering array: every combination of values of any `strength` factors occurs in some row (greedy)."""
    rng = np.random.default_rng(seed)
    names = list(factors)
    missing = {
        tuple(zip(some, values, strict=True))
        for some in itertools.combinations(range(len(names)), strength)
        for values in itertools.product(*(range(len(factors[names[i]])) for i in some))
    }
    rows = []
    while missing:
        start = min(missing)
        best, covered = None, set()
        for _ in range(50):
            row = [int(rng.integers(len(factors[name]))) for name in names]
            for i, value in start:
                row[i] = value
            hit = {c for c in missing if all(row[i] == value for i, value in c)}
            if len(hit) > len(covered):
                best, covered = row, hit
        missing -= covered
        rows.append({name: factors[name][i] for name, i in zip(names, best, strict=True)})
    return rows
