"""Pinned memory between a resume and the next pause: torch_memory_saver frees it, which the next pause pays for.

It is kept as long as the host has plenty, at most for some minutes.
"""

from __future__ import annotations

import atexit
import threading
import time
from pathlib import Path

from memsaver_core import _native

#: How long memory is kept that no pause uses: longer than a training step.
KEPT_FOR_S = 600.0
#: How often the host is asked.
_EVERY_S = 1.0
#: Percent of the last 10 s in which some task waited for memory (``some avg10``).
_PRESSURE = 1.0
_PRESSURE_FILE = Path("/proc/pressure/memory")


def is_plentiful(spare_bytes: int) -> bool:
    """Return whether the host, or this process's control group, can do without ``spare_bytes`` of pinned memory: no
    task waited for memory lately, and at least as much is available besides."""
    return _pressure() < _PRESSURE and _native.available_memory_bytes() >= spare_bytes


def _pressure() -> float:
    """Return ``some avg10``; 0 if the kernel does not tell."""
    try:
        fields = _PRESSURE_FILE.read_text().split()
    except OSError:
        return 0.0
    return float(next((field[6:] for field in fields if field.startswith("avg10=")), "0"))


class SpareMemory:
    """Watches over the memory of one saver."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0
        self._watching = False
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        atexit.register(self._end)

    def keep(self, saver: _native.Saver) -> None:
        """Keep what the saver has pinned until it is scarce, or unused for ``KEPT_FOR_S``; then unpin it."""
        with self._lock:
            self._until = time.monotonic() + KEPT_FOR_S
            if self._watching:
                return
            self._watching = True
        self._thread = threading.Thread(target=self._watch, args=(saver,), name="memsaver-spare-memory", daemon=True)
        self._thread.start()

    def _end(self) -> None:
        """Python ends a thread that returns from native code after this, and C++ then aborts the process."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, saver: _native.Saver) -> None:
        while True:
            status = saver.status()
            spare = status["pool_capacity_bytes"] - status["pool_used_bytes"]
            with self._lock:
                over = time.monotonic() > self._until or not is_plentiful(spare)
                self._watching = not over
            if over:
                saver.trim_backup_memory()
                return
            if self._ending.wait(_EVERY_S):
                return
