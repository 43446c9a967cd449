"""What an operation would do and take, without doing any of it.

The size of a backup is the core's estimate: a packed one, if a sample of the content or the last backup could be
packed. It may be less, as a block of zeros needs no host memory. Nothing is reserved: others may take what is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memsaver_core.contract.errors import MemsaverError, UnsupportedError
from memsaver_core.contract.phases import Phase
from memsaver_core.contract.reports import DeviceRoom, DiskRoom, PlanAnswer, PlannedTag, Room
from memsaver_core.contract.requests import Asked, OperationName, Release, ResizeKvCache, Resume
from memsaver_core.contract.status import DeviceMemory, Status, TagStatus
from memsaver_core.ranks.plans import backup_rooms, device_rooms, most_for, planned_release
from memsaver_core.release_resume import tags_left_resident
from memsaver_server.engine.admission import failed_for_good
from memsaver_server.engine.lifecycle import Lifecycle, Snapshot
from memsaver_server.engine.tag_selection import keeps_content, narrowed, needs_writing
from memsaver_server.operation.operation import Operation
from memsaver_server.operation.queue import conflicts

_NO_ROOM = Room(needed_bytes=0, free_bytes=0)
_NO_DISK = DiskRoom(needed_bytes=0, free_bytes=0)


def plan_release(lifecycle: Lifecycle, request: Release) -> PlanAnswer:
    """Return what the release would do; raise UnknownTagError, or as ``narrowed``."""
    memory = lifecycle.memory
    memory.check_tags((*request.tags, *request.restore))
    now, status = lifecycle.snapshot(), lifecycle.status_of(request)
    asked = narrowed(request, status.tags) if now.status.enabled else request
    held = () if now.status.hibernated else status.tags  # then nothing is on the device
    blockers = list(_blockers(lifecycle, now, request))
    left = frozenset[str]()
    try:
        left = tags_left_resident(held, asked)
    except UnsupportedError as refused:
        blockers.append(str(refused))
    tags = [_released(tag, asked) for tag in held if asked.concerns(tag.tag) and tag.tag not in left]
    host, file = backup_rooms(tags, now.status)
    if request.hibernate and now.status.enabled:
        blockers += memory.hibernation_obstacles()
    if host.needed_bytes > (most := most_for(host, now.status)):
        blockers.append(f"host memory: the backup may need {host.needed_bytes} bytes, {most} are free")
    if file.is_short:
        blockers.append(f"disk: the backup may need {file.needed_bytes} bytes, {file.free_bytes} are free")
    return plan_answer("release", tags, blockers, host=host, file=file)


def plan_resume(lifecycle: Lifecycle, request: Resume, devices: Iterable[DeviceMemory]) -> PlanAnswer:
    """Return what the resume would do, with the present readings of ``devices``; raise UnknownTagError."""
    lifecycle.memory.check_tags(request.tags)
    now = lifecycle.snapshot()
    asked = lifecycle.tags_to_resume(request)
    tags = [tag for tag in lifecycle.status_of(request).tags if tag.released_bytes and (not asked or tag.tag in asked)]
    whole = [tag for tag in tags if request.kv_cache == "whole" or tag.tag not in ResizeKvCache.tags]
    rooms = device_rooms(whole, now.status, devices)
    blockers = list(_blockers(lifecycle, now, request))
    planned = [
        PlannedTag(tag=tag.tag, restore=tag.restore, bytes=tag.released_bytes, loses_content=tag.tag in now.unwritten)
        for tag in tags
    ]
    return plan_answer("resume", planned, blockers, rooms)


def expected_s(plan: PlanAnswer, recent: Iterable[Operation]) -> float | None:
    """Return how long ``plan`` takes at the rate of the last operation of its kind among ``recent`` (newest first) that
    moved memory, without what it waited for. None if there is none."""
    size = sum(tag.bytes for tag in plan.tags)
    for operation in recent:
        report = operation.report
        if report is None or report.operation != plan.operation:
            continue
        if moved := report.released_bytes if plan.operation == "release" else report.resumed_bytes:
            return size / moved * sum(phase.seconds for phase in report.phases if not Phase(phase.name).waits)
    return None


def plan_answer(
    operation: OperationName,
    tags: Sequence[PlannedTag],
    blockers: list[str],
    devices: Sequence[DeviceRoom] = (),
    host: Room = _NO_ROOM,
    file: DiskRoom = _NO_DISK,
    does: str = "",
) -> PlanAnswer:
    """Return the plan of an operation that moves ``tags``, in words what it ``does``, unless there are ``blockers``, or
    one of the ``devices`` has too little room."""
    for room in devices:
        if room.is_short:
            blockers.append(f"device {room.index}: {room.needed_bytes} bytes are needed, {room.free_bytes} are free")
    moves = any(tag.bytes for tag in tags)
    would = f"would {does or planned_text(operation, tags)}" if moves else f"nothing to {operation}"
    return PlanAnswer(
        message=f"dry run: would fail: {'; '.join(blockers)}" if blockers else f"dry run: {would}",
        operation=operation,
        tags=tuple(tags),
        blockers=tuple(blockers),
        host=host,
        file=file,
        devices=tuple(devices),
    )


def planned_text(operation: OperationName, tags: Iterable[PlannedTag]) -> str:
    moved = readable(sum(tag.bytes for tag in tags))
    names = ", ".join(tag.tag for tag in tags if tag.bytes)
    return f"{operation} {f'{moved} of {names}' if names else 'nothing'}"


def readable(size: int) -> str:
    value = float(size)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:g} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def _released(tag: TagStatus, request: Release) -> PlannedTag:
    lost = bool(tag.resident_bytes) and not keeps_content(tag, request) and needs_writing(tag, request)
    return planned_release(tag, request).model_copy(update={"loses_content": lost})


def _blockers(lifecycle: Lifecycle, now: Snapshot, request: Release | Resume) -> Iterable[str]:
    yield from general_blockers(now.status, request, now.running)
    try:
        lifecycle.check(request)
    except MemsaverError as refused:
        yield str(refused)


def general_blockers(status: Status, request: Asked, running: Operation | None) -> Iterable[str]:
    if not status.enabled:
        yield "memsaver is disabled in this process: nothing would happen"
    if status.state == "failed":
        yield failed_for_good(status)
    joins = running is not None and not running.blocks_others and running.request.digest() == request.digest()
    if running is not None and conflicts(request, running) and not joins:
        yield running.in_progress()
