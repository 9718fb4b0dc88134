"""Configs that no person would write: each is a run that could start, or one line that names the field at fault.

Hypothesis draws a valid config and a few changes to it, and prints the fewest changes that fail. See `exploring` for
more examples than the fixed 200.
"""

import json

import numpy as np
import pytest
import tokenizers
from exploring import examples
from helpers import random_params
from hypothesis import given, note
from hypothesis import strategies as st
from ml_collections import ConfigDict
from tokenizers import decoders, models, pre_tokenizers

from experiments import launch
from lsfuse import io, train
from lsfuse.model import ModelConfig, uniform_blocks
from lsfuse.train.schema import fields
from tests.resume_child import CONFIG

FIELDS = fields()
GROUPS = sorted({name.rsplit(".", i)[0] for name in FIELDS for i in range(1, name.count(".") + 1)})

# --- what is drawn ----------------------------------------------------------------------------------------------------

ODD_TEXTS = ("", " ", "4", "-4", "4.0", "²", "９", "none", "None", "stop", "(", "[a-", "q_proj", "norm")
ODD_TEXTS += ("~no_such_user/x", "owner/name", "/", "\0", "x" * 300)
ODD_NUMBERS = (-1, 0, 1, 2, 3, 7, 2**31, 2**32, 2**63, 10**30, 10**400, -(10**400), 0.5, -0.0, 1e300, 1e-300)
ODD_NUMBERS += (float("nan"), float("inf"), float("-inf"), True, False, 1j)
ODD_THINGS = (None, (), [], {}, {"a": 1}, b"x", {1}, [1, [2]], ((1, 2),), print, object, np.int64(2), np.float32(0.5))
ODD_THINGS += (np.zeros(2), ConfigDict({"a": 1}), range(3))
STAGES = (
    3,
    "abc",
    ((2, 3),),
    ((2, 3, 4),),
    ((2, 3, ()), (0, 1, ())),
    ((2.0, 3, ()),),
    (("2", 3, ()),),
    ((True, 3, ()),),
    ((2, 3, (("prompt_length", 16), ("num_pairs", 1))),),
    ((2, 3, {"prompt_length": 16, "num_pairs": 1}),),
    ((2, 3, (("prompt_length", 64),)),),
    ((2, 3, (("prompt_length", "16"),)),),
    ((2, 3, (("prompt_len", 16),)),),
    ((2, 3, (("prompt_length", None),)),),
    ((2, 3, (("seed", -1),)),),
    ((2, 3, (("score", 3),)),),
    ((2, 3, (("min_prompt_length", 16.0),)),),
    ((2, 3, (("num_pairs", 40),)),),
    ((2, 3, (([], 1),)),),
    ((2, 3, ({1, 2},)),),
    ((2, 3, print),),
    ((2, 10**400, ()),),
)
# Several fields at once, each fine alone.
COMBINATIONS = (
    {"rl.num_generations": 1, "rl.objective.name": "rloo"},
    {"rl.num_generations": 1, "rl.objective.name": "reinforce", "rl.dynamic_sampling": 2},
    {"rl.num_generations": 3, "rl.objective.name": "dpo"},
    {"rl.objective.name": "dpo", "rl.objective.epsilon": 0.1},
    {"rl.objective.name": "dpo", "rl.objective.loss_type": "ipo", "rl.objective.label_smoothing": 0.1},
    {"rl.objective.name": "gspo", "rl.importance_correction": "token"},
    {"rl.objective.name": "nll", "rl.importance_correction": "sequence"},
    {"rl.advantage_baseline": "none", "rl.advantage_scale": "std"},
    {"rl.importance_correction": "token", "rl.importance_cap": 0.0},
    {"rl.max_prompt": 62, "rl.max_response": 3},
    {"rl.max_response": 3, "rl.overlong_buffer": 4},
    {"rl.max_response": 24, "replay.response_buckets": (8, 24)},
    {"rl.optimizer.schedule": "cosine", "rl.optimizer.warmup_steps": 11},
    {"model.num_heads": 3, "model.num_kv_heads": 2},
    {"task.retrieval.distinct_values": False, "task.retrieval.answer_length": 10**6},
    {"warm_start.steps": 2, "warm_start.max_response": 3},
    {"task.name": "gsm8k"},
    {"task.name": "groups"},
    {"replay.prefix_grad": "4", "replay.chunk_size": 2**31 - 1, "replay.branch_batch": 2**31 - 1},
)


def usual(name: str):
    """Values that the field's declaration allows."""
    field = FIELDS[name]
    if field.choices:
        return st.sampled_from(field.choices)
    kind = type(field.default) if field.default is not None else field.types[0]
    low, high = field.minimum, field.maximum
    return {
        bool: st.booleans(),
        int: st.integers(int(low or 0), int(min(high or 40, 40))),
        float: st.floats(float(low or 0), float(high or 4), allow_nan=False),
        str: st.sampled_from(ODD_TEXTS),
        tuple: st.sampled_from(STAGES),
    }[kind]


