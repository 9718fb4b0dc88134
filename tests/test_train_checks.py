"""Combinations of fields that no run could use, and groups that do not fit: refused by `set_up`, with what to do."""

import json

import pytest

from lsfuse import data, rl, train
from tests.resume_child import CONFIG

FIELDS = {k: v for k, v in CONFIG.items() if k != "warm_start"}
LINE = {"prompt_ids": [3, 4], "response_ids": [[5], [6, 7]], "rewards": [1.0, 0.0]}


def with_rl(**changes):
    return {**FIELDS, "rl": {**CONFIG["rl"], "objective": {}, **changes}}


@pytest.fixture
def groups(tmp_path):
    def make(*lines):
        (tmp_path / "groups.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return data.JsonlGroups(tmp_path / "groups.jsonl", train.set_up(FIELDS).tokenizer)

    return make


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": {"name": "dpo"}}, 'name is "dpo", which reads pairs .*config.task.name to "groups"'),
        ({"advantage_baseline": "none"}, 'advantage_scale to "none"'),
        ({"objective": {"name": "rloo", "beta": 0.1}}, 'objective.beta is set, but objective "rloo" has no settings'),
        ({"objective": {"name": "cispo", "kl": "k1"}}, 'objective.kl is set, but objective "cispo" has only epsilon, '),
        ({"overlong_buffer": 4}, "overlong_buffer 4 exceeds config.rl.max_response 3"),
        (
            {"dynamic_sampling": 2, "num_generations": 1, "objective": {"name": "reinforce"}},
            "dynamic_sampling is 2, but a group of num_generations 1 never has rewards that differ",
        ),
        ({"importance_correction": "token", "objective": {"name": "gspo"}}, 'one weight a response; set it to "seq'),
        ({"objective": {"name": "nll"}}, 'name is "nll", which raises the likelihood of given responses: set'),
        ({"importance_correction": "token", "old_logps": "none", "num_iterations": 1}, "so that there is no ratio"),
        ({"num_iterations": 2, "old_logps": "none"}, "num_iterations is 2: from the second update on"),
        ({"importance_correction": "token", "importance_cap": 0.0}, "importance_cap, the largest weight, is 0.0"),
    ],
)
def test_fields_that_do_not_go_together(changes, message):
    with pytest.raises(ValueError, match=message):
        train.set_up(with_rl(**changes))


@pytest.mark.parametrize(
    ("lines", "changes", "message"),
    [
        (
            [LINE, {**LINE, "rewards": [1.0], "response_ids": [[5]]}],
            {"objective": {"name": "rloo"}},
            "line 2: .* one re",
        ),
        ([{**LINE, "rewards": [r], "response_ids": [[5]]} for r in (0, 1)], {}, "line 1: this group and all .* be 0"),
        (
            [{k: v for k, v in LINE.items() if k != "rewards"}],
            {},
            'line 1: config.rl.objective.name "grpo" needs rewards',
        ),
        ([LINE], {"importance_correction": "token"}, "the groups have no old_logps, .*line 1"),
        ([LINE], {"importance_correction": "token", "objective": {"name": "nll"}}, 'objective "nll" has none'),
        ([LINE], {"old_logps": "sampler"}, 'old_logps is "sampler", but groups sampled elsewhere have none'),
        ([LINE], {"dynamic_sampling": 2}, "dynamic_sampling is 2, but groups sampled elsewhere are not sampled"),
        ([LINE], {"overlong_buffer": 1}, "overlong_buffer is 1, but groups sampled elsewhere are not sampled"),
        ([{**LINE, "response_ids": [[5]] * 5, "rewards": [1] * 5}], {}, "num_generations is 4, but .* need 5"),
        ([{**LINE, "response_ids": [[5], [5] * 4]}], {}, "max_response is 3, but .* need 4"),
        ([LINE, LINE, {**LINE, "old_logps": [[-1], [-1, -2]]}], {}, "line 3 has old_logps, but .* line 1 has none"),
        ([LINE, {**LINE, "rewards": None}], {}, "line 1 has rewards, but .* line 2 has none; give it to all groups or"),
        (
            [LINE, {**LINE, "response_ids": [[5]] * 3, "rewards": [1] * 3}],
            {"objective": {"name": "dpo"}},
            "line 2: config.rl.objective.name .dpo. reads pairs .* has 3 responses; group sizes must be even",
        ),
    ],
)
def test_groups_that_do_not_fit(groups, lines, changes, message):
    with pytest.raises(ValueError, match=message):
        train.set_up(with_rl(**changes), task=groups(*lines))


def test_warm_starts_without_targets_or_with_long_ones(groups):
    task = groups(LINE)
    with pytest.raises(ValueError, match='no supervised targets; objective "nll" trains on their responses'):
        train.set_up({**with_rl(), "warm_start": {"steps": 1, "max_response": 12}}, task=task)
    with pytest.raises(ValueError, match="warm_start.max_response is 3, but a supervised target has 8 tokens"):
        train.set_up({**FIELDS, "warm_start": {"steps": 1, "max_response": 3}})


def test_what_fits_is_accepted(groups):
    task = groups(LINE, LINE)
    train.set_up(with_rl(), task=task)
    train.set_up(with_rl(objective={"name": "dpo"}), task=task)
    train.set_up(with_rl(objective={"name": "nll"}), task=groups({**LINE, "rewards": None} | {"response_ids": [[5]]}))
    train.set_up(with_rl(num_generations=1), objective=rl.nll())
