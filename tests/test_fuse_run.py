"""Fusion from analysis to report: what it leaves, stages alone, what it refuses, killed runs with the same bits."""

import dataclasses
import gc
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import random_params
from test_distil_run import CONFIG, TOKENIZER, write_text

from lsfuse import fusion, train
from lsfuse.io import checkpoint, load_hf
from lsfuse.model import ModelConfig, count_params, init_params, uniform_blocks
from lsfuse.train import fuse_table
from lsfuse.train.fuse_setup import RESULTS

# `train.fuse` and `train.distil` are the functions
train_fuse, train_distil = (sys.modules[f"lsfuse.train.{name}"] for name in ("fuse", "distil"))


def settings(folder) -> dict:
    return {
        "data": {"path": write_text(folder), "held_out": (200, 400)},
        "analysis": {"window": 16, "count": 1},
        "plan": {"num_attentions": 3, "threshold": 2.0},
        "eval": {"window": 16, "count": 2},
        "generate": {"count": 2, "prompt": 4, "tokens": 4},
        "distil": {"stages": ({"loss": "blockwise", "context": 8, "batch": 2, "steps": 4, "learning_rate": 1e-2},)},
        "probe": {"count": 0},
        "time": {"context": 4, "steps": 2, "repeats": 2},
        "checkpoint": {"every": 2},
    }


def run(folder, workdir, seed=0, **more):
    parent = CONFIG, init_params(CONFIG, jax.random.key(seed))
    options = {"resume": more.pop("resume", False), "parent": parent, "tokenizer": TOKENIZER, "progress": False}
    return train.fuse({**settings(folder), **more}, workdir, **options)


def outcome(workdir) -> dict[str, bytes]:
    """What must not depend on when a run was stopped: all but sessions, times and what only a resume reads."""
    passing = {"run.json", ".lock", "metrics.jsonl", "plots.png", "summary.json", "summary.txt", "time.json"}
    files = [p for p in workdir.rglob("*") if p.is_file() and p.name not in passing and "checkpoints" not in p.parts]
    found = {str(p.relative_to(workdir)): p.read_bytes() for p in files}
    timed = rb"(?s)## Time of a decoding step.*?(?=## Where)"
    return {name: re.sub(timed, b"", text) if name == "report.md" else text for name, text in found.items()}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """(folder, work directory) of a run whose first three stages ran, each in a session of its own."""
    folder = tmp_path_factory.mktemp("fuse")
    for n, stage in enumerate(("analyse", "plan", "fuse")):
        assert run(folder, folder / "run", stages=(stage,), resume=n > 0) == {}
    return folder, folder / "run"


def test_stages_alone(begun):
    """The rule, from what the analysis left; the child, from the plan."""
    _, workdir = begun
    found, plan = (json.loads((workdir / name).read_text()) for name in ("analysis.json", "plan.json"))
    sums = [sum(found["attention"][i : i + 3]) for i in range(2)]
    first = int(np.argmin(sums))
    assert found["cheapest"] == found["removed"] == plan["remove_attention"] == list(range(first, first + 3))
    assert plan["fuse_ffn"] == [[first, first + 1]]  # the last FFN stays
    mean = fusion.load_dependency(workdir / "analysis" / "region").mean
    assert plan["largest"] == [mean[first, first + 1]] and plan["largest"][0] > 0
    assert (workdir / "analysis" / "region.png").read_bytes().startswith(b"\x89PNG")
    spans = [tuple(span) for span in plan["fuse_ffn"]]
    surgery = fusion.chain(fusion.remove_attention(plan["remove_attention"]), fusion.fuse_ffn(spans))
    want = surgery(CONFIG, init_params(CONFIG, jax.random.key(0)))
    config, params = load_hf(workdir / "fused")
    assert config == want[0]
    jax.tree.map(np.testing.assert_array_equal, params, want[1])


@pytest.mark.slow
def test_a_parent_of_the_nemotron_family(tmp_path):
    """Its child goes through a checkpoint of that family, and is still known as what the plan makes."""
    config = dataclasses.replace(CONFIG, family="nemotron-nas")
    parent = config, init_params(config, jax.random.key(0))
    plan = {"remove_attention": (1, 2, 3), "fuse_ffn": ((1, 2),)}
    given = {**settings(tmp_path), "plan": plan, "stages": ("analyse", "plan", "fuse", "distil", "export")}
    train.fuse(given, tmp_path / "run", parent=parent, tokenizer=TOKENIZER, progress=False)
    for folder in ("fused", "distil/model", "export/nemotron-nas"):
        assert json.loads((tmp_path / "run" / folder / "config.json").read_text())["model_type"] == "nemotron-nas"
        assert load_hf(tmp_path / "run" / folder)[0].sources == ((0,), (1, 2), (3,))


