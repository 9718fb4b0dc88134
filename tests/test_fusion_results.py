"""Analyses that were interrupted go on to the same bits, refuse what is not theirs, and come back from their files."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from test_fusion_analysis import CONFIG, TEXTS, model

from lsfuse import fusion
from lsfuse.fusion import analysis, scores
from lsfuse.fusion.fuse import NORMS
from lsfuse.fusion.store import Rows


def small():
    config, params = model()
    return config, {**params, "runs": params["runs"]}


class Stop(Exception):
    pass


def test_an_interrupted_analysis_goes_on(tmp_path, monkeypatch):
    want = fusion.dependency(*small(), TEXTS, batch_size=2)
    calls, inner = [], analysis._distances

    def distances(*args):
        calls.append(int(args[-2]))
        if len(calls) == 6:
            raise Stop
        return inner(*args)

    monkeypatch.setattr(analysis, "_distances", distances)
    with pytest.raises(Stop):
        fusion.dependency(*small(), TEXTS, batch_size=2, folder=tmp_path / "rows")
    (tmp_path / "rows" / ".dependency-1-1.npy.tmp").write_bytes(b"half a row")  # as a kill leaves it
    got = fusion.dependency(*small(), TEXTS, batch_size=2, folder=tmp_path / "rows")
    assert calls == [0, 1, 2, 3, 0, 1, 1, 2, 3]
    for field in ("mean", "p95", "relative", "influence", "consecutive"):
        np.testing.assert_array_equal(getattr(got, field), getattr(want, field))
    calls.clear()
    fusion.dependency(*small(), TEXTS, blocks=[2], batch_size=2, folder=tmp_path / "rows")
    assert not calls


def test_scores_are_kept_too(tmp_path, monkeypatch):
    want = fusion.removal_scores(*small(), TEXTS, batch_size=3, folder=tmp_path / "rows")

    def never(*args):
        raise AssertionError("computed again")

    monkeypatch.setattr(scores, "_kl", never)
    got = fusion.removal_scores(*small(), TEXTS, batch_size=3, folder=tmp_path / "rows")
    np.testing.assert_array_equal(got, want)
    with pytest.raises(AssertionError, match="computed again"):
        fusion.removal_scores(*small(), TEXTS, "ffn", batch_size=3, folder=tmp_path / "rows")


def test_a_kept_score_is_of_the_transform_that_was_scored(tmp_path, x64):
    """Transforms of one name, place and outcome in shapes; and the same ones at other places of the list."""
    ones = [(1, 2, fusion.fuse_ffn([(0, 1)], norm=norm)) for norm in NORMS]
    halves = [[np.arange(8.0) * sign, None] for sign in (1, -1)]
    ones += [(1, 2, lambda c, p, i=i: fusion.prune_ffn({0: 4}, i)(c, p)) for i in halves]
    want = [fusion.replacement_scores(*small(), TEXTS, [one])[0] for one in ones]
    assert len(set(want)) == len(ones)
    config, params = small()
    # A row as it was named before, which said nothing of the transform.
    Rows(tmp_path, config, params, TEXTS, batch_size=1).put("replacements-0-0-1-2", np.float64(99))
    for one, score in zip(ones, want, strict=True):
        assert fusion.replacement_scores(*small(), TEXTS, [one], folder=tmp_path)[0] == score
    files = sorted(tmp_path.iterdir())
    again = fusion.replacement_scores(*small(), TEXTS, [*ones[::-1], (1, 2, None)], folder=tmp_path)
    np.testing.assert_array_equal(again[:-1], want[::-1])
    assert len(list(tmp_path.iterdir())) == len(files) + len(TEXTS)  # the last one's rows


def test_plans_and_importances_are_kept(tmp_path, monkeypatch):
    """A plan's row is of its changes, whatever their order, and not of its place among the plans."""
    fuse = fusion.Choice(1, 2, "fuse", 0.0, {}, fusion.fuse_ffn([(0, 1)]))
    free = fusion.Choice(3, 3, "free", 0.0, {}, fusion.remove_attention([0]))
    keep = fusion.Choice(0, 0, "keep", 0.0, {})
    want = fusion.plan_scores(*small(), TEXTS, [[keep, fuse, free], [free], [fuse]], folder=tmp_path)
    np.testing.assert_array_equal(want, fusion.plan_scores(*small(), TEXTS, [[keep, fuse, free], [free], [fuse]]))
    importance = fusion.ffn_importance(*small(), TEXTS, folder=tmp_path)

    def never(*args):
        raise AssertionError("computed again")

    monkeypatch.setattr(scores, "_kl", never)
    monkeypatch.setattr(analysis, "_activation_sums", never)
    got = fusion.plan_scores(*small(), TEXTS, [[fuse], [free, fuse]], folder=tmp_path)
    np.testing.assert_array_equal(got, want[[2, 0]])
    for a, b in zip(importance, fusion.ffn_importance(*small(), TEXTS, folder=tmp_path), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(AssertionError, match="computed again"):
        fusion.plan_scores(*small(), TEXTS, [[dataclasses.replace(free, first=0, last=0)]], folder=tmp_path)


def test_a_damaged_row_is_named(tmp_path):
    config, params = small()
    rows = Rows(tmp_path, config, params, TEXTS, batch_size=2)
    rows.put("a", np.arange(3))
    whole = (tmp_path / "a.npy").read_bytes()
    for content in (b"", whole[:5], whole[:-3], b"no numbers"):
        (tmp_path / "a.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.npy is damaged \(.*\); delete it, and it is computed again") as error:
            rows.get("a")
        assert "\n" not in str(error.value)
    (tmp_path / "rows.json").write_text("{")
    with pytest.raises(ValueError, match=r"rows\.json is damaged; delete the folder"):
        Rows(tmp_path, config, params, TEXTS, batch_size=2)


def test_another_model_or_text_is_refused(tmp_path):
    config, params = small()
    rows = Rows(tmp_path, config, params, TEXTS, batch_size=2)
    rows.put("a", np.arange(3))
    np.testing.assert_array_equal(Rows(tmp_path, config, params, TEXTS, batch_size=2).get("a"), np.arange(3))
    changed = {**params, "norm": params["norm"].at[0].add(1e-6)}
    other = fusion.from_lists([[1, 2, 3]])
    for args, batch_size, what in (
        ((config, changed, TEXTS), 2, "another model"),
        ((config, params, other), 2, "another texts"),
        ((config, params, TEXTS), 1, "another batch_size: 2 there, 1 here"),
    ):
        with pytest.raises(ValueError, match=what):
            Rows(tmp_path, *args, batch_size=batch_size)
    (tmp_path / "rows.json").unlink()
    with pytest.raises(ValueError, match="holds files, but no rows.json"):
        Rows(tmp_path, config, params, TEXTS, batch_size=2)


def test_contributions_are_subtracted_in_float32():
    """1 + 2^-7 less 1 is exact in bfloat16, the difference of a sum's neighbours is not rounded on the way."""
    before, after = jnp.array([256.0, 1.0], jnp.bfloat16), jnp.array([258.0, -255.0], jnp.bfloat16)
    got = analysis._contribution(before, after)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, [2.0, -256.0])
    odd = analysis._contribution(jnp.array([-1.0], jnp.bfloat16), jnp.array([256.0], jnp.bfloat16))
    np.testing.assert_array_equal(odd, [257.0])  # bfloat16 has 256 and 258


