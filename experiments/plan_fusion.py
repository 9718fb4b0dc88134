"""Plans that save sequential blocks: Puzzle's search against the paper's rule, on text that no score has seen.

    python -m experiments.plan_fusion --model=../SmolLM2-135M-Instruct --text=../shared/data/wikitext2/valid.txt

Every way of saving up to --saved blocks at one place is scored by KL(parent ‖ child) on a few windows of the text:

    remove      the block is left out
    fuse        n blocks: the first keeps its attention, the others lose theirs, and their FFNs become one
    rule        the paper's: n blocks lose their attention, and all their FFNs but the last become one
    rule+       the same where the first member keeps its attention, which `fusion.fuse_ffn` allows
    parallel    n whole blocks beside each other, attentions kept

The rules save n blocks at one place (each kind, at the best place), or one place after the other (the cheapest a block
saved, until n are; also of removals alone), or remove the attentions of least score one by one until the rule's spans
save n. The planner takes the best of all combinations, `fusion.solve`; of the --shortlist combinations of least summed
score it keeps the one that is best when scored as a whole, on the scored windows and --rescored more: on 256 tokens
alone the order of near plans is chance. Every kind of rule is shown at the place that is best on the *held-out* text
among its three best on the scored one: an advantage that only the rules get. "fused" plans run on one device; "any"
adds parallel blocks, which save depth on several.

Scores are kept in --out as they are found; a run that was interrupted goes on from them.
Writes table.txt, rows.csv, rows.json and plans.png into --out.
"""

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence

import jax
import matplotlib
import numpy as np
from absl import app, flags

from experiments.tables import write_table
from lsfuse import fusion, io
from lsfuse.fusion import Choice, Texts, Transform
from lsfuse.model import ModelConfig
from lsfuse.types import Params

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

FUSED = ("keep", "remove", "fuse", "rule", "rule+")
ANY = (*FUSED, "parallel")
SETS = {"fused": FUSED, "any": ANY}
PLANNER, GREEDY = "planner", "one after the other"
# Rules that need no search over scored spans: the paper's, at the best place or where attention matters least, and
# blocks left out.
PAPERS = (
    "one place: rule",
    "one place: rule+",
    "least attentions, rule",
    "least attentions, rule+",
    "one place: remove",
    "blocks of least score",
)
# Blocks that a kind saves at one place at most: several removals are several choices, and more than three blocks beside
# each other are far from what they were.
MOST = {"remove": 1, "fuse": 4, "rule": 4, "rule+": 4, "parallel": 2}
_TRIED = 3  # places of a rule that the held-out text may choose from

Model = tuple[ModelConfig, Params]


@dataclasses.dataclass(frozen=True)
class Row:
    """One plan. choices: what it was made from, "fused" or "any"; rule: who made it; plan: what it changes; summed: the
    scores of that added up; scored, held_out: KL of the whole plan, nats a token, on the scored and on the held-out
    text."""

    choices: str
    saved: int
    rule: str
    plan: str
    summed: float
    scored: float
    held_out: float


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


def score(model: Model, choices: Sequence[Choice], texts: Texts, folder: pathlib.Path, progress: bool) -> list[Choice]:
    """The same choices with the KL of each alone."""
    given = [c for c in choices if c.transform is not None]
    spans = [(c.first, c.last, c.transform) for c in given]
    kl = iter(fusion.replacement_scores(*model, texts, spans, progress=progress, name="choices", folder=folder))
    return [c if c.transform is None else dataclasses.replace(c, score=float(next(kl))) for c in choices]


def saved_by(plan: Sequence[Choice]) -> int:
    return sum(c.last - c.first + 1 - int(c.costs["blocks"]) for c in plan)


def spell(plan: Sequence[Choice]) -> str:
    return ", ".join(f"{c.name} {c.first}" + (f"-{c.last}" if c.last > c.first else "") for c in plan if c.transform)


# --- rules and the planner --------------------------------------------------------------------------------------------


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
    choices: Sequence[Choice], config: ModelConfig, removal: np.ndarray, saved: int, kinds: Sequence[str]
) -> Iterator[tuple[str, list[Choice]]]:
    """(rule, plan) of every rule that can save so many."""
    for kind in kinds:
        for plan in one_place(choices, kind, saved):
            yield f"one place: {kind}", plan
    yield "blocks of least score", one_after_the_other(choices, ("remove",), saved)
    yield GREEDY, one_after_the_other(choices, kinds, saved)
    yield "least attentions, rule", least_attentions(config, removal, saved, keep_first=False)
    yield "least attentions, rule+", least_attentions(config, removal, saved, keep_first=True)


