"""The oracle against a forward pass in plain numpy, one token at a time, and against finite differences of it."""

import dataclasses
import math

import families
import helpers
import jax
import numpy as np
import oracle
import pytest

from lsfuse.model.config import RopeScaling


def _rms(x, gain, config):
    return (gain + config.norm_offset) * x / math.sqrt(float(np.mean(np.square(x))) + config.rms_norm_eps)


def _cap(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def _activate(x, name):
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return np.asarray([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x])
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return np.maximum(x, 0)


def _linear(x, p, name):
    return x @ p[name] + p.get(name + "_bias", 0.0)


def _turn(x, position, freqs):
    """Rotate one head: the pair (i, i + H/2) as a complex number times e^(i · position · frequency)."""
    half = len(x) // 2
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * position * freqs)
    return np.concatenate([z.real, z.imag])


def token_by_token(config, params, ids, constants=None, fixed=0):
    """Logits [T, V], keys and values of earlier tokens read from a cache; those of the first `fixed` tokens come from a
    second model, `constants`, which is how a constant K/V behaves under a change of parameters."""
    out, cache = [], [[] for _ in config.blocks]
    for position, token in enumerate(ids):
        models = [params] if position >= fixed else [params, constants]
        for model in models:  # the last one's keys and values stay in the cache
            for entries in cache:
                del entries[position:]
            x = config.embed_scale * model["embed_tokens"][token]
            for block, p, entries in zip(config.blocks, oracle.split_blocks(config, model), cache, strict=True):
                source = x
                if block.attention != "none":
                    x = x + _attend(config, block, p, source, entries, position)
                if block.ffn_width:
                    before = p["pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"]
                    h = _rms(source if block.parallel else x, before, config)
                    if block.ffn == "plain":
                        y = _linear(_activate(_linear(h, p, "fc_in"), config.hidden_act), p, "fc_out")
                    else:
                        gate = _activate(_linear(h, p, "gate_proj"), config.hidden_act)
                        y = _linear(gate * _linear(h, p, "up_proj"), p, "down_proj")
                    x = x + (_rms(y, p["post_feedforward_layernorm"], config) if config.post_norms else y)
        head = model["embed_tokens"].T if config.tie_word_embeddings else model["lm_head"]
        out.append(_cap(_rms(x, model["norm"], config) @ head, config.final_logit_softcapping))
    return np.asarray(out)


def _attend(config, block, p, x, entries, position):
    h = _rms(x, p["input_layernorm"], config)
    size = config.head_dim
    rope = (config.rope_theta, config.rope_scaling)
    if block.local_rope:
        rope = (config.local_rope_theta, config.local_rope_scaling)
    freqs, length = oracle.rotary_frequencies(size, *rope), oracle.rotary_length(rope[1])
    q, k = (_linear(h, p, name).reshape(-1, size) for name in ("q_proj", "k_proj"))
    if config.qk_norm:
        q, k = ([_rms(head, p[norm], config) for head in heads] for heads, norm in ((q, "q_norm"), (k, "k_norm")))
    k = np.asarray([length * _turn(head, position, freqs) for head in k])
    entries.append((k, _linear(h, p, "v_proj").reshape(-1, size)))
    entries = entries[-block.window :] if block.attention == "sliding" else entries
    heads = []
    for n in range(config.num_heads):
        kv = n * block.num_kv_heads // config.num_heads
        scores = np.asarray([length * _turn(q[n], position, freqs) @ k[kv] for k, _ in entries])
        scores = _cap(scores / math.sqrt(config.query_pre_attn_scalar or size), config.attn_logit_softcapping)
        weights = np.exp(scores - scores.max())
        heads.append(sum(w * v[kv] for w, (_, v) in zip(weights / weights.sum(), entries, strict=True)))
    y = _linear(np.concatenate(heads), p, "o_proj")
    return _rms(y, p["post_attention_layernorm"], config) if config.post_norms else y


def _log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


ACTIVATIONS = [helpers.tiny(hidden_act=act, blocks=helpers.TINY.blocks[:1]) for act in ("gelu", "relu")]


