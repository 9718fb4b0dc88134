"""Wrong arrays at the public boundary: which argument, both shapes, what to do, before anything is compiled."""

import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsfuse import data, fusion, io, model, replay, rl
from lsfuse.checks import BOOL, REAL, check_arrays

CONFIG = helpers.TINY  # D 16, V 23, two blocks
PARAMS = helpers.random_params(CONFIG, dtype=np.float32)
BATCH = helpers.make_batch(CONFIG, dtype=np.float32)  # B 4, P 11, G 4, R 6
KEY = jax.random.key(0)
IDS = np.zeros((2, 5), np.int32)
F32 = np.float32
FULL = np.array([5, 5])


def traced(f, *args):
    """What a jitted call does first, and nothing after it."""
    return jax.eval_shape(f, *args)


def step(batch=BATCH, params=PARAMS, objective=helpers.PLAIN_GRPO, make=replay.value_and_grad):
    return traced(make(objective, CONFIG, chunk_size=4, branch_batch=2), params, batch)


def put(**changes):
    return lambda: step(BATCH.replace(**changes))


def leaf(path: str, value) -> dict:
    *parents, last = path.split("/")
    changed = jax.tree.map(lambda x: x, PARAMS)
    node = changed
    for key in parents:
        node = node[key]
    node[last] = value
    return changed


def texts(ids=IDS, lengths=FULL):
    return fusion.Texts(ids, lengths)


def forward(*args, params=PARAMS):
    return traced(lambda p, *a: model.forward(p, CONFIG, *a), params, *args)


def sampler(ids=IDS, lengths=FULL, key=KEY, params=PARAMS):
    return rl.sample(params, CONFIG, ids, lengths, num_generations=2, max_tokens=2, key=key)


def logps(*shapes):
    return [np.zeros(shape, F32) for shape in shapes]


