"""Attention of tails over a shared prefix against plain softmax in numpy and `jax.vjp` of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsfuse.kernels import tail_attention
from lsfuse.kernels.tail_attention import reference


def plain(q, own_k, own_v, lengths, offset, k=None, v=None, prefix=0, window=None, cap=None):
    """[B, T, N, H]; K/V of branch b: `prefix` shared keys [K, P, H], then its own. Zero where nothing is visible."""
    b, t, n, h = q.shape
    group = n // own_k.shape[1]
    rows = []
    for i in range(b):
        keys, values = own_k[i], own_v[i]
        visible = np.arange(keys.shape[1])[None, :] <= np.arange(t)[:, None] + offset
        visible &= np.arange(keys.shape[1]) < lengths[i]
        if prefix:
            keys, values = (jnp.concatenate([s[:, :prefix], o], 1) for s, o in ((k, keys), (v, values)))
            visible = np.concatenate([np.ones((t, prefix), bool), visible], 1)
        if window is not None:
            visible &= np.arange(keys.shape[1]) > np.arange(t)[:, None] + prefix + offset - window
        keys, values = (jnp.repeat(x, group, 0) for x in (keys, values))
        scores = jnp.einsum("tnh,nsh->nts", q[i], keys) / np.sqrt(h)
        scores = scores if cap is None else cap * jnp.tanh(scores / cap)
        p = jnp.where(visible, jnp.exp(scores - scores.max()), 0.0)
        total = p.sum(-1, keepdims=True)
        rows.append(jnp.einsum("nts,nsh->tnh", p / jnp.where(total == 0, 1.0, total), values))
    return jnp.stack(rows)


def arrays(seed, b, t, n, kv, h, s, p, layers=3):
    rng = np.random.default_rng(seed)
    own = [rng.standard_normal(shape) for shape in ((b, t, n, h), (b, kv, s, h), (b, kv, s, h))]
    return own, [rng.standard_normal((layers, kv, p, h)) for _ in range(2)], rng.standard_normal((b, t, n, h))


def to_api(x, kv_heads=None):
    """[B, T, N, H] → [K, B, T, g, H] for a number of kv heads; without it, own keys [B, K, S, H] → [K, B, S, H]."""
    if kv_heads is None:
        return np.swapaxes(x, 0, 1)
    b, t, n, h = x.shape
    return np.moveaxis(np.reshape(x, (b, t, kv_heads, n // kv_heads, h)), 2, 0)


def from_api(x):
    """[K, B, T, g, …] → [B, T, N, …]; [K, B, S, H] → [B, K, S, H]."""
    x = np.asarray(x)
    if x.ndim == 4 and x.dtype != bool:
        return np.swapaxes(x, 0, 1)
    x = np.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def visibility(t, s):
    """Which of s keys each of the last t queries sees, read off the output: value j is the j-th unit vector."""
    v = np.eye(s)[None, None]
    prefix = tail_attention.Prefix(np.zeros((1, 1, s - t, s)), v[:, :, : s - t], jnp.int32(0), jnp.int32(s - t))
    forward = jax.jit(lambda *args: tail_attention.forward(*args, prefix))
    o, _ = forward(np.zeros((1, 1, t, 1, s)), np.zeros((1, 1, t, s)), v[:, :, s - t :], np.asarray([t], np.int32))
    return ["".join("01"[int(x)] for x in row > 0) for row in np.asarray(o)[0, 0, :, 0]]


def test_two_queries_on_five_keys(x64):
    """Bottom-right: 11110 and 11111, not 10000 and 11000."""
    assert visibility(2, 5) == ["11110", "11111"]
    assert visibility(3, 4) == ["1100", "1110", "1111"]
    assert visibility(1, 3) == ["111"]


# Shapes that broadcast by accident (B = 1, B = T, T = S = P), uneven tiles, an offset, empty branches and prefixes.
CASES = [
    # b, t, n, kv, h, s, p, prefix length, offset, own lengths
    (1, 1, 2, 1, 4, 1, 1, 0, 0, (1,)),
    (2, 2, 2, 2, 2, 2, 2, 2, 0, (2, 1)),
    (3, 5, 4, 2, 6, 5, 7, 4, 0, (5, 0, 2)),
    (4, 4, 4, 1, 4, 4, 9, 9, 0, (4, 4, 4, 4)),
    (2, 3, 6, 3, 2, 7, 5, 1, 4, (7, 6)),
    (1, 11, 2, 2, 4, 11, 1, 0, 0, (9,)),
]


# A window of one key (the query's own), others inside the own part, across into the prefix, and beyond everything.
WINDOWS = [(CASES[3], 1, None), (CASES[2], 3, 0.7), (CASES[3], 6, None), (CASES[4], 5, 0.7), (CASES[2], 2**30, 0.7)]


@pytest.mark.parametrize(
    ("tiles", "case", "window", "cap"),
    [
        (None, CASES[2], None, None),
        (None, CASES[4], None, None),
        (None, CASES[3], 6, 0.7),
        *(((3, 4, 2), case, None, None) for case in CASES),
        *(((3, 4, 2), *case) for case in WINDOWS),
    ],
    ids=str,
)
def test_forward_and_backward(x64, monkeypatch, tiles, case, window, cap):
    """NaN in every padding position; a layer of a stacked state; cotangents of the prefix added in place."""
    b, t, n, kv, h, s, p, length, offset, lengths = case
    if tiles:
        for name, size in zip(("TILE", "ROWS", "OWN_TILE"), tiles, strict=True):
            monkeypatch.setattr(reference, name, size)
    (q, own_k, own_v), (k, v), do = arrays(0, b, t, n, kv, h, s, p)
    lengths, layer = np.asarray(lengths, np.int32), 1
    queries = np.arange(t)[None, :] + offset >= 0
    do = do * queries[..., None, None]
    padded = [np.array(x) for x in (own_k, own_v)]
    for x in padded:
        x[np.broadcast_to((np.arange(s) >= lengths[:, None])[:, None, :, None], x.shape)] = np.nan
    state = [np.array(x) for x in (k, v)]
    for x in state:
        x[:, :, length:] = np.nan
        x[[0, 2]] = np.nan
    prefix = tail_attention.Prefix(*state, jnp.int32(layer), jnp.int32(length), jnp.int32(0))
    args = (to_api(q, kv), *map(to_api, padded))
    start = [np.random.default_rng(1).standard_normal((3, kv, p, h)) for _ in range(2)]

    def both(q, own_k, own_v, do, down, window=window):
        how = {"own_offset": offset, "rule": tail_attention.Rule(window, None, cap)}
        o, lse = tail_attention.forward(q, own_k, own_v, lengths, prefix, **how)
        back = tail_attention.backward(q, own_k, own_v, lengths, prefix, o, lse, do, down, **how)
        return o, lse, back

    def expected(q, own_k, own_v, k, v, do):
        o, pull = jax.vjp(
            lambda q, ok, ov, k, v: plain(q, ok, ov, lengths, offset, k, v, length, window, cap), q, own_k, own_v, k, v
        )
        return o, pull(do)

    o, lse, (dq, dk, dv, down) = jax.jit(both)(*args, to_api(do, kv), tuple(start))
    want, pulled = jax.jit(expected)(q, own_k, own_v, k[layer], v[layer], do)
    np.testing.assert_allclose(from_api(o), want, rtol=1e-12, atol=1e-12)
    unseen = np.ones((b, t), bool)
    for i, j in np.ndindex(b, t):
        for key in range(length + s):
            own = key - length
            seen = key < length or (own <= j + offset and own < lengths[i])
            unseen[i, j] &= not (seen and (window is None or key > length + j + offset - window))
    hidden = from_api(np.isneginf(lse))
    np.testing.assert_array_equal(hidden, np.broadcast_to(unseen[..., None], hidden.shape))

    for got, wanted in zip((dq, dk, dv), pulled[:3], strict=True):
        np.testing.assert_allclose(from_api(got), wanted, rtol=1e-11, atol=1e-12)
    for got, base, wanted in zip(down, start, pulled[3:], strict=True):
        added = np.asarray(got) - base
        np.testing.assert_allclose(added[layer, :, :length], wanted[:, :length], rtol=1e-10, atol=1e-12)
        assert not added[[0, 2]].any() and not added[layer, :, length:].any()


def test_tiles_before_the_window_are_not_read(x64, monkeypatch):
    """NaN there would show: masks come after the product. Of the prefix, its differentiable part, and the own keys."""
    for name, size in (("TILE", 4), ("ROWS", 6), ("OWN_TILE", 2)):
        monkeypatch.setattr(reference, name, size)
    (q, own_k, own_v), (k, v), do = arrays(0, 2, 3, 4, 2, 4, 9, 20, layers=1)
    window, length, offset = 8, 17, 5
    seen = length + offset - window + 1  # by query 0: position 15, so prefix tiles 0 to 2; later queries see less
    k[:, :, : seen // 4 * 4] = v[:, :, : seen // 4 * 4] = np.nan
    lengths, zeros = np.asarray([9, 8], np.int32), (jnp.zeros((1, 2, 20, 4)),) * 2
    how = {"own_offset": offset, "rule": tail_attention.Rule(jnp.int32(window))}

    @jax.jit
    def run(q, own_k, own_v, k, v):
        prefix = tail_attention.Prefix(k, v, jnp.int32(0), jnp.int32(length), jnp.int32(6))
        o, lse = tail_attention.forward(q, own_k, own_v, lengths, prefix, **how)
        return o, tail_attention.backward(q, own_k, own_v, lengths, prefix, o, lse, to_api(do, 2), zeros, **how)

    args = to_api(q, 2), to_api(own_k), to_api(own_v)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(run(*args, k, v)))
    # A window that the own part outgrows: query 2 of the last tile sees keys from 5 on.
    own_k[:, :, :4] = own_v[:, :, :4] = np.nan
    args = to_api(np.tile(q, (1, 2, 1, 1))[:, :4], 2), to_api(own_k), to_api(own_v), lengths
    how = {"own_offset": 5, "rule": tail_attention.Rule(jnp.int32(2))}
    o, lse = jax.jit(lambda *args: tail_attention.forward(*args, None, **how))(*args)
    back = jax.jit(lambda *args: tail_attention.backward(*args, **how))(*args, None, o, lse, jnp.ones(o.shape))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((o, back)))


@pytest.mark.parametrize("constant", [0, 5, 9])
def test_constant_keys_take_no_cotangent(x64, constant):
    """The first `constant` keys: their share of dq stays, dk and dv start at the first differentiable key.

    The state has room for `constant` keys and the whole cotangent buffer, as the engine's has."""
    (q, own_k, own_v), (k, v), do = arrays(3, 2, 3, 4, 2, 4, 3, 18)
    lengths, length = np.asarray([3, 2], np.int32), 7
    args, do = (to_api(q, 2), to_api(own_k), to_api(own_v), lengths), to_api(do, 2)

    def prefix(constant):
        return tail_attention.Prefix(k, v, jnp.int32(2), jnp.int32(length), constant)

    o, lse = tail_attention.forward(*args, prefix(None))
    zeros = (jnp.zeros((3, 2, 9, 4)),) * 2
    backward = jax.jit(lambda at, zeros: tail_attention.backward(*args, prefix(at), o, lse, do, zeros))
    full, part, none = backward(None, zeros), backward(jnp.int32(constant), zeros), backward(None, None)
    assert none[3] is None
    for other in (part, none):
        for got, wanted in zip(other[:3], full[:3], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-13)
    for got, wanted in zip(part[3], full[3], strict=True):
        live = max(length - constant, 0)
        np.testing.assert_allclose(got[:, :, :live], wanted[:, :, constant : constant + live], rtol=1e-12, atol=1e-13)
        assert not np.asarray(got)[:, :, live:].any()


