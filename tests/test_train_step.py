"""The jitted step, optimizers and schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lsfuse import train
from lsfuse.train.optimizer import decayed, make_optimizer, make_schedule
from lsfuse.train.step import make_update, to_host
from tests import helpers, oracle

MODEL = helpers.TINY


def optimizer_fields(**changes):
    config = train.default_config().rl.optimizer
    for name, value in changes.items():
        config[name] = value
    return config


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_three_steps_equal_the_dense_gradient_s(name, x64):
    """Parameters after every step, not only losses; ragged batches through one compilation."""
    optimizer = make_optimizer(optimizer_fields(name=name, learning_rate=1e-2, warmup_steps=2, weight_decay=0.1), 3)
    objective = helpers.objective("plain_grpo")
    params = jax.tree.map(jnp.asarray, helpers.random_params(MODEL))
    update = make_update(objective, MODEL, optimizer, chunk_size=4)
    mine, state = jax.tree.map(jnp.copy, params), optimizer.init(params)
    dense, dense_state = params, optimizer.init(params)
    for seed in range(3):
        batch = helpers.ragged_batch(MODEL, seed, groups=2)
        mine, state, metrics = update(mine, state, batch)
        (loss, _), grads = oracle.value_and_grad(objective, MODEL, dense, batch)
        updates, dense_state = optimizer.update(jax.tree.map(jnp.asarray, grads), dense_state, dense)
        dense = optax.apply_updates(dense, updates)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-10)
        np.testing.assert_allclose(metrics["grad_norm"], optax.global_norm(grads), rtol=1e-10)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), mine, dense)
    assert update._cache_size() == 1


def test_one_compilation_serves_ragged_steps_and_donates():
    optimizer = make_optimizer(optimizer_fields(), 50)
    update = make_update(helpers.objective("plain_grpo"), MODEL, optimizer, chunk_size=4)
    params = jax.tree.map(jnp.asarray, helpers.random_params(MODEL, dtype=np.float32))
    state = jax.jit(optimizer.init)(params)
    first = params["embed_tokens"]
    for seed in range(50):
        batch = helpers.ragged_batch(MODEL, seed, groups=2, dtype=np.float32)
        params, state, metrics = update(params, state, batch)
    assert update._cache_size() == 1
    assert first.is_deleted()
    to_host(metrics, "test")


def test_schedules():
    rates = [float(make_schedule(optimizer_fields(learning_rate=1.0, warmup_steps=3), 10)(i)) for i in range(6)]
    np.testing.assert_allclose(rates, [0.25, 0.5, 0.75, 1, 1, 1])
    linear = make_schedule(optimizer_fields(learning_rate=1.0, schedule="linear"), 4)
    np.testing.assert_allclose([float(linear(i)) for i in range(5)], [1, 0.75, 0.5, 0.25, 0])
    cosine = make_schedule(optimizer_fields(learning_rate=1.0, schedule="cosine", warmup_steps=1), 5)
    np.testing.assert_allclose([float(cosine(i)) for i in (1, 3, 5)], [1, 0.5, 0], atol=1e-7)
    with pytest.raises(ValueError, match="warmup_steps is 9, but the run has only 4 updates"):
        make_schedule(optimizer_fields(warmup_steps=9), 4)


def test_weight_decay_spares_norms_and_biases():
    mask = decayed(helpers.random_params(helpers.MIXED))
    assert mask["embed_tokens"] is True and mask["norm"] is False
    block = mask["runs"]["0"]
    assert not block["input_layernorm"] and not block["q_proj_bias"] and block["q_proj"]


def test_not_finite_is_named():
    with pytest.raises(FloatingPointError, match="RL step 3: grad_norm is nan.*last checkpoint is from before"):
        to_host({"loss": jnp.float32(1), "grad_norm": jnp.float32(jnp.nan)}, "RL step 3")


@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "adafactor", "sgd"])
def test_only_what_is_trainable_moves(name):
    """Other leaves keep every bit and have no optimizer state, weight decay or not."""
    optimizer = make_optimizer(optimizer_fields(name=name, trainable="[qv]_proj$", weight_decay=0.1), 5)
    params = jax.tree.map(jnp.asarray, helpers.random_params(MODEL, dtype=np.float32))
    state = optimizer.init(params)
    moments = sum(x.size for x in jax.tree.leaves(state))
    assert moments <= 2 * sum(params["runs"]["0"][n].size for n in ("q_proj", "v_proj")) + 20
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    moved = {path[-1].key for path, u in jax.tree_util.tree_leaves_with_path(updates) if np.any(np.asarray(u))}
    assert moved == {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    "pattern, message", [("lora", "'lora' is found in no parameter; they are embed_tokens"), ("(", "no.* regular expr")]
)
def test_a_pattern_that_trains_nothing_raises_before_any_work(pattern, message):
    with pytest.raises(ValueError, match=message.replace("no.* regular expr", "is not a regular expression")):
        train.set_up({"rl": {"optimizer": {"trainable": pattern}}})
