"""What holds each device's memory: every byte that the device counts has an owner, or is called unexplained."""

from __future__ import annotations

from dataclasses import replace

import pytest

import memsaver_core as ms
from memsaver_core.reports import DeviceMemory, Status, TagStatus
from memsaver_server.readings import Reading
from memsaver_server.sources import Source, sources

GIB = 1 << 30


def tag(name: str, mapped: dict[int, int], live: int) -> TagStatus:
    resident = sum(mapped.values())
    return TagStatus(name, "host", "resident", live, resident, live - resident, 0, 0, 1, 1, mapped)


def device(used: int, process: int | None, index: int = 0) -> DeviceMemory:
    return DeviceMemory(index, f"GPU-{index}", "a GPU", 141 * GIB, used, process)


@pytest.fixture
def status() -> Status:
    """Weights on two devices, of which the second's are released; a cache on the first."""
    tags = (tag("weights", {0: 20 * GIB, 1: 0}, 40 * GIB), tag("kv_cache", {0: 30 * GIB}, 30 * GIB))
    return replace(ms.status(), driver="cuda", tags=tags)


def held(*devices: DeviceMemory, status: Status, torch_bytes: dict[int, int]) -> list[dict[tuple[str, str], int]]:
    reading = Reading(1.0, devices, status, torch_bytes)
    found = [sources(each, reading) for each in devices]
    for each, parts in zip(devices, found, strict=True):
        assert sum(part.bytes for part in parts) == each.used_bytes
        assert all(part.bytes >= 0 for part in parts)
    return [{(part.kind, part.name): part.bytes for part in parts} for parts in found]


def test_one_device_is_told_apart(status: Status) -> None:
    tags = tuple(replace(tag, bytes=sum(tag.mapped_by_device.values())) for tag in status.tags)
    [parts] = held(device(60 * GIB, 55 * GIB), status=replace(status, tags=tags), torch_bytes={0: 54 * GIB})
    assert parts == {
        ("tag", "weights"): 20 * GIB,
        ("tag", "kv_cache"): 30 * GIB,
        ("torch", "torch outside regions"): 4 * GIB,
        ("process", "context and libraries"): 1 * GIB,
        ("others", "other processes"): 5 * GIB,
    }


def test_each_device_has_its_own(status: Status) -> None:
    first, second = held(
        device(60 * GIB, 55 * GIB), device(3 * GIB, 1 * GIB, 1), status=status, torch_bytes={0: 54 * GIB, 1: 20 * GIB}
    )
    assert first["tag", "weights"] == 20 * GIB
    assert first["process", "context, libraries and torch outside regions"] == 5 * GIB
    assert second["tag", "weights"] == second["tag", "kv_cache"] == 0
    assert second["others", "other processes"] == 2 * GIB


def test_what_the_driver_does_not_tell_is_called_unexplained(status: Status) -> None:
    [parts] = held(device(60 * GIB, None), status=status, torch_bytes={0: 70 * GIB})
    assert parts["unexplained", "context and libraries, other processes"] == 10 * GIB


def test_a_count_that_lags_behind_is_never_exceeded(status: Status) -> None:
    [parts] = held(device(25 * GIB, 24 * GIB), status=status, torch_bytes={})
    assert list(parts.values()) == [20 * GIB, 5 * GIB, 0, 0, 0]


def test_without_a_core_all_of_it_is_unexplained() -> None:
    [part] = [part for part in sources(device(GIB, None), Reading(1.0, (device(GIB, None),))) if part.bytes]
    assert part == Source("unexplained", "context and libraries, other processes", GIB)