@pytest.mark.parametrize(
    "config", [helpers.TINY, helpers.MIXED, helpers.HOLLOW, *ACTIVATIONS, *families.FAMILIES.values()]
)
def test_logits_equal_numpy(config):
    params = helpers.random_params(config)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 9)
    np.testing.assert_allclose(
        oracle.logits(config, params, ids), token_by_token(config, params, ids), rtol=1e-12, atol=1e-12
    )


def test_rotary_frequencies():
    plain = oracle.rotary_frequencies(8, 10000.0, None)
    np.testing.assert_allclose(plain, [1.0, 0.1, 0.01, 0.001], rtol=1e-14)
    np.testing.assert_allclose(oracle.rotary_frequencies(8, 10000.0, RopeScaling("linear", 4.0)), plain / 4, rtol=1e-14)
    # Wavelengths 6.28, 62.8, 628, 6283 against the borders 100 / 4 and 100 / 1: kept, blended, divided, divided.
    scaled = oracle.rotary_frequencies(8, 10000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 100))
    blend = (100 / (2 * math.pi / 0.1) - 1) / 3
    np.testing.assert_allclose(scaled, [1.0, 0.1 * ((1 - blend) / 8 + blend), 0.01 / 8, 0.001 / 8], rtol=1e-14)


def test_yarn_frequencies():
    """Within 1000 positions the pairs turn 159, 15.9, 1.6 and 0.16 times: pair log10(1000 / 2πr) turns r times."""
    plain = oracle.rotary_frequencies(8, 10000.0, None)
    first, last = math.log10(1000 / (2 * math.pi * 20)), math.log10(1000 / (2 * math.pi * 0.5))
    for truncate, (low, high) in {True: (0, 3), False: (first, last)}.items():
        assert (math.floor(first), math.ceil(last)) == (0, 3)
        slow = np.clip((np.arange(4) - low) / (high - low), 0, 1)
        scaling = RopeScaling("yarn", 4.0, original_max_position=1000, beta_fast=20, beta_slow=0.5, truncate=truncate)
        want = plain * (1 - slow) + plain / 4 * slow
        np.testing.assert_allclose(oracle.rotary_frequencies(8, 10000.0, scaling), want, rtol=1e-13)
    assert oracle.rotary_length(scaling) == pytest.approx(1 + 0.1 * math.log(4), rel=1e-14)
    assert oracle.rotary_length(dataclasses.replace(scaling, attention_factor=1.5)) == 1.5


def test_per_token_logps_and_entropies():
    config, params = helpers.TINY, helpers.random_params(helpers.TINY)
    prompt_lengths, lengths = (7, 1, 0, 4), ((1, 0), (), (), (4,))
    batch = helpers.make_batch(config, prompt_lengths, lengths, (11, 4, 6))
    logps, entropies = oracle.per_token_logps(config, params, batch, temperature=0.6)
    assert logps.shape == (4, 4, 6)
    for b, p in enumerate(prompt_lengths):
        for g in range(4):
            length = lengths[b][g] if g < len(lengths[b]) else 0
            assert not logps[b, g, length:].any() and not entropies[b, g, length:].any()
            if length:
                response = batch.completion_ids[b, g, :length]
                ids = np.concatenate([batch.prompt_ids[b, :p], response])
                want = _log_softmax(token_by_token(config, params, ids)[p - 1 : -1] / 0.6)
                np.testing.assert_allclose(logps[b, g, :length], want[np.arange(length), response], atol=1e-12)
                np.testing.assert_allclose(entropies[b, g, :length], -(np.exp(want) * want).sum(-1), atol=1e-12)


