"""Per-token log-probs and entropies: equal to dense, one branch independent of the others, padding without effect."""

import dataclasses

import helpers
import jax
import numpy as np
import oracle
import pytest

from lsfuse.model.config import BlockConfig, ModelConfig
from lsfuse.replay.batch import Batch

TINY = helpers.TINY
OPTIONS = {"chunk_size": 4, "branch_batch": 2}


def scores(config, params, batch, **options):
    return tuple(np.asarray(x) for x in helpers.scorer(config, **{**OPTIONS, **options})(params, batch))


def group(prompt, responses, width=None, prompt_room=None):
    """A batch of one group from lists of tokens."""
    width = width or max(map(len, responses))
    ids = np.full((1, len(responses), width), -7, np.int32)
    for g, response in enumerate(responses):
        ids[0, g, : len(response)] = response
    room = np.full((1, prompt_room or len(prompt)), 10**6, np.int32)
    room[0, : len(prompt)] = prompt
    lengths = np.asarray([[len(r) for r in responses]], np.int32)
    return Batch(
        prompt_ids=room,
        prompt_lengths=np.asarray([len(prompt)], np.int32),
        completion_ids=ids,
        completion_lengths=lengths,
        completion_mask=np.ones(ids.shape, np.int32),
        group_sizes=np.asarray([len(responses)], np.int32),
    )


@pytest.mark.parametrize(
    "config",
    [TINY, helpers.MIXED, pytest.param(helpers.HOLLOW, marks=pytest.mark.slow)],
    ids=["tiny", "mixed", "hollow"],
)
def test_equal_to_dense(x64, config):
    params = helpers.random_params(config)
    for batch in (helpers.make_batch(config), helpers.ragged_batch(config, 4)):
        got, want = scores(config, params, batch), oracle.per_token_logps(config, params, batch)
        for mine, theirs in zip(got, want, strict=True):
            assert mine.dtype == np.float64
            np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)
            assert not mine[theirs == 0].any(), "zero where no token exists"


