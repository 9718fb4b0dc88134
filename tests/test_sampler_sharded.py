"""The sampler over meshes of eight CPU devices, against one device: the same tokens, the same log-probs."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import random_params
from test_replay_sharded import MODELS, make_mesh
from test_sampler import arrays, make, prompts

from lsfuse import replay


def both(name, sizes, **options):
    """Samples on one device, and on a mesh. The stop token ends some branches early."""
    config = dataclasses.replace(MODELS[name], max_position_embeddings=150)
    params, prompt, key = random_params(config, 3), prompts(config), jax.random.key(5)
    options = {"stop_ids": (1, 2, 3), **options}
    want = make(config, **options)(params, *prompt, key)
    mesh = make_mesh(*sizes)
    split = jax.device_put(params, replay.param_shardings(config, mesh))
    return arrays(want), arrays(make(config, mesh=mesh, **options)(split, *prompt, key))


def check(want, got):
    for a, b in zip(want[:2], got[:2], strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(got[2], want[2], rtol=1e-12, atol=1e-12)


def test_every_axis_at_once(x64):
    want, got = both("gemma3", (1, 2, 2, 2))
    check(want, got)
    assert len(set(want[1].flatten().tolist()) - {0}) > 1  # some branches end early


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("llama", (1, 8, 1, 1), {"chunk_size": 64}),
        ("llama", (4, 1, 1, 2), {"top_p": 0.8}),
        ("mixed", (2, 2, 1, 2), {"temperature": 0.7}),
        ("beside", (2, 1, 4, 1), {"chunk_size": 3}),
        ("gemma3", (2, 4, 1, 1), {"temperature": 0.0}),
        ("plain", (1, 1, 4, 2), {"max_tokens": 130}),  # more than a tile of own keys
    ],
    ids=str,
)
def test_meshes_and_families(x64, name, sizes, options):
    check(*both(name, sizes, **options))


def test_groups_that_do_not_divide():
    config, mesh = MODELS["llama"], make_mesh(8, 1, 1, 1)
    with pytest.raises(ValueError, match="number of groups in the batch is 4, which the mesh's 8 devices along data"):
        make(config, mesh=mesh)(random_params(config), *prompts(config), jax.random.key(0))
