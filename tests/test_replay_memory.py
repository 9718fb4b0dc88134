"""Memory of compiled steps, by the compiler's own account, and that no quadratic array exists in them.

Nothing is run: steps are lowered from shapes. State: K and V of every attention block, per prompt token.
"""

import dataclasses
import functools
import math
import re

import helpers
import jax
import jax.numpy as jnp
import pytest

from lsfuse import model, replay
from lsfuse.model.config import BlockConfig, ModelConfig, param_shapes, uniform_blocks
from lsfuse.replay.batch import Batch

CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    num_heads=4,
    head_dim=16,
    blocks=uniform_blocks(8, 2, 128),
    max_position_embeddings=8192,
)
STATE = 8 * 2 * 2 * 16 * 4  # bytes a token: blocks · (K, V) · kv heads · head dim · float32
CHUNK = 256


def shapes_of(config, groups, prompt, branches, response):
    """(params, batch) of float32 and int32 shapes, with every array that GRPO needs."""

    def of(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    integer = functools.partial(of, dtype=jnp.int32)
    params = jax.tree.map(lambda s: of(*s), param_shapes(config), is_leaf=lambda s: isinstance(s, tuple))
    tokens = (groups, branches, response)
    return params, Batch(
        prompt_ids=integer(groups, prompt),
        prompt_lengths=integer(groups),
        completion_ids=integer(*tokens),
        completion_lengths=integer(groups, branches),
        completion_mask=integer(*tokens),
        group_sizes=integer(groups),
        advantages=of(groups, branches),
        old_per_token_logps=of(*tokens),
        ref_per_token_logps=of(*tokens),
    )


@functools.cache
def compiled(name, config, prompt, branches=2, response=64, groups=1, dense=False, **static):
    factory = replay.dense_value_and_grad if dense else replay.value_and_grad
    step = jax.jit(factory(helpers.objective(name), config, **static))
    return step.lower(*shapes_of(config, groups, prompt, branches, response)).compile()


def temp(name, prompt, config=CONFIG, **static):
    step = compiled(name, config, prompt, chunk_size=CHUNK, branch_batch=1, **static)
    return step.memory_analysis().temp_size_in_bytes


# One prompt token belongs to the tails, so these are 4 and 16 full chunks of prefix.
SHORT, LONG = 4 * CHUNK + 1, 16 * CHUNK + 1


def check_slope(name, per_token, **static):
    static = {"prefix_activations": "recompute", **static}
    short, long = temp(name, SHORT, **static), temp(name, LONG, **static)
    slope = (long - short) / (LONG - SHORT)
    assert slope <= 1.05 * per_token, f"{slope:.0f} bytes a prompt token, at most {1.05 * per_token:.0f}"
    rest = short - per_token * SHORT, long - per_token * LONG
    assert abs(rest[1] / rest[0] - 1) <= 0.01, f"beside the state: {rest[0]} bytes at P = {SHORT}, {rest[1]} at {LONG}"


def test_exact_with_recompute_holds_the_state_and_its_cotangent():
    check_slope("plain_grpo", 2 * STATE, prefix_grad="exact")


def test_stop_holds_the_state():
    check_slope("plain_grpo", STATE, prefix_grad="stop")


@pytest.mark.slow
def test_a_device_of_a_mesh_holds_its_share():
    """Of four devices along the prompt, at lengths at which each device's share is a tile of keys at least."""
    mesh = jax.make_mesh((1, 2, 2, 2), ("data", "context", "fsdp", "tensor"))
    static = {"prefix_grad": "exact", "prefix_activations": "recompute", "mesh": mesh}
    short, long = (temp("plain_grpo", prompt, **static) for prompt in (2049, 8193))
    assert (long - short) / 6144 <= 1.05 * 2 * STATE / 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "per_token", "static"),
    [
        ("coupled", 2 * STATE, {"prefix_grad": "exact", "groups": 2}),
        ("coupled", STATE, {"prefix_grad": "stop", "groups": 2}),
        ("plain_dpo", 2 * STATE, {"prefix_grad": "exact", "groups": 2}),
        ("plain_grpo", STATE, {"prefix_grad": 300}),
        ("plain_grpo", 2 * STATE, {"prefix_grad": "exact", "remat_policy": "nothing_saveable", "groups": 3}),
    ],
)
def test_slope_of_other_programs(name, per_token, static):
    check_slope(name, per_token, **static)


def kept_bytes(policy, config=CONFIG):
    """Of a prompt of LONG tokens."""
    geometry = replay.make_geometry(replay.Options(chunk_size=CHUNK), LONG, 2, 64)
    return replay.kept_bytes(config, policy, geometry, jnp.float32)


