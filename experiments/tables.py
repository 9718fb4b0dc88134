"""What every benchmark and comparison leaves: table.txt, rows.csv, rows.json, and its pictures."""

import csv
import io
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from lsfuse.files import write_atomic


def write_table(
    out: pathlib.Path,
    text: str,
    rows: Sequence[Mapping[str, Any]],
    setting: Mapping[str, Any],
    figures: Mapping[str, Any] | None = None,
) -> None:
    """Makes the folder. text: for people; rows: the same as records of equal fields; setting: what was run; figures:
    file name -> matplotlib figure. Everything is rendered before the first file is written, and each file is written
    whole."""
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    files: dict[str, str | bytes] = {
        "table.txt": text + "\n",
        "rows.json": json.dumps({"setting": setting, "rows": rows}, indent=2) + "\n",
        "rows.csv": table.getvalue(),
    }
    for name, figure in (figures or {}).items():
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=130)
        files[name] = picture.getvalue()
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomic(out / name, content)


def check_out(out: str | pathlib.Path) -> pathlib.Path:
    """The folder that --out names. Raises ValueError, before any work, where none can be."""
    path = pathlib.Path(out).expanduser()
    for place in (path, *path.parents):
        if place.exists():
            if not place.is_dir():
                raise ValueError(f"--out={out}: {place} is a file, not a folder; name another folder for the results")
            break
    return path


def whole_numbers(flag: str, given: Sequence[str]) -> list[int]:
    """A list flag's numbers, each once, in order. Raises ValueError, naming the flag, for anything below 1, anything
    that is no number, and for none."""
    found = [text.strip() for text in given]
    if wrong := [text for text in found if not (text.isdecimal() and int(text) >= 1)]:
        raise ValueError(f"--{flag}={','.join(given)}: {wrong[0]!r} is no whole number from 1, as in --{flag}=1,4")
    if not found:
        raise ValueError(f"--{flag} is empty; give whole numbers from 1, as in --{flag}=1,4")
    return list(dict.fromkeys(map(int, found)))
