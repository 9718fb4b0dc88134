"""Ways of saving sequential blocks, and the rules that choose among them: what `plan_fusion` compares a search with."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from lsfuse import fusion
from lsfuse.fusion import Choice, Transform
from lsfuse.model import ModelConfig

FUSED = ("keep", "remove", "fuse", "rule", "rule+")
ANY = (*FUSED, "parallel")
SETS = {"fused": FUSED, "any": ANY}
PLANNER, GREEDY = "planner", "one after the other"
WINDOWS = (2, 3, 4)  # whole blocks beside each other, by their dependencies
# Rules that need no search over scored spans: the paper's, at the best place or where attention matters least, and
# blocks left out.
PAPERS = (
    "one place: rule",
    "one place: rule+",
    "least attentions, rule",
    "least attentions, rule+",
    "cheapest attentions in a row",
    *(f"windows of {size}" for size in WINDOWS),
    "one place: remove",
    "blocks of least score",
)
# Blocks that a kind saves at one place at most: several removals are several choices, and more than three blocks beside
# each other are far from what they were.
MOST = {"remove": 1, "fuse": 4, "rule": 4, "rule+": 4, "parallel": 2}
_TRIED = 3  # places of a rule that the held-out text may choose from


# --- choices ----------------------------------------------------------------------------------------------------------


def transform(kind: str, n: int) -> Transform:
    """What a kind makes of n blocks, taken as a model of their own."""
    if kind == "remove":  # an empty block: the logits are those without it
        return fusion.chain(fusion.remove_attention(range(n)), fusion.remove_ffn(range(n)))
    if kind == "parallel":
        return fusion.parallel_blocks([(0, n - 1)])
    first, last = {"fuse": (1, n - 1), "rule": (0, n - 2), "rule+": (1, n - 2)}[kind]
    return fusion.chain(fusion.remove_attention(range(first, n)), fusion.fuse_ffn([(0, last)]))


def blocks_for(kind: str, saved: int) -> int:
    """Blocks that a kind needs at one place to save so many."""
    return saved + {"remove": 0, "fuse": 1, "rule": 2, "rule+": 2, "parallel": 1}[kind]


def make_choices(num_blocks: int, saved_at_once: Sequence[int]) -> list[Choice]:
    """Every kind at every place, unscored; costs: {"blocks": what is left of the place}."""
    found = [Choice(i, i, "keep", 0.0, {"blocks": 1.0}) for i in range(num_blocks)]
    for kind, saved in itertools.product(ANY[1:], saved_at_once):
        if saved > MOST[kind]:
            continue
        n = blocks_for(kind, saved)
        made, cost = transform(kind, n), {"blocks": float(n - saved)}
        found += [Choice(i, i + n - 1, kind, np.nan, cost, made) for i in range(num_blocks - n + 1)]
    return found


def check_saved(choices: Sequence[Choice], num_blocks: int, saved: Sequence[int]) -> None:
    """Raises ValueError, before anything is scored, for more blocks than a plan of the choices can save."""
    for name, kinds in SETS.items():
        most = _most_saved([c for c in choices if c.name in kinds], num_blocks)
        if max(saved) > most:
            given = ",".join(map(str, saved))
            raise ValueError(
                f"--saved={given}: choices that save {given} at one place save {most} of {num_blocks} blocks at most"
                f' together ("{name}"), not {max(saved)}; name less, or smaller numbers beside it'
            )


def _most_saved(choices: Sequence[Choice], num_blocks: int) -> int:
    """By choices that do not overlap; every block may be kept."""
    most = [0]  # of the blocks before each
    for last in range(num_blocks):
        most.append(max(most[c.first] + saved_by([c]) for c in choices if c.last == last))
    return most[-1]


def saved_by(plan: Sequence[Choice]) -> int:
    return sum(c.last - c.first + 1 - int(c.costs["blocks"]) for c in plan)


def spell(plan: Sequence[Choice]) -> str:
    return ", ".join(f"{c.name} {c.first}" + (f"-{c.last}" if c.last > c.first else "") for c in plan if c.transform)


# --- rules ----------------------------------------------------------------------------------------------------------


def one_place(choices: Sequence[Choice], kind: str, saved: int) -> list[list[Choice]]:
    """The best places of a rule that saves all in one, best first."""
    fitting = [[c] for c in choices if c.name == kind and saved_by([c]) == saved]
    return sorted(fitting, key=lambda plan: plan[0].score)[:_TRIED]


def one_after_the_other(choices: Sequence[Choice], kinds: Sequence[str], saved: int) -> list[Choice]:
    """The choice that costs least a block saved, then the next beside it, until so many are saved."""
    plan: list[Choice] = []
    ordered = [c for c in choices if c.transform is not None and c.name in kinds]
    for c in sorted(ordered, key=lambda c: c.score / saved_by([c])):
        apart = all(c.last < other.first or other.last < c.first for other in plan)
        if apart and saved_by([*plan, c]) <= saved:
            plan.append(c)
    return plan if saved_by(plan) == saved else []


def least_attentions(config: ModelConfig, removal: np.ndarray, saved: int, keep_first: bool) -> list[Choice]:
    """Attentions go by their score until the spans of the rule save so many."""
    free: set[int] = set()
    for block in np.argsort(removal):
        free.add(int(block))
        spans = [(a, b) for a, b in _runs(free, keep_first) if b - a > 1]
        # Of the last attention's run as many members as are wanted.
        if sum(b - a - 1 for a, b in spans) >= saved:
            return _as_choices(spans, saved, "rule+" if keep_first else "rule")
    return []


def cheapest_in_a_row(removal: np.ndarray, saved: int) -> list[Choice]:
    """The paper's rule where the attentions of a whole span cost least in sum."""
    n = blocks_for("rule", saved)
    try:
        first, *_ = fusion.cheapest_run(removal, n)
    except ValueError:  # a model of fewer attentions in a row
        return []
    return [Choice(first, first + n - 1, "rule", np.nan, {"blocks": 2.0}, transform("rule", n))]


