"""Bad options and bad batches: a clear error before any work."""

import helpers
import numpy as np
import pytest

from lsfuse import replay
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
