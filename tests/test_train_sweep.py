"""Sweeps: what is parsed, crossed, named and refused."""

import pytest

from lsfuse import train


def test_crossed_in_order():
    fields = train.parse_sweep(["rl.optimizer.learning_rate=1e-3,1e-4", "replay.prefix_grad=exact,stop,4"])
    runs = list(train.sweep(train.default_config(), fields))
    assert len(runs) == 6
    assert runs[0][0] == "rl.optimizer.learning_rate=0.001,replay.prefix_grad=exact"
    assert [c.replay.prefix_grad for _, c in runs] == ["exact", "stop", 4] * 2
    assert [c.rl.optimizer.learning_rate for _, c in runs] == [1e-3] * 3 + [1e-4] * 3


def test_values_with_commas_and_paths():
    fields = train.parse_sweep(["config.warm_start.stages=((2,4,()),),()", "model.path=a/b,none"])
    assert fields == {"warm_start.stages": [((2, 4, ()),), ()], "model.path": ["a/b", "none"]}
    names = [name for name, _ in train.sweep(train.default_config(), fields)]
    assert len(set(names)) == 4 and all("/" not in name for name in names)


@pytest.mark.parametrize(
    "given, message",
    [
        (["rl.stepz=1,2"], 'no field "rl.stepz"; did you mean "rl.steps"'),
        (["rl.steps"], "write field=value"),
        (["rl.steps="], "write field=value"),
        (["rl.steps=1,,2"], "an empty value"),
        (["rl.steps=1,1"], "given twice"),
        (["rl.steps=1", "rl.steps=2"], "swept twice"),
    ],
)
def test_bad_sweeps(given, message):
    with pytest.raises(ValueError, match=message):
        train.parse_sweep(given)


def test_a_bad_value_raises_before_the_first_run():
    with pytest.raises(ValueError, match="config.rl.steps: 'a' does not fit there"):
        next(train.sweep(train.default_config(), train.parse_sweep(["rl.steps=1,a"])))
    fields = train.parse_sweep(["rl.steps=1,-1"])
    with pytest.raises(ValueError, match="rl.steps must be at least 0"):
        next(train.sweep(train.default_config(), fields))
