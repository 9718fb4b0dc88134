"""The prefix state: what it holds, and that its padding and history change nothing."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from lsfuse.model.state import PrefixState, init_state
from lsfuse.model.transformer import Context
from lsfuse.replay.geometry import Options, branch_slice, group_slice, make_geometry, pad_batch, prefix_bounds
from lsfuse.replay.prefix import capture, prefix_backward
from lsfuse.replay.tails import tails_backward, tails_forward

TINY, PARAMS = helpers.TINY, helpers.random_params(helpers.TINY, 1)


def one_group(options, prompt=9, lengths=(4, 6, 2)):
    batch = helpers.make_batch(TINY, (prompt,), (lengths,), (14, 3, 6), silent=())
    geometry = make_geometry(options, 14, 3, 6)
    return geometry, group_slice(pad_batch(jax.tree.map(jnp.asarray, batch), geometry), 0)


def filled(config, size, value):
    return jax.tree.map(lambda x: jnp.full_like(x, value), init_state(config, size, jnp.float64))


@pytest.mark.parametrize("prefix_grad", ["exact", pytest.param(3, marks=pytest.mark.slow)])
def test_captured_keys_and_values_are_those_of_the_prompt_alone(x64, prefix_grad):
    """Positions 0 … P - 2 whatever the chunk size, also from the oracle's layers run on the prompt alone."""
    states = []
    for chunk in (1, 4):
        geometry, group = one_group(Options(prefix_grad, chunk))
        run = jax.jit(capture, static_argnums=(1, 4))
        state, _ = run(PARAMS, TINY, group.prompt_ids[0], group.prompt_lengths[0], geometry)
        states.append(jax.tree.map(lambda x: np.asarray(x)[:, :, :8], state))
    for other in states[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), states[0], other)
    p = oracle.split_blocks(TINY, PARAMS)[0]
    x = PARAMS["embed_tokens"][np.asarray(group.prompt_ids[0, :8])]
    h = np.asarray(oracle.rms_norm(x, p["input_layernorm"], TINY.rms_norm_eps))
    k = oracle.rotate((h @ p["k_proj"]).reshape(8, 2, 4), oracle.rotary_frequencies(4, TINY.rope_theta, None))
    np.testing.assert_allclose(states[0].k["0"][0], np.swapaxes(k, 0, 1), rtol=1e-12)
    np.testing.assert_allclose(states[0].v["0"][0], np.swapaxes((h @ p["v_proj"]).reshape(8, 2, 4), 0, 1), rtol=1e-12)


@pytest.mark.parametrize("prefix_grad", ["exact", 3])
def test_what_the_state_held_before_changes_nothing(x64, prefix_grad):
    """Buffers that start as zeros, and as 1e4 or NaN: log-probs, gradients and cotangents bit for bit."""
    options = Options(prefix_grad, 4, 3)
    geometry, group = one_group(options)
    start, end = prefix_bounds(geometry, group.prompt_lengths[0])
    ids, length = group.prompt_ids[0], group.prompt_lengths[0]

    def run(params, state, value):
        state, _ = capture(params, TINY, ids, length, geometry, state)
        # The rest of the buffer, too: whatever a longer prompt left there.
        beyond = jnp.arange(geometry.state) >= end
        state = jax.tree.map(lambda x: jnp.where(beyond[:, None], value, x), state)
        context = Context(state, end, None if geometry.exact else start)
        part = branch_slice(group, 0, 3)
        logps, entropies, saved = tails_forward(params, TINY, part, context, 1.0, options.remat_policy)
        grads = jax.tree.map(jnp.zeros_like, params)
        down = init_state(TINY, geometry.cotangent, jnp.float64) if geometry.grad_tokens else None
        grads, down = tails_backward(params, TINY, part, context, 1.0, saved, logps, entropies, grads, down)
        if down is not None:
            args = (params, TINY, ids, length, geometry, state, down, grads, None, options.remat_policy)
            grads = prefix_backward(*args)
        return logps, entropies, grads

    run = jax.jit(run)
    clean, *dirty = (run(PARAMS, filled(TINY, geometry.state, x), x) for x in (0.0, 1e4, np.nan))
    for other in dirty:
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(clean), jax.tree.leaves(other), strict=True):
            assert np.isfinite(b).all(), path
            np.testing.assert_array_equal(a, b)


def test_a_state_holds_blocks_with_attention_only():
    """4 blocks, 2 without attention, 2 kv heads of 4: 2 blocks × 2 × 2 × 4 numbers a token; none at all: nothing."""
    state = init_state(helpers.HOLLOW, 10, jnp.float32)
    assert sum(x.size for x in jax.tree.leaves(state)) == 10 * 2 * 2 * 2 * 4 and state.size == 10
    none = helpers.tiny(blocks=tuple(b for b in helpers.HOLLOW.blocks if not b.has_attention))
    assert init_state(none, 10, jnp.float32) == PrefixState({}, {})
