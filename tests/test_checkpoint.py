"""Checkpoints: exact round trips, what is refused, and what a damaged one falls back to."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lsfuse.io import checkpoint as checkpoint_module
from lsfuse.io.checkpoint import Checkpoints, Restored
from lsfuse.io.checkpoint_manifest import (
    CheckpointError,
    ConfigMismatch,
    Manifest,
    config_differences,
    digest,
    leaf_names,
)

# A failed read leaves tensorstore futures nobody waits for.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CONFIG = {"seed": 1, "train": {"lr": 1e-3, "blocks": [2, 4]}, "model": {"path": None}}


def make_state(step: int, dtype=jnp.float32):
    rng = np.random.default_rng(step)
    params = {
        "embed_tokens": jnp.asarray(rng.standard_normal((13, 6)), dtype),
        "runs": {"0": {"q_proj": jnp.asarray(rng.standard_normal((2, 6, 6)), jnp.bfloat16)}},
        "norm": jnp.asarray(rng.standard_normal(6), dtype),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {
        "params": params,
        "opt_state": optimizer.init(params),
        "key": jax.random.key_data(jax.random.key(step)),
        "count": jnp.int32(step),
        "nothing": jnp.zeros((0, 3)),
    }


def abstract(state):
    return jax.eval_shape(lambda: state)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for name, x, y in zip(leaf_names(a), jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape, name
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name)


def fill(directory, steps=(2, 4), **kwargs) -> Checkpoints:
    checkpoints = Checkpoints(directory, CONFIG, **kwargs)
    for step in steps:
        checkpoints.save(step, make_state(step), {"data_position": 8 * step, "best": None})
    return checkpoints


def restore(checkpoints: Checkpoints, template=None) -> Restored:
    restored = checkpoints.restore(abstract(make_state(0)) if template is None else template)
    assert restored is not None
    return restored


def files(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def test_round_trip_is_exact(tmp_path):
    restored = restore(fill(tmp_path))
    assert restored.step == 4 and restored.info == {"data_position": 32, "best": None}
    assert_same(restored.state, make_state(4))


def test_template_may_depend_on_info(tmp_path):
    checkpoints = fill(tmp_path)
    restored = restore(checkpoints, lambda info: abstract(make_state(info["data_position"] // 8)))
    assert_same(restored.state, make_state(4))


def test_no_checkpoint_is_none(tmp_path):
    assert Checkpoints(tmp_path / "absent", CONFIG).restore({}) is None
    assert not (tmp_path / "absent").exists()


def test_keeps_the_last_ones(tmp_path):
    assert fill(tmp_path / "a", range(1, 7)).steps() == [4, 5, 6]
    assert fill(tmp_path / "b", range(1, 4), keep=1).steps() == [3]
    with pytest.raises(ValueError, match="keep must be at least 1"):
        Checkpoints(tmp_path, CONFIG, keep=0)


def test_save_discards_a_later_future(tmp_path):
    checkpoints = fill(tmp_path, (2, 4, 6))
    checkpoints.save(4, make_state(5), {})
    assert checkpoints.steps() == [2, 4]
    assert_same(restore(checkpoints).state, make_state(5))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s["params"].update(norm=jnp.ones(7)), r"params/norm with shape \[6\].*needs \[7\]"),
        (lambda s: s["params"].update(norm=jnp.ones(6, jnp.float16)), "params/norm with dtype float32.*needs float16"),
        (lambda s: s["params"].update(lm_head=jnp.ones(7)), "lacks params/lm_head"),
        (lambda s: s["params"].pop("norm"), "has params/norm besides"),
        (lambda s: s.update(opt_state=optax.sgd(0.1, momentum=0.9).init(s["params"])), "opt_state/0/trace"),
    ],
)
def test_another_tree_is_refused(tmp_path, change, message):
    checkpoints = fill(tmp_path)
    state = make_state(0)
    change(state)
    with pytest.raises(CheckpointError, match=message), warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.restore(abstract(state))


def test_another_config_is_refused_with_every_field(tmp_path):
    fill(tmp_path)
    other = {"seed": 2, "train": {"lr": 1e-3, "blocks": (2, 4)}, "model": {"path": "x", "new": True}}
    with pytest.raises(ConfigMismatch) as error:
        Checkpoints(tmp_path, other).restore(abstract(make_state(0)))
    text = str(error.value)
    assert "seed: 1 there, 2 here" in text and "model.path: None there, 'x' here" in text
    assert "model.new: (absent) there, True here" in text and "train" not in text


def test_fields_that_came_later_count_as_their_defaults(tmp_path):
    fill(tmp_path)
    later = {**CONFIG, "new": {"field": 3}}
    restored = restore(Checkpoints(tmp_path, later, defaults={"seed": 9, "new": {"field": 3}}))
    assert restored.step == 4
    with pytest.raises(ConfigMismatch, match="new.field: 2 there, 3 here"):
        Checkpoints(tmp_path, later, defaults={"new": {"field": 2}}).restore(abstract(make_state(0)))


def test_config_differences_tell_types_apart():
    assert config_differences({"n": 1}, {"n": 1.0}) == ["n: 1 there, 1.0 here"]
    assert config_differences({"n": (1, 2), "m": {}}, {"n": [1, 2], "m": {}}) == []


def flip(path: pathlib.Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def damage_cases(directory: pathlib.Path):
    """(what, function) for every kind of damage to every file of a checkpoint."""
    for path in files(directory):
        name, size = path.relative_to(directory), path.stat().st_size
        rng = np.random.default_rng(size)
        for position in sorted({0, size - 1, *rng.integers(0, size, 6)} if size else set()):
            bit = int(rng.integers(8))
            yield f"bit {bit} of byte {position} of {name}", lambda p=name, i=int(position), b=bit: flip(p, i, b)
        if size:
            yield f"half of {name}", lambda p=name, n=size // 2: os.truncate(p, n)
            yield f"nothing left in {name}", lambda p=name: os.truncate(p, 0)
        yield f"no {name}", lambda p=name: os.remove(p)


@pytest.mark.slow
def test_any_damage_to_any_file_falls_back_or_changes_nothing(tmp_path, monkeypatch):
    """Bits that carry no information (a time stamp) may flip without effect; never may a wrong value come back."""
    checkpoints = fill(tmp_path / "run")
    newest, copy = checkpoints.path(4), tmp_path / "copy"
    shutil.copytree(newest, copy)
    fell_back = 0
    for what, damage in damage_cases(copy):
        shutil.rmtree(newest)
        shutil.copytree(copy, newest)
        monkeypatch.chdir(newest)
        damage()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            restored = restore(checkpoints)
        assert_same(restored.state, make_state(restored.step))
        assert restored.info["data_position"] == 8 * restored.step, what
        if restored.step == 2:
            fell_back += 1
            assert any("checkpoint of step 4" in str(w.message) for w in caught), what
    assert fell_back > 50


def data_files(path: pathlib.Path) -> list[pathlib.Path]:
    """The files that hold the arrays' bytes, largest first."""
    return sorted((path / "state").rglob("d/*"), key=lambda p: -p.stat().st_size)


