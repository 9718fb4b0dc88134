"""Which spans to fuse, and which choice to make for every block: the paper's rule, and Puzzle's search as a MILP."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from scipy import optimize, sparse

from lsfuse.checks import check_arrays
from lsfuse.fusion.surgery import replace_spans
from lsfuse.fusion.tree import Transform
from lsfuse.model.config import ModelConfig
from lsfuse.types import Params


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

    dependency: [L, L]; then every pair in a span stays at or below `threshold`. Of a run that does not as a whole, the
        longest stretch that does is taken first, then the longest of what is left on either side; of equally long ones
        the one whose largest dependency is least.

    Raises: ValueError for a dependency of another shape, or a pair of a run that it does not know (NaN).
    """
    if dependency is not None:
        blocks = {"L": (config.num_blocks, "the config")}
        check_arrays("fusion_spans", {"dependency": (dependency, "L L", float)}, blocks)
    if not np.isfinite(threshold):
        raise ValueError(f"fusion_spans: threshold must be a finite number, got {threshold}")
    spans: list[tuple[int, int]] = []
    for first, last in attention_free_runs(config):
        stretches = [(first, last - 1)]  # the run's last FFN stays
        if dependency is not None:
            _check_known("fusion_spans", dependency, first, last - 1)
            stretches = _longest_first(np.triu(dependency, 1), threshold, first, last - 1)
        for a, b in stretches:
            spans += _split([block.ffn_width for block in config.blocks[a : b + 1]], a, max_width)
    return [(a, b) for a, b in spans if b - a + 1 >= min_members]


def _check_known(where: str, dependency: np.ndarray, first: int, last: int) -> None:
    """Raises ValueError for a pair of blocks first … last whose dependency is not finite: no comparison holds."""
    for i, j in itertools.combinations(range(first, last + 1), 2):
        if not np.isfinite(dependency[i, j]):
            raise ValueError(
                f"{where}: the dependency of block {j} on block {i} is {dependency[i, j]}; it was not computed, or the"
                " model overflows: compute it for these blocks, in float32 or wider"
            )


def _longest_first(upper: np.ndarray, threshold: float, first: int, last: int) -> list[tuple[int, int]]:
    """Blocks first … last as stretches of which no pair exceeds the threshold, in order; upper: [L, L], 0 elsewhere."""
    largest = {(a, b): upper[a : b + 1, a : b + 1].max() for a in range(first, last + 1) for b in range(a, last + 1)}
    fitting = [span for span, value in largest.items() if span[0] == span[1] or value <= threshold]
    if not fitting:
        return []
    a, b = max(fitting, key=lambda span: (span[1] - span[0], -largest[span]))
    before, after = _longest_first(upper, threshold, first, a - 1), _longest_first(upper, threshold, b + 1, last)
    return [*before, (a, b), *after]


def _split(widths: Sequence[int], first: int, max_width: int | None) -> Iterator[tuple[int, int]]:
    """FFNs from block `first` on, of these widths, from left to right in spans as wide as `max_width` allows."""
    start, total = first, 0
    for i, width in enumerate(widths, start=first):
        if max_width is not None and i > start and total + width > max_width:
            yield start, i - 1
            start, total = i, 0
        total += width
    yield start, first + len(widths) - 1


def block_windows(dependency: np.ndarray, count: int, size: int = 4) -> list[tuple[int, int]]:
    """`count` spans (first, last), inclusive, of `size` whole blocks each, for `parallel_blocks`, in order.

    Source: FFN Fusion (arXiv 2503.18908, sec. 6): of all windows the one whose largest dependency is least is taken, of
    equal ones that of the least sum, then the next of those that it leaves whole.

    dependency: [L, L] of whole blocks, entry (i, j) for i < j, as `dependency` computes it of the parent.

    Raises: ValueError for a window of fewer than two blocks or more than there are, a count that does not fit, a pair
        within `size` blocks of each other that is not finite.
    """
    check_arrays("block_windows", {"dependency": (dependency, "L L", float)})
    blocks = len(dependency)
    if not 2 <= size <= blocks:
        raise ValueError(f"block_windows: size must be 2 to the {blocks} blocks of the dependency, got {size}")
    if count < 1:
        raise ValueError(f"block_windows: count must be at least 1, got {count}")
    free = list(range(blocks - size + 1))  # first blocks of windows
    for first in free:
        _check_known("block_windows", dependency, first, first + size - 1)
    upper = np.triu(dependency, 1)

    def cost(first: int) -> tuple[float, float]:
        inside = upper[first : first + size, first : first + size]
        return float(inside.max()), float(inside.sum())

    taken: list[int] = []
    while len(taken) < count:
        if not free:
            raise ValueError(
                f"block_windows: {len(taken)} windows of {size} blocks leave no room for another among {blocks};"
                f" {count} are asked for"
            )
        best = min(free, key=cost)
        taken.append(best)
        free = [first for first in free if abs(first - best) >= size]
    return [(first, first + size - 1) for first in sorted(taken)]


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


