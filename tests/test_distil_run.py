"""Runs of distillation: what they leave, what they refuse, and killed runs that go on to the same bits."""

import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from lsfuse import train
from lsfuse.data import SymbolTokenizer
from lsfuse.io import load_hf
from lsfuse.model import ModelConfig, init_params, uniform_blocks
from lsfuse.train.distil_data import TextWindows

CONFIG = ModelConfig(
    vocab_size=10, hidden_size=8, num_heads=2, head_dim=4, blocks=uniform_blocks(4, 1, 12), max_position_embeddings=64
)
TOKENIZER = SymbolTokenizer([str(i) for i in range(10)], pad="0", stop="0")


def write_text(folder) -> str:
    """Path of a text of 600 tokens."""
    rng = np.random.default_rng(0)
    (folder / "text.txt").write_text(" ".join(map(str, rng.integers(0, 10, 600))))
    return str(folder / "text.txt")


def settings(folder) -> dict:
    return {
        "surgery": {"remove_attention": (1, 2), "fuse_ffn": ((1, 2),)},
        "data": {"path": write_text(folder), "held_out": (200, 400)},
        "stages": (
            {"loss": "blockwise", "context": 8, "batch": 2, "steps": 4, "learning_rate": 1e-2},
            {"loss": "distil", "context": 16, "batch": 1, "steps": 3, "learning_rate": 1e-3},
            {"loss": "lm", "context": 16, "batch": 1, "steps": 2, "learning_rate": 1e-3, "trainable": "embed"},
        ),
        "eval": {"window": 16, "count": 2},
        "checkpoint": {"every": 2},
    }


def run(folder, workdir, **more):
    parent = CONFIG, init_params(CONFIG, jax.random.key(0))
    return train.distil(settings(folder), workdir, parent=parent, tokenizer=TOKENIZER, progress=False, **more)


def outcome(workdir):
    lines = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
    lines = [{k: v for k, v in r.items() if not k.startswith("time/")} for r in lines]
    return lines, (workdir / "model" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_and_the_same_run_killed_twice(tmp_path, repo_root):
    result = run(tmp_path, tmp_path / "whole")
    lines, _ = outcome(tmp_path / "whole")
    assert [r["stage"] for r in lines if r["phase"] == "eval"] == [0, 0, 1, 2]
    assert lines[0]["kl"] > lines[5]["kl"] > 0  # the fused block has learned
    assert result.summary["held_out"].keys() == {"before", "after stage 0", "after stage 1", "after stage 2"}
    assert (tmp_path / "whole" / "plots.png").read_bytes().startswith(b"\x89PNG")
    config, params = load_hf(tmp_path / "whole" / "model")
    assert config.sources == ((0,), (1, 2), (3,))
    jax.tree.map(np.testing.assert_array_equal, params, result.params)
    for n in (2, 3):
        command = [sys.executable, "-m", "tests.test_distil_run", str(tmp_path), str(n)]
        done = subprocess.run(
            command, cwd=repo_root, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "tests"}
        )
        assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    run(tmp_path, tmp_path / "killed", resume=True)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


def test_no_window_holds_held_out_text():
    text = TextWindows(" ".join(["1"] * 30 + ["2"] * 20 + ["3"] * 30), TOKENIZER, (60, 100))
    assert set(TOKENIZER.encode(text.held_out)) == {2} and text.size(7) == 8
    ids, position = text.batch(7, 16, seed=1, position=0)
    assert position == 112 and all(len(set(row)) == 1 for row in ids.tolist()) and not (ids == 2).any()
    assert len({tuple(r) for r in ids.tolist()}) == 2
    later, _ = text.batch(7, 8, seed=1, position=56)
    np.testing.assert_array_equal(later, ids[8:])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"stages": ()}, "config.stages is empty"),
        ({"stages": ({"loss": "kl"},)}, r"config.stages\[0\].loss must be one of blockwise, distil, lm"),
        ({"stages": ({"los": "lm"},)}, r"config.stages\[0\] has no field 'los'"),
        ({"stages": ({"context": 65},)}, r"config.stages\[0\].context: 65 tokens exceed the model's 64 positions"),
        ({"probe": {"context": 65}}, "config.probe.context: 65 tokens exceed the model's 64 positions"),
        ({"eval": {"window": 65}}, "config.eval.window: 65 tokens exceed the model's 64 positions"),
        ({"stages": ({"context": 64, "batch": 1, "trainable": "x_proj"},)}, "found in no parameter"),
        ({"surgery": {}, "stages": ({"loss": "blockwise", "context": 8},)}, "every block of the child is the parent's"),
        ({"surgery": {"fuse_ffn": ((0, 1),)}}, "config.surgery: .*block 1 has attention"),
        ({"surgery": {"fuse_ffn": (0, 1)}}, r"config.surgery.fuse_ffn must hold spans .* got \(0, 1\)"),
        ({"surgery": {"remove_attention": (-1,)}}, r"config.surgery.remove_attention must hold blocks"),
        ({"data": {"path": None}}, "config.data.path is not set"),
        ({"eval": {"window": 64, "count": 9}}, "config.eval: of the held-out characters"),
        ({"stagez": ()}, 'did you mean "stages"'),
    ],
)
def test_bad_input_is_refused_before_any_work(tmp_path, change, message):
    config = {**settings(tmp_path), **change}
    parent = CONFIG, {}
    with pytest.raises(ValueError, match=message):
        train.distil(config, tmp_path / "run", parent=parent, tokenizer=TOKENIZER)
    assert not (tmp_path / "run").exists()


def main(folder: str, n: str) -> None:
    """Dies in the n-th checkpoint of this session, half way between the arrays' commit and what follows."""
    import pathlib

    from lsfuse.io import checkpoint

    original, count = checkpoint.ocp.save_checkpointables, [0]

    def save(*args, **kwargs):
        count[0] += 1
        if count[0] == int(n):
            os.kill(os.getpid(), signal.SIGKILL)
        original(*args, **kwargs)

    checkpoint.ocp.save_checkpointables = save
    workdir = pathlib.Path(folder) / "killed"
    run(pathlib.Path(folder), workdir, resume=workdir.exists())


if __name__ == "__main__":
    main(*sys.argv[1:])
