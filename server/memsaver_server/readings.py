"""Device readings that cost their readers nothing: one thread asks the driver, everybody else gets the last answer."""

from __future__ import annotations

import logging
import threading
import time

import memsaver_core as ms
from memsaver_core.reports import DeviceMemory

logger = logging.getLogger("memsaver")


class DeviceReadings:
    """The last reading of each device, at most ``interval_s`` old while the driver answers.

    A driver call that blocks delays the readings, and nobody who reads them.
    """

    def __init__(self, interval_s: float = 1.0) -> None:
        self._interval_s = interval_s
        self._changed = threading.Condition()
        self._latest: tuple[DeviceMemory, ...] = ()
        self._taken_at = 0.0
        self._reads = 0
        self._wanted = 0
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start reading. Idempotent."""
        with self._changed:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="memsaver-meter", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop reading, for good. Does not wait for a driver call that blocks."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def latest(self) -> tuple[DeviceMemory, ...]:
        """Return the last reading at once; nothing where there was none yet."""
        self.start()
        with self._changed:
            return self._latest

    def fresh(self, timeout_s: float = 0.25) -> tuple[DeviceMemory, ...]:
        """Return a reading begun after this call; the last one where the driver takes longer than ``timeout_s``."""
        self.start()
        with self._changed:
            # A reading may be under way that began before this call: the one after it is wanted.
            wanted = self._reads + 2
            self._wanted = max(self._wanted, wanted)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._reads >= wanted or self._stopping, timeout_s)
            return self._latest

    def _run(self) -> None:
        while True:
            try:
                reading = ms.read_devices()
            except Exception:
                logger.exception("cannot read the devices' memory; the last reading stands")
                reading = self._latest
            with self._changed:
                self._latest = reading
                self._taken_at = time.time()
                self._reads += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopping or self._wanted > self._reads, self._interval_s)
                if self._stopping:
                    return
