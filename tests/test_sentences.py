"""Generated text of a small world."""

import pytest

from lsfuse.data import sentence_tokenizer, sentences
from lsfuse.data.sentences import NUMBERS


def test_the_small_world_is_true_to_itself():
    """Sums are right, what is given is had, nobody lives in two places; a function of count and seed."""
    text = sentences(600, seed=3)
    assert text == sentences(600, seed=3) != sentences(600, seed=4)
    lines = [line.split() for line in text.split("\n")]
    assert len(lines) == 600 and " ".join(lines[0]) == sentences(1, seed=3)
    tokenizer = sentence_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)).split() == text.split()
    homes, sums, gifts = {}, 0, 0
    for line, after in zip(lines, [*lines[1:], []], strict=True):
        if "plus" in line:
            *terms, total = (NUMBERS.index(word) for word in line if word in NUMBERS)
            sums += 1
            assert sum(terms) == total
        elif line[1] == "gives" and after:
            gifts += 1
            assert after == ["now", line[2], "has", *line[3:]]
        elif line[1] == "lives" and line[0] not in ("she", "he"):
            assert homes.setdefault(line[0], line[3]) == line[3]
    assert sums > 50 and gifts > 50 and len(homes) > 10
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        sentences(0, seed=0)
