"""Parameters after optimizer steps, splits of a batch, and what must leave a gradient alone."""

import dataclasses

import helpers
import jax
import numpy as np
import optax
import oracle
import pytest

from lsfuse.replay.objective import Mean, masked_mean

TINY, PARAMS = helpers.TINY, helpers.random_params(helpers.TINY, 1)
OPTIONS = {"chunk_size": 4, "branch_batch": 2, "temperature": 1.0}


@pytest.mark.parametrize("prefix_grad", ["exact", "stop"])
@pytest.mark.parametrize(
    ("optimizer", "tol"), [(optax.sgd(0.1), 1e-10), (optax.adam(1e-3), 1e-7)], ids=["sgd", "adam"]
)
def test_parameters_after_three_steps(x64, optimizer, tol, prefix_grad):
    """Old and reference log-probs fixed. Adam alone would hide a wrong scale."""
    batches = [helpers.ragged_batch(TINY, seed) for seed in (0, 1, 0)]
    step = helpers.engine("plain_grpo", TINY, prefix_grad=prefix_grad, **OPTIONS)
    update = jax.jit(optimizer.update)
    ours, theirs = PARAMS, PARAMS
    state, oracle_state = optimizer.init(ours), optimizer.init(theirs)
    for batch in batches:
        _, grads = step(ours, batch)
        moves, state = update(grads, state)
        ours = optax.apply_updates(ours, moves)
        _, grads = oracle.value_and_grad(helpers.PLAIN_GRPO, TINY, theirs, batch, prefix_grad)
        moves, oracle_state = update(jax.tree.map(np.asarray, grads), oracle_state)
        theirs = optax.apply_updates(theirs, moves)
        for path, error in oracle.grad_errors(ours, theirs).items():
            assert error <= tol, (path, error)
    moved = oracle.grad_errors(theirs, PARAMS)
    assert min(moved.values()) > 1e-4, "every leaf moved"


def rows_of_one_prompt(dtype=np.float64):
    """One prompt of 8 and four responses, weights of the token mean fixed over all of them."""
    batch = helpers.make_batch(TINY, (8,), ((6, 4, 4, 6),), (11, 4, 6), silent=(), tool_tokens=False, dtype=dtype)
    mask = np.asarray(batch.loss_mask)
    return batch.replace(loss_weights=(mask / mask.sum()).astype(dtype))