def test_results_of_another_model_are_refused(begun):
    folder, workdir = begun
    for stage in ("plan", "fuse"):
        with pytest.raises(ValueError, match=rf"{RESULTS[stage]} is of another model: its SHA-256 is \w{{12}} there, "):
            run(folder, workdir, seed=1, stages=(stage,), resume=True)


def test_a_run_of_another_config_is_refused(begun):
    folder, workdir = begun
    with pytest.raises(FileExistsError, match="--resume"):
        run(folder, workdir, stages=("plan",))
    with pytest.raises(ValueError, match="plan.threshold: 2.0 there, 1.0 here"):
        run(folder, workdir, plan={"num_attentions": 3, "threshold": 1.0}, resume=True)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"stages": ("fuse",)}, 'stage "fuse" reads plan.json of stage "plan", which .*run lacks; add "plan"'),
        ({"stages": ("report", "plan", "analyse")}, 'stage "report" reads table.json of stage "evaluate"'),
        ({"stages": ("analyze",)}, "config.stages has 'analyze', which is none of .*did you mean \"analyse\""),
        ({"stages": ("warm_start",)}, "config.warm_start.stages is empty"),
        ({"stages": ("time",), "time": {"repeats": 0}}, 'config.stages has "time", but config.time.repeats is 0'),
        ({"time": {"context": 62, "steps": 3}}, "config.time.context and time.steps: 65 tokens exceed the model's 64"),
        ({"analysis": {"window": 64, "count": 9}}, "config.analysis.count: the text has 7 windows of 64 tokens, not 9"),
        ({"analysis": {"window": 600}}, "config.analysis.window: a context of 600 tokens is longer than the text"),
        ({"analysis": {"window": 65, "count": 1}}, "config.analysis.window: 65 tokens exceed the model's 64 positions"),
        ({"eval": {"window": 500}}, "config.eval: of the held-out characters"),
        ({"eval": {"window": 65, "count": 1}}, "config.eval.window: 65 tokens exceed the model's 64 positions"),
        ({"probe": {"context": 65}}, "config.probe.context: 65 tokens exceed the model's 64 positions"),
        ({"generate": {"prompt": 61, "count": 1}}, "config.generate.prompt and generate.tokens: 65 tokens exceed"),
        ({"plan": {"num_attentions": 5}}, "config.plan.num_attentions: .*no 5 blocks in a row have attention"),
        ({"plan": {"remove_attention": (3, 4)}}, "config.plan.*block 4 is out of range"),
        ({"plan": {"remove_attention": (1,), "fuse_ffn": ((1, 2),)}}, "config.plan: .*block 2 has attention"),
        ({"plan": {"fuse_ffn": (1, 2)}}, r"config.plan.fuse_ffn must hold spans .* got \(1, 2\)"),
        ({"plan": {"remove_attention": (-1,)}}, r"config.plan.remove_attention must hold blocks"),
        ({"distil": {"stages": ({"los": "lm"},)}}, r"config.distil: stages\[0\] has no field 'los'"),
        ({"data": {"path": None}}, "config.data.path and config.data.sentences are not set"),
        ({"data": {"path": "x", "sentences": 3}}, "config.data.path and config.data.sentences are both set"),
        ({"data": {"path": None, "sentences": 3}}, "config.data.held_out is of a text file"),
        ({"plan": {"treshold": 1.0}}, 'did you mean "plan.threshold"'),
    ],
)
def test_bad_input_is_refused_before_any_work(tmp_path, change, message):
    given = settings(tmp_path)
    for name, value in change.items():
        given[name] = {**given.get(name, {}), **value} if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=message) as error:
        train.fuse(given, tmp_path / "run", parent=(CONFIG, {}), tokenizer=TOKENIZER)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_model_is_needed(tmp_path):
    with pytest.raises(ValueError, match="config.model.path is not set; name a checkpoint, or train a model first"):
        train.fuse({"data": {"sentences": 100}}, tmp_path / "run")
    with pytest.raises(ValueError, match="a parent that is passed needs a tokenizer"):
        train.fuse({"data": {"sentences": 100}}, tmp_path / "run", parent=(CONFIG, {}))


