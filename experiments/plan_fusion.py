"""Plans that save sequential blocks: Puzzle's search against the paper's rule, on text that no score has seen.

    python -m experiments.plan_fusion --model=../SmolLM2-135M-Instruct --text=../shared/data/wikitext2/valid.txt

Every way of saving as many blocks as one of --saved's numbers at one place is scored by KL(parent ‖ child) on a few
windows of the text:

    remove      the block is left out
    fuse        n blocks: the first keeps its attention, the others lose theirs, and their FFNs become one
    rule        the paper's: n blocks lose their attention, and all their FFNs but the last become one
    rule+       the same where the first member keeps its attention, which `fusion.fuse_ffn` allows
    parallel    n whole blocks beside each other, attentions kept

The rules save n blocks at one place (each kind, at the best place), or one place after the other (the cheapest a block
saved, until n are; also of removals alone), remove the attentions of least score one by one until the rule's spans
save n, remove those in a row that cost least in sum and fuse between them (`fusion.cheapest_run`), or take windows of
whole blocks by their dependencies (`fusion.block_windows`). The planner's candidates are the --shortlist combinations
of least summed score, `fusion.shortlist`, and the rules' plans, since sums only estimate what a plan costs. Of the
--shortlist candidates that are best as a whole on the scored windows it takes the one that is best on these and
--rescored more: on few tokens the order of near plans is chance. Every kind of rule is shown at the place that is best
on the *held-out* text among its three best on the scored one: an advantage that only the rules get. "fused" plans run
on one device; "any" adds parallel blocks, which save depth on several.

The scores of single choices and of attentions, and dependencies, are kept in --out as they are found, and a run that
was interrupted goes on from them; whole plans, on the scored, the further and the held-out windows, are scored anew.
Writes table.txt, rows.csv, rows.json and plans.png into --out.
"""

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Mapping, Sequence

import jax
import matplotlib
import numpy as np
from absl import app, flags

from experiments.plan_rules import (
    GREEDY,
    PAPERS,
    PLANNER,
    SETS,
    check_saved,
    make_choices,
    rule_plans,
    spell,
)
from experiments.tables import check_out, whole_numbers, write_table
from lsfuse import fusion, io
from lsfuse.fusion import Choice, Texts
from lsfuse.model import ModelConfig
from lsfuse.types import Params

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

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


# --- the planner and the rules ----------------------------------------------------------------------------------------


def score(model: Model, choices: Sequence[Choice], texts: Texts, folder: pathlib.Path, progress: bool) -> list[Choice]:
    """The same choices with the KL of each alone."""
    given = [c for c in choices if c.transform is not None]
    spans = [(c.first, c.last, c.transform) for c in given]
    kl = iter(fusion.replacement_scores(*model, texts, spans, progress=progress, name="choices", folder=folder))
    return [c if c.transform is None else dataclasses.replace(c, score=float(next(kl))) for c in choices]


def compare(
    model: Model,
    choices: Sequence[Choice],
    removal: np.ndarray,
    dependency: np.ndarray,
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
        for rule, plan in rule_plans(allowed, config, removal, dependency, n, kinds[1:]):
            if plan:
                found.append((name, n, rule, plan))
        limits = {"blocks": float(config.num_blocks - n)}
        found += [(name, n, PLANNER, plan) for plan in fusion.shortlist(allowed, config.num_blocks, limits, count)]
    alone = {(c.name, c.first, c.last): c.score for c in choices}
    summed = {spell(plan): sum(alone.get((c.name, c.first, c.last), np.nan) for c in plan) for *_, plan in found}
    single = {name for name, score in summed.items() if "," not in name and np.isfinite(score)}  # one choice, scored
    several = {spell(plan): plan for *_, plan in found if spell(plan) not in single}
    scored = {name: summed[name] for name in single} | _kl_of(model, texts["scored"], several, progress)
    candidates: dict[tuple[str, int], dict[str, list[Choice]]] = {}
    for name, n, _, plan in found:
        candidates.setdefault((name, n), {})[spell(plan)] = plan
    listed = {key: sorted(plans, key=scored.__getitem__)[:count] for key, plans in candidates.items()}
    every = {name: plan for key, plans in candidates.items() for name, plan in plans.items() if name in listed[key]}
    again = _kl_of(model, texts["rescored"], every, progress)
    weight = texts["rescored"].num_tokens / (texts["scored"].num_tokens + texts["rescored"].num_tokens)
    joint = {name: (1 - weight) * scored[name] + weight * again[name] for name in every}
    picks = {key: candidates[key][min(names, key=joint.__getitem__)] for key, names in listed.items()}
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
    write_table(out, text, [dataclasses.asdict(r) for r in rows], setting, {"plans.png": figure})


def _windows(name: str, text: str, tokenizer: io.Tokenizer, window: int, count: int) -> Texts:
    """Raises ValueError, naming the flag, for a text that is too short."""
    try:
        # Ten characters a token are more than enough, and encoding all of it takes longer.
        return fusion.windows(text[: 10 * window * count], tokenizer, window, count)
    except ValueError as error:
        raise ValueError(f"--{name}_from: of the characters from there on, {error}") from None


def main(argv: list[str]) -> None:
    del argv
    given = flags.FLAGS
    try:
        out = check_out(given.out)
        saved = whole_numbers("saved", given.saved)
        config = io.check_hf(given.model)
        choices = make_choices(config.num_blocks, saved)
        check_saved(choices, config.num_blocks, saved)
        if given.window > config.max_position_embeddings:
            raise ValueError(f"--window={given.window} exceeds the model's {config.max_position_embeddings} positions")
        config, params = model = io.load_hf(given.model, "float32")
        tokenizer = io.Tokenizer.load(given.model)
        text = pathlib.Path(given.text).read_text(encoding="utf-8")
        parts = {"scored": text[given.scored_from :], "held_out": text[given.held_out_from : given.scored_from]}
        counts = {"scored": given.scored + given.rescored, "held_out": given.held_out}
        texts = {name: _windows(name, part, tokenizer, given.window, counts[name]) for name, part in parts.items()}
        both, n = texts["scored"], given.scored
        texts["scored"] = fusion.Texts(both.ids[:n], both.lengths[:n])
        texts["rescored"] = fusion.Texts(both.ids[n:], both.lengths[n:])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    scoring = texts["scored"]
    choices = score(model, choices, scoring, out / "scores", progress=True)
    removal = fusion.removal_scores(config, params, scoring, progress=True, folder=out / "scores")
    dependency = fusion.dependency(config, params, scoring, progress=True, folder=out / "scores").mean
    rows = compare(model, choices, removal, dependency, texts, saved, given.shortlist, progress=True)
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
