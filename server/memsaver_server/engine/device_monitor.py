"""Samples device memory in a thread, so that requests read the last sample instead of calling the driver."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import memsaver_core as ms
from memsaver_core.contract.errors import NoThreadError
from memsaver_core.contract.reports import DeviceDelta, MeteredDelta
from memsaver_core.contract.status import DeviceMemory, Status, TorchMemory
from memsaver_server.engine import LOCAL_MEMORY, Memory
from memsaver_server.threads import on_this_loop, reserved_heap, start_thread

logger = logging.getLogger("memsaver")

#: Interval of samples, and how long they are kept, seconds.
INTERVAL_S = 1.0
HISTORY_S = 900.0
#: How long a request waits for a new sample, seconds. A device answers within milliseconds unless it maps memory.
FRESH_S = 0.015


@dataclass(frozen=True)
class Sample:
    """What the devices, the core and torch reported at one moment; mappings are by device index."""

    at: float  # seconds since the epoch
    devices: tuple[DeviceMemory, ...] = ()
    status: Status = field(default_factory=lambda: Status(enabled=False, driver="none", state="resident"))
    torch: Mapping[int, TorchMemory] = field(default_factory=dict)
    graph_bytes: Mapping[int, int] = field(default_factory=dict)  # what captured graphs hold besides their tensors
    nccl: bool = False  # NCCL communicators exist; a part of what they hold cannot be suspended


class DeviceMonitor:
    """Samples every ``INTERVAL_S``, or later if the driver blocks. Readers never block on the driver."""

    def __init__(self, memory: Memory = LOCAL_MEMORY) -> None:
        self._memory = memory
        self._changed = threading.Condition()
        self._latest = Sample(0.0)
        self._history: deque[Sample] = deque(maxlen=int(HISTORY_S / INTERVAL_S))
        self._waiting: list[Future[None]] = []
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if none is alive; without one the last sample is used until a later call can start it."""
        with self._changed:
            if self._stopping or (self._thread is not None and self._thread.is_alive()):
                return
            try:
                self._thread = start_thread("memsaver-meter", self._run)
            except NoThreadError as error:
                logger.warning("device memory is not read: %s", error)

    def stop(self) -> None:
        """Stop for good. Does not wait for a driver call that blocks."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def latest(self) -> Sample:
        """Return the last sample at once; before the first one, a sample without devices."""
        self.start()
        return self._latest

    def history(self) -> list[Sample]:
        """Return the samples of the last ``HISTORY_S``, oldest first."""
        with self._changed:
            return [sample for sample in self._history if sample.at > time.time() - HISTORY_S]

    def note(self, devices: Iterable[DeviceDelta]) -> None:
        """Use an operation's last readings as the latest sample, so that its caller sees their effect."""
        metered = [each for each in devices if isinstance(each, MeteredDelta)]
        read = tuple(DeviceMemory(**{**dict(each), "used_bytes": each.used_after_bytes}) for each in metered)
        if read:
            sample = _sample(time.time(), read, self._memory)
            with self._changed:
                self._latest = sample

    async def fresh(self) -> Sample:
        """Return a sample taken after this call, or the last one if that takes longer than ``FRESH_S``."""
        taken: Future[None] = Future()
        self.start()
        with self._changed:
            self._waiting.append(taken)
            self._changed.notify()
        await asyncio.wait({on_this_loop(taken)}, timeout=FRESH_S)
        return self._latest

    @reserved_heap()
    def _run(self) -> None:
        remembered_at = 0.0
        failing = False
        while True:
            with self._changed:
                waiting, self._waiting = self._waiting, []
            try:
                sample = _sample(time.time(), self._memory.read_devices(), self._memory)
                failing = False
            except Exception:
                if not failing:
                    logger.exception("cannot read device memory; the last sample is used until it works again")
                failing = True
                sample = self._latest
            with self._changed:
                if sample.at >= self._latest.at:  # otherwise an operation has noted a later one
                    self._latest = sample
            for taken in waiting:
                taken.set_result(None)
            with self._changed:
                # Extra samples for requests must not displace the history.
                if sample.at - remembered_at >= 0.9 * INTERVAL_S:
                    self._history.append(sample)
                    remembered_at = sample.at
                self._changed.wait_for(lambda: self._stopping or self._waiting, INTERVAL_S)
                if self._stopping:
                    return


def _sample(at: float, devices: tuple[DeviceMemory, ...], memory: Memory) -> Sample:
    if memory is not LOCAL_MEMORY:
        return Sample(at, devices, memory.status())
    nccl = ms.read_communicators()  # before the status, which reports what this counts
    return Sample(
        at,
        devices,
        memory.status(),
        torch={device.index: ms.read_torch_memory(device.index) for device in devices},
        graph_bytes={device.index: ms.graph_memory_bytes(device.index) for device in devices},
        nccl=bool(nccl),
    )
