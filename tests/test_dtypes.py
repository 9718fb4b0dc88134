"""No wider or narrower float slips into a step: dtypes are read off the traced program, where promotion is silent."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from families import EVERYTHING

from lsfuse import replay, rl
from lsfuse.model import BlockConfig, ModelConfig, RopeScaling, param_shapes, uniform_blocks

MODEL = ModelConfig(vocab_size=64, hidden_size=32, num_heads=4, head_dim=8, blocks=uniform_blocks(2, 2, 48))
# What other families add, all at once.
FAMILY = dataclasses.replace(
    MODEL,
    blocks=(BlockConfig("sliding", 2, 48, window=5, local_rope=True), BlockConfig("full", 2, 48)),
    rope_scaling=RopeScaling("yarn", 4.0),
    **EVERYTHING,
)
GROUPS, BRANCHES, PROMPT, RESPONSE = 2, 4, 32, 8


def batch() -> replay.Batch:
    def array(dtype, *shape: int):
        return jax.ShapeDtypeStruct(shape, dtype)

    return replay.Batch(
        prompt_ids=array(jnp.int32, GROUPS, PROMPT),
        prompt_lengths=array(jnp.int32, GROUPS),
        completion_ids=array(jnp.int32, GROUPS, BRANCHES, RESPONSE),
        completion_lengths=array(jnp.int32, GROUPS, BRANCHES),
        completion_mask=array(jnp.float32, GROUPS, BRANCHES, RESPONSE),
        group_sizes=array(jnp.int32, GROUPS),
        advantages=array(jnp.float32, GROUPS, BRANCHES),
    )


def params(dtype, engine):
    shapes = param_shapes(FAMILY if engine.startswith("family") else MODEL)
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def arrays(jaxpr) -> Iterator[jax.core.ShapedArray]:
    """Types of everything that the program computes, loop bodies and called functions included."""
    for equation in jaxpr.eqns:
        yield from (v.aval for v in equation.outvars)
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from arrays(inner)


def float_dtypes(function, *args) -> dict[str, set[tuple[int, ...]]]:
    """dtype -> shapes of the float arrays that are computed."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for aval in arrays(jax.make_jaxpr(function)(*args).jaxpr):
        dtype = getattr(aval, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            found.setdefault(str(dtype), set()).add(aval.shape)
    return found


ENGINES = {
    "exact": replay.value_and_grad(rl.grpo(), MODEL, chunk_size=8),
    "kept": replay.value_and_grad(rl.grpo(), MODEL, chunk_size=8, prefix_activations="keep"),
    "stop": replay.value_and_grad(rl.grpo(), MODEL, chunk_size=8, prefix_grad="stop"),
    "dense": replay.dense_value_and_grad(rl.grpo(), MODEL),
    "family": replay.value_and_grad(rl.grpo(), FAMILY, chunk_size=8, prefix_grad=9),
    "family dense": replay.dense_value_and_grad(rl.grpo(), FAMILY),
}


def model_sized(shapes: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Shapes that end in hidden, FFN or vocabulary channels. Weights and masks [B, G, R] may be of JAX's default."""
    return {s for s in shapes if s and s[-1] in (MODEL.hidden_size, MODEL.blocks[0].ffn_width, MODEL.vocab_size)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype, other", [("float32", "float64"), ("float64", "float32")])
def test_the_parameters_dtype_is_kept_where_both_are_allowed(x64, engine, dtype, other):
    found = float_dtypes(ENGINES[engine], params(dtype, engine), batch())
    assert model_sized(found[dtype]) and not model_sized(found.get(other, set()))


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_have_the_parameters_dtype(engine):
    for dtype in (jnp.float32, jnp.bfloat16):
        (loss, _), grads = jax.eval_shape(ENGINES[engine], params(dtype, engine), batch())
        assert loss.dtype == jnp.float32
        assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(dtype)}
