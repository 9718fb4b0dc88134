"""Every optimizer of optax by its name, one's own by a dotted path: updates are plain optax's, block by block."""

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lsfuse import replay, train
from lsfuse.train.optimizer import decayed, make_optimizer
from lsfuse.train.optimizer_names import by_block, optimizer_names
from lsfuse.train.step import make_update
from tests import helpers

RATE = 0.02


def fields(**changes):
    config = train.default_config().rl.optimizer
    for name, value in {"learning_rate": RATE, "clip_norm": None, **changes}.items():
        config[name] = value
    return config


def tree(seed: int) -> dict:
    rng = np.random.default_rng(seed)

    def leaf(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    run = {"q_proj": leaf(2, 4, 6), "down_proj": leaf(2, 6, 4), "input_layernorm": leaf(2, 4)}
    return {"embed_tokens": leaf(5, 4), "runs": {"0": run}, "norm": leaf(4)}


def apart(params: dict) -> dict:
    """One leaf a block, as optax's authors think of a model."""
    run = {f"{name}.{i}": leaf[i] for name, leaf in params["runs"]["0"].items() for i in range(2)}
    return {"embed_tokens": params["embed_tokens"], "norm": params["norm"], **run}


def is_matrix(name: str) -> bool:
    return "norm" not in name


def plain(name: str, **more) -> optax.GradientTransformation:
    """optax's factory, called by hand."""
    factory = getattr(optax, name, None) or getattr(optax.contrib, name)
    takes = inspect.signature(factory).parameters
    more = {k: v for k, v in {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1, **more}.items() if k in takes}
    mask = {k: lambda p: {name: is_matrix(name) for name in p} for k in ("mask", "weight_decay_mask") if k in takes}
    if name == "muon":
        blocks = {f"{n}.{i}" for n in ("q_proj", "down_proj") for i in range(2)}
        numbers = optax.contrib.MuonDimensionNumbers
        more["muon_weight_dimension_numbers"] = lambda p: {n: numbers() if n in blocks else None for n in p}
    return factory(RATE, **more, **(mask if "weight_decay" in takes else {}))


def check(name: str) -> None:
    """Two steps: what an optimizer remembers counts too. Updates are looked at, not parameters: dog's first steps, 1e-6
    of the parameters' norm times the rate, are lost in the rounding of float32."""
    mine = optax.with_extra_args_support(make_optimizer(fields(name=name, weight_decay=0.1), 5))
    theirs = optax.with_extra_args_support(plain(name))
    params, whole, moved = tree(0), apart(tree(0)), set()
    state, their_state = mine.init(params), theirs.init(whole)
    for step in range(2):
        grads, value = tree(step + 1), jnp.float32(3)
        updates, state = mine.update(grads, state, params, value=value)
        want, their_state = theirs.update(apart(grads), their_state, whole, value=value)
        found = apart(updates)
        for leaf in want:
            size = np.abs(want[leaf]).max()
            np.testing.assert_allclose(found[leaf], want[leaf], rtol=2e-5, atol=5e-6 * size, err_msg=f"{name} {leaf}")
            moved |= {leaf} if size > 0 else set()
        params, whole = optax.apply_updates(params, updates), optax.apply_updates(whole, want)
    assert moved == set(whole), name


@pytest.mark.parametrize("name", ["novograd", "muon"])
def test_names_of_optax(name):
    check(name)


SPECIAL = {"sgd", "adafactor"}  # named before optax's names were, with meanings of their own


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(optimizer_names()) - SPECIAL))
def test_every_name_of_optax(name):
    check(name)


def test_the_names_a_researcher_expects():
    expected = "adabelief adadelta adafactor adagrad adam adamax adamw adan lamb lars lion muon nadam nadamw novograd"
    assert set(f"{expected} prodigy radam rmsprop sgd sm3 yogi".split()) <= set(optimizer_names())


OLD = {
    "adamw": lambda rate: optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decayed),
    "adam": lambda rate: optax.adam(rate, b1=0.9, b2=0.95, eps=1e-8),
    "lion": lambda rate: optax.lion(rate, 0.9, 0.95, weight_decay=0.1, mask=decayed),
    "sgd": lambda rate: optax.sgd(rate, momentum=0.9),
}


@pytest.mark.parametrize("name", OLD)
def test_old_names_mean_what_they_did(name):
    """To the bit, and with the same state, so that old checkpoints load."""
    mine, old = make_optimizer(fields(name=name, weight_decay=0.1), 5), optax.chain(OLD[name](lambda step: RATE))
    params, grads = tree(0), tree(1)
    state, old_state = mine.init(params), old.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(old_state)
    updates, want = mine.update(grads, state, params)[0], old.update(grads, old_state, params)[0]
    jax.tree.map(np.testing.assert_array_equal, updates, want)