def test_damaged_arrays_fall_back_and_name_the_leaf(tmp_path):
    checkpoints = fill(tmp_path)
    for path in data_files(checkpoints.path(4)):
        flip(path, path.stat().st_size // 2, 3)
    with pytest.warns(UserWarning, match="checkpoint of step 4 .*leaf (params|opt_state|key|count)"):
        restored = restore(checkpoints)
    assert restored.step == 2
    assert_same(restored.state, make_state(2))


def test_a_wrong_value_that_storage_accepts_is_caught(tmp_path, monkeypatch):
    """Another value saved under the digest of the right one, as after a bit flip that the storage does not notice."""
    checkpoints = fill(tmp_path, (2,))
    real = checkpoint_module.describe

    def lie(array):
        return real(array) if array.shape != (6,) else {**real(array), "sha256": "0" * 64}

    monkeypatch.setattr(checkpoint_module, "describe", lie)
    checkpoints.save(4, make_state(4), {})
    monkeypatch.undo()
    with pytest.warns(UserWarning, match=r"step 4 .*leaf opt_state/1/0/mu/norm: sha256 is"):
        assert restore(checkpoints, abstract(make_state(0))).step == 2


def test_another_dtype_on_disk_is_caught(tmp_path, monkeypatch):
    """orbax would cast it without a word."""
    checkpoints = fill(tmp_path, (2,))
    real = Manifest.to_json

    def lie(self):
        self.leaves["params/norm"]["dtype"] = "float16"
        return real(self)

    monkeypatch.setattr(Manifest, "to_json", lie)
    checkpoints.save(4, make_state(4), {})
    monkeypatch.undo()
    template = make_state(0)
    template["params"]["norm"] = template["params"]["norm"].astype(jnp.float16)
    with (
        pytest.warns(UserWarning, match=r"leaf params/norm: stored as float32\[6\], but float16\[6\] was saved"),
        pytest.raises(CheckpointError, match="params/norm with dtype float32"),
    ):
        restore(checkpoints, abstract(template))


def test_damage_everywhere_is_an_error(tmp_path):
    checkpoints = fill(tmp_path)
    for step in checkpoints.steps():
        (checkpoints.path(step) / "_CHECKPOINT_METADATA").unlink()
        shutil.rmtree(checkpoints.path(step) / "state")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="all 2 checkpoints .*step 4: .*step 2: "):
        restore(checkpoints)


