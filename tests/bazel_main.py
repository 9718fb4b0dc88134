"""Entry point of every py_test in BUILD: hands the arguments to pytest."""

import os
import sys

import pytest

if __name__ == "__main__":
    # Bazel's test directory takes the place of the ignored folder in the repository, which is read-only there.
    cache = os.path.join(os.environ.get("TEST_TMPDIR", "/tmp"), "jax")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
