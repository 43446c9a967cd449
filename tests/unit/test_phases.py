"""How often an operation reads the devices."""

from __future__ import annotations

import math

import pytest

from memsaver_core import PhaseLog, phases
from memsaver_core.contract.errors import MemsaverError
from memsaver_core.contract.phases import Phase
from memsaver_core.contract.status import DeviceMemory

NAMES = [Phase.SYNCHRONIZE, Phase.PAUSE, Phase.SETTLE]


class Device:
    """Uses a byte more at each reading."""

    def __init__(self) -> None:
        self.readings = 0
        self.fails = False

    def read(self) -> tuple[DeviceMemory, ...]:
        self.readings += 1
        if self.fails:
            raise MemsaverError("not now")
        return (DeviceMemory(index=0, uuid="0", name="", total_bytes=1, used_bytes=self.readings, process_bytes=None),)


def run(device: Device) -> list[tuple[int, int]]:
    log = PhaseLog(device.read)
    for name in NAMES:
        with log.phase(name):
            pass
    report = log.report("release", ())
    devices = [*(phase.devices for phase in report.phases), report.devices]
    return [(each.used_before_bytes, each.used_after_bytes) for (each,) in devices]


def test_a_phase_begins_with_what_the_last_one_ended_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "SAME_MOMENT_S", math.inf)
    assert run(Device()) == [(1, 2), (2, 3), (3, 4), (1, 4)]


def test_what_other_processes_did_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "SAME_MOMENT_S", math.inf)
    log = PhaseLog(Device().read)
    with log.running(lambda: "pause"):
        pass
    with log.phase(Phase.SETTLE):
        pass
    [(settle,)] = [phase.devices for phase in log.phases]
    assert (settle.used_before_bytes, settle.used_after_bytes) == (2, 3)


def test_what_is_read_later_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "SAME_MOMENT_S", 0.0)
    assert run(Device()) == [(2, 3), (4, 5), (6, 7), (1, 8)]


def test_a_device_that_cannot_be_read_stops_nothing() -> None:
    device = Device()
    log = PhaseLog(device.read)
    device.fails = True
    with log.phase(Phase.PAUSE):
        pass
    assert [phase.devices for phase in log.phases] == [()]
