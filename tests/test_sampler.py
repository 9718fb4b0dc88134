"""The sampler: tokens of dense forwards, log-probs of the scoring pass, the right distribution, and bad input."""

import functools
import pathlib
import subprocess
import sys

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling import chi_square, smallest_set, tempered

from lsfuse import data, model, replay, rl
from lsfuse.model.config import uniform_blocks
from lsfuse.rl import decode, kernels_in_run
from lsfuse.rl.sampler import Sampler

CONFIGS = {"tiny": helpers.TINY, "mixed": helpers.MIXED, "hollow": helpers.HOLLOW}
# Without attention, and so without a byte of state, it still generates.
FREE = helpers.tiny(blocks=(model.BlockConfig("none", 1, 8),) * 2)
ROOM, BRANCHES, STEPS = 11, 3, 6
LENGTHS = (11, 1, 0, 8)  # a prompt of one token, and a group that is only padding


def prompts(config, lengths=LENGTHS, seed=0):
    """Random prompts whose padding holds ids out of range."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, config.vocab_size, (len(lengths), ROOM), dtype=np.int32)
    ids[np.arange(ROOM) >= np.asarray(lengths)[:, None]] = 10**6
    return ids, np.asarray(lengths, np.int32)


def make(config, **options) -> Sampler:
    settings = {"num_generations": BRANCHES, "max_tokens": STEPS, "chunk_size": 4}
    return rl.make_sampler(config, **{**settings, **options})


def arrays(samples):
    return tuple(np.asarray(x) for x in samples)


def as_batch(prompt, samples) -> replay.Batch:
    ids, lengths, _ = samples
    return replay.Batch(
        prompt_ids=prompt[0],
        prompt_lengths=prompt[1],
        completion_ids=ids,
        completion_lengths=lengths,
        completion_mask=np.ones(ids.shape, np.int32),
        group_sizes=np.where(prompt[1] > 0, ids.shape[1], 0).astype(np.int32),
    )


@functools.cache
def dense(config):
    return jax.jit(
        lambda params, ids: jax.nn.log_softmax(model.logits(params, config, model.forward(params, config, ids)))
    )


def dense_logps(config, params, prompt, completion):
    """log-probs [R, V] of every next token of one response, from a forward over the whole row; padded to one shape."""
    row = np.concatenate([prompt, completion])
    ids = np.zeros((1, ROOM + STEPS), np.int32)
    ids[0, : row.size] = row
    return np.asarray(dense(config)(params, ids))[0, prompt.size - 1 : row.size - 1]


# --- against the model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CONFIGS, "free"])
def test_temperature_0_takes_the_argmax_of_a_dense_forward(x64, name):
    config = CONFIGS.get(name, FREE)
    params = helpers.random_params(config)
    assert (replay.state_bytes_per_token(config, np.float64) == 0) == (name == "free")
    ids, lengths = prompts(config)
    out, sizes, logps = arrays(make(config, temperature=0.0)(params, ids, lengths, jax.random.key(0)))
    assert logps.dtype == np.float64 and out.dtype == sizes.dtype == np.int32
    assert out.shape == logps.shape == (4, BRANCHES, STEPS)
    for b, length in enumerate(lengths):
        assert (sizes[b] == (STEPS if length else 0)).all()
        if not length:
            continue
        want = dense_logps(config, params, ids[b, :length], out[b, 0])
        np.testing.assert_array_equal(out[b, 0], want.argmax(-1))
        np.testing.assert_allclose(logps[b, 0], want.max(-1), atol=1e-12)
        assert (out[b] == out[b, 0]).all()


@pytest.mark.parametrize(
    ("name", "dtype", "temperature", "top_p"),
    [("tiny", "float32", 1.0, 1.0), ("mixed", "float32", 0.7, 0.8), ("hollow", "float64", 1.3, 1.0)],
)
def test_logps_are_those_of_the_scoring_pass(name, dtype, temperature, top_p):
    with jax.enable_x64(dtype == "float64"):
        config, params = CONFIGS[name], helpers.random_params(CONFIGS[name], dtype=dtype)
        prompt = prompts(config)
        sampler = make(config, temperature=temperature, top_p=top_p, stop_ids=(3, 4, 5, 6))
        samples = arrays(sampler(params, *prompt, jax.random.key(7)))
        score = helpers.scorer(config, chunk_size=4, branch_batch=2, temperature=temperature)
        want = np.asarray(score(params, as_batch(prompt, samples))[0])
    assert samples[2].dtype == want.dtype == dtype
    np.testing.assert_allclose(samples[2], want, atol=1e-10 if dtype == "float64" else 2e-5)
    beyond = np.arange(STEPS) >= samples[1][..., None]
    assert not samples[2][beyond].any() and not samples[0][beyond].any()
    assert (samples[2][~beyond] < 0).all()


def test_bfloat16():
    config, params = helpers.TINY, helpers.random_params(helpers.TINY, dtype=jnp.bfloat16)
    prompt = prompts(config)
    samples = arrays(make(config)(params, *prompt, jax.random.key(0)))
    assert samples[2].dtype == np.float32
    want = helpers.scorer(config, chunk_size=4, branch_batch=2)(params, as_batch(prompt, samples))[0]
    np.testing.assert_allclose(samples[2], want, atol=0.1)


def test_tiles_of_own_keys_and_of_kernels(x64, monkeypatch):
    """Many tiles, with a remainder, give what one tile gives."""
    config, params, prompt = helpers.TINY, helpers.random_params(helpers.TINY), prompts(helpers.TINY)
    key = jax.random.key(5)
    want = arrays(make(config, stop_ids=(3, 4, 5, 6))(params, *prompt, key))
    monkeypatch.setattr(decode, "OWN_TILE", 4)
    monkeypatch.setattr(kernels_in_run, "MAX_ROWS", 0)
    got = arrays(Sampler(config, BRANCHES, STEPS, 1.0, 1.0, (3, 4, 5, 6), 4)(params, *prompt, key))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.parametrize(("size", "out", "tile"), [(5, 7, 64), (24, 8, 64), (19, 8, 64), (40, 3, 1)])
def test_a_kernel_in_its_run_multiplies_as_it_would_alone(monkeypatch, size, out, tile):
    monkeypatch.setattr(kernels_in_run, "TILE", tile)
    rng = np.random.default_rng(0)
    stack = jnp.asarray(rng.standard_normal((3, size, out)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((1, 4, size)), jnp.float32)
    for layer in range(3):
        got = jax.jit(lambda x, stack, i: x @ kernels_in_run.KernelInRun(stack, i).astype(x.dtype))(x, stack, layer)
        np.testing.assert_allclose(got, x @ stack[layer], atol=2e-5)


# --- the distribution -------------------------------------------------------------------------------------------------


def test_branches_follow_the_distribution():
    """First and second tokens of 3,000 branches, on a vocabulary of four, against a dense forward."""
    config = helpers.tiny(vocab_size=4, blocks=uniform_blocks(1, 2, 8))
    params = helpers.random_params(config, 2, np.float32)
    params["lm_head"] *= 2
    ids, lengths = prompts(config, (5,))
    out, _, _ = arrays(make(config, num_generations=3000, max_tokens=2)(params, ids, lengths, jax.random.key(0)))
    for first in (None, 0, 1, 2, 3):
        tokens = out[0, :, 0] if first is None else out[0, out[0, :, 0] == first, 1]
        row = np.concatenate([ids[0, :5], [] if first is None else [first], [0]]).astype(np.int32)
        p = np.exp(dense_logps(config, params, row[:-1], row[-1:])[0].astype(np.float64))
        assert abs(chi_square(tokens, p / p.sum())) < 4


def test_no_response_leaves_the_nucleus(x64):
    config, params = helpers.TINY, helpers.random_params(helpers.TINY, 3)
    ids, lengths = prompts(config, seed=3)
    options = {"temperature": 1.5, "top_p": 0.6}
    out, _, _ = arrays(make(config, **options)(params, ids, lengths, jax.random.key(2)))
    for b, length in enumerate(lengths):
        for g in range(BRANCHES if length else 0):
            logps = dense_logps(config, params, ids[b, :length], out[b, g])
            for token, p in zip(out[b, g], tempered(logps, 1.5), strict=True):
                assert smallest_set(p, 0.6 + 1e-9)[token]


# --- seeds, stops, shapes ---------------------------------------------------------------------------------------------


def test_same_key_same_bits_and_another_key_another_response():
    params, prompt = helpers.random_params(helpers.TINY, dtype=np.float32), prompts(helpers.TINY)
    sampler = make(helpers.TINY)
    first, again, other = (arrays(sampler(params, *prompt, jax.random.key(k))) for k in (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        assert a.tobytes() == b.tobytes()
    assert (first[0][0] != other[0][0]).any()
    assert len({tuple(row) for row in first[0][0]}) == BRANCHES


def test_a_branch_depends_neither_on_the_others_nor_on_other_groups(x64):
    config, params = helpers.TINY, helpers.random_params(helpers.TINY)
    (ids, lengths), key = prompts(config), jax.random.key(3)
    want = arrays(make(config)(params, ids, lengths, key))
    alone = arrays(make(config, num_generations=BRANCHES + 2)(params, ids[:1], lengths[:1], key))
    strangers = prompts(config, (11, 4, 2, 7), seed=9)[0]
    strangers[0] = ids[0]
    among = arrays(make(config)(params, strangers, np.asarray((11, 4, 2, 7)), key))
    for i in range(3):
        np.testing.assert_allclose(alone[i][0, :BRANCHES], want[i][0], atol=1e-12)
        np.testing.assert_allclose(among[i][0], want[i][0], atol=1e-12)


class Digits:
    """A tokenizer whose stop id is 3."""

    vocab_size, pad_id, stop_ids = 23, 0, (3,)

    def encode(self, text):
        return [int(t) for t in text.split()]

    def decode(self, ids):
        return " ".join(str(int(t)) for t in ids if t not in self.stop_ids)


def test_a_stop_token_ends_its_branch_and_is_counted(x64):
    config, params, key = helpers.TINY, helpers.random_params(helpers.TINY), jax.random.key(5)
    prompt = prompts(config)
    stops = (3, 4, 5, 6)
    free, _, free_logps = arrays(make(config)(params, *prompt, key))
    out, sizes, logps = arrays(make(config, stop_ids=stops)(params, *prompt, key))
    ended = 0
    for b, g in np.ndindex(sizes.shape):
        if not prompt[1][b]:
            assert sizes[b, g] == 0
            continue
        hits = np.flatnonzero(np.isin(free[b, g], stops))
        length = hits[0] + 1 if hits.size else STEPS
        ended += hits.size > 0
        assert sizes[b, g] == length
        np.testing.assert_array_equal(out[b, g, :length], free[b, g, :length])
        np.testing.assert_allclose(logps[b, g, :length], free_logps[b, g, :length], atol=1e-12)
        row = np.where(out[b, g] == 3, 1, out[b, g])
        row[length - 1] = 3
        assert data.cut_completion(Digits(), row, length, ())[0] == length
    assert 0 < ended < 3 * BRANCHES, "the case has branches of both kinds"


def test_it_ends_when_every_branch_has_stopped():
    config = helpers.tiny(blocks=helpers.TINY.blocks[:1])
    params = helpers.random_params(config, dtype=np.float32)
    ids, lengths = (jnp.asarray(x) for x in prompts(config))
    steps = []

    def run(params, key):
        prefilled = decode.prefill(params, config, ids, lengths, 4)
        shared = decode.shared_attention(prefilled)

        def attend(run, layer, q, k, v, cache, row):
            jax.debug.callback(lambda step: steps.append(int(step)), row.step)
            return shared(run, layer, q, k, v, cache, row)

        caches = decode.shared_caches(config, 4, BRANCHES, STEPS, jnp.float32)
        keys = jax.random.split(key, (4, BRANCHES))
        options = {"max_tokens": STEPS, "temperature": 1.0, "top_p": 1.0, "stop_ids": tuple(range(17))}
        return decode.decode(params, config, prefilled, attend, caches, keys, **options)

    _, sizes, _ = arrays(jax.jit(run)(params, jax.random.key(1)))
    jax.effects_barrier()
    assert steps == list(range(sizes.max()))
    assert sizes.max() < STEPS


def test_one_compilation_serves_ragged_prompts():
    config = helpers.TINY
    sampler = Sampler(config, BRANCHES, STEPS, 1.0, 1.0, (), 4)
    rng = np.random.default_rng(0)
    for step in range(10):
        params = helpers.random_params(config, step, np.float32)
        lengths = tuple(rng.integers(0, ROOM + 1, 4))
        sampler(params, *prompts(config, lengths, step), jax.random.key(step))
    assert sampler.jitted._cache_size() == 1
    assert rl.make_sampler(config, num_generations=2, max_tokens=3, stop_ids=[1]) is rl.make_sampler(
        config, num_generations=2, max_tokens=3, stop_ids=(np.int32(1),)
    )


def test_the_prefix_is_not_copied():
    """Temporary bytes of decoding are the branches' own caches and little else, however long the prompt."""
    config = helpers.tiny(head_dim=32, max_position_embeddings=4096)
    params = helpers.random_params(config, dtype=np.float32)
    groups, branches, steps = 2, 8, 20

    def run(params, prefilled, key):
        caches = decode.shared_caches(config, groups, branches, steps, jnp.float32)
        keys = jax.random.split(key, (groups, branches))
        attend = decode.shared_attention(prefilled)
        options = {"max_tokens": steps, "temperature": 1.0, "top_p": 1.0, "stop_ids": ()}
        return decode.decode(params, config, prefilled, attend, caches, keys, **options)

    def temp(prompt):
        ids, lengths = jnp.zeros((groups, prompt), jnp.int32), jnp.full(groups, prompt)
        prefilled = jax.eval_shape(lambda p: decode.prefill(p, config, ids, lengths, 512), params)
        analysis = jax.jit(run).lower(params, prefilled, jax.random.key(0)).compile().memory_analysis()
        return analysis.temp_size_in_bytes, sum(x.size * 4 for x in jax.tree.leaves(prefilled.state))

    (short, _), (long, state) = temp(513), temp(4097)
    own = sum(x.size * 4 for x in jax.tree.leaves(decode.shared_caches(config, groups, branches, steps, jnp.float32)))
    assert state > 8e6 and long - short < 1e4
    assert long < own + 3e6


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1 .* got 0.0"),
        ({"top_p": 1.1}, "top_p"),
        ({"temperature": -0.1}, "temperature must be 0 .* or positive, got -0.1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop_ids": (3, 23)}, "stop id 23 is out of range; .* ids 0 to 22"),
        ({"stop_ids": (-1,)}, "stop id -1"),
        ({"num_generations": 0}, "num_generations must be at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make(helpers.TINY, **options)


def test_bad_prompts():
    params, (ids, lengths) = helpers.random_params(helpers.TINY, dtype=np.float32), prompts(helpers.TINY)
    key, sampler = jax.random.key(0), make(helpers.TINY, max_tokens=54)
    cases = [
        ((ids, lengths), r"prompt 0 of 11 tokens and max_tokens=54 make 65, .*max_position_embeddings\) is 64"),
        ((ids, lengths + 1), "prompt 0 has length 12, but prompt_ids has room for 11"),
        ((ids, lengths[:2]), r"prompt_ids must be \[B, P\] and prompt_lengths \[B\], got \[4, 11\] and \[2\]"),
        ((ids[0], lengths), "prompt_ids must be"),
        ((ids, np.asarray([1, 2, 3, 4])), "prompt 1 has id 1000000 at position 1, .* ids 0 to 22"),
    ]
    for prompt, message in cases:
        with pytest.raises(ValueError, match=message):
            sampler(params, *prompt, key)
    misfit = {**params, "norm": params["norm"][:3]}
    with pytest.raises(ValueError, match="norm"):
        rl.sample(misfit, helpers.TINY, ids, lengths, num_generations=1, max_tokens=1, key=key)
    assert sampler.jitted._cache_size() == 0


@pytest.mark.slow
def test_the_benchmark_runs(repo_root, tmp_path):
    sizes = ["--P=40", "--R=3", "--G=3", "--blocks=2", "--d=128", "--ffn=64", "--vocab=64", "--repeats=1"]
    command = [sys.executable, "-m", "experiments.bench_decode", *sizes, f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "times faster" in done.stdout
    names = {pathlib.Path(p).name for p in tmp_path.iterdir()}
    assert names == {"table.txt", "rows.csv", "rows.json", "bench.png"}
