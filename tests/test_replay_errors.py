"""Bad options and bad batches: a clear error before any work."""

import helpers
import numpy as np
import pytest

from lsfuse import replay, rl
from lsfuse.replay.objective import Objective

TINY = helpers.TINY


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_grad": 0}, r'prefix_grad must be "exact", "stop" or an int.*got 0'),
        ({"prefix_grad": -1}, r"got -1"),
        ({"prefix_grad": True}, r"got True"),
        ({"prefix_grad": 2.0}, r"got 2\.0"),
        ({"prefix_grad": "full"}, r"got 'full'"),
        ({"chunk_size": 0}, r"chunk_size.*got 0"),
        ({"chunk_size": 16.0}, r"chunk_size must be an int.*got 16\.0"),
        ({"branch_batch": 0}, r"branch_batch.*got 0"),
        ({"prefix_activations": "maybe"}, r"auto, recompute, keep.*'maybe'"),
        ({"temperature": 0.0}, r"temperature.*got 0\.0"),
        ({"temperature": float("nan")}, r"temperature.*nan"),
        ({"remat_policy": "save_everything"}, r"'save_everything'.*everything_saveable.*nothing_saveable"),
    ],
)
def test_bad_options(options, message):
    """Raised when the function is built or called, before anything is computed."""
    params, batch = helpers.random_params(TINY, dtype=np.float32), helpers.make_batch(TINY, dtype=np.float32)
    with pytest.raises(ValueError, match=message):
        replay.value_and_grad(helpers.coupled, TINY, **options)(params, batch)


def test_dense_is_exact_only():
    params, batch = helpers.random_params(TINY, dtype=np.float32), helpers.make_batch(TINY, dtype=np.float32)
    replay.dense_value_and_grad(helpers.coupled, TINY, prefix_grad="exact")
    for mode in ("stop", 3):
        with pytest.raises(ValueError, match="prefix_grad"):
            replay.dense_value_and_grad(helpers.coupled, TINY, prefix_grad=mode)(params, batch)


def test_bad_objectives():
    with pytest.raises(TypeError, match="Objective or a callable"):
        replay.value_and_grad("grpo", TINY)
    with pytest.raises(ValueError, match="branch, group, batch"):
        Objective(helpers.coupled, coupling="token")


def test_parameters_of_another_model():
    params, batch = helpers.random_params(TINY, dtype=np.float32), helpers.make_batch(TINY, dtype=np.float32)
    other = helpers.tiny(hidden_size=20)
    with pytest.raises(ValueError, match=r"embed_tokens.*\(23, 16\).*\(23, 20\)"):
        replay.value_and_grad(helpers.coupled, other)(params, batch)
    with pytest.raises(ValueError, match="lm_head"):
        replay.per_token_logps(helpers.tiny(tie_word_embeddings=True))(params, batch)


def good_batch():
    """Poisoned padding, which no check may look at; the mask is zero beyond the lengths."""
    batch = helpers.make_batch(TINY)
    return batch.replace(completion_mask=np.where(batch.token_mask, batch.completion_mask, 0))


def test_a_good_batch_passes_whatever_its_padding_holds():
    replay.check_batch(good_batch(), TINY)
    bare = good_batch().replace(advantages=None, old_per_token_logps=None, ref_per_token_logps=None, rewards=None)
    replay.check_batch(bare, TINY)
    replay.check_batch(good_batch().replace(advantages=np.where(bare.loss_mask, 1.0, np.nan)), TINY)


def put(name, at, value):
    """A good batch in which one number is another."""
    batch = good_batch()
    changed = np.array(getattr(batch, name))
    changed[at] = value
    return batch.replace(**{name: changed})