def split(batch, groups):
    """The branches of a batch of one group dealt out to `groups` groups with the same prompt."""

    def cut(x):
        return x.reshape(groups, x.shape[1] // groups, *x.shape[2:])

    names = [f.name for f in dataclasses.fields(batch) if f.name not in ("prompt_ids", "prompt_lengths", "group_sizes")]
    parts = {name: jax.tree.map(cut, getattr(batch, name)) for name in names}
    size = batch.completion_ids.shape[1] // groups
    return batch.replace(
        prompt_ids=np.repeat(batch.prompt_ids, groups, 0),
        prompt_lengths=np.repeat(batch.prompt_lengths, groups, 0),
        group_sizes=np.full(groups, size, np.int32),
        **parts,
    )


@pytest.mark.slow
def test_micro_batches_of_1_2_4_rows(x64):
    """At once, in branch batches, as several groups of the same prompt, and one call a group, added up."""
    batch = rows_of_one_prompt()
    options = {"prefix_grad": "exact", "temperature": 1.0, "chunk_size": 4}
    want = helpers.oracle_value_and_grad("rows", "fixed_grpo", TINY, PARAMS, batch)[1]
    for rows in (1, 4, 2):
        step = helpers.engine("fixed_grpo", TINY, branch_batch=rows, **options)
        oracle.assert_grads_close(step(PARAMS, batch)[1], want, 1e-12)
    parts = split(batch, 2)
    oracle.assert_grads_close(step(PARAMS, parts)[1], want, 1e-12)
    total = None
    for b in range(2):
        _, grads = step(PARAMS, jax.tree.map(lambda x, b=b: x[b : b + 1], parts))
        total = grads if total is None else jax.tree.map(np.add, total, grads)
    oracle.assert_grads_close(total, want, 1e-12)


def test_means_add_up_to_the_mean_of_all_tokens():
    """Rows of length 1 (loss 1) and 3 (loss 0): 0.25, in any split; NaN where nothing counts changes nothing."""
    losses, mask = np.asarray([[1.0, np.nan, np.inf], [0.0, 0.0, 0.0]]), np.asarray([[1, 0, 0], [1, 1, 1]])
    assert masked_mean(losses, mask).compute() == 0.25
    assert (masked_mean(losses[:1], mask[:1]) + masked_mean(losses[1:], mask[1:])).compute() == 0.25
    assert Mean(np.float32(0), np.float32(0)).compute() == 0.0
    assert masked_mean(losses, np.zeros_like(mask)).compute() == 0.0


def test_a_branch_of_advantage_zero_does_not_matter(x64):
    """beta 0 and fixed weights: branch 1 replaced, shortened, emptied; the whole gradient stays."""
    batch = rows_of_one_prompt()
    advantages = np.array(batch.advantages)
    advantages[0, 1] = 0.0
    batch = batch.replace(advantages=advantages)
    step = helpers.engine("fixed_grpo", TINY, prefix_grad="exact", **OPTIONS)
    base = jax.tree.map(np.asarray, step(PARAMS, batch)[1])
    ids, lengths = np.array(batch.completion_ids), np.array(batch.completion_lengths)
    ids[0, 1, :4] = (ids[0, 1, :4] + 1) % TINY.vocab_size
    for length in (4, 2, 0):
        lengths[0, 1] = length
        moved = batch.replace(completion_ids=ids, completion_lengths=lengths)
        oracle.assert_grads_close(step(PARAMS, moved)[1], base, 1e-12)


def test_padding_does_not_matter_bit_for_bit(x64):
    """Other poison in the same padding; masked old log-probs NaN or −inf: the same loss and gradient."""
    clean, poisoned = helpers.make_batch(TINY, poison=False), helpers.make_batch(TINY)
    real = np.asarray(clean.loss_mask)
    exists = np.arange(4) < clean.group_sizes[:, None]
    batches = []
    for other in (clean, poisoned):
        keep = {
            "advantages": np.where(exists, clean.advantages, other.advantages),
            "old_per_token_logps": np.where(real, clean.old_per_token_logps, other.old_per_token_logps),
            "ref_per_token_logps": np.where(real, clean.ref_per_token_logps, other.ref_per_token_logps),
            "completion_ids": np.where(clean.token_mask, clean.completion_ids, other.completion_ids),
            "completion_lengths": np.where(exists, clean.completion_lengths, other.completion_lengths),
            "completion_mask": np.where(clean.token_mask, clean.completion_mask, other.completion_mask),
            "prompt_ids": np.where(
                np.arange(11) < clean.prompt_lengths[:, None], clean.prompt_ids, other.prompt_ids
            ),
        }
        batches.append(clean.replace(**keep))
    assert np.isnan(batches[1].old_per_token_logps).any() and np.isneginf(batches[1].ref_per_token_logps).any()
    step = helpers.engine("plain_grpo", TINY, prefix_grad="exact", **OPTIONS)
    results = [jax.tree.leaves(step(PARAMS, b)) for b in batches]
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)


def test_the_same_bits_twice():
    params = helpers.random_params(TINY, 1, np.float32)
    batch = helpers.make_batch(TINY, dtype=np.float32)
    step = helpers.engine("plain_grpo", TINY, prefix_grad="exact", **OPTIONS)
    for first, second in zip(jax.tree.leaves(step(params, batch)), jax.tree.leaves(step(params, batch)), strict=True):
        np.testing.assert_array_equal(first, second)


def test_fifty_ragged_steps_compile_once():
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    params = helpers.random_params(TINY, 1, np.float32)
    step = helpers.engine("plain_grpo", TINY, prefix_grad="exact", **OPTIONS)
    jax.block_until_ready(step(params, helpers.ragged_batch(TINY, 0, rows=None, dtype=np.float32)))
    before = step._cache_size()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for seed in range(1, 51):
            (loss, _), _ = step(params, helpers.ragged_batch(TINY, seed, rows=None, dtype=np.float32))
            assert np.isfinite(loss), seed
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert step._cache_size() == before and not compiled