def windows_of(dependency: np.ndarray, size: int, saved: int) -> list[Choice]:
    """The paper's greedy windows of whole blocks, as many as save so many; none where they do not."""
    if saved % (size - 1) or size > len(dependency):
        return []
    try:
        spans = fusion.block_windows(dependency, saved // (size - 1), size)
    except ValueError:  # no room for so many
        return []
    made = transform("parallel", size)
    return [Choice(a, b, "parallel", np.nan, {"blocks": 1.0}, made) for a, b in spans]


def _runs(free: set[int], keep_first: bool) -> Iterator[tuple[int, int]]:
    """(first, last) of stretches of blocks without attention, with the block before them if it keeps its own."""
    for _, group in itertools.groupby(enumerate(sorted(free)), lambda pair: pair[1] - pair[0]):
        members = [block for _, block in group]
        yield (members[0] - 1 if keep_first and members[0] else members[0]), members[-1]


def _as_choices(spans: Sequence[tuple[int, int]], saved: int, kind: str) -> list[Choice]:
    plan: list[Choice] = []
    for a, b in sorted(spans, key=lambda s: s[0] - s[1]):
        n = min(b - a + 1, blocks_for(kind, saved - saved_by(plan)))
        if n > 2:
            plan.append(Choice(a, a + n - 1, kind, np.nan, {"blocks": 2.0}, transform(kind, n)))
    return plan


def rule_plans(
    choices: Sequence[Choice],
    config: ModelConfig,
    removal: np.ndarray,
    dependency: np.ndarray,
    saved: int,
    kinds: Sequence[str],
) -> Iterator[tuple[str, list[Choice]]]:
    """(rule, plan) of every rule that can save so many."""
    for kind in kinds:
        for plan in one_place(choices, kind, saved):
            yield f"one place: {kind}", plan
    yield "blocks of least score", one_after_the_other(choices, ("remove",), saved)
    yield GREEDY, one_after_the_other(choices, kinds, saved)
    yield "least attentions, rule", least_attentions(config, removal, saved, keep_first=False)
    yield "least attentions, rule+", least_attentions(config, removal, saved, keep_first=True)
    yield "cheapest attentions in a row", cheapest_in_a_row(removal, saved)
    if "parallel" in kinds:
        for size in WINDOWS:
            yield f"windows of {size}", windows_of(dependency, size, saved)
