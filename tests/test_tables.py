"""What benchmarks leave, whole or not at all, and the flags that they share."""

import json
import os

import pytest

from experiments import tables


class Figure:
    def savefig(self, file, format, dpi):
        file.write(b"picture")


def test_a_set_of_results(tmp_path):
    rows = [{"name": "a", "n": 1}, {"name": "b, c", "n": 2}]
    tables.write_table(tmp_path / "new" / "out", "text", rows, {"steps": 3}, {"bench.png": Figure()})
    files = {p.name: p.read_bytes() for p in (tmp_path / "new" / "out").iterdir()}
    assert files.keys() == {"table.txt", "rows.csv", "rows.json", "bench.png"}
    assert files["rows.csv"] == b'name,n\r\na,1\r\n"b, c",2\r\n' and files["bench.png"] == b"picture"
    assert json.loads(files["rows.json"]) == {"setting": {"steps": 3}, "rows": rows}


def test_nothing_is_half_written(tmp_path, monkeypatch):
    """What cannot be rendered changes nothing, and a file that cannot be put in place leaves the old one."""
    tables.write_table(tmp_path, "old", [{"n": 1}], {})
    old = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    class Broken:
        def savefig(self, *args, **kwargs):
            raise RuntimeError("no picture")

    for rows, setting, figures in (
        ([{"n": 2}], {}, {"bench.png": Broken()}),
        ([{"n": 2}], {"of": object()}, {}),
        ([{"n": 2}, {"m": 3}], {}, {}),
    ):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            tables.write_table(tmp_path, "new", rows, setting, figures)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == old

    def full(*args):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError):
        tables.write_table(tmp_path, "new", [{"n": 2}], {})
    assert {name: (tmp_path / name).read_bytes() for name in old} == old


def test_out_must_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    assert tables.check_out(tmp_path / "a" / "b") == tmp_path / "a" / "b" and not (tmp_path / "a").exists()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=f"--out={out}: {tmp_path / 'file'} is a file, not a folder"):
            tables.check_out(out)


def test_whole_numbers_of_a_flag():
    assert tables.whole_numbers("batches", ["4", " 1", "4"]) == [4, 1]
    for given in (["0"], ["1", "-1"], ["x"], ["1.5"], [""]):
        with pytest.raises(ValueError, match="--batches=.*: .* is no whole number from 1, as in --batches=1,4"):
            tables.whole_numbers("batches", given)
    with pytest.raises(ValueError, match="--saved is empty"):
        tables.whole_numbers("saved", [])
