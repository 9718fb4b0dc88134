"""The replay step compiles for one TPU v5p chip, ahead of time and without a TPU.

libtpu (extra `[tpu]`) compiles for a topology that environment variables describe. Whether the program then runs well
is another question; that it is legal for the chip, and what memory it needs there, is settled here.
"""

import dataclasses
import importlib.util
import os

import jax
import jax.numpy as jnp
import pytest
from families import EVERYTHING
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lsfuse import replay, rl
from lsfuse.model import BlockConfig, ModelConfig, param_shapes, uniform_blocks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None and "REQUIRE_LIBTPU" not in os.environ,
        reason="libtpu is not installed: pip install -e '.[tpu]'",
    ),
]

V5P_HBM_BYTES = 95.74 * 2**30
MODEL = ModelConfig(
    vocab_size=1024, hidden_size=256, num_heads=4, head_dim=64, blocks=uniform_blocks(2, 2, 512), family="llama"
)
# Gemma's features: alternating windows in one run, two rotary bases, soft-caps, norms around everything.
GEMMA = dataclasses.replace(
    MODEL,
    blocks=(BlockConfig("sliding", 2, 512, window=300, local_rope=True), BlockConfig("full", 2, 512)),
    **EVERYTHING,
)
GROUPS, BRANCHES, PROMPT, RESPONSE = 2, 4, 1024, 128


@pytest.fixture
def one_chip(monkeypatch) -> NamedSharding:
    """Everything on one chip of a v5p topology."""
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-16",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x2")
    return NamedSharding(Mesh(topology.devices[:1], ("chip",)), PartitionSpec())


def abstract_batch(sharding: NamedSharding) -> replay.Batch:
    def ints(*shape: int):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    def floats(*shape: int):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    return replay.Batch(
        prompt_ids=ints(GROUPS, PROMPT),
        prompt_lengths=ints(GROUPS),
        completion_ids=ints(GROUPS, BRANCHES, RESPONSE),
        completion_lengths=ints(GROUPS, BRANCHES),
        completion_mask=floats(GROUPS, BRANCHES, RESPONSE),
        group_sizes=ints(GROUPS),
        advantages=floats(GROUPS, BRANCHES),
    )


# Each takes about half a minute to compile.
@pytest.mark.parametrize(
    "model, prefix_grad, dtype",
    [
        (MODEL, "exact", jnp.float32),
        (MODEL, "exact", jnp.bfloat16),
        (MODEL, 65, jnp.float32),
        (MODEL, "stop", jnp.bfloat16),
        (GEMMA, "exact", jnp.bfloat16),
        (GEMMA, 65, jnp.float32),
    ],
    ids=["exact-f32", "exact-bf16", "n-f32", "stop-bf16", "gemma-exact-bf16", "gemma-n-f32"],
)
def test_replay_step_compiles_for_a_chip(one_chip, model, prefix_grad, dtype):
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype, sharding=one_chip),
        param_shapes(model),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    step = replay.value_and_grad(
        rl.grpo(), model, prefix_grad=prefix_grad, chunk_size=256, prefix_activations="recompute"
    )
    compiled = jax.jit(step).lower(params, abstract_batch(one_chip)).compile()
    memory = compiled.memory_analysis()
    parameter_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    assert memory.argument_size_in_bytes >= parameter_bytes
    assert memory.output_size_in_bytes >= parameter_bytes
    assert 0 < memory.temp_size_in_bytes < V5P_HBM_BYTES
