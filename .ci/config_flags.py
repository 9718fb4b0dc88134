"""Prints the launcher flags that a config file declares for CI, `CI = ("--dry_run",)`, without running the file."""

import ast
import pathlib
import sys


def ci_flags(path: str) -> tuple[str, ...]:
    """The value of the module-level tuple `CI`; ValueError if there is none or it is no tuple of flags."""
    for node in ast.parse(pathlib.Path(path).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CI":
            flags = ast.literal_eval(node.value)
            if not isinstance(flags, tuple) or not all(isinstance(f, str) and f.startswith("--") for f in flags):
                raise ValueError(f"{path}: CI must be a tuple of launcher flags, got {flags!r}")
            return flags
    raise ValueError(f'{path}: declare how CI runs it, CI = ("--dry_run",) or flags that make it two short steps')


if __name__ == "__main__":
    print(*ci_flags(sys.argv[1]))
