"""The clock of all time limits: the system's, unless a test replaces it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

source: Callable[[], float] = time.monotonic


def monotonic() -> float:
    """Return the time in seconds, which never goes back; only differences have a meaning."""
    return source()


def wait(changed: threading.Condition, seconds: float) -> None:
    """Wait until ``changed`` is notified, for at most ``seconds``. May return earlier."""
    changed.wait(seconds)
