"""Rewards on the answers that models really write."""

import pytest

from lsfuse.rl import (
    closeness_reward,
    exact_match,
    extract_number,
    format_reward,
    graded_numeric_reward,
    numeric_reward,
    token_match,
    weighted,
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", 18),
        ("She makes 9 * 2 = $18.\n#### 18", 18),
        ("####18.", 18),
        ("#### $1,234.50.", 1234.5),
        ("#### -7%", -7),
        ("#### −7", -7),
        ("#### -$1,000", -1000),
        ("#### $-3", -3),
        ("#### .5", 0.5),
        ("#### 0.50", 0.5),
        ("#### 12 apples and 3 pears", 12),
        ("#### 5\n\nQuestion: what is 2+2?\n#### 4", 5),
        ("so 16 - 3 = 13", 13),
        ("between 3-4", 4),
        ("The answer is 70,000.", 70000),
        ("it takes 2, maybe 3, days", 3),
        ("x2 and v3", None),
        ("no number", None),
        ("#### none, though 5 came before", 5),
        ("it was 5 #### none", None),
        ("", None),
        ("(42)", 42),
        ("about 10%", 10),
        ("US$18", 18),
        ("**7**", 7),
    ],
)
def test_extract_number(text, number):
    assert extract_number(text) == number


def test_numeric_reward_compares_numbers_not_text():
    example = {"answer": "He made 130,000-60,000\n#### 70000"}
    assert numeric_reward(example, "#### 70,000.00") == 1.0
    assert numeric_reward(example, "it is $70000.") == 1.0
    assert numeric_reward(example, "#### 70001") == 0.0
    assert numeric_reward(example, "nothing") == 0.0
    assert numeric_reward({"answer": 0}, "#### 0") == 1.0
    with pytest.raises(ValueError, match="holds no number"):
        numeric_reward({"answer": "none"}, "3")
    with pytest.raises(KeyError, match="question"):
        numeric_reward({"question": "?"}, "3")


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("no idea", 0.0),
        ("it is 5", 0.25),
        ("#### none, it was 5 before", 0.75),
        ("5 #### none", 0.25),
        ("reasoning #### 5", 0.75),
        ("reasoning\n#### 5 apples", 0.75),
        ("reasoning\n#### 5\nmore", 0.75),
        ("#### 5\n#### 6", 0.75),
        ("reasoning with 3\n#### $1,005.", 1.0),
        ("#### -5%", 1.0),
    ],
)
def test_format_reward(text, score):
    assert format_reward({}, text) == score


def test_graded_reward_gives_weak_answers_spread():
    example = {"answer": "#### 40"}
    scores = [graded_numeric_reward(example, t) for t in ("?", "80", "45", "a #### 45", "a\n#### 45", "a\n#### 40")]
    assert scores == sorted(scores) and len(set(scores)) == len(scores)
    assert scores[0] == 0.0 and scores[-1] == 1.0


def test_closeness_is_one_only_if_right():
    example = {"answer": "#### 40"}
    assert closeness_reward(example, "40") == 1.0
    assert 0.99 < closeness_reward(example, "40.001") < 1.0
    assert 0.0 <= closeness_reward(example, "9" * 400) < 1e-300
    assert closeness_reward(example, "none") == 0.0


def test_matches():
    example = {"answer": "v1 v2 v3"}
    assert exact_match(example, " v1 v2  v3 ") == 1.0
    assert exact_match(example, "v1 v2") == 0.0
    assert token_match(example, "v1 v2 v3") == 1.0
    assert token_match(example, "v1 v3 v3") == pytest.approx(2 / 3)
    assert token_match(example, "v2 v3") == 0.0
    assert token_match(example, "v1 v2 v3 v4 v5 v6") == 0.5
    assert token_match(example, "") == 0.0
    assert token_match({"answer": ""}, "") == 1.0


def test_weighted():
    reward = weighted([(2.0, exact_match), (-0.5, lambda example, text: len(text))])
    assert reward({"answer": "ab"}, "ab") == 1.0
    with pytest.raises(ValueError, match="at least one"):
        weighted([])
    with pytest.raises(ValueError, match="callable"):
        weighted([(exact_match, 1.0)])
    with pytest.raises(ValueError, match="finite"):
        weighted([(float("nan"), exact_match)])
