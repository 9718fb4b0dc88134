"""Any batch, by any of the engine's ways of computing it, has the oracle's loss and gradients.

Compiling is what these tests cost, so a program (family, objective, options, buffers) is drawn from a few, while
lengths, masks, group sizes and values, which are data, are drawn from all there are. See `exploring` for more than the
fixed examples.
"""

import functools

import families
import helpers
import jax
import numpy as np
import pytest
from exploring import examples
from hypothesis import given
from hypothesis import strategies as st

MODELS = {**families.FAMILIES, "tiny": helpers.TINY, "mixed": helpers.MIXED, "hollow": helpers.HOLLOW}
USUAL = (3, 11, 4, 6)  # buffers: groups, prompt, branches, response
# Prompt and response together, because the oracle compiles once per length of a row; those in all are slow.
FEW, MANY = (7, 12), (2, 3, 5, 7, 8, 12, 14, 17)

# Of one family, for which the oracle then compiles once.
QUICK = (
    {"name": "plain_gspo", "prefix_grad": "exact", "chunk_size": 4, "branch_batch": 2},
    {"name": "plain_grpo", "prefix_grad": 5, "chunk_size": 3, "branch_batch": 3},
)
FACTORS = {
    "model": tuple(MODELS),
    "name": ("coupled", "plain_grpo", "plain_gspo", "plain_dpo"),
    "prefix_grad": ("exact", "stop", 2, 5, 64),
    "chunk_size": (1, 4, 64),
    "branch_batch": (1, 3, None),
    "remat_policy": ("everything_saveable", "nothing_saveable", "dots_with_no_batch_dims_saveable"),
    "prefix_activations": ("recompute", "keep"),
    "buffers": (USUAL, (1, 5, 2, 9), (2, 16, 2, 1), (4, 1, 6, 3)),
}
# Every value of every option, in unlike company.
DEEP = tuple({name: v[(i + i // len(v)) % len(v)] for name, v in FACTORS.items()} for i in range(16))


@functools.cache
def params_of(model: str):
    return helpers.random_params(MODELS[model], 7)


@st.composite
def groups(draw, rows, buffers):
    """(prompt length, [(response length, mask bits)]); the prompt of a group without responses is empty."""
    _, longest, branches, response = buffers
    size = draw(st.integers(0, branches))
    prompt = draw(st.integers(1, longest)) if size else 0
    lengths = [0, *(r for r in range(1, response + 1) if prompt + r in rows)]
    response = st.tuples(st.sampled_from(lengths), st.integers(0, 2**response - 1))
    return prompt, draw(st.lists(response, min_size=size, max_size=size))


@st.composite
def cases(draw, programs, rows):
    """(program, groups, seed of ids and values, scale of advantages and of the distance from the old policy)."""
    program = draw(st.sampled_from(programs))
    count = program["buffers"][0]
    drawn = draw(st.lists(groups(rows, program["buffers"]), min_size=count, max_size=count))
    return program, drawn, draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from((0.0, 0.1, 1.0, 10.0)))


def make_batch(config, buffers, drawn, seed: int, scale: float):
    """The drawn lengths and masks in the program's buffers, poison in everything that must not be read."""
    lengths = tuple(tuple(length for length, _ in responses) for _, responses in drawn)
    prompts = tuple(prompt for prompt, _ in drawn)
    batch = helpers.make_batch(config, prompts, lengths, buffers[1:], seed, silent=(), tool_tokens=False)
    mask = np.array(batch.completion_mask)
    for b, (_, responses) in enumerate(drawn):
        for g, (length, bits) in enumerate(responses):
            mask[b, g, :length] = [bits >> t & 1 for t in range(length)]
    batch = batch.replace(completion_mask=mask)
    rng, poison = np.random.default_rng(seed), np.asarray([np.nan, np.inf, -np.inf, 1e30])
    near = -np.log(config.vocab_size) + scale * rng.standard_normal((2, *mask.shape))
    old, ref = np.where(batch.loss_mask, near, rng.choice(poison, mask.shape))
    advantages = np.where(batch.branch_mask, scale * rng.standard_normal(mask.shape[:2]), np.nan)
    return batch.replace(old_per_token_logps=old, ref_per_token_logps=ref, advantages=advantages)


def check(case) -> None:
    program, drawn, seed, scale = case
    options = dict(program)
    model, name = options.pop("model"), options.pop("name")
    with jax.enable_x64(True):
        batch = make_batch(MODELS[model], options.pop("buffers"), drawn, seed, scale)
        helpers.check_step(name, MODELS[model], params_of(model), batch, None, **options)


@examples(15)
@given(cases([{"model": "mistral", "buffers": USUAL, **program} for program in QUICK], FEW))
def test_any_batch_by_a_few_programs(case):
    check(case)


@pytest.mark.slow
@examples(80)
@given(cases(DEEP, MANY))
def test_any_batch_by_many_programs(case):
    check(case)


def test_the_deep_programs_cover_every_option():
    for factor, values in FACTORS.items():
        assert {program[factor] for program in DEEP} == set(values), factor
