"""Rewards: plain callables `(example, completion) -> float`.

`example` is a task's mapping with at least "answer" (str); `completion` is the response as text, without its stop
token. Anything callable in this way is a reward; `weighted` adds several up.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Reward = Callable[[Mapping[str, Any], str], float]

_NUMBER = re.compile(r"(?<![\w.])[-+−]?[$€£]?[-+−]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_MARK = "####"


def extract_number(text: str) -> float | None:
    """The number a GSM8K-style answer states: the first after the first "####", else the last in the text.

    Understands thousands commas, currency, %, signs (ASCII and U+2212), decimals, trailing dots: "#### $1,234.50." is
    1234.5, "-7%" is -7. A "-" right behind a word or number is taken as a hyphen or an operator ("3-4" ends in 4).
    None if there is no number, or none after the mark.
    """
    _, mark, after = text.partition(_MARK)
    numbers = _NUMBER.findall(after if mark else text)
    if not numbers:
        return None
    return _to_float(numbers[0] if mark else numbers[-1])


def _to_float(number: str) -> float:
    return float(re.sub(r"[$€£,+]", "", number).replace("−", "-"))


def _answer(example: Mapping[str, Any]) -> str:
    try:
        return str(example["answer"])
    except KeyError:
        raise KeyError(f"a reward needs example['answer']; this example has {sorted(example)}") from None


def numeric_reward(example: Mapping[str, Any], completion: str) -> float:
    """1 if the completion's number equals the answer's (to 1e-6 relative), else 0."""
    expected = extract_number(_answer(example))
    if expected is None:
        raise ValueError(f"example['answer'] holds no number: {_answer(example)!r}")
    found = extract_number(completion)
    return float(found is not None and math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9))


def format_reward(example: Mapping[str, Any], completion: str) -> float:
    """How much of "reasoning, then one line `#### number`, then nothing" a completion keeps to, in [0, 1].

    0.25 for any number, 0.5 for a number behind "####", 0.25 if the mark stands once, at the start of the last line,
    and only the number (with its sign, currency or %) follows.
    """
    del example
    numbers = _NUMBER.findall(completion)
    if not numbers:
        return 0.0
    _, mark, after = completion.partition(_MARK)
    if not mark or not _NUMBER.search(after):
        return 0.25
    last_line = completion.strip().splitlines()[-1].strip()
    rest = _NUMBER.sub("", last_line.removeprefix(_MARK), count=1)
    clean = completion.count(_MARK) == 1 and last_line.startswith(_MARK) and not rest.strip(" .%$")
    return 1.0 if clean else 0.75


def closeness_reward(example: Mapping[str, Any], completion: str) -> float:
    """exp(-|relative error|) of the completion's number, in [0, 1]; 0 without a number. 1 only if it is right.

    A dense signal for models that rarely hit the exact answer.
    """
    expected, found = extract_number(_answer(example)), extract_number(completion)
    if expected is None or found is None:
        return 0.0
    if numeric_reward(example, completion):
        return 1.0
    return math.exp(-min(abs(found - expected) / max(abs(expected), 1.0), 700.0))


def exact_match(example: Mapping[str, Any], completion: str) -> float:
    """1 if completion and answer are the same words, white space aside."""
    return float(completion.split() == _answer(example).split())


def token_match(example: Mapping[str, Any], completion: str) -> float:
    """Share of words that are right at their place, out of the longer of completion and answer; 1 only if exact."""
    expected, found = _answer(example).split(), completion.split()
    if not expected and not found:
        return 1.0
    return sum(a == b for a, b in zip(expected, found, strict=False)) / max(len(expected), len(found))


def weighted(parts: Sequence[tuple[float, Reward]]) -> Reward:
    """The reward Σ weight · reward of `(weight, reward)` parts."""
    parts = tuple(parts)
    if not parts:
        raise ValueError("weighted() needs at least one (weight, reward) pair")
    for weight, reward in parts:
        if not callable(reward) or not math.isfinite(weight):
            raise ValueError(f"weighted() takes (finite weight, callable) pairs, got ({weight!r}, {reward!r})")

    def reward_fn(example: Mapping[str, Any], completion: str) -> float:
        return sum(weight * reward(example, completion) for weight, reward in parts)

    return reward_fn


# 3/4 for the right answer, up to 1/8 for the format, up to 1/8 for being near: groups of a weak model get spread.
graded_numeric_reward: Reward = weighted([(0.75, numeric_reward), (0.125, format_reward), (0.125, closeness_reward)])