HIDDEN = np.zeros((3, 16), F32)
WRONG = {
    # model
    "init key": (
        lambda: model.init_params(CONFIG, 0),
        "init_params: key must be one PRNG key, got int; .*jax.random.key",
    ),
    "init keys": (lambda: model.init_params(CONFIG, jax.random.split(KEY)), r"key<fry> of shape \(2,\); make one"),
    "forward ids flat": (
        lambda: forward(IDS[0]),
        r"model.forward: ids has shape \(5,\).*\[B, T\]; an axis is .*ids\[None\]",
    ),
    "forward ids floats": (
        lambda: forward(IDS * 1.0),
        r"ids is of dtype float.*\(2, 5\).*integers: take ids.astype\(jnp.int32",
    ),
    "forward lengths": (
        lambda: forward(IDS, np.array([1, 2, 3])),
        r"lengths has shape \(3,\).*\(2,\), where B is 2 by ids",
    ),
    "forward list": (
        lambda: model.forward(PARAMS, CONFIG, [[1]]),
        "ids must be an array of axes .B, T., got list; .*asarray",
    ),
    "forward params": (
        lambda: model.forward(IDS, CONFIG, PARAMS),
        "parameters must be nested dicts .* got ndarray; mind the",
    ),
    "forward leaf": (
        lambda: forward(IDS, params=leaf("norm", np.ones(8, F32))),
        r"norm has shape \(8,\), the config says \(16,\)",
    ),
    "leaf missing": (lambda: forward(IDS, params={"norm": PARAMS["norm"]}), "parameters lack embed_tokens, lm_head"),
    "leaf int8": (
        lambda: forward(IDS, params=leaf("norm", np.ones(16, np.int8))),
        r"norm of shape \(16,\) has dtype int8.*cast",
    ),
    "leaf none": (
        lambda: model.check_params(CONFIG, leaf("norm", 3.0)),
        r"norm must be an array of shape \(16,\), got float",
    ),
    "logits width": (
        lambda: model.logits(PARAMS, CONFIG, np.zeros((3, 8), F32)),
        r"hidden has shape \(3, 8\).*D is 16 by the config",
    ),
    "logits ints": (
        lambda: model.logits(PARAMS, CONFIG, np.zeros((3, 16), int)),
        "hidden is of dtype int64.*floating-point",
    ),
    "logprobs x": (
        lambda: model.token_logprobs(PARAMS, CONFIG, HIDDEN[None], np.zeros(3, int)),
        r"x has shape \(1, 3, 16\).*x\[0\]",
    ),
    "logprobs labels": (
        lambda: model.token_logprobs(PARAMS, CONFIG, HIDDEN, np.zeros(4, int)),
        r"labels .*\(4,\).*T is 3 by x",
    ),
    "unstack": (lambda: model.unstack_blocks(CONFIG, {"runs": {}}), "parameters lack embed_tokens"),
    "stack": (lambda: model.stack_blocks(CONFIG, [{}]), "1 blocks of parameters for a config of 2"),
    # replay
    "no batch": (lambda: step(PARAMS), "batch must be a replay.Batch, got dict; mind the arguments' order"),
    "params and batch": (lambda: step(PARAMS, BATCH), "parameters must be nested dicts of arrays, got Batch; mind"),
    "float ids": (put(completion_ids=BATCH.completion_ids * 1.0), "completion_ids is of dtype float32.*integers"),
    "prompts": (
        put(prompt_ids=BATCH.prompt_ids[:3]),
        r"prompt_ids has shape \(3, 11\).*\(4, any\), where B is 4 by completion_ids",
    ),
    "prompt lengths": (
        put(prompt_lengths=BATCH.prompt_lengths[:, None]),
        r"prompt_lengths has shape \(4, 1\).*\(4,\).*too many",
    ),
    "lengths": (put(completion_lengths=np.zeros((4, 3), int)), r"completion_lengths has shape \(4, 3\).*\(4, 4\)"),
    "mask": (
        put(completion_mask=np.ones((4, 4))),
        r"completion_mask has shape \(4, 4\).*\(4, 4, 6\).*an axis is missing",
    ),
    "no mask": (put(completion_mask=None), "completion_mask is None; every batch has it"),
    "sizes": (put(group_sizes=np.ones(4)), "group_sizes is of dtype float32"),
    "advantages": (put(advantages=np.ones((4, 6))), r"advantages has shape \(4, 6\); it must be \[B, G\] = \(4, 4\)"),
    "token advantages": (put(advantages=np.ones((4, 4, 1))), r"advantages has shape \(4, 4, 1\).*\(4, 4, 6\)"),
    "old": (put(old_per_token_logps=np.ones((4, 6, 4))), r"old_per_token_logps has shape \(4, 6, 4\).*transpose"),
    "rewards": (
        lambda: replay.check_batch(BATCH.replace(rewards=np.full((4, 4), "1")), CONFIG),
        "rewards is of dtype <U1.*real numbers",
    ),
    "extras": (put(extras={"bonus": np.ones((4, 3))}), r"extras\['bonus'\] has shape \(4, 3\).*\[B, G, ...\]"),
    "dense": (
        lambda: step(BATCH.replace(group_sizes=np.ones((4, 1), int)), make=replay.dense_value_and_grad),
        "group_sizes has",
    ),
    "scoring": (
        lambda: traced(replay.per_token_logps(CONFIG), PARAMS, BATCH.replace(prompt_ids=IDS)),
        "prompt_ids has shape",
    ),
    "loss of tokens": (lambda: step(objective=lambda a, e, b: (a, {})), r"loss has shape \(4, 4, 6\); it must be \[\]"),
    "integer loss": (lambda: step(objective=lambda a, e, b: (jnp.int32(1), {})), "loss is of dtype int32"),
    "loss alone": (
        lambda: step(objective=lambda a, e, b: a.sum()),
        r"must return \(loss, metrics\), metrics a dict, got",
    ),
    "objective": (
        lambda: rl.nll()(*logps((4, 4, 6), (4, 6)), BATCH),
        r"nll: entropies has shape \(4, 6\).*\(4, 4, 6\)",
    ),
    "masked_mean": (
        lambda: replay.masked_mean(np.ones((2, 3)), np.ones((2, 4))),
        r"mask has shape \(2, 4\).*values \(2, 3\)",
    ),
    "check_batch": (
        lambda: replay.check_batch(BATCH.replace(rewards=np.ones(4)), CONFIG),
        r"rewards has shape \(4,\).*\(4, 4\)",
    ),
    # rl
    "kl": (
        lambda: rl.kl_estimate(*logps((2, 3), (2, 4), (2, 3))),
        r"ref_per_token_logps has shape \(2, 4\), but per_token_logps",
    ),
    "ratio": (
        lambda: rl.log_ratio(*logps((2, 3), (2, 3)), np.ones(3)),
        r"log_ratio: mask has shape \(3,\), but .*\(2, 3\)",
    ),
    "weights": (
        lambda: rl.token_weights(BATCH.replace(group_sizes=IDS), "token-mean"),
        "token_weights: group_sizes has shape",
    ),
    "advantage rewards": (
        lambda: rl.group_advantages(np.ones(4), np.array([4])),
        r"rewards must be .*got shapes \(4,\)",
    ),
    "advantage sizes": (
        lambda: rl.group_advantages(np.ones((1, 4)), np.array([4.0])),
        "group_sizes is of dtype float64",
    ),
    "penalty": (lambda: rl.overlong_penalty(np.array(["3"]), 4, 2), "lengths is of dtype <U1"),
    "importance": (
        lambda: rl.correct_importance(BATCH, np.ones((4, 6))),
        r"sampling_per_token_logps has shape \(4, 6\)",
    ),
    "sampler ids": (lambda: sampler(IDS * 1.0), "sampler: prompt_ids is of dtype float64"),
    "sampler lengths": (lambda: sampler(lengths=np.array([5.0, 4.0])), "prompt_lengths is of dtype float64"),
    "sampler key": (lambda: sampler(key=3), "sampler: key must be one PRNG key, got int"),
    "sampler params": (lambda: sampler(params=leaf("norm", np.ones(3, F32))), r"norm has shape \(3,\)"),
    # data
    "cut": (
        lambda: data.cut_completion(None, np.ones((2, 3), int)),
        r"ids has shape \(2, 3\); it must be \[R\]; .*ids\[0\]",
    ),
    "group": (
        lambda: data.check_group(data.Group(np.ones(3), [IDS[0]])),
        "prompt must be a flat list of integer token ids",
    ),
    # fusion
    "texts": (lambda: texts(IDS[0]), r"Texts: ids has shape \(5,\); it must be \[N, T\]"),
    "texts lengths": (lambda: texts(lengths=np.array([5])), r"lengths has shape \(1,\).*\(2,\), where N is 2 by ids"),
    "evaluate ids": (
        lambda: fusion.evaluate((CONFIG, PARAMS), texts(IDS + 23)),
        "evaluate: text 0 has id 23 at .* ids 0 to 22",
    ),
    "dependency params": (
        lambda: fusion.dependency(CONFIG, leaf("norm", np.ones(3, F32)), texts()),
        r"norm has shape \(3,\)",
    ),
    "importance ids": (
        lambda: fusion.ffn_importance(CONFIG, PARAMS, texts(IDS - 1)),
        "ffn_importance: text 0 has id -1",
    ),
    "distance": (
        lambda: fusion.cosine_distance(np.ones((2, 3)), np.ones((2, 4))),
        r"b has shape \(2, 4\), but a \(2, 3\)",
    ),
    "spans": (
        lambda: fusion.fusion_spans(CONFIG, np.ones((2, 3))),
        r"dependency has shape \(2, 3\).*\(2, 2\), where L is 2",
    ),
    # io
    "save": (
        lambda: io.save_hf("nowhere", CONFIG, leaf("norm", np.ones(3, F32))),
        r"norm has shape \(3,\), the config says",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arrays(name):
    call, message = WRONG[name]
    with pytest.raises(ValueError) as error:
        call()
    text = str(error.value)
    assert re.search(message, text), text
    assert "\n" not in text


def test_right_ones_pass():
    """Of every kind that is allowed: numpy, jax, abstract, bools for masks, raw keys."""
    step()
    step(jax.eval_shape(lambda: jax.tree.map(jnp.asarray, BATCH)), jax.eval_shape(lambda: PARAMS))
    step(BATCH.replace(completion_mask=np.asarray(BATCH.completion_mask, bool)))
    forward(jnp.asarray(IDS), jnp.array([5, 2]))
    traced(lambda: model.init_params(CONFIG, jax.random.PRNGKey(0)))
    given = {"a": (np.ones((2, 3)), "B ... T", float), "b": (np.ones(2, bool), "B", BOOL), "c": (None, "B", int)}
    check_arrays("here", {**given, "d": (np.ones((2, 1), np.int8), "B 1", REAL)})


def test_a_check_leaves_no_trace():
    """Nothing of it is in the program."""
    program = jax.make_jaxpr(lambda x: check_arrays("here", {"x": (x, "B T", float)}, {"T": (3, "me")}) or x)
    assert not program(jnp.ones((2, 3))).eqns
    with pytest.raises(ValueError, match=r"x has shape \(2, 4\); it must be \[B, T\] = \(any, 3\), where T is 3 by me"):
        program(jnp.ones((2, 4)))