# Full and sliding attention in turn, two rotary bases, post-norms, soft-caps: 8 blocks of CONFIG's shapes.
ALTERNATING = dataclasses.replace(
    CONFIG,
    blocks=(BlockConfig("sliding", 2, 128, window=100, local_rope=True), BlockConfig("full", 2, 128)) * 4,
    qk_norm=True,
    post_norms=True,
    attn_logit_softcapping=5.0,
    final_logit_softcapping=5.0,
    local_rope_theta=100.0,
)


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["recompute", "keep"])
def test_an_alternating_model_holds_no_more(keep):
    """The state of its sliding blocks is as long as that of the others; norms after attention and FFN keep an input."""
    kept = kept_bytes("everything_saveable", ALTERNATING) / (LONG - 1) if keep == "keep" else 0
    check_slope("plain_grpo", 2 * STATE + kept, config=ALTERNATING, prefix_activations=keep)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["everything_saveable", "nothing_saveable"])
def test_kept_activations_cost_what_the_formula_says(policy):
    kept = kept_bytes(policy)
    per_token = 2 * STATE + kept / (LONG - 1)
    check_slope("plain_grpo", per_token, prefix_activations="keep", remat_policy=policy)


def test_auto_keeps_what_fits_into_the_budget():
    options = {"prompt": LONG, "branches": 2, "response": 64, "dtype": jnp.float32}
    kept = kept_bytes("everything_saveable")
    for budget, choice in ((kept - 1, "recompute"), (kept, "keep")):
        auto = replay.Options(chunk_size=CHUNK, memory_budget=budget)
        assert replay.choose_prefix_activations(CONFIG, auto, **options) == choice
        for fixed in ("keep", "recompute"):
            chosen = replay.Options(chunk_size=CHUNK, memory_budget=budget, prefix_activations=fixed)
            assert replay.choose_prefix_activations(CONFIG, chosen, **options) == fixed


def test_memory_does_not_grow_with_the_number_of_branches():
    """branch_batch = 1: at most 64 bytes per added branch token, arguments and results included."""
    total = {}
    for branches in (2, 16):
        step = compiled(
            "plain_grpo",
            CONFIG,
            SHORT,
            branches,
            chunk_size=CHUNK,
            branch_batch=1,
            prefix_grad="exact",
            prefix_activations="recompute",
        )
        m = step.memory_analysis()
        total[branches] = m.temp_size_in_bytes + m.argument_size_in_bytes + m.output_size_in_bytes
    assert (total[16] - total[2]) / (14 * 64) <= 64


def largest_array(text: str) -> tuple[int, str]:
    """(elements, shape) of the largest array in HLO text."""
    shapes = set(re.findall(r"\b(?:f64|f32|bf16|f16|s64|s32|u32|s8|u8|pred)\[[\d,]+\]", text))
    assert shapes
    return max((math.prod(map(int, re.findall(r"\d+", s.split("[")[1]))), s) for s in shapes)


def test_largest_array():
    text = "%a = f32[3,40]{1,0} add(f32[3,40] %b, f32[] %c), pred[121]{0}"
    assert largest_array(text) == (121, "pred[121]")


# P² = 67 million elements, 1,024 response tokens × 16,384 words = 17 million; the state has 0.5 million.
SQUARE = ModelConfig(16384, 16, 4, 8, uniform_blocks(2, 2, 32), max_position_embeddings=16384)


@pytest.mark.parametrize(
    "static",
    [
        {"name": "plain_grpo", "prefix_activations": "keep"},
        pytest.param({"name": "coupled", "prefix_grad": 5000}, marks=pytest.mark.slow),
        pytest.param({"name": "coupled", "dense": True}, marks=pytest.mark.slow),
    ],
    ids=["exact", "n", "dense"],
)
def test_nothing_quadratic_and_no_tokens_by_vocabulary(static):
    """Eight prompts' worth of tokens square, and response tokens × vocabulary, are at least twice any array."""
    static = {"chunk_size": 1024, "branch_batch": 2, **static}
    step = compiled(config=SQUARE, prompt=8192, branches=4, response=512, groups=2, **static)
    elements, shape = largest_array(step.as_text())
    assert elements <= 2 * 512 * SQUARE.vocab_size // 2, shape


def test_forward_and_its_gradient_hold_nothing_quadratic():
    def loss(params, ids):
        return jnp.sum(model.forward(params, SQUARE, ids))

    params, _ = shapes_of(SQUARE, 1, 1, 1, 1)
    ids = jax.ShapeDtypeStruct((1, 8192), jnp.int32)
    elements, shape = largest_array(jax.jit(jax.grad(loss)).lower(params, ids).compile().as_text())
    assert elements <= 8192 * 8192 // 8, shape
