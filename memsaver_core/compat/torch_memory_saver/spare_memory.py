"""Pinned memory between a resume and the next pause: torch_memory_saver frees it, which the next pause pays for.

It is kept as long as the host has plenty, at most for some minutes.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from pathlib import Path

from memsaver_core import _native

logger = logging.getLogger(__name__)

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
        """Keep what the saver has pinned until it is scarce, or unused for ``KEPT_FOR_S``; then unpin it.

        Unpins it now if nothing can watch over it.
        """
        with self._lock:
            self._until = time.monotonic() + KEPT_FOR_S
            if self._watching:
                return
            thread = threading.Thread(target=self._watch, args=(saver,), name="memsaver-spare-memory", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("backup memory is unpinned at once: no thread to watch over it: %s", error)
            else:
                self._watching, self._thread = True, thread
                return
        saver.trim_backup_memory(at_once=True)

    def _end(self) -> None:
        """Python ends a thread that returns from native code after this, and C++ then aborts the process."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, saver: _native.Saver) -> None:
        while self._keeps(saver):
            if self._ending.wait(_EVERY_S):
                return
        saver.trim_backup_memory()

    def _keeps(self, saver: _native.Saver) -> bool:
        try:
            status = saver.status()
            plentiful = is_plentiful(status["pool_capacity_bytes"] - status["pool_used_bytes"])
        except Exception:
            logger.exception("backup memory is unpinned: how much memory the host has cannot be told")
            plentiful = False
        with self._lock:
            self._watching = plentiful and time.monotonic() <= self._until
            return self._watching
