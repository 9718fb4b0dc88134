"""Settings of the property tests: the same examples in every run, unless one asks for others.

    LSFUSE_EXAMPLES=500 python -m pytest tests/test_replay_properties.py --hypothesis-seed=7

runs 500 examples of each property, drawn from seed 7 (from a new one without the flag), instead of the fixed few. A
failure prints the smallest example that fails.
"""

import os

from hypothesis import HealthCheck, settings


def examples(count: int) -> settings:
    """Hypothesis' settings for `count` examples, or for as many as LSFUSE_EXAMPLES says."""
    wanted = int(os.environ.get("LSFUSE_EXAMPLES", 0))
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]  # a first example may compile for seconds
    return settings(max_examples=wanted or count, derandomize=not wanted, deadline=None, suppress_health_check=slow)
