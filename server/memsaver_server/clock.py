"""The clock by which limits of time are measured: that of the system, until a test puts another into its place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

source: Callable[[], float] = time.monotonic


def monotonic() -> float:
    """Return the time in seconds, of which only differences mean something; it never goes back."""
    return source()


def wait(changed: threading.Condition, seconds: float) -> None:
    """Wait until ``changed`` is notified, for at most ``seconds``. It may return before."""
    changed.wait(seconds)