def compare(
    model: Model,
    choices: Sequence[Choice],
    removal: np.ndarray,
    texts: Mapping[str, Texts],
    saved: Sequence[int],
    count: int,
    progress: bool,
) -> list[Row]:
    """Every rule and the planner, at every number of blocks saved, with parallel blocks and without."""
    config = model[0]
    found: list[tuple[str, int, str, list[Choice]]] = []
    for (name, kinds), n in itertools.product(SETS.items(), saved):
        allowed = [c for c in choices if c.name in kinds]
        for rule, plan in rule_plans(allowed, config, removal, n, kinds[1:]):
            if plan:
                found.append((name, n, rule, plan))
        limits = {"blocks": float(config.num_blocks - n)}
        found += [(name, n, PLANNER, plan) for plan in fusion.shortlist(allowed, config.num_blocks, limits, count)]
    alone = {(c.name, c.first, c.last): c.score for c in choices}
    summed = {spell(plan): sum(alone.get((c.name, c.first, c.last), np.nan) for c in plan) for *_, plan in found}
    single = {spell(plan) for *_, plan in found if sum(c.transform is not None for c in plan) == 1}
    several = {spell(plan): plan for *_, plan in found if spell(plan) not in single}
    scored = {name: summed[name] for name in single} | _kl_of(model, texts["scored"], several, progress)
    listed = {spell(plan): plan for *_, rule, plan in found if rule == PLANNER}
    again = _kl_of(model, texts["rescored"], listed, progress)
    weight = texts["rescored"].num_tokens / (texts["scored"].num_tokens + texts["rescored"].num_tokens)
    joint = {name: (1 - weight) * scored[name] + weight * again[name] for name in listed}
    # The planner's pick: best as a whole on both texts.
    picks: dict[tuple[str, int], list[Choice]] = {}
    for name, n, rule, plan in found:
        best = picks.get((name, n))
        if rule == PLANNER and (best is None or joint[spell(plan)] < joint[spell(best)]):
            picks[name, n] = plan
    kept = [f for f in found if f[2] != PLANNER] + [(*key, PLANNER, plan) for key, plan in picks.items()]
    held_out = _kl_of(model, texts["held_out"], {spell(plan): plan for *_, plan in kept}, progress)
    rows = [
        Row(name, n, rule, spell(plan), summed[spell(plan)], scored[spell(plan)], held_out[spell(plan)])
        for name, n, rule, plan in kept
    ]
    return sorted(rows, key=lambda r: (r.choices, r.saved, r.rule != PLANNER, r.held_out))


def _kl_of(model: Model, texts: Texts, plans: Mapping[str, list[Choice]], progress: bool) -> dict[str, float]:
    return dict(zip(plans, fusion.plan_scores(*model, texts, list(plans.values()), progress=progress), strict=True))


# --- what is left of it -----------------------------------------------------------------------------------------------


def best_rules(rows: Sequence[Row]) -> list[Row]:
    """The planner's row and, of each rule, the plan that is best on the held-out text."""
    best: dict[tuple[str, int, str], Row] = {}
    for r in rows:
        best.setdefault((r.choices, r.saved, r.rule), r)  # in order of held_out
    return list(best.values())


def verdicts(rows: Sequence[Row]) -> list[str]:
    """The planner against the best of the paper's rules, and against the greedy search over the same choices."""
    lines = []
    for key in sorted({(r.choices, r.saved) for r in rows}):
        own = [r for r in rows if (r.choices, r.saved) == key]
        planner = next(r for r in own if r.rule == PLANNER)
        for of, rules in (("best rule", PAPERS), ("greedy search", (GREEDY,))):
            others = [r for r in own if r.rule in rules]
            if others:
                other = min(others, key=lambda r: r.held_out)
                same = set(planner.plan.split(", ")) == set(other.plan.split(", "))
                lines.append(
                    f"{key[0]}, {key[1]} saved: KL {planner.held_out:.4f} planned, {other.held_out:.4f} by the {of}"
                    f" ({'the same plan' if same else other.plan})"
                )
    return lines


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'choices':<8}{'saved':>5}  {'rule':<24}{'summed':>8}{'scored':>8}{'held out':>9}  plan"]
    for r in best_rules(rows):
        lines.append(
            f"{r.choices:<8}{r.saved:>5}  {r.rule:<24}{r.summed:>8.4f}{r.scored:>8.4f}{r.held_out:>9.4f}  {r.plan}"
        )
    return "\n".join([*lines, "", *verdicts(rows)])