def test_dry_run_runs_nothing(tmp_path, monkeypatch):
    """With an explicit plan: blocks before and after; of a model that is yet to be trained."""
    monkeypatch.chdir(tmp_path)
    stage = {"context": 8, "batch": 1, "steps": 3}
    config = {
        "model": {"num_blocks": 4, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "ffn_width": 12},
        "data": {"sentences": 3000},
        "warm_start": {"stages": ({"loss": "lm", **stage},)},
        "plan": {"remove_attention": (1, 2, 3), "fuse_ffn": ((1, 2),)},
        "distil": {"stages": ({"loss": "blockwise", **stage},)},
        "analysis": {"window": 64},
        "eval": {"window": 64},
    }
    text = train.describe_fusion(config)
    assert "warm_start: stage 0 (lm, 8 tokens): 3 steps of 1 windows" in text and "of 1-2" in text
    assert "plan: attention of [1, 2, 3] removed, FFNs [(1, 2)] fused" in text and not list(tmp_path.iterdir())
    assert "by the rule, 4 attentions in a row" in train.describe_fusion({**config, "plan": {}})


def test_pruned_widths_make_the_size():
    """Within half a channel a block, biases and unequal widths included."""
    blocks = (*uniform_blocks(2, 1, 12), *uniform_blocks(1, 1, 40), *uniform_blocks(1, 1, 0))
    config = ModelConfig(10, 8, 2, 4, blocks, mlp_bias=True)
    params = random_params(config)
    importance = [np.arange(b.ffn_width, dtype=float) if b.has_ffn else None for b in blocks]
    for target in (count_params(config), count_params(config) - 400, count_params(config) - 701):
        widths = fuse_table.widths_of_size(config, target)
        pruned, _ = fusion.prune_ffn(widths, importance)(config, jax.tree.map(jnp.asarray, params))
        assert abs(count_params(pruned) - target) <= 3 * (3 * 8 + 2) / 2
    assert fuse_table.widths_of_size(config, count_params(config)) == {0: 12, 1: 12, 2: 40}


def test_where_greedy_text_diverges(x64):
    """One forward pass of the child on the parent's text tells what generating with it does."""
    parent = CONFIG, jax.tree.map(jnp.asarray, random_params(CONFIG))
    child = fusion.remove_attention([0])(*parent)
    prompts = fusion.from_lists(np.random.default_rng(1).integers(0, 10, (12, 5)).tolist())
    texts = [fuse_table.continued(model, prompts, 8) for model in (parent, child)]
    same = texts[0][:, 5:] == texts[1][:, 5:]
    want = np.cumprod(same, 1).sum(1)
    assert 0 in want and 8 in want and len(set(want.tolist())) > 2  # all kinds
    as_texts = fusion.from_lists(texts[0].tolist())
    np.testing.assert_array_equal(fusion.greedy_agreement(child, as_texts, 5), want)
    np.testing.assert_array_equal(fusion.greedy_agreement(parent, as_texts, 5), 8)
    with pytest.raises(ValueError, match="start 13 must be at least 1 and less than the shortest text's 13 tokens"):
        fusion.greedy_agreement(child, as_texts, 13)


@pytest.mark.slow
def test_teacher_and_student_hold_unchanged_weights_once(tmp_path, monkeypatch):
    """While the child is trained, nothing but the teacher's and the child's leaves is alive."""
    stage = {"context": 8, "batch": 1, "steps": 2, "learning_rate": 1e-3}
    config = {
        "model": {"num_blocks": 4, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "ffn_width": 12}
        | {"max_position_embeddings": 64},
        "data": {"sentences": 3000},
        "warm_start": {"stages": ({"loss": "lm", **stage},), "optimizer": {"warmup_steps": 0}},
        "plan": {"remove_attention": (1, 2, 3), "fuse_ffn": ((1, 2),)},
        "distil": {"stages": ({"loss": "blockwise", **stage}, {"loss": "distil", **stage, "trainable": "runs/1"})}
        | {"optimizer": {"warmup_steps": 0}},
        "analysis": {"window": 16, "count": 1},
        "eval": {"window": 16, "count": 1},
        "probe": {"count": 0},
        "generate": {"count": 1, "prompt": 4, "tokens": 4},
    }
    first = {"stages": ("warm_start", "analyse", "plan", "fuse")}
    train.fuse(config | first, tmp_path / "run", progress=False)
    parent = load_hf(tmp_path / "run" / "parent" / "model")
    embedding, shapes = parent[1]["embed_tokens"].shape, jax.tree.map(jnp.shape, parent[1]["runs"])
    del parent
    gc.collect()
    alive = []

    def buffers():  # two arrays may be one buffer
        gc.collect()
        return {x.unsafe_buffer_pointer(): x.shape for x in jax.live_arrays() if x.ndim}

    known = buffers()

    def watched(*args):
        alive.append([shape for pointer, shape in buffers().items() if pointer not in known])
        return to_host(*args)

    to_host = train_distil.to_host
    monkeypatch.setattr(train_distil, "to_host", watched)
    train.fuse(config | {"stages": ("distil",)}, tmp_path / "run", resume=True, progress=False)
    assert len(alive) == 4
    for found in alive:
        assert found.count(embedding) == 1
        # The parent's four blocks are one run; the teacher has it in the child's pieces.
        assert not [s for s in shapes["0"].values() if s in found]


