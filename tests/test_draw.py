"""One draw: the distribution, the nucleus, log-probs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling import chi_square, smallest_set, tempered

from lsfuse.rl import draw


@pytest.mark.parametrize(("vocab", "temperature", "top_p"), [(2, 1.0, 1.0), (23, 0.6, 1.0), (300, 1.5, 0.7)])
def test_draws_follow_the_distribution(vocab, temperature, top_p):
    """20,000 rows with the same logits, vocabularies of one and of several blocks, the last not full."""
    logits = 1.5 * np.random.default_rng(vocab).standard_normal(vocab).astype(np.float32)
    rows = 20_000
    keys = jax.random.split(jax.random.key(1), rows)
    step = jax.jit(draw.draw_tokens, static_argnums=(2, 3))
    tokens, logps = step(jnp.broadcast_to(jnp.asarray(logits), (rows, vocab)), keys, temperature, top_p)
    p = tempered(logits, temperature)
    np.testing.assert_allclose(logps, np.log(p)[np.asarray(tokens)], atol=1e-5)
    kept = smallest_set(p, top_p) if top_p < 1 else np.ones(vocab, bool)
    assert abs(chi_square(np.asarray(tokens), np.where(kept, p, 0) / p[kept].sum())) < 4


def test_log_probs_by_hand():
    logits = jnp.asarray([[2.0, 1.0, 0.0]])
    keys = jax.random.split(jax.random.key(0), 1)
    tokens, logps = draw.draw_tokens(logits, keys, 0.6, 0.1)
    assert tokens[0] == 0, "a nucleus of one token"
    np.testing.assert_allclose(logps, [-0.202573], atol=1e-6)
    np.testing.assert_allclose(draw.draw_tokens(logits, keys, 0.0, 1.0)[1], [-0.407606], atol=1e-6)


def test_nucleus_is_the_smallest_set(x64):
    rng = np.random.default_rng(0)
    rows = [tempered(rng.standard_normal(300) * s, 1.0) for s in (0.0, 0.1, 1.0, 5.0, 40.0)]
    rows.append(np.repeat(tempered(rng.standard_normal(30), 1.0) / 10, 10))  # ties everywhere
    p = np.stack(rows)
    for top_p in (1e-9, 0.1, 0.5, 0.9, 0.999):
        got = np.asarray(draw.nucleus(jnp.asarray(p), top_p))
        assert (got.sum(-1) >= 1).all()
        for row, kept in zip(p[1:], got[1:], strict=True):
            mass = row[kept].sum()
            assert mass >= top_p - 1e-12 and mass - row[kept].min() < top_p
            assert row[kept].min() >= row[~kept].max(initial=0)
        np.testing.assert_array_equal(got[1:5], [smallest_set(row, top_p) for row in p[1:5]])
    quarter = draw.nucleus(jnp.full((1, 4), 0.25), 0.5)
    np.testing.assert_array_equal(quarter, [[True, True, False, False]])