def some_dependency():
    rng = np.random.default_rng(0)
    upper = np.triu(rng.random((4, 4)), 1)
    return analysis.Dependency(upper, 2 * upper, rng.random(4), rng.random(4), rng.random(3))


def test_files(tmp_path):
    config, params = small()
    about, there = fusion.fingerprint(config, params, TEXTS), some_dependency()
    fusion.save_dependency(tmp_path / "x" / "ffn.v1", there, config, about)
    back = fusion.load_dependency(tmp_path / "x" / "ffn.v1", about)
    described = json.loads((tmp_path / "x" / "ffn.v1.json").read_text())
    for field in ("mean", "p95", "relative", "influence", "consecutive"):
        np.testing.assert_array_equal(getattr(back, field), getattr(there, field))
        np.testing.assert_array_equal(described[field], getattr(there, field))
    assert [b["attention"] for b in described["blocks"]] == ["2 kv heads", "none", "none", "2 kv heads"]
    with pytest.raises(ValueError, match="another model: .* there, 0 here"):
        fusion.load_dependency(tmp_path / "x" / "ffn.v1", {"model": "0"})
    with pytest.raises(FileNotFoundError):
        fusion.load_dependency(tmp_path / "y")
    (tmp_path / "x" / "ffn.v1.npz").write_bytes(b"PK half")
    with pytest.raises(ValueError, match="is no dependency matrix"):
        fusion.load_dependency(tmp_path / "x" / "ffn.v1")


def test_heat_map(tmp_path):
    """Blue below, red above, white where there is no pair: read off the picture's own pixels."""
    import matplotlib.image

    m = np.triu(np.full((4, 4), 2.0**-9), 1)
    fusion.plot_dependency(tmp_path / "low.png", m, CONFIG, spans=[(1, 2)], title="low")
    fusion.plot_dependency(tmp_path / "high.png", m * 2**8, CONFIG)
    low, high = (matplotlib.image.imread(tmp_path / f"{n}.png")[..., :3] for n in ("low", "high"))

    def share(picture, sign):  # of clearly coloured pixels left of the colour bar
        left = picture[:, : int(0.75 * picture.shape[1])]
        return float((sign * (left[..., 2] - left[..., 0]) > 0.3).mean())

    assert share(low, 1) > 0.1 > 0.01 > share(low, -1)
    assert share(high, -1) > 0.1 > 0.01 > share(high, 1)
    with pytest.raises(ValueError, match=r"the matrix is \(3, 3\), the model has 4 blocks"):
        fusion.plot_dependency(tmp_path / "x.png", np.zeros((3, 3)), CONFIG)
