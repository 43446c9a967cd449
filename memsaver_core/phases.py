"""The record of an operation: its phases, each with its time and the device memory before and after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from memsaver_core.device_memory import read_devices
from memsaver_core.errors import MemsaverError
from memsaver_core.reports import DeviceDelta, DeviceMemory, PhaseReport

logger = logging.getLogger("memsaver")


def deltas(before: tuple[DeviceMemory, ...] | None, after: tuple[DeviceMemory, ...] | None) -> tuple[DeviceDelta, ...]:
    """Pair two readings by device; a device that the first reading lacks counts as unchanged. Without one: nothing."""
    if before is None or after is None:
        return ()
    earlier = {reading.index: reading for reading in before}
    return tuple(
        DeviceDelta(
            index=now.index,
            uuid=now.uuid,
            name=now.name,
            total_bytes=now.total_bytes,
            used_before_bytes=earlier.get(now.index, now).used_bytes,
            used_after_bytes=now.used_bytes,
            process_bytes=now.process_bytes,
        )
        for now in after
    )


class PhaseLog:
    """Collects phases in the order in which they run.

    A device that cannot be read fails nothing, as what was done is done: its phase tells no figures then.

    Args:
        read: reads the devices; by default those of this process.
    """

    def __init__(self, read: Callable[[], tuple[DeviceMemory, ...]] = read_devices) -> None:
        self._read = read
        self._phases: list[PhaseReport] = []
        self._starts: list[float] = []
        self._tell: Callable[[], str] = lambda: ""
        self._failed = ""
        self._started = time.monotonic()
        self._first = self.read()

    @property
    def phases(self) -> tuple[PhaseReport, ...]:
        """The phases that have ended, failed ones included."""
        return tuple(self._phases)

    @property
    def starts(self) -> tuple[float, ...]:
        """When each of them began, in seconds since the epoch; where a phase runs now, its beginning is the last."""
        return tuple(self._starts)

    @property
    def now(self) -> str:
        """The phase that runs, or ran last; an empty string before the first."""
        return self._tell()

    @property
    def failed(self) -> str:
        """The phase that began last, where an error ended it; else an empty string."""
        return self._failed

    @property
    def seconds(self) -> float:
        """Since the log was made."""
        return time.monotonic() - self._started

    def devices(self) -> tuple[DeviceDelta, ...]:
        """Device memory from when the log was made until now."""
        return deltas(self._first, self.read())

    def read(self) -> tuple[DeviceMemory, ...] | None:
        """Read the devices; None where that fails."""
        try:
            return self._read()
        except MemsaverError as error:
            logger.warning("the devices' memory cannot be read, so its change is not told: %s", error)
            return None

    @contextmanager
    def phase(self, name: str) -> Iterator[dict[str, float]]:
        """Record what runs inside as one phase; figures put into the dictionary become its details."""
        with self._telling(lambda: name):
            details: dict[str, float] = {}
            before = self.read()
            start = time.monotonic()
            try:
                yield details
            finally:
                seconds = time.monotonic() - start
                self._phases.append(PhaseReport(name, seconds, deltas(before, self.read()), details))

    @contextmanager
    def elsewhere(self, tell: Callable[[], str]) -> Iterator[None]:
        """The phases inside run in other processes: ``tell`` says which runs now, ``add`` takes what they report."""
        with self._telling(tell):
            yield

    def add(self, phases: Sequence[PhaseReport]) -> None:
        """Append phases that ran somewhere else, one after the other until now."""
        began = time.time() - sum(phase.seconds for phase in phases)
        del self._starts[len(self._phases) :]
        for phase in phases:
            self._starts.append(began)
            self._phases.append(phase)
            began += phase.seconds

    def add_failure(self, phase: str) -> None:
        """Take it that ``phase`` failed, where that was somewhere else."""
        self._failed = phase

    @contextmanager
    def _telling(self, tell: Callable[[], str]) -> Iterator[None]:
        del self._starts[len(self._phases) :]  # where one could not be recorded
        self._starts.append(time.time())
        self._tell, self._failed = tell, ""
        try:
            yield
        except BaseException:
            self._failed = tell()
            raise