def _directional(config, params, batch, prefix_grad, direction, step):
    """d loss / d parameters along `direction` by a fourth-order central difference of the numpy forward."""

    def loss(t):
        moved = jax.tree.map(lambda x, d: x + t * d, params, direction)
        logps, entropies = np.zeros((2, *batch.completion_ids.shape))
        for b, g in np.ndindex(logps.shape[:2]):
            p, r = int(batch.prompt_lengths[b]), int(batch.completion_lengths[b, g])
            if g < batch.group_sizes[b] and r:
                ids = np.concatenate([batch.prompt_ids[b, :p], batch.completion_ids[b, g, :r]])
                fixed = oracle.constant_tokens(prefix_grad, p)
                logp = _log_softmax(token_by_token(config, moved, ids, params, fixed)[p - 1 : -1])
                logps[b, g, :r] = logp[np.arange(r), ids[p:]]
                entropies[b, g, :r] = -(np.exp(logp) * logp).sum(-1)
        return float(helpers.coupled(logps, entropies, batch)[0])

    return (8 * (loss(step) - loss(-step)) - (loss(2 * step) - loss(-2 * step))) / (12 * step)


@pytest.mark.parametrize("prefix_grad", ["exact", "stop", 3, 64])
@pytest.mark.parametrize(
    "config", [helpers.TINY, helpers.MIXED, families.FAMILIES["gemma2"]], ids=["tiny", "mixed", "gemma2"]
)
def test_gradient_equals_finite_differences(x64, config, prefix_grad):
    params = helpers.random_params(config, 3)
    batch = helpers.make_batch(config, (6, 4), ((2, 2, 0), (4,)), None, silent=())
    _, grads = oracle.value_and_grad(helpers.coupled, config, params, batch, prefix_grad)
    rng = np.random.default_rng(5)
    direction = jax.tree.map(lambda x: rng.standard_normal(x.shape), params)
    want = _directional(config, params, batch, prefix_grad, direction, 1e-4)
    got = sum(np.sum(g * d) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True))
    np.testing.assert_allclose(got, want, rtol=1e-8)


def test_partial_gradients_differ_and_meet():
    """The modes are different numbers, n = P is exact, and "stop" is n = 1."""
    config, params = helpers.TINY, helpers.random_params(helpers.TINY)
    batch = helpers.make_batch(config, (6, 4), ((2, 2), (4,)), None, silent=())
    of = {
        mode: oracle.value_and_grad(helpers.coupled, config, params, batch, mode)[1]
        for mode in ("exact", "stop", 1, 2, 5, 6)
    }
    oracle.assert_grads_close(of[6], of["exact"], 0.0)
    oracle.assert_grads_close(of[1], of["stop"], 0.0)
    for first, second in (("stop", 2), (2, 5), (5, "exact")):
        assert max(oracle.grad_errors(of[first], of[second]).values()) > 1e-3


def test_the_metric(monkeypatch):
    monkeypatch.setattr(oracle, "WORST", {})  # these errors are made, not found
    tree = {"norm": np.asarray([3.0, 4.0]), "runs": {"0": {"q_proj": np.asarray([[1.0, 1.0], [1e-20, 0.0]])}}}

    def moved(by, at=0):
        return {**tree, "runs": {"0": {"q_proj": tree["runs"]["0"]["q_proj"] + np.asarray([[by, 0], [0, at]])}}}

    oracle.assert_grads_close(tree, tree, 0.0)
    oracle.assert_grads_close(moved(1e-13), tree, 1e-12)
    with pytest.raises(AssertionError, match=r"runs/0/q_proj\[0\]"):
        oracle.assert_grads_close(moved(1e-11), tree, 1e-12)
    oracle.assert_grads_close(moved(0, 4e-14), tree, 1e-12)
    with pytest.raises(AssertionError, match=r"runs/0/q_proj\[1\]"):  # zero by cancellation: ‖a‖ ≤ 1e-14 × 5.2
        oracle.assert_grads_close(moved(0, 6e-14), tree, 1e-12)
    with pytest.raises(AssertionError, match="norm"):
        oracle.assert_grads_close({**tree, "norm": np.asarray([3.0, np.nan])}, tree, 1e-12)
    zero = jax.tree.map(np.zeros_like, tree)
    with pytest.raises(AssertionError, match="norm"):
        oracle.assert_grads_close({**zero, "norm": np.asarray([0.0, 1e-300])}, zero, 1e-12)