def odd_value():
    every = st.sampled_from((*ODD_TEXTS, *ODD_NUMBERS, *ODD_THINGS))
    return st.one_of(every, st.text(max_size=4), st.integers(), st.floats())


def misspelt(name: str):
    return st.integers(0, len(name) - 1).flatmap(
        lambda i: st.sampled_from((name[:i] + name[i + 1 :], name[:i] + "_" + name[i:], name + "s", name.upper()))
    )


NAMES = st.sampled_from(sorted(FIELDS))
CHANGES = st.one_of(
    NAMES.flatmap(lambda n: st.tuples(st.just(n), usual(n))).map(lambda c: dict([c])),
    NAMES.flatmap(lambda n: st.tuples(st.just(n), usual(n))).map(lambda c: dict([c])),
    st.tuples(NAMES, odd_value()).map(lambda c: dict([c])),
    st.sampled_from(COMBINATIONS),
    st.sampled_from(STAGES).map(lambda s: {"warm_start.stages": s}),
    st.tuples(NAMES.flatmap(misspelt), odd_value()).map(lambda c: dict([c])),
    st.tuples(st.sampled_from(GROUPS), odd_value()).map(lambda c: dict([c])),
)


@st.composite
def configs(draw):
    """(which of the bases, what differs from it: flat, by dotted names)."""
    changes = {}
    for change in draw(st.lists(CHANGES, min_size=1, max_size=4)):
        changes |= change
    return draw(st.sampled_from(("retrieval", "gsm8k", "groups", "pairs"))), changes


# --- what it is drawn around ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Valid configs, flat: of a model of random parameters, and of a tiny checkpoint with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("bases")
    vocab = {c: i for i, c in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    model = ModelConfig(len(vocab), 8, 2, 4, uniform_blocks(1, 1, 8), max_position_embeddings=128)
    io.save_hf(folder / "model", model, random_params(model, dtype=np.float32))
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    (folder / "model" / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    problem = {"question": "1 + 1?", "answer": "#### 2"}
    (folder / "train.jsonl").write_text("\n".join([json.dumps(problem)] * 3))
    line = {"prompt": "ab", "responses": ["c", "de"], "rewards": [1.0, 0.0]}
    (folder / "groups.jsonl").write_text(json.dumps(line))
    pairs = [{"prompt": "ab", "chosen": ["c", "d"], "rejected": ["e", "f"]}]
    pairs.append({"prompt": "a", "chosen": "c", "rejected": ""})
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    sizes = {"rl.max_prompt": 64, "rl.max_response": 32, "rl.num_generations": 4, "model.path": str(folder / "model")}
    files = {f"task.gsm8k.{split}_path": str(folder / "train.jsonl") for split in ("train", "eval")}
    checkpoint = {**sizes, **files, "task.gsm8k.num_shots": 1}
    return {
        "retrieval": flat(CONFIG),
        "gsm8k": {**checkpoint, "task.name": "gsm8k", "warm_start.steps": 2},
        "groups": {**checkpoint, "task.name": "groups", "task.groups.path": str(folder / "groups.jsonl")},
        "pairs": {
            **checkpoint,
            "task.name": "groups",
            "task.groups.path": str(folder / "pairs.jsonl"),
            "rl.objective.name": "dpo",
        },
    }


def flat(config, prefix=""):
    out = {}
    for key, value in config.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def check(config, changed) -> bool:
    """Whether the config is a run that could start; if not, it ends in one line that names a field: by its full name,
    or one that was changed."""
    try:
        setup = train.set_up(config)
    except Exception as error:
        text = str(error)
        note(f"{type(error).__name__}: {text}")
        if not launch.is_users(error):
            raise
        assert text and "\n" not in text and len(text) < 1500
        names = {*FIELDS, *changed, *(name.split(".")[-1] for name in changed)}
        assert any(name in text for name in names), text
        return False
    assert train.resolve_config(setup.config) == setup.config
    assert json.loads(json.dumps(setup.saved)) == setup.saved
    return True


def test_the_bases_are_valid(bases):
    for name, base in bases.items():
        assert check(base, {}), name


def test_any_config_is_a_run_or_one_line(bases):
    runs = []

    @examples(200)
    @given(configs())
    def holds(drawn):
        name, changes = drawn
        runs.append(check({**bases[name], **changes}, changes))

    holds()
    assert 0.1 < np.mean(runs) < 0.9, "a check of one kind only: nearly all configs are refused, or none"
