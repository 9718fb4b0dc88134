"""Text of a small world, generated: what a model that nothing is downloaded for is trained and compared on.

    ada lives in oslo . she eats plums . seven plus four is eleven . ben gives eva the red lamp . now eva …

Who lives where and eats what, and the sums, are facts of the world that a model must remember, which is its FFNs' part;
what changes hands stands in the text, and needs attention. Names, quantities and the order of things are drawn.
"""

import numpy as np

from lsfuse.data.order import counter_rng
from lsfuse.data.symbols import SymbolTokenizer

WOMEN = ("ada", "eva", "ida", "ines", "lea", "mia", "nora", "olga", "rosa", "sara", "tina", "vera")
MEN = ("ben", "carl", "emil", "finn", "hugo", "ivan", "jan", "karl", "max", "otto", "paul", "tom")
NAMES = WOMEN + MEN
FACTS = (
    (("lives", "in"), ("bern", "cairo", "delhi", "lima", "oslo", "paris", "quito", "rome", "tokyo", "wien")),
    (("works", "as"), ("baker", "cook", "judge", "nurse", "painter", "pilot", "poet", "sailor", "tailor", "weaver")),
    (("eats",), ("beans", "bread", "cheese", "eggs", "figs", "fish", "nuts", "pears", "plums", "rice")),
)
COLOURS = ("black", "blue", "brown", "green", "grey", "red", "white", "yellow")
THINGS = ("book", "box", "chair", "clock", "cup", "drum", "key", "lamp", "map", "ring", "rope", "sword")
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen twenty twenty-one twenty-two twenty-three twenty-four twenty-five twenty-six twenty-seven"
).split()
_REST = ("<pad>", ".", "the", "gives", "now", "has", "plus", "is", "she", "he")
WORDS = (*_REST, *NAMES, *(w for verb, values in FACTS for w in (*verb, *values)), *COLOURS, *THINGS, *NUMBERS)


def sentence_tokenizer() -> SymbolTokenizer:
    """A token a word."""
    return SymbolTokenizer(WORDS, "<pad>", ".", hidden=("<pad>",))


def sentences(count: int, seed: int) -> str:
    """`count` sentences, a function of the two arguments. The world's facts depend on the seed as well.

    Raises: ValueError for fewer than one.
    """
    if count < 1:
        raise ValueError(f"sentences: count must be at least 1, got {count}")
    world = counter_rng(seed, 0, 0)
    facts = [dict(zip(NAMES, world.choice(values, len(NAMES)), strict=True)) for _, values in FACTS]
    rng = counter_rng(seed, 1, 0)
    said: list[str] = []
    while len(said) < count:
        said += (_about, _sum, _gift)[rng.choice(3, p=(0.4, 0.4, 0.2))](rng, facts)
    return "\n".join(said[:count])


def _about(rng: np.random.Generator, facts: list[dict[str, str]]) -> list[str]:
    """What is known of somebody, by name and then by pronoun."""
    name = str(rng.choice(NAMES))
    pronoun = "she" if name in WOMEN else "he"
    order = rng.permutation(len(FACTS))[: rng.integers(1, len(FACTS) + 1)]
    return [" ".join((pronoun if n else name, *FACTS[k][0], facts[k][name], ".")) for n, k in enumerate(order)]


def _sum(rng: np.random.Generator, facts: list[dict[str, str]]) -> list[str]:
    del facts
    terms = rng.integers(0, 10, rng.integers(2, 4))
    return [f"{' plus '.join(NUMBERS[n] for n in terms)} is {NUMBERS[terms.sum()]} ."]


def _gift(rng: np.random.Generator, facts: list[dict[str, str]]) -> list[str]:
    del facts
    giver, taker = rng.choice(NAMES, 2, replace=False)
    thing = f"the {rng.choice(COLOURS)} {rng.choice(THINGS)}"
    return [f"{giver} gives {taker} {thing} .", f"now {taker} has {thing} ."]
