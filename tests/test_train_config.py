"""Configs: what is refused, and how; overrides of every type; files."""

import textwrap

import numpy as np
import pytest
from ml_collections import ConfigDict

from lsfuse import train
from lsfuse.train.config import check_fields
from lsfuse.train.schema import SCHEMA, Field, fields


def test_defaults_are_complete_and_valid():
    config = train.default_config()
    assert train.resolve_config(config) == config
    assert train.resolve_config({}) == config
    for name, field in fields().items():
        assert field.help, name
        assert type(field.default) in field.allowed, name
        if field.choices:
            assert field.default is None or field.default in field.choices, name


def test_a_field_given_twice_and_no_config_at_all():
    with pytest.raises(ValueError, match="config.rl.steps is given twice, 3 and 4"):
        train.resolve_config({"rl.steps": 3, "rl": {"steps": 4}})
    for given in (3, [1], None, "rl"):
        with pytest.raises(ValueError, match="a config is a ConfigDict or a dict of fields, got"):
            train.resolve_config(given)


def test_numpy_scalars_and_groups_that_are_config_dicts():
    config = train.resolve_config({"seed": np.int64(3), "rl": ConfigDict({"temperature": np.float32(0.5)})})
    assert (config.seed, config.rl.temperature) == (3, 0.5) and type(config.seed) is int


def test_resolve_copies():
    config = train.default_config()
    resolved = train.resolve_config(config)
    resolved.rl.steps = 7
    assert config.rl.steps == SCHEMA["rl"]["steps"].default


@pytest.mark.parametrize(
    "given, message",
    [
        ({"rl": {"stepz": 1}}, 'no field "rl.stepz"; did you mean "rl.steps"'),
        ({"learning_rate": 1.0}, 'no field "learning_rate"; did you mean "rl.optimizer.learning_rate"'),
        ({"qqqq": 1.0}, 'no field "qqqq"; the groups are seed, dtype'),
        ({"rl": {"optimizer": {"lerning_rate": 1.0}}}, 'did you mean "rl.optimizer.learning_rate"'),
        ({"seed": "x"}, "config.seed must be of type int .*got 'x'"),
        ({"seed": True}, "config.seed must be of type int"),
        ({"rl": {"steps": 1.5}}, "config.rl.steps must be of type int"),
        ({"rl": 3}, "config.rl is a group of fields"),
        ({"rl": {"steps": -1}}, "config.rl.steps must be at least 0 .*got -1"),
        ({"rl": {"top_p": 1.5}}, "config.rl.top_p must be between 0 and 1 .*got 1.5"),
        ({"rl": {"optimizer": {"learning_rate": float("nan")}}}, "learning_rate must be at least 0 .*got nan"),
        ({"task": {"name": "retreival"}}, "must be one of retrieval, .*got 'retreival'; did you mean \"retrieval\""),
        ({"replay": {"prefix_grad": 1.5}}, "config.replay.prefix_grad must be of type str or int"),
        ({"replay": {"branch_batch": "x"}}, "config.replay.branch_batch must be of type None or int"),
        ({"model": {"path": 3}}, "config.model.path must be of type None or str"),
        ({"seed": None}, "config.seed must be of type int"),
        ({"seed": 2**32}, "config.seed must be between 0 and 4294967295"),
        ({"rl": {"steps": 2**31}}, "config.rl.steps must be at most 2147483647"),
        ({"rl": {"steps": 10**5000}}, "config.rl.steps must be at most .*got a int too large to print"),
        ({"rl": {"optimizer": {"learning_rate": 10**400}}}, "learning_rate must be finite .*got inf"),
        ({"replay": {"branch_batch": "²"}}, "config.replay.branch_batch must be of type None or int"),
        ({"warm_start": {"stages": (print,)}}, "config.warm_start.stages must hold numbers and texts only"),
    ],
)
def test_mistakes_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        train.resolve_config(given)
    with pytest.raises(ValueError, match=message):
        train.resolve_config(ConfigDict(given))


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("replay.prefix_grad", "stop", "stop"),
        ("replay.prefix_grad", 4, 4),
        ("replay.prefix_grad", "4", 4),
        ("replay.branch_batch", 2, 2),
        ("replay.branch_batch", None, None),
        ("rl.optimizer.clip_norm", None, None),
        ("rl.optimizer.clip_norm", 1, 1.0),
        ("rl.temperature", 1, 1.0),
        ("warm_start.stages", [], ()),
        ("model.path", "somewhere", "somewhere"),
        ("rl.objective.kl", "k1", "k1"),
    ],
)
def test_fields_of_several_types(name, value, expected):
    group, _, last = name.rpartition(".")
    nested = {last: value}
    for part in reversed(group.split(".")):
        nested = {part: nested}
    for given in (nested, {name: value}):
        config = train.resolve_config(given)
        for part in name.split("."):
            config = config[part]
        assert config == expected and type(config) is type(expected)


def test_setting_a_misspelt_field_raises_at_once():
    config = train.default_config()
    with pytest.raises(AttributeError, match='Did you mean "steps"'):
        config.rl.stepz = 3
    with pytest.raises(ValueError, match='did you mean "rl.steps"'):
        train.set_field(config, "rl.stepz", 3)


def test_config_files(tmp_path):
    file = tmp_path / "some.py"
    file.write_text(
        textwrap.dedent("""
            from lsfuse.train import default_config

            def get_config(path="none"):
                config = default_config()
                config.model.path = path
                return config
        """)
    )
    assert train.load_config(file).model.path == "none"
    config = train.load_config(f"{file}:here", {"rl.steps": 3, "replay.prefix_grad": "stop"})
    assert (config.model.path, config.rl.steps, config.replay.prefix_grad) == ("here", 3, "stop")
    with pytest.raises(ValueError, match='did you mean "rl.steps"'):
        train.load_config(file, {"rl.stepz": 3})
    with pytest.raises(FileNotFoundError, match="no config file .*absent.py"):
        train.load_config(tmp_path / "absent.py")


def test_check_fields():
    check_fields(["seed", "rl.optimizer.name"])
    with pytest.raises(ValueError, match="config.rl.optimizer is a group of fields, .*rl.optimizer.name"):
        check_fields(["rl.optimizer"])


def test_schema_holds_fields_only():
    def walk(node):
        for value in node.values():
            if isinstance(value, dict):
                walk(value)
            else:
                assert isinstance(value, Field)

    walk(SCHEMA)
