"""Runs on a mesh of CPU devices against the same runs on one."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lsfuse import replay, scale, train
from lsfuse.train.optimizer import make_optimizer
from lsfuse.train.phases import GroupRL, init_state
from lsfuse.train.step import make_update
from tests import helpers, resume_child

CONFIG = resume_child.CONFIG | {
    "model": resume_child.CONFIG["model"] | {"vocab_size": 24, "num_kv_heads": 2},
    "warm_start": {"steps": 2, "num_prompts": 2, "max_response": 12},
    "rl": resume_child.CONFIG["rl"] | {"steps": 3},
}
EVERY_AXIS = {"data": 2, "context": 2, "tensor": 2}


def on(mesh, config=CONFIG):
    return {**config, "mesh": mesh}


def test_a_mesh_of_one_device_is_none():
    assert scale.make_mesh({}) is None and scale.make_mesh({"data": 1, "tensor": 1}) is None
    mesh = scale.make_mesh({"context": 2, "tensor": 3})
    assert dict(mesh.shape) == {"data": 1, "context": 2, "fsdp": 1, "tensor": 3}
    assert dict(scale.abstract_mesh({"data": 512}).shape) == {"data": 512, "context": 1, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        (
            {"data": 3, "context": 3},
            {},
            "a mesh of data 3 x context 3 x fsdp 1 x tensor 1 has 9 devices, but there are 8",
        ),
        ({"data": 4}, {}, "config.rl.num_prompts is 2, but a mesh of 4 along data.*: take 4$"),
        (
            {"data": 2},
            {"warm_start": {"num_prompts": 3, "steps": 1}},
            "config.warm_start.num_prompts is 3.*take 2 or 4",
        ),
        (
            {"data": 2},
            {"warm_start": {"stages": ((1, 2, ()), (1, 5, ()))}},
            r"config.warm_start.stages\[1\]: num_prompts is 5.*take 4 or 6",
        ),
        ({"tensor": 4}, {}, "num_heads is 2, which the mesh's 4 devices along tensor do not divide"),
        (
            {"context": 2, "fsdp": 2},
            {"model": {"hidden_size": 18, "vocab_size": 20}},
            "hidden_size is 18.*4 devices along context x fsdp",
        ),
        ({"context": 2}, {"replay": {"prefix": "longest_common"}}, 'config.replay.prefix is "longest_common"'),
        ({"tensor": 2}, {"report": {"compare_dense": True}}, "config.report.compare_dense"),
        ({"data": 0}, {}, "config.mesh.data must be at least 1"),
    ],
)
def test_meshes_that_do_not_fit_are_refused_before_any_work(mesh, changes, message, tmp_path):
    config = {k: {**v, **changes.get(k, {})} if isinstance(v, dict) else v for k, v in CONFIG.items()}
    with pytest.raises(ValueError, match=message):
        train.run(on(mesh, {**changes, **config}), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_takes_more_devices_than_there_are():
    text = train.dry_run(
        on({"context": 64}, {**CONFIG, "model": {**CONFIG["model"], "hidden_size": 64, "vocab_size": 64}})
    )
    assert "context 64" in text


def test_optimizer_state_lies_as_the_parameters_do():
    model = helpers.TINY
    model = train.set_up(CONFIG).model
    mesh = scale.make_mesh(EVERY_AXIS)
    optimizer = make_optimizer(train.default_config().rl.optimizer, 3)
    params = scale.place(jax.tree.map(jnp.asarray, helpers.random_params(model)), model, mesh)
    state = init_state(params, model, optimizer, 0, mesh)
    lie = replay.param_shardings(model, mesh)
    moments = [
        x for x in jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, dict)) if isinstance(x, dict)
    ]
    assert len(moments) == 2
    for tree in (state.params, *moments):
        jax.tree.map(lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim) or pytest.fail(), tree, lie)
    counts = [x for x in jax.tree.leaves(state.opt_state) if x.ndim == 0]
    assert counts and all(x.sharding.spec == PartitionSpec() for x in counts)


def test_an_update_equals_one_device_s_and_stays_where_it_was(x64):
    model, mesh = train.set_up(CONFIG).model, scale.make_mesh(EVERY_AXIS)
    optimizer = make_optimizer(train.default_config().rl.optimizer, 3)
    params = jax.tree.map(jnp.asarray, helpers.random_params(model))
    batch = helpers.ragged_batch(model, 0, groups=2)
    results = []
    for where in (None, mesh):
        mine = scale.place(jax.tree.map(jnp.copy, params), model, where)
        state = init_state(mine, model, optimizer, 0, where)
        lie = [x.sharding for x in jax.tree.leaves((state.params, state.opt_state))]
        update = make_update(helpers.objective("plain_grpo"), model, optimizer, chunk_size=4, mesh=where)
        out = update(state.params, state.opt_state, batch)
        new = jax.tree.leaves(out[:2])
        assert all(x.sharding.is_equivalent_to(a, x.ndim) for x, a in zip(new, lie, strict=True))
        results.append((new, out[2]))
    (one, metrics), (many, more) = results
    for a, b in zip(one, many, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    for name in metrics:
        np.testing.assert_allclose(metrics[name], more[name], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_run_on_a_mesh_is_the_run_on_one_device(tmp_path):
    """Warm start, sampling, scoring, reference, two updates a batch, evaluation, checkpoints, model."""
    runs = {
        name: train.run(on(mesh), tmp_path / name, progress=False) for name, mesh in (("one", {}), ("mesh", EVERY_AXIS))
    }
    records = {name: read(run.workdir) for name, run in runs.items()}
    assert len(records["one"]) == len(records["mesh"]) == 8  # 2 + 3 steps, 3 evaluations
    for a, b in zip(records["one"], records["mesh"], strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if not name.startswith("time/"):
                expected = pytest.approx(a[name], rel=2e-3, abs=1e-4) if isinstance(a[name], float) else a[name]
                assert b[name] == expected, (name, a, b)
    samples = [(run.workdir / "samples.jsonl").read_text() for run in runs.values()]
    assert samples[0] == samples[1]
    for a, b in zip(*(jax.tree.leaves(run.params) for run in runs.values()), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_bits_there_and_to_rounding_elsewhere(tmp_path, monkeypatch):
    """A run of three steps against one stopped after two; on the same mesh, and on another."""
    step = GroupRL.step

    def stop(phase, state, number):
        if number == 2:
            raise KeyboardInterrupt
        return step(phase, state, number)

    whole = train.run(on(EVERY_AXIS), tmp_path / "whole", progress=False)
    for name, mesh in (("same", EVERY_AXIS), ("other", {"context": 4, "tensor": 2})):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(GroupRL, "step", stop)
            train.run(on(EVERY_AXIS), tmp_path / name, progress=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = train.run(on(mesh), tmp_path / name, progress=False, resume=True)
        said = any("mesh" in str(w.message) for w in caught)
        same = [np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs(whole, out)]
        if name == "same":
            assert all(same) and not said
        else:
            assert said
            for a, b in pairs(whole, out):
                np.testing.assert_allclose(a, b, atol=1e-4)


def pairs(a, b):
    return zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True)


def read(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
