"""The fixtures do what they say, and leave nothing behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def test_float32_without_the_fixture():
    assert jnp.asarray(np.ones(2)).dtype == jnp.float32


def test_x64_fixture(x64):
    assert jnp.asarray(np.ones(2)).dtype == jnp.float64
    assert jax.jit(lambda a: a * 2)(np.ones(2)).dtype == jnp.float64


def test_float32_again_after_the_fixture():
    assert jnp.asarray(np.ones(2)).dtype == jnp.float32


def test_strict_promotion_fixture(strict_promotion):
    with pytest.raises(Exception, match="promotion"):
        jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.bfloat16)
    with pytest.raises(Exception, match="promotion"):
        jnp.ones((2, 2)) + jnp.ones(2)
