"""Device readings that cost their readers nothing: one thread asks the driver, everybody else gets the last answer."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import memsaver_core as ms
from memsaver_core.communicators import nccl_groups
from memsaver_core.reports import DeviceDelta, DeviceMemory, Status, TorchMemory
from memsaver_server.engine import LOCAL_MEMORY, Memory
from memsaver_server.heap_reserve import headroom

logger = logging.getLogger("memsaver")

#: How long readings are remembered, seconds, for whoever wants to see memory over time.
REMEMBERED_S = 900.0
#: How long somebody who wants a fresh reading waits for it at most, seconds. A device answers in a few milliseconds,
#: but not while it is busy mapping memory.
FRESH_S = 0.015


@dataclass(frozen=True)
class Reading:
    """What the devices and the core said at one moment.

    Attributes:
        at: when, in seconds since the epoch.
        status: the core's own account at that moment; None where there was no reading yet.
        torch: what torch holds of each device, by its index.
        graph_bytes: what captured graphs hold of each device beside their tensors, by its index.
        nccl: NCCL communicators are alive, and hold memory that nobody tells of.
    """

    at: float
    devices: tuple[DeviceMemory, ...] = ()
    status: Status | None = None
    torch: Mapping[int, TorchMemory] = field(default_factory=dict)
    graph_bytes: Mapping[int, int] = field(default_factory=dict)
    nccl: bool = False


class DeviceReadings:
    """The last reading of each device, at most ``interval_s`` old while the driver answers, and those before it.

    A driver call that blocks delays the readings, and nobody who reads them.
    """

    def __init__(self, interval_s: float = 1.0, memory: Memory = LOCAL_MEMORY) -> None:
        self._memory = memory
        self._interval_s = interval_s
        self._changed = threading.Condition()
        self._latest = Reading(0.0)
        self._past: deque[Reading] = deque(maxlen=int(REMEMBERED_S / interval_s))
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
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
        return self._latest

    def past(self) -> list[Reading]:
        """Return the readings of the last ``REMEMBERED_S``, the oldest first."""
        with self._changed:
            return [reading for reading in self._past if reading.at > time.time() - REMEMBERED_S]

    def note(self, devices: Iterable[DeviceDelta]) -> None:
        """Take what an operation read last for the last reading, so that who saw it end finds what it left."""
        read = tuple(
            DeviceMemory(each.index, each.uuid, each.name, each.total_bytes, each.used_after_bytes, each.process_bytes)
            for each in devices
        )
        if not read:
            return
        reading = _with_accounts(time.time(), read, self._memory)
        with self._changed:
            self._latest = reading

    async def fresh(self, timeout_s: float = FRESH_S) -> Reading:
        """Return a reading begun after this call; the last one where the driver takes longer than ``timeout_s``."""
        loop = asyncio.get_running_loop()
        taken: asyncio.Future[None] = loop.create_future()
        self.start()
        with self._changed:
            self._waiting.append((loop, taken))
            self._changed.notify()
        await asyncio.wait({taken}, timeout=timeout_s)
        return self._latest

    @headroom()
    def _run(self) -> None:
        remembered_at = 0.0
        failing = False
        while True:
            with self._changed:
                waiting, self._waiting = self._waiting, []
            try:
                reading = _read(self._memory)
                failing = False
            except Exception:
                if not failing:
                    logger.exception("cannot read the devices' memory; the last reading stands until it works again")
                failing = True
                reading = self._latest
            with self._changed:
                if reading.at >= self._latest.at:  # else an operation has noted a later one
                    self._latest = reading
            for loop, taken in waiting:
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(_settle, taken)
            with self._changed:
                # Extra readings, taken because somebody asked, must not push the past out.
                if reading.at - remembered_at >= 0.9 * self._interval_s:
                    self._past.append(reading)
                    remembered_at = reading.at
                self._changed.wait_for(lambda: self._stopping or self._waiting, self._interval_s)
                if self._stopping:
                    return


def _settle(taken: asyncio.Future[None]) -> None:
    if not taken.done():
        taken.set_result(None)


def _read(memory: Memory) -> Reading:
    began = time.time()
    return _with_accounts(began, memory.read_devices(), memory)


def _with_accounts(at: float, devices: tuple[DeviceMemory, ...], memory: Memory) -> Reading:
    """What else is known of ``devices`` now; asks the driver for next to nothing."""
    if memory is not LOCAL_MEMORY:
        return Reading(at, devices, memory.status())
    return Reading(
        at,
        devices,
        memory.status(),
        torch={device.index: ms.read_torch_memory(device.index) for device in devices},
        graph_bytes={device.index: ms.graph_memory_bytes(device.index) for device in devices},
        nccl=bool(nccl_groups()),
    )
