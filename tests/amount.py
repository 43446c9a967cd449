"""How much is done by tests that could go on for ever."""

from __future__ import annotations

import os


def amount(sample: int, *, long: int) -> int:
    """``long`` in `make test-long`, to which the test's marker ``long`` takes it; else ``sample``."""
    return long if os.environ.get("TESTS_LONG") == "1" else sample
