"""The breakdown of each device's memory: every byte that the device counts has a source or is called unexplained."""

from __future__ import annotations

import pytest

import memsaver_core as ms
from memsaver_core.contract.status import DeviceMemory, Status, TagStatus, TorchMemory
from memsaver_server.engine.device_monitor import Sample
from memsaver_server.engine.memory_breakdown import Consumer, break_down

MIB = 1 << 20
GIB = 1 << 30
KEPT = "what the driver keeps of a hibernated process"


def tag(name: str, mapped: dict[int, int], live: dict[int, int]) -> TagStatus:
    size, resident = sum(live.values()), sum(mapped.values())
    return TagStatus(
        tag=name,
        restore="host",
        state="resident",
        bytes=size,
        resident_bytes=resident,
        released_bytes=size - resident,
        retained_bytes=0,
        backed_up_bytes=0,
        allocations=1,
        chunks=1,
        mapped_by_device=mapped,
        bytes_by_device=live,
    )


def device(used: int, process: int | None, index: int = 0) -> DeviceMemory:
    return DeviceMemory(
        index=index,
        uuid=f"GPU-{index}",
        name="a GPU",
        total_bytes=141 * GIB,
        used_bytes=used,
        process_bytes=process,
    )


@pytest.fixture
def status() -> Status:
    """Weights on two devices, released on the second one, and a cache on the first."""
    tags = (
        tag("weights", {0: 20 * GIB, 1: 0}, {0: 20 * GIB, 1: 20 * GIB}),
        tag("kv_cache", {0: 30 * GIB}, {0: 30 * GIB}),
    )
    return ms.status().model_copy(update={"driver": "cuda", "tags": tags})


def held(*devices: DeviceMemory, **read: object) -> list[dict[tuple[str, str], int]]:
    sample = Sample(1.0, devices, **read)  # type: ignore[arg-type]
    found = [break_down(each, sample) for each in devices]
    for each, parts in zip(devices, found, strict=True):
        assert sum(part.bytes for part in parts) == each.used_bytes
        assert all(part.bytes >= 0 for part in parts)
    return [{(part.kind, part.name): part.bytes for part in parts if part.bytes} for parts in found]


def test_what_a_process_holds_is_told_apart(status: Status) -> None:
    [parts] = held(
        device(60 * GIB, 55 * GIB),
        status=status,
        torch={0: TorchMemory(54 * GIB, 3 * GIB)},
        graph_bytes={0: 40 * MIB},
    )
    assert parts == {
        ("tag", "weights"): 20 * GIB,
        ("tag", "kv_cache"): 30 * GIB,
        ("torch", "torch outside regions"): 1 * GIB,
        ("cache", "torch's cache"): 3 * GIB,
        ("graphs", "captured graphs, beside their tensors"): 40 * MIB,
        ("process", "context and modules"): GIB - 40 * MIB,
        ("others", "other processes"): 5 * GIB,
    }


def test_each_device_has_its_own(status: Status) -> None:
    """torch counts released regions too; on the second device it holds nothing else."""
    first, second = held(
        device(60 * GIB, 55 * GIB),
        device(3 * GIB, 1 * GIB, 1),
        status=status,
        torch={0: TorchMemory(54 * GIB, None), 1: TorchMemory(20 * GIB, 0)},
        nccl=True,
    )
    assert first["tag", "weights"] == 20 * GIB
    assert first["torch", "torch outside regions, and its cache"] == 4 * GIB
    assert first["process", "context and modules, NCCL"] == 1 * GIB
    assert second == {("process", "context and modules, NCCL"): 1 * GIB, ("others", "other processes"): 2 * GIB}


def test_a_hibernated_process_holds_what_the_driver_keeps(status: Status) -> None:
    """Neither resident tags nor torch's own count describe what is on the device then."""
    [parts] = held(
        device(10 * GIB, 4 * MIB),
        status=status.model_copy(update={"hibernated": True}),
        torch={0: TorchMemory(54 * GIB, 0)},
    )
    assert parts == {("process", KEPT): 4 * MIB, ("others", "other processes"): 10 * GIB - 4 * MIB}


def test_what_the_driver_does_not_tell_is_called_unexplained(status: Status) -> None:
    [parts] = held(device(60 * GIB, None), status=status, torch={0: TorchMemory(54 * GIB, 0)})
    assert parts["torch", "torch outside regions"] == 4 * GIB
    assert parts["unexplained", "context and modules, other processes"] == 6 * GIB


def test_a_count_that_lags_behind_is_never_exceeded(status: Status) -> None:
    """Nor do sources of this process include what the driver counts for others."""
    [parts] = held(device(40 * GIB, 24 * GIB), status=status, torch={0: TorchMemory(50 * GIB, 0)})
    assert parts == {
        ("tag", "weights"): 20 * GIB,
        ("tag", "kv_cache"): 4 * GIB,
        ("others", "other processes"): 16 * GIB,
    }


def test_without_a_core_all_of_it_is_unexplained() -> None:
    [part] = [part for part in break_down(device(GIB, None), Sample(1.0, (device(GIB, None),))) if part.bytes]
    assert part == Consumer(
        kind="unexplained", name="context and modules, torch outside regions, other processes", bytes=GIB
    )