def test_float32():
    params = helpers.random_params(TINY, dtype=np.float32)
    batch = helpers.make_batch(TINY, dtype=np.float32)
    for mine, theirs in zip(scores(TINY, params, batch), oracle.per_token_logps(TINY, params, batch), strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_lengths_are_those_of_the_responses(x64):
    """prompt [3, 4], responses [5] and [6], then [5, 7] and [6]: nothing predicts the stream's first token."""
    params = helpers.random_params(TINY)
    logits = {ids: oracle.logits(TINY, params, ids) for ids in ((3, 4, 5, 7), (3, 4, 6))}
    logp = {ids: x - np.log(np.exp(x).sum(-1, keepdims=True)) for ids, x in logits.items()}
    short = scores(TINY, params, group([3, 4], [[5], [6]], width=3))[0][0]
    np.testing.assert_allclose(short[:, 0], [logp[3, 4, 5, 7][1, 5], logp[3, 4, 6][1, 6]], rtol=1e-12)
    assert not short[:, 1:].any()
    long = scores(TINY, params, group([3, 4], [[5, 7], [6]], width=3))[0][0]
    np.testing.assert_allclose(long[0, :2], [logp[3, 4, 5, 7][1, 5], logp[3, 4, 5, 7][2, 7]], rtol=1e-12)
    assert long[1, 0] == short[1, 0] and not long[0, 2:].any() and not long[1, 1:].any()


def test_first_response_tokens_share_one_distribution(x64):
    """P = 3: every branch's first token comes from the prompt's last hidden state; positions restart at P in each."""
    params = helpers.random_params(TINY)
    logps, entropies = scores(TINY, params, group([1, 2, 3], [[t, 8, 9] for t in range(TINY.vocab_size)]))
    np.testing.assert_allclose(np.exp(logps[0, :, 0]).sum(), 1.0, rtol=1e-13)
    assert len(set(entropies[0, :, 0])) == 1
    for t in (5, 9):
        want = oracle.logits(TINY, params, [1, 2, 3, t, 8])
        want = want - np.log(np.exp(want).sum(-1, keepdims=True))
        np.testing.assert_allclose(logps[0, t], [want[2, t], want[3, 8], want[4, 9]], rtol=1e-12)


@pytest.mark.parametrize(("branch_batch", "wide"), [(1, True), (2, True), (4, False)])
def test_branches_are_independent_bit_for_bit(wide, branch_batch):
    """A prompt of 11, branches of 12, 12, 7, 9: branch 1 replaced, then shortened to 2, then the branches permuted."""
    with jax.enable_x64(wide):
        params = helpers.random_params(TINY, dtype=np.float64 if wide else np.float32)
        rng = np.random.default_rng(0)
        prompt = rng.integers(0, TINY.vocab_size, 11)
        responses = [list(rng.integers(0, TINY.vocab_size, n)) for n in (12, 12, 7, 9)]

        def run(responses):
            batch = group(prompt, responses, width=12)
            return np.stack(scores(TINY, params, batch, branch_batch=branch_batch, optimized=True))[:, 0]

        base = run(responses)
        others = [0, 2, 3]
        for other in ([(t + 1) % TINY.vocab_size for t in responses[1]], responses[1][:2], []):
            moved = run([responses[0], other, *responses[2:]])
            np.testing.assert_array_equal(moved[:, others], base[:, others])
            if other and other[0] != responses[1][0]:
                assert (moved[0, 1] != base[0, 1]).all()
        order = [2, 0, 3, 1]
        np.testing.assert_array_equal(run([responses[i] for i in order]), base[:, order])


def test_a_masked_token_stays_context(x64):
    """Response of 12, tokens 4–6 from a tool: changing one changes later log-probs and none before."""
    params = helpers.random_params(TINY)
    rng = np.random.default_rng(1)
    prompt, response = rng.integers(0, TINY.vocab_size, 5), list(rng.integers(0, TINY.vocab_size, 12))
    mask = np.ones((1, 1, 12), np.int32)
    mask[0, 0, 4:7] = 0
    batch = group(prompt, [response]).replace(completion_mask=mask)
    changed = [*response[:5], (response[5] + 1) % TINY.vocab_size, *response[6:]]
    before, after = scores(TINY, params, batch)[0][0, 0], scores(
        TINY, params, group(prompt, [changed]).replace(completion_mask=mask)
    )[0][0, 0]
    np.testing.assert_array_equal(before[:5], after[:5])
    assert (before[5:] != after[5:]).all()
    np.testing.assert_allclose(before, oracle.per_token_logps(TINY, params, batch)[0][0, 0], rtol=1e-12)


def test_padding_changes_nothing(x64):
    """The same rows in buffers 0, 1 and 7 positions longer, other garbage behind them."""
    params = helpers.random_params(TINY)
    rng = np.random.default_rng(2)
    prompt = rng.integers(0, TINY.vocab_size, 6)
    responses = [list(rng.integers(0, TINY.vocab_size, n)) for n in (4, 2)]
    base = scores(TINY, params, group(prompt, responses))
    for extra in (1, 7):
        batch = group(prompt, responses, 4 + extra, 6 + extra)
        for mine, theirs in zip(scores(TINY, params, batch), base, strict=True):
            np.testing.assert_allclose(mine[:, :, :4], theirs, rtol=1e-12, atol=1e-12)
            assert not mine[:, :, 4:].any()
        # The garbage itself: bit for bit, at equal shapes.
        other = batch.replace(prompt_ids=np.where(batch.prompt_ids > 99, -1, batch.prompt_ids))
        other = other.replace(completion_ids=np.where(other.completion_ids < 0, 2**31 - 1, other.completion_ids))
        np.testing.assert_array_equal(scores(TINY, params, batch), scores(TINY, params, other))


def fixed_logits_model():
    """(config, params) whose logits are [2, 1, 0] after every token: an FFN of zeros and a hidden state of ones."""
    config = ModelConfig(3, 2, 1, 2, (BlockConfig("none", 1, 2),), rms_norm_eps=1e-300)
    ffn = {"post_attention_layernorm": np.ones((1, 2)), "gate_proj": np.ones((1, 2, 2)), "up_proj": np.ones((1, 2, 2))}
    return config, {
        "embed_tokens": np.ones((3, 2)),
        "runs": {"0": {**ffn, "down_proj": np.zeros((1, 2, 2))}},
        "norm": np.ones(2),
        "lm_head": np.asarray([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
    }


def test_temperature(x64):
    """Logits [2, 1, 0] at temperature 0.6; the entropy is the tempered distribution's."""
    config, params = fixed_logits_model()
    batch = group([0], [[0], [1], [2]])
    want = np.asarray([-0.202573, -1.869240, -3.535906])
    for temperature, logps in ((0.6, want), (1.0, np.log(np.exp([2.0, 1.0, 0.0]) / np.exp([2.0, 1.0, 0.0]).sum()))):
        got, entropies = scores(config, params, batch, temperature=temperature)
        np.testing.assert_allclose(got[0, :, 0], logps, atol=1e-6)
        np.testing.assert_allclose(entropies[0, :, 0], -(np.exp(logps) * logps).sum(), atol=1e-5)


def test_scoring_and_training_see_the_same_log_probs():
    """Old log-probs from the scoring pass, same parameters: every ratio is exactly 1 in the training pass."""
    params, batch = helpers.random_params(TINY, dtype=np.float32), helpers.make_batch(TINY, dtype=np.float32)
    old = scores(TINY, params, batch, optimized=True)[0]
    step = helpers.engine("log_ratio", TINY, optimized=True, prefix_grad="exact", **OPTIONS)
    (_, metrics), _ = step(params, batch.replace(old_per_token_logps=old))
    assert metrics["distance"] == 0.0


def test_extreme_logits_stay_finite(x64):
    config, params = fixed_logits_model()
    params = {**params, "lm_head": np.asarray([[2000.0, 1000.0, -1000.0], [0.0, 0.0, 0.0]])}
    logps, entropies = scores(config, params, group([0], [[0], [1], [2]]))
    np.testing.assert_allclose(logps[0, :, 0], [0.0, -1000.0, -3000.0], atol=1e-9)
    np.testing.assert_allclose(entropies, 0.0, atol=1e-9)


def test_config_is_static_and_hashable():
    assert helpers.scorer(TINY) is helpers.scorer(dataclasses.replace(TINY))
