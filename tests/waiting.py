"""Waits for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float = 800.0, interval_s: float = 0.002) -> None:
    """Return once ``condition()`` is true; fail after ``timeout_s`` seconds. The condition may itself assert.

    It is looked at first after ``interval_s``, and then ever more rarely.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition was not met within {timeout_s:g} s"
        time.sleep(interval_s)
        interval_s = max(interval_s, min(1.5 * interval_s, 0.05))