@pytest.mark.slow
def test_the_whole_path_and_the_same_killed_three_times(begun, tmp_path, repo_root, monkeypatch):
    folder, workdir = begun
    summary = run(folder, workdir, resume=True)
    rows, plan = summary["table"], summary["plan"]
    assert list(rows)[0] == fuse_table.PARENT and list(rows)[-1] == fuse_table.DISTILLED and len(rows) == 10
    parent, child = (CONFIG, init_params(CONFIG, jax.random.key(0))), load_hf(workdir / "fused")
    texts = train.set_up_fusion(settings(folder), parent=parent, tokenizer=TOKENIZER).held_out
    trained = load_hf(workdir / "distil" / "model")
    for name, model in (("fused, norms folded", child), (fuse_table.DISTILLED, trained)):
        want = fusion.evaluate(model, texts, parent=parent)
        assert {k: rows[name][k] for k in ("perplexity", "kl", "top1")}.items() <= want.items()
    assert rows[fuse_table.PARENT]["kl"] == 0 and rows[fuse_table.PARENT]["agreed"] == 4
    assert rows[fuse_table.DISTILLED]["kl"] != rows["fused, norms folded"]["kl"] > 0
    head = 2 * CONFIG.head_dim * 4  # float32 keys and values of the one attention left
    assert [rows[n]["kv_bytes"] // head for n in (fuse_table.PARENT, "attention removed", "fused, int8")] == [4, 1, 1]
    report = (workdir / "report.md").read_text()
    pictures = re.findall(r"!\[.*?\]\((.+?)\)", report)
    assert len(pictures) == 5 and all((workdir / p).read_bytes().startswith(b"\x89PNG") for p in pictures)
    assert all(f"| {name} |" in report for name in rows)
    timed = json.loads((workdir / "time.json").read_text())
    assert [r["in_turn"] for r in timed["rows"]] == [4, 4, 3] and all(r["seconds"] != 0 for r in timed["rows"])
    fused = next(q for q in timed["ratios"] if q["model"] == "fused")
    assert f"{fused['median']:.3f} ({fused['least']:.3f}-{fused['most']:.3f}) |" in report and timed["why"] in report
    for name in ("lsfuse", "nemotron-nas"):
        config, params = load_hf(workdir / "export" / name)
        assert config.blocks == child[0].blocks
        jax.tree.map(np.testing.assert_array_equal, params, trained[1])
    assert load_hf(workdir / "export" / "lsfuse")[0].transforms == child[0].transforms and plan["norm"] == "fold"

    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "tests.test_fuse_run", str(folder), str(killed)]
    environment = os.environ | {"PYTHONPATH": "tests"}
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert not (killed / "analysis.json").exists() and list(killed.rglob("*.npy"))
    for place, name, times in ((train_fuse, "measure", 3), (checkpoint.ocp, "save_checkpointables", 2)):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(place, name, dies_at(getattr(place, name), times))
            run(folder, killed, resume=True)
    table = json.loads((killed / "table.json").read_text())
    assert len(table["rows"]) == 9 and not (killed / "distilled.json").exists()
    again = run(folder, killed, resume=True)
    assert again["table"] == rows
    assert outcome(killed) == outcome(workdir)


class Killed(BaseException):
    """Nothing that a run does may catch it."""


def dies_at(function, times: int, death=None):
    """The function, but in its call number `times` of this process nothing comes after."""
    count = [0]

    def call(*args, **kwargs):
        count[0] += 1
        if count[0] == times:
            raise Killed if death is None else death()
        return function(*args, **kwargs)

    return call


if __name__ == "__main__":
    # Dies for real, between two rows of the second analysis.
    kill = dies_at(os.replace, 11, lambda: os.kill(os.getpid(), signal.SIGKILL))
    os.replace = kill
    run(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
