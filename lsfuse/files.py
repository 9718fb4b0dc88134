"""Files that appear whole or not at all, and what is in them."""

import hashlib
import io
import os
import pathlib
from typing import Any


def write_atomic(path: pathlib.Path, content: str | bytes) -> None:
    """The file holds its old content or this, whatever happens; text is UTF-8."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_figure(path: pathlib.Path, figure: Any, dpi: int = 120) -> None:
    """A matplotlib figure as PNG, by `write_atomic`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    write_atomic(path, buffer.getvalue())


def sha256_of(path: str | pathlib.Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