def test_merge_of_disjoint_keys(x64):
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal((3, 8)), rng.standard_normal((8, 4))

    def part(keys):
        s = scores[:, keys]
        p = np.exp(s - s.max(-1, keepdims=True)) if s.size else s
        lse = s.max(-1) + np.log(p.sum(-1)) if s.size else np.full(3, -np.inf)
        return (p / p.sum(-1, keepdims=True)) @ values[keys] if s.size else np.zeros((3, 4)), lse

    whole = part(slice(0, 8))
    for cut in (0, 3, 8):
        for got, wanted in zip(tail_attention.merge(*part(slice(0, cut)), *part(slice(cut, 8))), whole, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12)
    o, lse = tail_attention.merge(*part(slice(0, 0)), *part(slice(0, 0)))
    assert not np.asarray(o).any() and np.isneginf(lse).all()


def test_misshapen_arguments():
    (q, own_k, own_v), (k, v), _ = arrays(0, 2, 3, 4, 2, 4, 3, 5)
    q, own_k, own_v, lengths = to_api(q, 2), to_api(own_k), to_api(own_v), np.asarray([3, 3], np.int32)
    with pytest.raises(ValueError, match=r"q \(2, 2, 3, 4\)"):
        tail_attention.forward(q[:, :, :, 0], own_k, own_v, lengths, None)
    with pytest.raises(ValueError, match="K, B and H must be equal"):
        tail_attention.forward(q[:1], own_k, own_v, lengths, None)
    with pytest.raises(ValueError, match=r"own_lengths must be \[2\]"):
        tail_attention.forward(q, own_k, own_v, lengths[:1], None)
    wrong = tail_attention.Prefix(k[:, :1], v[:, :1], jnp.int32(0), jnp.int32(5))
    with pytest.raises(ValueError, match="must be equal"):
        tail_attention.forward(q, own_k, own_v, lengths, wrong)
