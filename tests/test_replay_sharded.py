"""The engine over meshes of eight CPU devices, against the one-device dense oracle, leaf by leaf."""

import dataclasses

import families
import helpers
import jax
import numpy as np
import pytest

from lsfuse import replay
from lsfuse.model.config import BlockConfig, param_shapes

AXES = ("data", "context", "fsdp", "tensor")
MODELS = {
    name: dataclasses.replace(config, vocab_size=24)
    for name, config in (("llama", helpers.TINY), *families.FAMILIES.items())
}
# Biases, a linear map, unequal blocks, no FFN; two kv heads everywhere, as `tensor` may ask for.
MODELS["mixed"] = dataclasses.replace(
    helpers.MIXED,
    vocab_size=32,
    hidden_size=16,
    blocks=(
        BlockConfig("full", 2, 20),
        BlockConfig("linear_map", 1, 28),
        BlockConfig("full", 2, 16, parallel=True),
        BlockConfig("full", 4, 0),
        BlockConfig("none", 1, 12),
    ),
)
# Two whole blocks beside each other, and a fused model's one wide FFN.
MODELS["beside"] = dataclasses.replace(
    MODELS["llama"],
    blocks=(BlockConfig("full", 2, 24), BlockConfig("full", 2, 24, beside=True), BlockConfig("none", 2, 72)),
)


def make_mesh(*sizes):
    return jax.make_mesh(sizes, AXES)


def check(x64, sizes, model, name, **options):
    config = MODELS[model]
    params, batch = helpers.random_params(config, 3), helpers.make_batch(config)
    options = {"chunk_size": 4, "branch_batch": 2, **options}
    helpers.check_step(name, config, params, batch, ("sharded", model), mesh=make_mesh(*sizes), **options)


def test_every_axis_at_once(x64):
    check(x64, (1, 2, 2, 2), "gemma3", "coupled")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "model", "name", "options"),
    [
        ((1, 8, 1, 1), "llama", "plain_grpo", {"prefix_grad": "exact"}),
        ((1, 8, 1, 1), "beside", "plain_gspo", {"prefix_grad": 5, "prefix_activations": "keep"}),
        ((2, 2, 2, 1), "llama", "coupled", {"prefix_grad": 5, "chunk_size": 3}),
        ((1, 2, 2, 2), "mixed", "coupled", {"prefix_grad": "exact", "remat_policy": "nothing_saveable"}),
        ((1, 1, 4, 2), "plain", "plain_grpo", {"prefix_grad": "exact", "response_buckets": (3,)}),
        ((1, 1, 4, 2), "gemma3", "plain_dpo", {"prefix_grad": "stop", "chunk_size": 64}),
        ((4, 1, 1, 2), "llama", "coupled", {"prefix_grad": "exact", "prefix": "longest_common"}),
    ],
    ids=str,
)
def test_meshes_modes_and_families(x64, sizes, model, name, options):
    check(x64, sizes, model, name, **options)


def test_scores(x64):
    config = MODELS["llama"]
    params, batch = helpers.random_params(config, 3), helpers.make_batch(config)
    want = helpers.scorer(config, chunk_size=4)(params, batch)
    got = helpers.scorer(config, chunk_size=4, mesh=make_mesh(2, 2, 1, 2))(params, batch)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_parameters_and_gradients_are_split(x64):
    """Each device holds its share, and gradients come back as the parameters lie."""
    config, mesh = MODELS["llama"], make_mesh(1, 2, 2, 2)
    shardings = replay.param_shardings(config, mesh)
    params = jax.device_put(helpers.random_params(config, 3), shardings)
    step = helpers.engine("plain_grpo", config, mesh=mesh, chunk_size=4, branch_batch=2, prefix_grad="stop")
    _, grads = step(params, helpers.make_batch(config))
    for path, shape in jax.tree_util.tree_leaves_with_path(param_shapes(config), is_leaf=lambda s: type(s) is tuple):
        leaf, grad = (
            jax.tree_util.tree_reduce(lambda _, x: x, [dict(jax.tree_util.tree_leaves_with_path(tree))[path]])
            for tree in (params, grads)
        )
        parts = 8 if len(shape) > 1 and not str(path).count("norm") else 1
        assert leaf.addressable_shards[0].data.size * parts == leaf.size, path
        assert grad.sharding.is_equivalent_to(leaf.sharding, leaf.ndim), path


@pytest.mark.parametrize(
    ("sizes", "changes", "options", "message"),
    [
        ((1, 1, 1, 8), {}, {}, "num_heads is 4, which the mesh's 8 devices along tensor do not divide; .*: 1, 2, 4"),
        ((1, 1, 1, 4), {}, {}, "num_kv_heads of block 0 is 2, which the mesh's 4 devices .*: 1, 2"),
        ((1, 8, 1, 1), {"hidden_size": 12}, {}, "hidden_size is 12, which the mesh's 8 devices along context x fsdp"),
        ((1, 2, 2, 2), {"vocab_size": 20}, {}, "vocab_size is 20, which the mesh's 8 devices"),
        ((1, 2, 1, 1), {}, {"prefix": "longest_common"}, 'prefix="longest_common" runs on meshes that split groups'),
        ((8, 1, 1, 1), {}, {}, "number of groups in the batch is 4, which the mesh's 8 devices along data do not"),
    ],
)
def test_sizes_that_do_not_fit(sizes, changes, options, message):
    config = dataclasses.replace(MODELS["llama"], **changes)
    params, batch = helpers.random_params(config), helpers.make_batch(config)
    with pytest.raises(ValueError, match=message):
        replay.value_and_grad(helpers.objective("plain_grpo"), config, mesh=make_mesh(*sizes), **options)(params, batch)


def test_an_axis_that_has_no_meaning():
    with pytest.raises(ValueError, match="mesh has an axis 'model'; axes may be data, context, fsdp, tensor"):
        replay.value_and_grad(helpers.objective("plain_grpo"), MODELS["llama"], mesh=jax.make_mesh((8,), ("model",)))
