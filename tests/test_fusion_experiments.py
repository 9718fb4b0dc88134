"""experiments.bench_fusion and experiments.plan_fusion on models of a few blocks."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import random_params, tiny

from experiments import bench_fusion as bench
from experiments import plan_fusion as planning
from lsfuse import fusion, io
from lsfuse.model import uniform_blocks


def test_spans_as_written():
    assert bench.parse_spans("6-8, 12") == [(6, 8), (12, 12)]
    for bad in ("", "6-", "-8", "6..8"):
        with pytest.raises(ValueError, match="spans are written 6-8"):
            bench.parse_spans(bad)


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
    assert bench.work(none, "decode", 8, 2, 3) == (4 * (16 * 23 + 16), 2 * head)
    for phase, tokens in (("decode", 1), ("prefill", 8)):
        (nbytes, flops), (other, same) = (bench.work(models[n], phase, 8, 2, 3) for n in ("fused", "sequential"))
        assert flops == same and other - nbytes == 4 * 16  # one norm less
        empty, span = bench.work(none, phase, 8, 2, 3), bench.work(wide, phase, 8, 2, 3)
        assert span[1] - empty[1] == 3 * 2 * tokens * 2 * (3 * 16 * 48)
    # Keys and values of 7 positions before the first step and 2 more on average, of 2 blocks fewer than the parent's 5.
    (parent_bytes, _), (sequential_bytes, _) = (
        bench.work(models[n], "decode", 8, 2, 3) for n in ("parent", "sequential")
    )
    attention = 3 * 4 * (16 * 16 * 2 + 16 * 8 * 2 + 16)
    assert parent_bytes - sequential_bytes == attention + 3 * 2 * 9 * 2 * 2 * 4 * 4


def test_spans_are_what_is_left_of_their_copies():
    seconds = {name: np.array([2.0, 3.0]) for name in (*bench.WHOLE, bench.AGAIN)}
    seconds |= {f"{name} span": np.array([5.0, 4.0]) for name in bench.WHOLE} | {bench.NO_BLOCKS: np.array([1.0, 2.0])}
    seconds["fused"] = np.array([1.0, 3.0])
    works = {name: (4e9, 1e9) for name in (*bench.WHOLE, *(f"{n} span" for n in bench.WHOLE))}
    works[bench.NO_BLOCKS] = (2e9, 0.5e9)
    rates = {"read": 2e9, "copy": 1e9, "matmul": 1e9}
    rows, ratios = bench.make_rows(seconds, works, rates, "decode", 1, 2)
    whole, span = rows[0], rows[3]
    assert (whole.seconds, whole.roofline_seconds, whole.reached, whole.bound) == (2.0, 2.0, 1.0, "bytes")
    assert (span.what, span.seconds, span.roofline_seconds, span.bytes) == ("span", 1.0, 0.5, 1e9)
    fused = next(q for q in ratios if (q.what, q.model) == ("whole", "fused"))
    assert (fused.median, fused.least, fused.most, fused.roofline) == (0.75, 0.5, 1.0, 1.0)


def scored(num_blocks):
    rng = np.random.default_rng(0)
    choices = planning.make_choices(num_blocks, (1, 2))
    return [c if c.transform is None else dataclasses.replace(c, score=float(rng.random())) for c in choices]


def test_rules_save_what_they_are_asked_to():
    choices, config = scored(8), tiny(blocks=uniform_blocks(8, 2, 24))
    removal = np.arange(8.0)[::-1]  # the last block's attention matters least
    for saved in (1, 2):
        plans = dict(planning.rule_plans(choices, config, removal, saved, planning.ANY[1:]))
        assert {planning.saved_by(plan) for plan in plans.values() if plan} == {saved}
        for plan in plans.values():
            fusion.dry_run(fusion.apply_plan(plan), config)  # none overlaps, all can be done
    assert planning.spell(plans["least attentions, rule"]) == "rule 4-7"
    assert planning.spell(plans["least attentions, rule+"]) == "rule+ 4-7"
    best = min((c for c in choices if c.name == "fuse" and c.last - c.first == 2), key=lambda c: c.score)
    assert planning.one_place(choices, "fuse", 2)[0] == [best]


@pytest.mark.slow
def test_the_planner_is_compared_with_the_rules():
    config = tiny(blocks=uniform_blocks(5, 2, 24))
    model = config, jax.tree.map(jnp.asarray, random_params(config, dtype=np.float32))
    ids = np.random.default_rng(1).integers(0, 23, (3, 1, 12), dtype=np.int32)
    texts = {
        name: fusion.Texts(x, np.full(1, 12, np.int32))
        for name, x in zip(("scored", "rescored", "held_out"), ids, strict=True)
    }
    choices = planning.make_choices(5, (1, 2))
    given = [(c.first, c.last, c.transform) for c in choices if c.transform is not None]
    kl = iter(fusion.replacement_scores(*model, texts["scored"], given))
    choices = [c if c.transform is None else dataclasses.replace(c, score=float(next(kl))) for c in choices]
    removal = fusion.removal_scores(*model, texts["scored"])
    rows = planning.compare(model, choices, removal, texts, (1, 2), 3, progress=False)
    for name in planning.SETS:
        for saved in (1, 2):
            own = [r for r in rows if (r.choices, r.saved) == (name, saved)]
            planner = next(r for r in own if r.rule == planning.PLANNER)
            allowed = [c for c in choices if c.name in planning.SETS[name]]
            listed = fusion.shortlist(allowed, 5, {"blocks": 5.0 - saved}, 3)
            assert planner.plan in [planning.spell(plan) for plan in listed]
            assert len(own) > 4 and np.isfinite([(r.scored, r.held_out) for r in own]).all()
    assert len(planning.verdicts(rows)) == 8 and "planned" in planning.table(rows)


@pytest.mark.slow
def test_the_benchmark_runs(repo_root, tmp_path):
    config = tiny(blocks=uniform_blocks(4, 2, 24))
    io.save_hf(tmp_path / "model", config, random_params(config, dtype=np.float32))
    sizes = ["--context=8", "--steps=2", "--batches=2", "--repeats=2", "--copies=2"]
    surgery = ["--remove_attention=1-3", "--fuse=1-2"]
    out = tmp_path / "out"
    command = [sys.executable, "-m", "experiments.bench_fusion", f"--model={tmp_path / 'model'}", f"--out={out}"]
    done = subprocess.run([*command, *sizes, *surgery], cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {pathlib.Path(p).name for p in out.iterdir()} == {"table.txt", "rows.csv", "rows.json", "bench.png"}
    found = json.loads((out / "rows.json").read_text())
    assert {(r["phase"], r["what"], r["model"]) for r in found["rows"]} == {
        (phase, what, model) for phase in bench.PHASES for what in ("whole", "span") for model in bench.WHOLE
    }
    assert {q["model"] for q in found["setting"]["ratios"]} == {"parent", "fused", bench.AGAIN}
    refused = subprocess.run([*command, "--remove_attention=9"], cwd=repo_root, capture_output=True, text=True)
    assert refused.returncode == 1 and "block 9 is out of range" in refused.stderr