def test_none_leaves_an_optimizer_its_own_default():
    config = fields(name="yogi", b1=None, b2=None, eps=None)
    params, grads = tree(0), tree(1)
    mine, own = make_optimizer(config, 5), optax.yogi(RATE)
    found, want = (o.update(grads, o.init(params), params)[0] for o in (mine, own))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, want)
    assert train.resolve_config({"rl": {"optimizer": {"eps": "None", "b1": None}}}).rl.optimizer.eps is None


def test_only_what_is_trainable_has_state_by_block_too():
    optimizer = make_optimizer(fields(name="lamb", trainable="q_proj"), 5)
    params = tree(0)
    updates, state = optimizer.update(tree(1), optimizer.init(params), params)
    moved = {path[-1].key for path, x in jax.tree_util.tree_leaves_with_path(updates) if np.any(np.asarray(x))}
    assert moved == {"q_proj"}
    assert sum(x.size for x in jax.tree.leaves(state)) <= 2 * params["runs"]["0"]["q_proj"].size + 10


def test_by_block_changes_nothing_that_is_elementwise():
    params, grads = tree(0), tree(1)
    found, want = (o.update(grads, o.init(params), params)[0] for o in (by_block(optax.adam(0.1)), optax.adam(0.1)))
    jax.tree.map(np.testing.assert_array_equal, found, want)


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_optimizers.py").write_text(
        "import optax\n\n\n"
        "def slow_adam(learning_rate, b1):\n    return optax.adam(learning_rate, b1=b1, b2=0.5)\n\n\n"
        "def rateless():\n    return optax.sgd(0.1)\n\n\n"
        "def hungry(learning_rate, size):\n    return optax.sgd(0.1)\n\n\n"
        "def nothing(learning_rate):\n    return learning_rate\n\n\n"
        "def searching(learning_rate):\n    return optax.lbfgs()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_a_factory_of_one_s_own(own_module):
    name = "own_optimizers:slow_adam"
    assert train.resolve_config({"rl": {"optimizer": {"name": name}}}).rl.optimizer.name == name
    params, grads = tree(0), tree(1)
    mine, own = make_optimizer(fields(name=name, b1=0.8), 5), optax.adam(RATE, b1=0.8, b2=0.5)
    found, want = (o.update(grads, o.init(params), params)[0] for o in (mine, own))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, want)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"name": "adamv"}, r"config.rl.optimizer.name 'adamv' is no optimizer of optax; did you mean \"adam"),
        ({"name": "zzz"}, "'zzz' is no optimizer of optax; valid: acprop, .*yogi. One of your own is"),
        ({"name": "lbfgs"}, '"lbfgs" cannot be used by name: its line search asks for the loss function'),
        ({"name": 3}, "config.rl.optimizer.name must be of type str"),
        ({"name": "no.such:f"}, "'no.such:f': the module cannot be imported .*No module named 'no'.*PYTHONPATH"),
        ({"name": "own_optimizers:slow_adan"}, "has no function 'slow_adan'; did you mean \"own_optimizers:slow_adam"),
        ({"name": "own_optimizers:rateless"}, "the function takes no learning_rate"),
        ({"name": "own_optimizers:hungry"}, "was called with learning_rate: .*missing 1 required .*'size'"),
        ({"name": "own_optimizers:nothing"}, "must return an optax.GradientTransformation, got function"),
        ({"name": "rprop", "schedule": "cosine"}, '"rprop" takes one learning rate only: schedule "constant" and'),
        ({"name": "own_optimizers:searching"}, "config.rl.optimizer.name 'own.*' cannot take a step from gradients"),
    ],
)
def test_what_cannot_be_used_is_named_before_any_work(changes, message, own_module):
    with pytest.raises(ValueError, match=message):
        train.set_up({"rl": {"optimizer": changes}})


def test_an_optimizer_that_is_passed_is_checked_too():
    with pytest.raises(ValueError, match="optimizer cannot take a step .*value"):
        train.set_up({}, optimizer=optax.lbfgs())


def test_old_configs_resume():
    """Fields that may be None are stored as they were."""
    saved = json.loads(json.dumps(train.default_config().rl.optimizer.to_dict()))
    assert saved["name"] == "adamw" and (saved["b1"], saved["b2"]) == (0.9, 0.95)
    assert (saved["eps"], saved["weight_decay"]) == (1e-8, 0.0)


def test_the_loss_reaches_an_optimizer_that_reads_it(monkeypatch):
    """Whatever the gradient is made of: here loss 3 and the parameters themselves."""
    monkeypatch.setattr(replay, "value_and_grad", lambda *_, **__: lambda p, batch: ((jnp.float32(3), {}), p))
    optimizer, params = optax.contrib.momo(1.0), tree(0)
    update = make_update(helpers.PLAIN_GRPO, helpers.TINY, optimizer)
    found, _, metrics = update(tree(0), optimizer.init(params), helpers.make_batch(helpers.TINY))
    want = optimizer.update(params, optimizer.init(params), params, value=jnp.float32(3))[0]
    want = optax.apply_updates(params, want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, want)
    assert metrics["loss"] == 3
