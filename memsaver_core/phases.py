"""The record of an operation: its phases, each with its duration and the device memory before and after it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from memsaver_core.contract.errors import MemsaverError
from memsaver_core.contract.phases import Phase
from memsaver_core.contract.reports import MeteredDelta, OperationReport, PhaseReport, TagReport
from memsaver_core.contract.requests import OperationName
from memsaver_core.contract.status import DeviceMemory

logger = logging.getLogger("memsaver")

#: A phase that follows another one within this time, seconds, begins with what that one has read: readings take time.
SAME_MOMENT_S = 0.01


def deltas(before: tuple[DeviceMemory, ...] | None, after: tuple[DeviceMemory, ...] | None) -> tuple[MeteredDelta, ...]:
    """Pair figures by device; a device missing from ``before`` counts as unchanged. If either is None: no pairs."""
    if before is None or after is None:
        return ()
    earlier = {device.index: device.used_bytes for device in before}
    return tuple(
        MeteredDelta(
            **dict(now),
            used_before_bytes=(was := earlier.get(now.index, now.used_bytes)),
            used_after_bytes=now.used_bytes,
            delta_bytes=now.used_bytes - was,
        )
        for now in after
    )


class PhaseLog:
    """Collects phases in the order in which they run, with the devices that ``read`` returns before and after each. If
    they cannot be read, the operation goes on and its phases have no device figures."""

    def __init__(self, read: Callable[[], tuple[DeviceMemory, ...]]) -> None:
        self._read = read
        #: The phases that have ended, failed ones included.
        self.phases: tuple[PhaseReport, ...] = ()
        #: When each phase began, in seconds since the epoch; the last entry may be of a phase that still runs.
        self.starts: tuple[float, ...] = ()
        self._current: Callable[[], str] = lambda: ""
        #: The last phase, if an error ended it, here or in another process.
        self.failed = ""
        self._started = time.monotonic()
        self._first = self.read()

    @property
    def now(self) -> str:
        """The phase that runs, or ran last; an empty string before the first."""
        return self._current()

    def report(self, operation: OperationName, tags: tuple[TagReport, ...], *, enabled: bool = True) -> OperationReport:
        """Return the report of an operation on ``tags`` whose phases these are."""
        devices = deltas(self._first, self.recent())
        return OperationReport(
            operation=operation,
            enabled=enabled,
            seconds=time.monotonic() - self._started,
            released_bytes=sum(tag.released_bytes for tag in tags),
            resumed_bytes=sum(tag.resumed_bytes for tag in tags),
            tags=tags,
            phases=self.phases,
            devices=devices,
        )

    def read(self) -> tuple[DeviceMemory, ...] | None:
        """Read the devices; None if that fails."""
        self._latest = None
        try:
            self._latest = self._read()
        except MemsaverError as error:
            logger.warning("device memory cannot be read, so its change is not reported: %s", error)
        self._read_at = time.monotonic()
        return self._latest

    def recent(self) -> tuple[DeviceMemory, ...] | None:
        """As ``read``, or what that returned less than ``SAME_MOMENT_S`` ago, if nothing has run since."""
        return self._latest if time.monotonic() - self._read_at < SAME_MOMENT_S else self.read()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[dict[str, float]]:
        """Record what runs inside as one phase; the figures that it puts into the dictionary become its details."""
        details: dict[str, float] = {}
        before = self.recent()
        start = time.monotonic()
        try:
            with self.running(lambda: phase.value):
                yield details
        finally:
            seconds = time.monotonic() - start
            devices = deltas(before, self.read())
            self.phases += (PhaseReport(name=phase.value, seconds=seconds, devices=devices, details=details),)

    def add(self, phases: Sequence[PhaseReport]) -> None:
        """Append phases that ran in other processes, one after the other until now."""
        began = time.time() - sum(phase.seconds for phase in phases)
        self.starts = self.starts[: len(self.phases)]
        for phase in phases:
            self.starts += (began,)
            self.phases += (phase,)
            began += phase.seconds

    @contextmanager
    def running(self, current: Callable[[], str]) -> Iterator[None]:
        """Note that what runs inside is the phase that ``current`` returns; its report is added later, by ``add``."""
        # Drops the start of a phase that could not be recorded.
        self.starts = (*self.starts[: len(self.phases)], time.time())
        self._current, self.failed = current, ""
        try:
            yield
        except BaseException:
            self.failed = current()
            raise
        finally:
            self._read_at = -math.inf