# Group 3 has a prompt of 8 and responses of 6, 4, 4 tokens; (0, 0) loses its middle tokens to a tool.
@pytest.mark.parametrize(
    ("field", "at", "value", "message"),
    [
        ("prompt_ids", (3, 2), 23, r"prompt_ids\[3, 2\] is token id 23.*0 to 22"),
        ("prompt_ids", (0, 10), -1, r"prompt_ids\[0, 10\] is token id -1"),
        ("completion_ids", (3, 1, 3), 99, r"completion_ids\[3, 1, 3\] is token id 99"),
        ("completion_ids", (0, 0, 1), -7, r"completion_ids\[0, 0, 1\] is token id -7"),  # masked, and still context
        ("prompt_lengths", 1, 12, r"prompt_lengths\[1\] is 12; it must be from 0 to 11"),
        ("prompt_lengths", 1, -1, r"prompt_lengths\[1\] is -1"),
        ("prompt_lengths", 3, 0, r"group 3 has 3 branches and an empty prompt"),
        ("completion_lengths", (3, 0), 7, r"completion_lengths\[3, 0\] is 7; it must be from 0 to 6"),
        ("completion_lengths", (3, 0), -1, r"completion_lengths\[3, 0\] is -1"),
        ("group_sizes", 2, 5, r"group_sizes\[2\] is 5; it must be from 0 to 4"),
        ("completion_mask", (3, 1, 5), 1, r"group 3, branch 1: completion_mask.*token 5.*length 4"),
        ("advantages", (1, 0), np.nan, r"advantages\[1, 0\] is nan"),
        ("advantages", (3, 2), np.inf, r"advantages\[3, 2\] is inf"),
        ("rewards", (3, 0), np.nan, r"rewards\[3, 0\] is nan"),
        ("old_per_token_logps", (3, 0, 5), np.nan, r"old_per_token_logps\[3, 0, 5\] is nan"),
        ("ref_per_token_logps", (0, 0, 0), -np.inf, r"ref_per_token_logps\[0, 0, 0\] is -inf"),
    ],
)
def test_bad_batches(field, at, value, message):
    with pytest.raises(ValueError, match=message):
        replay.check_batch(put(field, at, value), TINY)


def test_rows_beyond_the_context():
    replay.check_batch(good_batch(), helpers.tiny(max_position_embeddings=17))
    with pytest.raises(ValueError, match=r"group 0, branch 0: 11 prompt and 6 response tokens.*context of 16"):
        replay.check_batch(good_batch(), helpers.tiny(max_position_embeddings=16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_sizes": np.zeros(3, np.int32)}, r"group_sizes has shape \(3,\).*\(4,\)"),
        ({"prompt_lengths": np.zeros((4, 1), np.int32)}, r"prompt_lengths has shape \(4, 1\)"),
        ({"completion_lengths": np.zeros((4, 3), np.int32)}, r"completion_lengths has shape \(4, 3\).*\(4, 4\)"),
        ({"completion_mask": np.zeros((4, 4, 5))}, r"completion_mask has shape \(4, 4, 5\).*\(4, 4, 6\)"),
        ({"advantages": np.zeros((4, 6))}, r"advantages has shape \(4, 6\).*\(4, 4\)"),
        ({"advantages": np.zeros((4, 4, 1))}, r"advantages has shape \(4, 4, 1\).*\(4, 4, 6\)"),
        ({"old_per_token_logps": np.zeros((4, 4))}, r"old_per_token_logps has shape \(4, 4\)"),
        ({"prompt_ids": np.zeros((3, 11), np.int32)}, r"prompt_ids has shape \(3, 11\).*\(4, any\), where B is 4"),
        ({"completion_ids": np.zeros((4, 6), np.int32)}, r"completion_ids has shape \(4, 6\); it must be \[B, G, R\]"),
    ],
)
def test_misshapen_batches(changes, message):
    with pytest.raises(ValueError, match=message):
        replay.check_batch(good_batch().replace(**changes), TINY)


def test_a_factory_is_no_objective():
    with pytest.raises(TypeError, match=r"grpo makes an objective and is none: pass grpo\(\)"):
        replay.value_and_grad(rl.grpo, TINY)


@pytest.mark.parametrize(("name", "axis"), [("B", 0), ("G", 1), ("R", 2)])
def test_a_batch_has_room_for_something(name, axis):
    batch = helpers.make_batch(TINY)

    def shrunk(x):
        return x[(slice(None),) * axis + (slice(0),)] if x.ndim > axis else x

    fields = ["completion_ids", "completion_mask", "completion_lengths", "advantages"]
    fields += ["old_per_token_logps", "ref_per_token_logps", "rewards"]
    fields += ["prompt_ids", "prompt_lengths", "group_sizes"] if name == "B" else []
    given = {field: getattr(batch, field) for field in fields}
    batch = batch.replace(**{field: shrunk(x) for field, x in given.items() if axis < 2 or x.ndim == 3})
    with pytest.raises(ValueError, match=f"batch has no room: {name} is 0"):
        replay.value_and_grad(helpers.PLAIN_GRPO, TINY)(helpers.random_params(TINY), batch)