def test_half_written_checkpoint_is_ignored_and_swept(tmp_path):
    checkpoints = fill(tmp_path)
    half = tmp_path / f"{checkpoints.path(6).name}.orbax-checkpoint-tmp"
    shutil.copytree(checkpoints.path(4), half)
    with pytest.warns(UserWarning, match="00000006.orbax-checkpoint-tmp is a half-written checkpoint"):
        assert restore(checkpoints).step == 4
    checkpoints.save(6, make_state(6), {})
    assert not half.exists() and checkpoints.steps() == [2, 4, 6]


def test_renamed_checkpoint_is_caught(tmp_path):
    checkpoints = fill(tmp_path)
    checkpoints.path(2).rename(checkpoints.path(9))
    with pytest.warns(UserWarning, match="its manifest is of step 2"):
        assert restore(checkpoints).step == 4


def test_config_with_a_flipped_bit_is_damage_not_another_config(tmp_path):
    checkpoints = fill(tmp_path)
    metadata = checkpoints.path(4) / "_CHECKPOINT_METADATA"
    saved = json.loads(metadata.read_text())
    text = saved["custom_metadata"]["text"]
    assert '"seed": 1' in text
    saved["custom_metadata"]["text"] = text.replace('"seed": 1', '"seed": 3')
    metadata.write_text(json.dumps(saved))
    with pytest.warns(UserWarning, match="step 4 .*manifest does not match its SHA-256"):
        assert restore(checkpoints).step == 2


def test_digest_depends_on_dtype_shape_and_bytes():
    x = np.arange(6, dtype=np.float32)
    assert len({digest(x), digest(x.reshape(2, 3)), digest(x.view(np.int32)), digest(x + 1)}) == 4
    assert digest(x.reshape(2, 3).T) == digest(np.ascontiguousarray(x.reshape(2, 3).T))
    assert digest(np.float32(1.0)) == digest(np.asarray(1.0, np.float32))


def test_full_disk_leaves_earlier_checkpoints(tmp_path, monkeypatch):
    checkpoints = fill(tmp_path)

    def no_room(path, checkpointables, **kwargs):
        path.with_name(f"{path.name}.orbax-checkpoint-tmp").mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module.ocp, "save_checkpointables", no_room)
    with pytest.raises(CheckpointError, match="step 6 could not be written .*disk is full.*untouched .steps: 2, 4."):
        checkpoints.save(6, make_state(6), {})
    monkeypatch.undo()
    assert checkpoints.steps() == [2, 4] and len(list(tmp_path.iterdir())) == 2
    assert_same(restore(checkpoints).state, make_state(4))


FULL = """
    import pathlib, sys, numpy as np, jax.numpy as jnp
    from lsfuse.io.checkpoint import Checkpoints
    directory = pathlib.Path(sys.argv[1])
    checkpoints = Checkpoints(directory, {})
    noise = lambda seed, n: {"x": jnp.asarray(np.random.default_rng(seed).standard_normal(n))}
    checkpoints.save(1, noise(1, 1000), {})
    try:
        checkpoints.save(2, noise(2, 4_000_000), {})
    except ValueError as error:
        print(error)
        print(type(error.__cause__))
    assert checkpoints.steps() == [1], checkpoints.steps()
    assert checkpoints.restore(noise(0, 1000)).step == 1
    checkpoints.save(3, noise(3, 1000), {})
    print("goes on", checkpoints.steps())
"""


@pytest.mark.slow
def test_really_full_disk(small_disk):
    script = [sys.executable, "-c", textwrap.dedent(FULL), str(small_disk / "checkpoints")]
    result = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "The disk is full" in result.stdout and "goes on [1, 3]" in result.stdout
    assert "Traceback" not in result.stderr, result.stderr[-3000:]