def save(out: pathlib.Path, rows: Sequence[Row], text: str, setting: Mapping[str, object]) -> None:
    write_table(out, text, [dataclasses.asdict(r) for r in rows], setting)
    figure, axes = plt.subplots(1, len(SETS), figsize=(9, 3.6), layout="constrained", sharey=True)
    shown = best_rules(rows)
    for axis, name in zip(axes, SETS, strict=True):
        for rule in dict.fromkeys(r.rule for r in shown if r.choices == name):
            own = [r for r in shown if r.choices == name and r.rule == rule]
            style = "k*-" if rule == PLANNER else "o--"
            axis.plot([r.saved for r in own], [r.held_out for r in own], style, label=rule)
        axis.set(xlabel="sequential blocks saved", title=name, yscale="log")
        axis.legend(fontsize="x-small")
    axes[0].set_ylabel("KL on held-out text, nats a token")
    figure.savefig(out / "plans.png", dpi=130)


def main(argv: list[str]) -> None:
    del argv
    given, out = flags.FLAGS, pathlib.Path(flags.FLAGS.out)
    try:
        saved = [int(n) for n in given.saved]
        config, params = model = io.load_hf(given.model, "float32")
        tokenizer = io.Tokenizer.load(given.model)
        text = pathlib.Path(given.text).read_text(encoding="utf-8")
        parts = {"scored": text[given.scored_from :], "held_out": text[given.held_out_from : given.scored_from]}
        counts = {"scored": given.scored + given.rescored, "held_out": given.held_out}
        texts = {
            # Ten characters a token are more than enough, and encoding all of it takes longer.
            name: fusion.windows(part[: 10 * given.window * counts[name]], tokenizer, given.window, counts[name])
            for name, part in parts.items()
        }
        both, n = texts["scored"], given.scored
        texts["scored"] = fusion.Texts(both.ids[:n], both.lengths[:n])
        texts["rescored"] = fusion.Texts(both.ids[n:], both.lengths[n:])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    scoring = texts["scored"]
    choices = make_choices(config.num_blocks, saved)
    choices = score(model, choices, scoring, out / "scores", progress=True)
    removal = fusion.removal_scores(config, params, scoring, progress=True, folder=out / "scores")
    rows = compare(model, choices, removal, texts, saved, given.shortlist, progress=True)
    text = table(rows)
    print(text)
    names = ("model", "saved", "window", "scored", "rescored", "held_out", "scored_from", "held_out_from", "shortlist")
    save(out, rows, text, {name: given[name].value for name in names} | {"jax": jax.__version__})
    print(f"written to {out}")


def define_flags() -> None:
    """Only where this is the program."""
    flags.DEFINE_string("model", None, "Checkpoint folder.", required=True)
    flags.DEFINE_string("text", None, "Text file.", required=True)
    flags.DEFINE_list("saved", ["1", "2", "4"], "Sequential blocks to save.")
    flags.DEFINE_integer("window", 256, "Tokens of a window.", lower_bound=2)
    flags.DEFINE_integer("scored", 2, "Windows that choices are scored on.", lower_bound=1)
    flags.DEFINE_integer("rescored", 4, "More windows that the planner's shortlist is scored on.", lower_bound=1)
    flags.DEFINE_integer("held_out", 4, "Windows that plans are compared on.", lower_bound=1)
    flags.DEFINE_integer("held_out_from", 2_000, "First character of the held-out windows.", lower_bound=0)
    flags.DEFINE_integer("scored_from", 60_000, "First character of the scored windows.", lower_bound=1)
    flags.DEFINE_integer("shortlist", 5, "Combinations that are scored as a whole.", lower_bound=1)
    flags.DEFINE_string("out", "runs/plan_fusion", "Folder for the results.")


if __name__ == "__main__":
    define_flags()
    app.run(main)
