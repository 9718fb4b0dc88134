"""experiments.bench_fusion and experiments.plan_fusion on models of a few blocks."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import random_params, tiny

from experiments import bench_fusion as bench
from experiments import describe
from experiments import plan_fusion as planning
from experiments import plan_rules as rules
from lsfuse import fusion, io
from lsfuse.model import uniform_blocks, unstack_blocks
from lsfuse.train import fuse_time as timing


def test_spans_as_written():
    assert bench.parse_spans("fuse", "6-8, 12") == [(6, 8), (12, 12)]
    for bad in ("", "6-", "-8", "6..8", "8-6"):
        with pytest.raises(ValueError, match=f"--fuse={bad}: spans are written 6-8"):
            bench.parse_spans("fuse", bad)


def test_the_model_must_have_the_positions():
    config = tiny(max_position_embeddings=32)
    bench.check_positions(config, 24, 8)
    with pytest.raises(ValueError, match="--context=25 and --steps=8: 33 tokens exceed the model's 32 positions"):
        bench.check_positions(config, 25, 8)


def test_more_blocks_than_can_be_saved_are_refused():
    for saved, good in (((1, 2), True), ((1, 8), True), ((1, 9), False), ((3,), True), ((5,), False), ((4, 6), False)):
        choices = rules.make_choices(8, saved)
        if good:
            rules.check_saved(choices, 8, saved)
            continue
        with pytest.raises(
            ValueError, match=f"--saved=.* of 8 blocks at most together .*, not {max(saved)}; name less"
        ):
            rules.check_saved(choices, 8, saved)
        limits = {"blocks": 8.0 - max(saved)}
        with pytest.raises(fusion.Infeasible):
            fusion.solve([dataclasses.replace(c, score=0.0) for c in choices if c.name != "parallel"], 8, limits)


GIVEN = {
    bench: {"model": None, "fuse": "1-2", "remove_attention": "1-3", "batches": ["1"], "context": 8, "steps": 8}
    | {"dtype": "float32", "out": "out"},
    planning: {"model": "{model}", "text": "none", "saved": ["1"], "window": 8, "out": "out"},
    describe: {"model": "{model}", "table": None, "devices": 1, "tensor_parallel": 1, "dtype": "float32", "out": None},
}


@pytest.mark.parametrize(
    "module, change, said",
    [
        (bench, {"batches": ["0"]}, "--batches=0: '0' is no whole number from 1"),
        (bench, {"batches": []}, "--batches is empty"),
        (bench, {"context": 8190}, "--context=8190 and --steps=8: 8198 tokens exceed the model's 8192 positions"),
        (bench, {"fuse": "8-6"}, "--fuse=8-6: spans are written 6-8"),
        (bench, {"model": "{model}", "fuse": "1-4"}, "fuse_ffn: .*block 4 has attention"),
        (planning, {"saved": ["x"]}, "--saved=x: 'x' is no whole number"),
        (planning, {"window": 33}, "--window=33 exceeds the model's 32"),
        (planning, {"saved": ["4", "9"]}, "--saved=4,9: choices that save 4,9 at one place save 4 of 5 blocks at most"),
        (describe, {"model": "{bad}", "table": "heads"}, 'heads: "config" needs "num_attention_heads"'),
        (describe, {"model": "{bad}", "table": "blocks"}, "blocks: block 0 must be .* got 3"),
        *((module, {"out": "{file}"}, "--out=.* is a file") for module in GIVEN),
    ],
)
def test_mistakes_are_refused_in_one_line(module, change, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tiny(blocks=uniform_blocks(5, 2, 24), max_position_embeddings=32)
    io.save_hf(tmp_path / "model", config, random_params(config, dtype=np.float32))
    (tmp_path / "file").write_text("")
    blocks = {"config": {"num_attention_heads": 2}, "blocks": [3]}
    (tmp_path / "bad").write_text(json.dumps({"heads": {"config": {}, "blocks": []}, "blocks": blocks}))
    given = {
        k: v.format(model="model", file="file", bad="bad") if isinstance(v, str) else v
        for k, v in {**GIVEN[module], **change}.items()
    }
    monkeypatch.setattr(module.flags, "FLAGS", types.SimpleNamespace(**given))
    with pytest.raises(SystemExit) as error:
        module.main([])
    message = str(error.value)
    assert message.startswith("error: ") and "\n" not in message and re.search(said, message), message
    assert not (tmp_path / "out").exists()


def test_the_copies_and_what_they_ask_for():
    """Bytes are those of the leaves, FLOPs two a weight and token; fused and sequential ask for the same."""
    config = tiny(blocks=uniform_blocks(5, 2, 24), tie_word_embeddings=True)
    parent = config, random_params(config, dtype=np.float32)
    models = bench.make_models(parent, range(1, 4), [(1, 2)])
    wide = bench.copies_of(models["fused"], 1, 1, 3)
    assert [b.ffn_width for b in wide[0].blocks] == [48, 48, 48] and not wide[0].blocks[0].has_attention
    none = bench.without_blocks(models["sequential"])
    assert not (none[0].blocks[0].has_ffn or none[0].blocks[0].has_mixer)
    head = 2 * 16 * 23
    assert timing.work(none, "decode", 8, 2, 3) == (4 * (16 * 23 + 16), 2 * head)
    for phase, tokens in (("decode", 1), ("prefill", 8)):
        (nbytes, flops), (other, same) = (timing.work(models[n], phase, 8, 2, 3) for n in ("fused", "sequential"))
        assert flops == same and other - nbytes == 4 * 16  # one norm less
        empty, span = timing.work(none, phase, 8, 2, 3), timing.work(wide, phase, 8, 2, 3)
        assert span[1] - empty[1] == 3 * 2 * tokens * 2 * (3 * 16 * 48)
    # Keys and values of 7 positions before the first step and 2 more on average, of 2 blocks fewer than the parent's 5.
    (parent_bytes, _), (sequential_bytes, _) = (
        timing.work(models[n], "decode", 8, 2, 3) for n in ("parent", "sequential")
    )
    attention = 3 * 4 * (16 * 16 * 2 + 16 * 8 * 2 + 16)
    assert parent_bytes - sequential_bytes == attention + 3 * 2 * 9 * 2 * 2 * 4 * 4


def test_spans_are_what_is_left_of_their_copies():
    seconds = {name: np.array([2.0, 3.0]) for name in (*bench.WHOLE, timing.AGAIN)}
    seconds |= {f"{name} 1-2": np.array([5.0, 4.0]) for name in bench.WHOLE} | {bench.NO_BLOCKS: np.array([1.0, 2.0])}
    seconds["fused"] = np.array([1.0, 3.0])
    works = {name: (4e9, 1e9) for name in (*bench.WHOLE, *(f"{n} 1-2" for n in bench.WHOLE))}
    works[bench.NO_BLOCKS] = (2e9, 0.5e9)
    rates = {"read": 2e9, "copy": 1e9, "matmul": 1e9}
    blocks = {name: 4 for name in works}
    rows, ratios = bench.all_rows(seconds, works, rates, blocks, ["1-2"], "decode", 1, 2)
    whole, span = rows[0], rows[3]
    assert (whole.seconds, whole.roofline_seconds, whole.reached, whole.bound) == (2.0, 2.0, 1.0, "bytes")
    assert (span.what, span.seconds, span.roofline_seconds, span.bytes, span.in_turn) == ("1-2", 1.0, 0.5, 1e9, 2)
    fused = next(q for q in ratios if (q.what, q.model) == ("whole", "fused"))
    assert (fused.median, fused.least, fused.most, fused.roofline) == (0.75, 0.5, 1.0, 1.0)
    said = bench.reasons(rows, ratios, "cpu").replace("\n", " ")
    assert "decode at batch 1, whole: fused / sequential 0.750 (0.500-1.000)" in said and "more than noise" in said
    assert "moves 4,000.0 MB, the sequential one 4,000.0" in said and "a ratio of 1.000 is what that allows" in said


def test_every_span_has_its_place_in_every_model():
    config = tiny(blocks=uniform_blocks(7, 2, 24))
    spans, removed = [(1, 2), (4, 5)], (1, 2, 4, 5)
    wholes = bench.make_models((config, random_params(config, dtype=np.float32)), removed, spans)
    subjects = bench.make_subjects(wholes, spans, 2)
    assert len(subjects) == 3 + 2 * 3 + 1
    for span in ("1-2", "4-5"):
        assert [b.ffn_width for b in subjects[f"fused {span}"][0].blocks] == [48, 48]
        assert [b.ffn_width for b in subjects[f"sequential {span}"][0].blocks] == [24] * 4
    wide = unstack_blocks(*wholes["fused"])[3]
    np.testing.assert_array_equal(unstack_blocks(*subjects["fused 4-5"])[0]["gate_proj"], wide["gate_proj"])
    assert [timing.in_turn(model[0]) for model in wholes.values()] == [7, 7, 5]


def scored(num_blocks):
    rng = np.random.default_rng(0)
    choices = rules.make_choices(num_blocks, (1, 2))
    return [c if c.transform is None else dataclasses.replace(c, score=float(rng.random())) for c in choices]


def test_rules_save_what_they_are_asked_to():
    choices, config = scored(8), tiny(blocks=uniform_blocks(8, 2, 24))
    removal = np.arange(8.0)[::-1]  # the last block's attention matters least
    dependency = np.triu(np.ones((8, 8)), 1)
    dependency[2, 3] = dependency[4, 5] = 0.1
    for saved in (1, 2):
        plans = dict(rules.rule_plans(choices, config, removal, dependency, saved, rules.ANY[1:]))
        assert {rules.saved_by(plan) for plan in plans.values() if plan} == {saved}
        for plan in plans.values():
            fusion.dry_run(fusion.apply_plan(plan), config)  # none overlaps, all can be done
    assert rules.spell(plans["least attentions, rule"]) == "rule 4-7"
    assert rules.spell(plans["least attentions, rule+"]) == "rule+ 4-7"
    assert rules.spell(plans["cheapest attentions in a row"]) == "rule 4-7"
    assert rules.spell(plans["windows of 2"]) == "parallel 2-3, parallel 4-5"
    assert rules.spell(plans["windows of 3"]) == "parallel 1-3" and not plans["windows of 4"]
    assert rules.windows_of(dependency, 2, 5) == rules.cheapest_in_a_row(removal[:3], 2) == []
    best = min((c for c in choices if c.name == "fuse" and c.last - c.first == 2), key=lambda c: c.score)
    assert rules.one_place(choices, "fuse", 2)[0] == [best]


@pytest.mark.slow
def test_the_planner_is_compared_with_the_rules():
    config = tiny(blocks=uniform_blocks(5, 2, 24))
    model = config, jax.tree.map(jnp.asarray, random_params(config, dtype=np.float32))
    ids = np.random.default_rng(1).integers(0, 23, (3, 1, 12), dtype=np.int32)
    texts = {
        name: fusion.Texts(x, np.full(1, 12, np.int32))
        for name, x in zip(("scored", "rescored", "held_out"), ids, strict=True)
    }
    choices = rules.make_choices(5, (1, 2))
    given = [(c.first, c.last, c.transform) for c in choices if c.transform is not None]
    kl = iter(fusion.replacement_scores(*model, texts["scored"], given))
    choices = [c if c.transform is None else dataclasses.replace(c, score=float(next(kl))) for c in choices]
    removal = fusion.removal_scores(*model, texts["scored"])
    dependency = fusion.dependency(*model, texts["scored"]).mean
    rows = planning.compare(model, choices, removal, dependency, texts, (1, 2), 3, progress=False)
    for name in rules.SETS:
        for saved in (1, 2):
            own = [r for r in rows if (r.choices, r.saved) == (name, saved)]
            planner = next(r for r in own if r.rule == rules.PLANNER)
            allowed = [c for c in choices if c.name in rules.SETS[name]]
            listed = fusion.shortlist(allowed, 5, {"blocks": 5.0 - saved}, 3)
            by_rule = {r.plan: r.scored for r in own if r is not planner}
            assert planner.plan in {rules.spell(plan) for plan in listed} | set(by_rule)
            assert sum(scored < planner.scored for scored in by_rule.values()) < 3  # one of the three best as a whole
            assert len(own) > 4 and np.isfinite([(r.scored, r.held_out) for r in own]).all()
    assert len(planning.verdicts(rows)) == 8 and "planned" in planning.table(rows)


@pytest.mark.slow
def test_the_benchmark_runs(repo_root, tmp_path):
    config = tiny(blocks=uniform_blocks(4, 2, 24))
    io.save_hf(tmp_path / "model", config, random_params(config, dtype=np.float32))
    sizes = ["--context=8", "--steps=2", "--batches=2", "--repeats=2", "--copies=2"]
    surgery = ["--remove_attention=1-3", "--fuse=0-1,2-3"]
    out = tmp_path / "out"
    command = [sys.executable, "-m", "experiments.bench_fusion", f"--model={tmp_path / 'model'}", f"--out={out}"]
    done = subprocess.run([*command, *sizes, *surgery], cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {pathlib.Path(p).name for p in out.iterdir()} == {"table.txt", "rows.csv", "rows.json", "bench.png"}
    found = json.loads((out / "rows.json").read_text())
    assert {(r["phase"], r["what"], r["model"]) for r in found["rows"]} == {
        (phase, what, model)
        for phase in bench.PHASES
        for what in ("whole", "0-1", "2-3")
        for model in bench.WHOLE
    }
    assert {q["model"] for q in found["setting"]["ratios"]} == {"parent", "fused", timing.AGAIN}
    assert "decode at batch 2, whole: fused / sequential" in (out / "table.txt").read_text()
    refused = subprocess.run([*command, *sizes, "--remove_attention=9"], cwd=repo_root, capture_output=True, text=True)
    assert refused.returncode == 1 and "block 9 is out of range" in refused.stderr
