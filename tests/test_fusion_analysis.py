"""Dependency matrices, removal scores and comparisons against models with the block really taken out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HOLLOW, random_params, tiny

from lsfuse import fusion
from lsfuse.fusion import analysis
from lsfuse.model import BlockConfig, forward, logits, stack_blocks, unstack_blocks
from lsfuse.model.transformer import embed, make_tokens, no_prefix, run_blocks

FULL, FFN = BlockConfig("full", 2, 24), BlockConfig("none", 1, 8)
CONFIG = tiny(blocks=(FULL, FFN, FFN, FULL))
RNG = np.random.default_rng(3)
TEXTS = fusion.from_lists([RNG.integers(0, 23, n).tolist() for n in (17, 9, 1)])
EACH = [fusion.from_lists([ids[:n].tolist()]) for ids, n in zip(TEXTS.ids, TEXTS.lengths, strict=True)]


def model(config=CONFIG, seed=0):
    return config, jax.tree.map(jnp.asarray, random_params(config, seed))


def stream(model, ids):
    """The residual stream after every block of one text, by models cut short."""
    config, params = model
    parts = unstack_blocks(config, params)
    out = [embed(params, config, jnp.asarray(ids), jnp.ones(len(ids), bool))[None]]
    for block, leaves in zip(config.blocks, parts, strict=True):
        one = dataclasses.replace(config, blocks=(block,), sources=(), transforms=())
        tokens = make_tokens(config, 0, len(ids), jnp.array([len(ids)]), jnp.float64)
        out.append(run_blocks({"runs": stack_blocks(one, [leaves])}, one, out[-1], tokens, no_prefix())[0])
    return np.stack([np.asarray(x[0]) for x in out])


def distance(a, b):
    unit = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b)]
    return 0.5 * ((unit[0] - unit[1]) ** 2).sum(-1)


def brute_force(model, texts):
    """[L, L, tokens]: every block taken out in turn."""
    config = model[0]
    all_tokens = []
    for ids, length in zip(texts.ids, texts.lengths, strict=True):
        xs = stream(model, ids[:length])
        h = xs[1:] - xs[:-1]
        out = np.zeros((config.num_blocks, config.num_blocks, length))
        for i in range(config.num_blocks):
            ys = stream(fusion.remove_blocks([i])(*model), ids[:length])
            g = np.insert(ys[1:] - ys[:-1], i, 0.0, axis=0)
            for j in range(i + 1, config.num_blocks):
                out[i, j] = distance(h[j], g[j])
        all_tokens.append(out)
    return np.concatenate(all_tokens, -1)


def test_dependency_is_that_of_models_without_the_block(x64):
    want = brute_force(model(), TEXTS)
    got = fusion.dependency(*model(), TEXTS, batch_size=2)
    np.testing.assert_allclose(got.mean, want.mean(-1), rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(got.p95, np.quantile(want, 0.95, axis=-1), rtol=1e-10, atol=1e-14)
    assert np.count_nonzero(got.mean) == 6 and not np.tril(got.mean).any()
    some = fusion.dependency(*model(), TEXTS, blocks=[1], batch_size=3)
    np.testing.assert_allclose(some.mean[1], got.mean[1], rtol=1e-12)
    for field in ("mean", "p95"):  # what was not computed is not taken for independence
        upper = np.triu(np.ones((4, 4), bool), 1) & (np.arange(4) != 1)[:, None]
        np.testing.assert_array_equal(np.isnan(getattr(some, field)), upper)


def test_rows_of_a_region_end_with_it(x64, monkeypatch):
    """The same figures for pairs inside, from m (m - 1) / 2 blocks a batch beside the one pass over all."""
    ran, inner = [], analysis.run_from

    def run_from(params, config, x, lengths, first, after=None):
        ran.append(int(config.num_blocks if after is None else after) - int(first))
        return inner(params, config, x, lengths, first, after)

    config = tiny(blocks=(FULL, FFN, FFN, FFN, FULL, FFN, FFN))
    whole = fusion.dependency(*model(config), TEXTS, batch_size=3)
    regions = fusion.attention_free_runs(config)
    assert regions == [(1, 3), (5, 6)]
    with jax.disable_jit(), monkeypatch.context() as patch:
        patch.setattr(analysis, "run_from", run_from)
        got = fusion.dependency(*model(config), TEXTS, batch_size=3, regions=regions)
    assert sorted(ran) == [0, 0, 1, 1, 2]  # the parent's own pass is elsewhere
    inside = np.zeros((7, 7), bool)
    for first, last in regions:
        inside[first : last + 1, first : last + 1] = True
    for field in ("mean", "p95"):
        mine, all_of_it = getattr(got, field), getattr(whole, field)
        np.testing.assert_allclose(mine[inside], all_of_it[inside], rtol=1e-10)
        np.testing.assert_array_equal(np.isnan(mine), np.triu(~inside, 1))
    np.testing.assert_allclose(got.relative, whole.relative, rtol=1e-10)
    assert fusion.fusion_spans(config, got.mean, 2.0) == fusion.fusion_spans(config, whole.mean, 2.0) == [(1, 2)]
    for regions, message in (
        ([(1, 7)], "dependency: span 1-7 is out of range"),
        ([(1, 3), (3, 4)], "dependency: spans 1-3 and 3-4 overlap"),
        ((1, 3), "dependency: spans must be a list of pairs"),
    ):
        with pytest.raises(ValueError, match=message):
            fusion.dependency(*model(config), TEXTS, regions=regions)
    with pytest.raises(ValueError, match="dependency: blocks and regions are both given; take one"):
        fusion.dependency(*model(config), TEXTS, [1], regions=[(1, 3)])


@pytest.mark.slow
def test_texts_alone_and_padded_in_one_batch(x64):
    """Weighted by their tokens, the matrices of texts alone are that of all together."""
    together = fusion.dependency(*model(), TEXTS, batch_size=3)
    alone = [fusion.dependency(*model(), text) for text in EACH]
    weights = TEXTS.lengths / TEXTS.num_tokens
    for field in ("mean", "relative", "influence", "consecutive"):
        mean = sum(w * getattr(a, field) for w, a in zip(weights, alone, strict=True))
        np.testing.assert_allclose(getattr(together, field), mean, rtol=1e-10, err_msg=field)
    scores = fusion.removal_scores(*model(), TEXTS, batch_size=3)
    each = [fusion.removal_scores(*model(), text) for text in EACH]
    np.testing.assert_allclose(scores, sum(w * s for w, s in zip(weights, each, strict=True)), rtol=1e-10)


def test_block_statistics(x64):
    xs = np.concatenate([stream(model(), ids[:n]) for ids, n in zip(TEXTS.ids, TEXTS.lengths, strict=True)], 1)
    h = xs[1:] - xs[:-1]
    got = fusion.dependency(*model(), TEXTS)
    norm = np.linalg.norm
    np.testing.assert_allclose(got.relative, (norm(h, axis=-1) / norm(xs[:-1], axis=-1)).mean(1), rtol=1e-6)
    np.testing.assert_allclose(got.influence, distance(xs[:-1], xs[1:]).mean(1), rtol=1e-10)
    np.testing.assert_allclose(got.consecutive, distance(h[:-1], h[1:]).mean(1), rtol=1e-10)


def ffns(reads, writes, seed=0):
    """FFNs of one hidden channel each; FFN j reads coordinate reads[j] and writes writes[j]."""
    config = tiny(blocks=(BlockConfig("none", 1, 1),) * len(reads))
    params = random_params(config, seed)
    run = {n: np.zeros_like(v) for n, v in params["runs"]["0"].items()}
    run["post_attention_layernorm"] += 1.0
    for j, (r, w) in enumerate(zip(reads, writes, strict=True)):
        run["gate_proj"][j, r, 0] = run["up_proj"][j, r, 0] = 3.0
        run["down_proj"][j, 0, w] = 2.0
    return config, {**params, "runs": {"0": run}}


def test_disjoint_ffns_are_independent_and_a_chain_is_not(x64):
    apart = ffns(reads=(0, 1, 2), writes=(8, 9, 10))
    assert fusion.dependency(*apart, TEXTS).mean.max() <= 1e-12
    config, params = ffns(reads=(0, 8, 9), writes=(8, 9, 10))
    params["embed_tokens"][:, 8:11] = 0.0  # the second reads nothing but what the first writes
    m = fusion.dependency(config, params, TEXTS).mean
    np.testing.assert_allclose(m[np.triu_indices(3, 1)], 1.0, rtol=1e-12)


def test_distance_of_zero_vectors():
    a, zero = jnp.array([1.0, 2.0]), jnp.zeros(2)
    cases = [(zero, zero, 0.0), (a, zero, 1.0), (zero, a, 1.0), (a, a, 0.0), (a, -a, 2.0)]
    cases += [(a, 1e-30 * a, 0.0), (1e30 * a, a, 0.0)]
    for x, y, want in cases:
        np.testing.assert_allclose(fusion.cosine_distance(x, y), want, atol=1e-6)
    # Bfloat16 inputs are compared in float32.
    assert fusion.cosine_distance(a.astype(jnp.bfloat16), a).dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("part", ["attention", "ffn", "block"])
def test_removal_scores(x64, part):
    remove = {"attention": fusion.remove_attention, "ffn": fusion.remove_ffn, "block": fusion.remove_blocks}[part]
    for config in (CONFIG, HOLLOW):
        whole = model(config)
        got = fusion.removal_scores(*whole, TEXTS, part, batch_size=2)
        for i, block in enumerate(config.blocks):
            if part == "attention" and not block.has_attention:
                assert np.isnan(got[i])
                continue
            want = fusion.evaluate(remove([i])(*whole), TEXTS, parent=whole)["kl"]
            np.testing.assert_allclose(got[i], want, rtol=1e-9)


@pytest.mark.slow
def test_evaluation(x64):
    """Perplexity, KL and agreement from whole logits, text by text."""
    parent, child = model(), fusion.remove_attention([3])(*model())
    nll, kl, same = [], [], []
    for ids, n in zip(TEXTS.ids, TEXTS.lengths, strict=True):
        ids = jnp.asarray(ids[None, :n])
        p, q = (jax.nn.log_softmax(logits(m[1], m[0], forward(m[1], m[0], ids)))[0] for m in (parent, child))
        kl.append(jnp.sum(jnp.exp(p) * (p - q), -1))
        same.append(p.argmax(-1) == q.argmax(-1))
        nll.append(-q[jnp.arange(n - 1), ids[0, 1:]])
    got = fusion.evaluate(child, TEXTS, parent=parent, batch_size=2)
    np.testing.assert_allclose(got["kl"], np.concatenate(kl).mean(), rtol=1e-9)
    np.testing.assert_allclose(got["top1"], np.concatenate(same).mean(), rtol=1e-12)
    np.testing.assert_allclose(got["perplexity"], np.exp(np.concatenate(nll).mean()), rtol=1e-9)
    own = fusion.evaluate(parent, TEXTS, parent=parent)
    assert own["kl"] == 0.0 and own["top1"] == 1.0 and own["perplexity"] == own["parent_perplexity"]


def test_a_batch_holds_at_least_one_text(tmp_path):
    measures = {
        "dependency": lambda **more: fusion.dependency(*model(), TEXTS, folder=tmp_path / "rows", **more),
        "removal_scores": lambda **more: fusion.removal_scores(*model(), TEXTS, folder=tmp_path / "rows", **more),
        "replacement_scores": lambda **more: fusion.replacement_scores(
            *model(), TEXTS, [(0, 0, None)], folder=tmp_path / "rows", **more
        ),
        "plan_scores": lambda **more: fusion.plan_scores(*model(), TEXTS, [], **more),
        "ffn_importance": lambda **more: fusion.ffn_importance(*model(), TEXTS, **more),
        "evaluate": lambda **more: fusion.evaluate(model(), TEXTS, **more),
    }
    for name, measure in measures.items():
        for size in (0, -1, 1.5):
            with pytest.raises(ValueError, match=f"{name}: batch_size must be a whole number .* got {size}"):
                measure(batch_size=size)
    assert not list(tmp_path.iterdir())


def test_bad_input():
    with pytest.raises(ValueError, match=r"dependency: blocks must be a list of block numbers .* got \[1.5\]"):
        fusion.dependency(*model(), TEXTS, blocks=[1.5])
    with pytest.raises(ValueError, match="part 'norm' is unknown; valid: attention, ffn, block"):
        fusion.removal_scores(*model(), TEXTS, "norm")
    with pytest.raises(ValueError, match=r"\[4\] are out of range; the model has blocks 0 to 3"):
        fusion.dependency(*model(), TEXTS, blocks=[4])
    with pytest.raises(ValueError, match="vocabularies of 24 and 23"):
        fusion.evaluate(model(), TEXTS, parent=model(tiny(vocab_size=24)))
    with pytest.raises(ValueError, match="at least two tokens"):
        fusion.evaluate(model(), fusion.from_lists([[1], [2]]))
    for sequences in ([], [[1], []]):
        with pytest.raises(ValueError, match="at least one token each"):
            fusion.from_lists(sequences)

    class Letters:
        def encode(self, text):
            return [ord(c) for c in text]

    assert fusion.windows("abcdefg", Letters(), 3).ids.tolist() == [[97, 98, 99], [100, 101, 102]]
    with pytest.raises(ValueError, match="the text has 7 tokens; 1 windows of 8"):
        fusion.windows("abcdefg", Letters(), 8)
    with pytest.raises(ValueError, match="3 windows of 3 .at least 2. need 9"):
        fusion.windows("abcdefg", Letters(), 3, count=3)