class Plan(list[Choice]):
    """Choices that cover every block of a model of `num_blocks` blocks once, in order of blocks."""

    def __init__(self, choices: Iterable[Choice], num_blocks: int):
        super().__init__(choices)
        self.num_blocks = num_blocks


class Infeasible(ValueError):
    """No plan keeps to the limits. limits: those of which each alone, given up, would let one."""

    def __init__(self, message: str, limits: tuple[str, ...]):
        super().__init__(message)
        self.limits = limits


def solve(choices: Sequence[Choice], num_blocks: int, limits: Mapping[str, float]) -> Plan:
    """The choices of least total score that cover every block once and keep to the limits, in order of blocks.

    Source: Puzzle (arXiv 2411.19146), sec. 4.2: a mixed-integer program, here with choices that span several blocks.

    Raises:
        ValueError: a block without choice, scores, costs or limits that are not finite, a limit that a choice has no
            cost for.
        Infeasible: says which limits bind.
    """
    _check_choices(choices, num_blocks, limits)
    found = _milp(choices, num_blocks, limits)
    if found is not None:
        return _in_order(choices, found, num_blocks)
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
) -> list[Plan]:
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
        plans.append(_in_order(choices, found, num_blocks))
    return plans


def _check_choices(choices: Sequence[Choice], num_blocks: int, limits: Mapping[str, float]) -> None:
    for name, limit in limits.items():
        if not np.isfinite(limit):
            raise ValueError(f"the limit of {name!r} is {limit}; it must be a finite number, or be left out")
    for choice in choices:
        if not (0 <= choice.first <= choice.last < num_blocks) or not np.isfinite(choice.score):
            span = f"{choice.first}-{choice.last}, score {choice.score}"
            raise ValueError(f"choice {choice.name!r} ({span}) is not valid in a model of {num_blocks} blocks")
        for name in limits:
            if name not in choice.costs:
                raise ValueError(f"choice {choice.name!r} says nothing of {name!r}, which is limited")
            if not np.isfinite(choice.costs[name]):
                span, cost = f"{choice.first}-{choice.last}", choice.costs[name]
                raise ValueError(f"choice {choice.name!r} ({span}) costs {cost} of {name!r}, which is limited")
    covered = {i for c in choices for i in range(c.first, c.last + 1)}
    if lacking := sorted(set(range(num_blocks)) - covered):
        raise ValueError(f"block {lacking[0]} has no choice at all")


def _in_order(choices: Sequence[Choice], found: Sequence[int], num_blocks: int) -> Plan:
    return Plan(sorted((choices[i] for i in found), key=lambda c: c.first), num_blocks)


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
    """The transform that makes every choice of a plan; blocks that none names stay as they are.

    Raises: ValueError as `check_plan` and `replace_spans`.
    """

    def apply(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        check_plan("apply_plan", plan, config)
        return replace_spans([(c.first, c.last, c.transform) for c in plan if c.transform is not None])(config, params)

    return apply


def check_plan(where: str, plan: Sequence[Choice], config: ModelConfig) -> None:
    """Raises ValueError for a plan of a model of another number of blocks: one of `solve`, which knows it, or one that
    names blocks to keep, as a plan of some changes does not, and so covers a whole model."""
    covered = max((c.last + 1 for c in plan if c.transform is None), default=None)
    blocks = plan.num_blocks if isinstance(plan, Plan) else covered and max(c.last + 1 for c in plan)
    if blocks is not None and blocks != config.num_blocks:
        raise ValueError(f"{where}: the plan is of a model of {blocks} blocks, this one has {config.num_blocks}")
