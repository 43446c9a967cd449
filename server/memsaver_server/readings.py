"""Device readings that cost their readers nothing: one thread asks the driver, everybody else gets the last answer."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

import memsaver_core as ms
from memsaver_core.reports import DeviceMemory, Status

logger = logging.getLogger("memsaver")

#: How long readings are remembered, seconds, for whoever wants to see memory over time.
REMEMBERED_S = 900.0


@dataclass(frozen=True)
class Reading:
    """What the devices and the core said at one moment.

    Attributes:
        at: when, in seconds since the epoch.
        status: the core's own account at that moment; None where there was no reading yet.
        torch_bytes: what torch's allocator holds of each device, by its index: regions, whether mapped or released, and
            everything else. A device on which torch holds nothing is not there.
    """

    at: float
    devices: tuple[DeviceMemory, ...] = ()
    status: Status | None = None
    torch_bytes: Mapping[int, int] = field(default_factory=dict)


class DeviceReadings:
    """The last reading of each device, at most ``interval_s`` old while the driver answers, and those before it.

    A driver call that blocks delays the readings, and nobody who reads them.
    """

    def __init__(self, interval_s: float = 1.0) -> None:
        self._interval_s = interval_s
        self._changed = threading.Condition()
        self._latest = Reading(0.0)
        self._past: deque[Reading] = deque(maxlen=int(REMEMBERED_S / interval_s))
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

    def latest(self) -> Reading:
        """Return the last reading at once; one without devices where there was none yet."""
        self.start()
        with self._changed:
            return self._latest

    def past(self) -> list[Reading]:
        """Return the readings of the last ``REMEMBERED_S``, the oldest first."""
        with self._changed:
            return [reading for reading in self._past if reading.at > time.time() - REMEMBERED_S]

    def fresh(self, timeout_s: float = 0.25) -> Reading:
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
        remembered_at = 0.0
        failing = False
        while True:
            try:
                reading = _read()
                failing = False
            except Exception:
                if not failing:
                    logger.exception("cannot read the devices' memory; the last reading stands until it works again")
                failing = True
                reading = self._latest
            with self._changed:
                self._latest = reading
                # Extra readings, taken because somebody asked, must not push the past out.
                if reading.at - remembered_at >= 0.9 * self._interval_s:
                    self._past.append(reading)
                    remembered_at = reading.at
                self._reads += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopping or self._wanted > self._reads, self._interval_s)
                if self._stopping:
                    return


def _read() -> Reading:
    devices = ms.read_devices()
    held = {}
    if torch.cuda.is_initialized() and ms.driver_name() == "cuda":
        held = {device.index: torch.cuda.memory_reserved(device.index) for device in devices}
    return Reading(time.time(), devices, ms.status(), held)
