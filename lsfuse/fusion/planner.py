"""Which spans to fuse, and which choice to make for every block: the paper's rule, and Puzzle's search as a MILP."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import optimize, sparse

from lsfuse.checks import check_arrays
from lsfuse.fusion.surgery import replace_spans
from lsfuse.fusion.tree import Transform
from lsfuse.model.config import ModelConfig


def fusion_spans(
    config: ModelConfig,
    dependency: np.ndarray | None = None,
    threshold: float = 0.1,
    max_width: int | None = None,
    min_members: int = 2,
) -> list[tuple[int, int]]:
    """Spans (first, last), inclusive, by the rule of FFN Fusion (arXiv 2503.18908, sec. 3 and 5): runs of FFNs without
    attention, the last FFN of each run left alone, split so that no wide FFN exceeds `max_width` channels. (`fuse_ffn`
    also takes a first member with attention; the paper's spans have none.)

    dependency: [L, L]; then a span grows only while every pair in it stays at or below `threshold`.
    """
    if dependency is not None:
        blocks = {"L": (config.num_blocks, "the config")}
        check_arrays("fusion_spans", {"dependency": (dependency, "L L", float)}, blocks)
    spans = []
    for first, last in attention_free_runs(config):
        start = first
        for i in range(first, last):  # the run's last FFN stays
            grown = range(start, i + 1)
            width = sum(config.blocks[j].ffn_width for j in grown)
            dependent = dependency is not None and any(dependency[j, i] > threshold for j in grown if j < i)
            if (max_width is not None and width > max_width) or dependent:
                spans.append((start, i - 1))
                start = i
        spans.append((start, last - 1))
    return [(a, b) for a, b in spans if b - a + 1 >= min_members]


def cheapest_run(scores: np.ndarray, count: int) -> tuple[int, ...]:
    """The `count` consecutive blocks whose attentions cost least, by the sum of their `removal_scores` [L], NaN where
    there is none: what the rule fuses lies between them.

    Raises: ValueError if no so many blocks in a row have attention.
    """
    sums = [float(np.sum(scores[i : i + count])) for i in range(len(scores) - count + 1)]
    if not np.isfinite(sums).any():
        raise ValueError(f"cheapest_run: no {count} blocks in a row have attention, of {len(scores)} blocks")
    first = int(np.nanargmin(sums))
    return tuple(range(first, first + count))


def attention_free_runs(config: ModelConfig) -> list[tuple[int, int]]:
    """Longest stretches (first, last), of two blocks or more, without attention and with FFNs of one kind."""
    runs = []
    free = [block.ffn if block.has_ffn and not block.has_mixer else None for block in config.blocks]
    for kind, members in itertools.groupby(range(config.num_blocks), free.__getitem__):
        first, *rest = members
        if kind is not None and rest:
            runs.append((first, rest[-1]))
    return runs


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way of having blocks first … last, inclusive.

    score: what it costs in quality (KL; 0 for the blocks as they are), added over choices. costs: what it uses of each
    limited resource. transform: of the blocks as a model of their own; None leaves them as they are.
    """

    first: int
    last: int
    name: str
    score: float
    costs: Mapping[str, float]
    transform: Transform | None = None


class Infeasible(ValueError):
    """No plan keeps to the limits. limits: those of which each alone, given up, would let one."""

    def __init__(self, message: str, limits: tuple[str, ...]):
        super().__init__(message)
        self.limits = limits


def solve(choices: Sequence[Choice], num_blocks: int, limits: Mapping[str, float]) -> list[Choice]:
    """The choices of least total score that cover every block once and keep to the limits, in order of blocks.

    Source: Puzzle (arXiv 2411.19146), sec. 4.2: a mixed-integer program, here with choices that span several blocks.

    Raises:
        ValueError: a block without choice, scores that are not finite, a limit that no choice has a cost for.
        Infeasible: says which limits bind.
    """
    _check_choices(choices, num_blocks, limits)
    found = _milp(choices, num_blocks, limits)
    if found is not None:
        return _in_order(choices, found)
    binding = tuple(n for n in limits if _milp(choices, num_blocks, {k: v for k, v in limits.items() if k != n}))
    least = {name: _least(choices, num_blocks, name) for name in limits}
    alone = [n for n in limits if least[n] > limits[n]]
    said = "; ".join(f"{n} is limited to {limits[n]:g}, the least possible is {least[n]:g}" for n in limits)
    which = (
        f"{', '.join(alone)} cannot be met even alone"
        if alone
        else f"giving up {' or '.join(binding)} would let one"
        if binding
        else "the limits can be met one by one, but not together"
    )
    raise Infeasible(f"no plan keeps to the limits: {which} ({said})", tuple(alone) or binding or tuple(limits))


def shortlist(
    choices: Sequence[Choice], num_blocks: int, limits: Mapping[str, float], count: int
) -> list[list[Choice]]:
    """The `count` plans of least total score, least first; fewer if there are no more. Scores of choices do not quite
    add up, so the plan to take is the one of these that is best when scored as a whole.

    Raises: as `solve`; ValueError for a count below 1.
    """
    if count < 1:
        raise ValueError(f"shortlist: count must be at least 1, got {count}")
    plans = [solve(choices, num_blocks, limits)]
    places = {id(choice): i for i, choice in enumerate(choices)}
    while len(plans) < count:
        known = [[places[id(choice)] for choice in plan] for plan in plans]
        found = _milp(choices, num_blocks, limits, known=known)
        if found is None:
            break
        plans.append(_in_order(choices, found))
    return plans


def _check_choices(choices: Sequence[Choice], num_blocks: int, limits: Mapping[str, float]) -> None:
    for choice in choices:
        if not (0 <= choice.first <= choice.last < num_blocks) or not np.isfinite(choice.score):
            span = f"{choice.first}-{choice.last}, score {choice.score}"
            raise ValueError(f"choice {choice.name!r} ({span}) is not valid in a model of {num_blocks} blocks")
        if missing := [name for name in limits if name not in choice.costs]:
            raise ValueError(f"choice {choice.name!r} says nothing of {missing[0]!r}, which is limited")
    covered = {i for c in choices for i in range(c.first, c.last + 1)}
    if lacking := sorted(set(range(num_blocks)) - covered):
        raise ValueError(f"block {lacking[0]} has no choice at all")


def _in_order(choices: Sequence[Choice], found: Sequence[int]) -> list[Choice]:
    return sorted((choices[i] for i in found), key=lambda c: c.first)


def _milp(
    choices: Sequence[Choice],
    num_blocks: int,
    limits: Mapping[str, float],
    score: Sequence[float] | None = None,
    known: Sequence[Sequence[int]] = (),
) -> list[int] | None:
    """Indices of the chosen; None if there are none. known: plans, as indices, that are not to be found again."""
    rows = [i for c in choices for i in range(c.first, c.last + 1)]
    columns = [n for n, c in enumerate(choices) for _ in range(c.first, c.last + 1)]
    cover = sparse.csr_array((np.ones(len(rows)), (rows, columns)), shape=(num_blocks, len(choices)))
    constraints = [optimize.LinearConstraint(cover, 1, 1)]
    for name, limit in limits.items():
        # The solver's tolerances are absolute, 1e-6: in units of a millionth of the limit, they are no excess.
        unit = (abs(limit) or 1.0) / 1e6
        costs = np.array([c.costs[name] for c in choices]) / unit
        constraints.append(optimize.LinearConstraint(costs[None], -np.inf, limit / unit))
    for plan in known:  # a plan covers every block once, so one that keeps all of these choices is the same plan
        row = np.zeros(len(choices))
        row[list(plan)] = 1
        constraints.append(optimize.LinearConstraint(row[None], -np.inf, len(plan) - 1))
    objective = np.array([c.score for c in choices] if score is None else score, float)
    objective = objective * (1e4 / (np.abs(objective).max() or 1.0))
    result = optimize.milp(
        objective,
        constraints=constraints,
        integrality=np.ones(len(choices)),
        bounds=(0, 1),
        options={"mip_rel_gap": 0},
    )
    return None if result.x is None else [int(i) for i in np.flatnonzero(result.x > 0.5)]


def _least(choices: Sequence[Choice], num_blocks: int, name: str) -> float:
    chosen = _milp(choices, num_blocks, {}, [c.costs[name] for c in choices])
    assert chosen is not None
    return float(sum(choices[i].costs[name] for i in chosen))


def apply_plan(plan: Sequence[Choice]) -> Transform:
    """The transform that makes every choice of a plan."""
    return replace_spans([(c.first, c.last, c.transform) for c in plan if c.transform is not None])
