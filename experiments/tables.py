"""What every benchmark and comparison leaves: table.txt, rows.csv, rows.json."""

import csv
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any


def write_table(out: pathlib.Path, text: str, rows: Sequence[Mapping[str, Any]], setting: Mapping[str, Any]) -> None:
    """Makes the folder. text: for people; rows: the same as records of equal fields; setting: what was run."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.txt").write_text(text + "\n")
    (out / "rows.json").write_text(json.dumps({"setting": setting, "rows": rows}, indent=2) + "\n")
    with open(out / "rows.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
