"""Reading jsonl files so that every complaint names file, line and field."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any


def read_jsonl(path: str | pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of every line that is not blank; `where` is "path, line n", for errors.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is cut short, is no JSON object or is not UTF-8.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, parse_line(where, line)


def parse_line(where: str, line: bytes) -> dict[str, Any]:
    """One line's object; ValueError naming `where` if it is not one."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        cut = " The line may be cut short." if not line.endswith(b"\n") else ""
        raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}.{cut}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError(f"{where}: lists or objects are nested too deeply to be read") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ValueError(f"{where}: {str(error).split(';')[0]}") from None
    if b"\\u" in line:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("unicode_escape").decode()
            raise ValueError(f"{where}: a text holds {half}, half of a surrogate pair, which is no character") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row
