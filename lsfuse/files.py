"""Files that appear whole or not at all."""

import os
import pathlib


def write_atomic(path: pathlib.Path, content: str | bytes) -> None:
    """The file holds its old content or this, whatever happens; text is UTF-8."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
