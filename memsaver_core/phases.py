"""The record of an operation: its phases, each with its time and the device memory before and after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from memsaver_core.meter import read_devices
from memsaver_core.reports import DeviceDelta, DeviceMemory, PhaseReport


def deltas(before: tuple[DeviceMemory, ...], after: tuple[DeviceMemory, ...]) -> tuple[DeviceDelta, ...]:
    """Pair two readings by device; a device that the first reading lacks counts as unchanged."""
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

    Args:
        on_phase: called with the name of each phase as it begins.
        read: reads the devices; by default those of this process.
    """

    def __init__(
        self,
        on_phase: Callable[[str], None] | None = None,
        read: Callable[[], tuple[DeviceMemory, ...]] = read_devices,
    ) -> None:
        self._on_phase = on_phase
        self._read = read
        self._phases: list[PhaseReport] = []
        self._started = time.monotonic()
        self._first = read()

    @property
    def phases(self) -> tuple[PhaseReport, ...]:
        """The phases that have ended, failed ones included."""
        return tuple(self._phases)

    @property
    def seconds(self) -> float:
        """Since the log was made."""
        return time.monotonic() - self._started

    def devices(self) -> tuple[DeviceDelta, ...]:
        """Device memory from when the log was made until now."""
        return deltas(self._first, self._read())

    def add(self, phases: Iterable[PhaseReport]) -> None:
        """Append phases that ran somewhere else."""
        self._phases.extend(phases)

    def close(self) -> None:
        """Tell nobody any more of phases that begin."""
        self._on_phase = None

    @contextmanager
    def phase(self, name: str) -> Iterator[dict[str, float]]:
        """Record what runs inside as one phase; figures put into the dictionary become its details."""
        if self._on_phase is not None:
            self._on_phase(name)
        details: dict[str, float] = {}
        before = self._read()
        start = time.monotonic()
        try:
            yield details
        finally:
            seconds = time.monotonic() - start
            self._phases.append(PhaseReport(name, seconds, deltas(before, self._read()), details))
