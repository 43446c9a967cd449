"""What a release or a resume would do and take, without doing any of it.

What a backup would take is the core's expectation: packed, if a sample of the content or its last backup says so. It
may take less, as a block of zeros needs no host memory. Nothing is reserved: others may take what is free before the
operation.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import memsaver_core as ms
from memsaver_core.options import ReleaseOptions
from memsaver_core.release_resume import available_host_bytes
from memsaver_core.reports import DeviceMemory, HostBackupStatus, Status, TagStatus
from memsaver_server.admission import failed_for_good
from memsaver_server.lifecycle import Lifecycle
from memsaver_server.operation import Operation, OperationRequest, ReleaseRequest, ResumeRequest, tag_list
from memsaver_server.tag_selection import keeps_content, needs_writing, options_for

#: Phases in which an operation waits for others.
_WAITS = frozenset({"drain", "prepared", "wait_for_weights", "wait_for_memory"})


@dataclass(frozen=True)
class Room:
    """Bytes that are needed somewhere, and free there."""

    needed_bytes: int
    free_bytes: int

    @property
    def is_short(self) -> bool:
        return self.needed_bytes > self.free_bytes


@dataclass(frozen=True)
class PlannedTag:
    """One tag of the operation.

    Attributes:
        restore: the policy that the release would use, or the region's own.
        bytes: device memory that the operation would give back or take.
        backup_bytes: what its backup is expected to take more than it holds.
        loses_content: it would have to be written before it is used again.
    """

    tag: str
    restore: str
    bytes: int
    backup_bytes: int = 0
    loses_content: bool = False


@dataclass(frozen=True)
class Plan:
    """What an operation would do; with ``blockers`` it would fail, and for what reasons."""

    operation: str
    tags: tuple[PlannedTag, ...]
    host: Room
    file: Room
    devices: dict[int, Room]
    blockers: tuple[str, ...]


def plan_release(lifecycle: Lifecycle, request: ReleaseRequest) -> Plan:
    """Return what the release would do.

    Raises:
        UnknownTagError: a tag does not exist.
        NotEnoughToReleaseError: the tags hold less than ``at_least_bytes``.
    """
    memory = lifecycle.memory
    memory.check_tags((*request.tags, *request.options.restore))
    now = lifecycle.snapshot()
    options = options_for(request, now.status.tags) if now.status.enabled else request.options
    tags = [_released(tag, options) for tag in now.status.tags if not options.tags or tag.tag in options.tags]
    needed: Counter[str] = Counter()
    for tag in tags:
        needed[tag.restore] += tag.backup_bytes
    host = Room(needed["host"] + needed["mixed"], _free_host_bytes(now.status.host_backup))
    file = Room(needed["file"], _free_file_bytes() if needed["file"] else 0)
    blockers = [*_general_blockers(now.status, request, now.running)]
    if request.options.hibernate and now.status.enabled:
        blockers += memory.hibernation_obstacles()
    # What others have in the shared store is not needed again, which shows only while content is saved.
    if host.is_short and now.status.host_backup.shared_store is None:
        blockers.append(f"host memory: the backup may need {host.needed_bytes} bytes, {host.free_bytes} are free")
    if file.is_short:
        blockers.append(f"disk: the backup may need {file.needed_bytes} bytes, {file.free_bytes} are free")
    return Plan("release", tuple(tags), host, file, {}, tuple(blockers))


def plan_resume(lifecycle: Lifecycle, request: ResumeRequest, devices: Iterable[DeviceMemory]) -> Plan:
    """Return what the resume would do; ``devices`` are their present readings.

    Raises:
        UnknownTagError: a tag does not exist.
    """
    lifecycle.memory.check_tags(request.tags)
    now = lifecycle.snapshot()
    asked = lifecycle.tags_to_resume(request.tags)
    tags = [tag for tag in now.status.tags if tag.released_bytes and (not asked or tag.tag in asked)]
    needed = Counter({index: -size for index, size in now.status.reserved_by_device.items()})
    for tag in tags:
        needed.update(_missing_by_device(tag))
    free = {device.index: device.total_bytes - device.used_bytes for device in devices}
    rooms = {index: Room(max(0, size), free.get(index, 0)) for index, size in sorted(needed.items())}
    blockers = list(_general_blockers(now.status, request, now.running))
    for index, room in rooms.items():
        if room.is_short:
            blockers.append(f"device {index}: {room.needed_bytes} bytes are needed, {room.free_bytes} are free")
    planned = tuple(
        PlannedTag(tag.tag, tag.restore, tag.released_bytes, loses_content=tag.tag in now.unwritten) for tag in tags
    )
    return Plan("resume", planned, Room(0, 0), Room(0, 0), rooms, tuple(blockers))


def expected_s(plan: Plan, recent: Iterable[Operation]) -> float | None:
    """Return how long ``plan`` takes at the rate of the last operation of its kind among ``recent`` (newest first) that
    moved memory, without what it waited for. None if there is none."""
    size = sum(tag.bytes for tag in plan.tags)
    for operation in recent:
        report = operation.report
        if report is None or report.operation != plan.operation:
            continue
        if moved := report.released_bytes if plan.operation == "release" else report.resumed_bytes:
            return size / moved * sum(phase.seconds for phase in report.phases if phase.name not in _WAITS)
    return None


def _released(tag: TagStatus, options: ReleaseOptions) -> PlannedTag:
    override = options.restore.get(tag.tag)
    restore = override.value if override is not None else tag.restore
    kept = keeps_content(tag, options)
    backup = max(0, tag.resident_bytes - tag.backed_up_bytes) if restore == "file" else tag.expected_bytes
    return PlannedTag(
        tag.tag,
        restore if tag.resident_bytes else tag.restore,
        sum(tag.mapped_by_device.values()),
        backup if kept or restore == "mixed" else 0,
        loses_content=bool(tag.resident_bytes) and not kept and needs_writing(tag, options),
    )


def _missing_by_device(tag: TagStatus) -> dict[int, int]:
    if len(tag.bytes_by_device) == 1:
        return dict.fromkeys(tag.bytes_by_device, tag.released_bytes)
    return {
        index: max(0, size - tag.mapped_by_device.get(index, 0)) for index, size in tag.bytes_by_device.items() if size
    }


def _general_blockers(status: Status, request: OperationRequest, running: Operation | None) -> Iterable[str]:
    if not status.enabled:
        yield "memsaver is disabled in this process: nothing would happen"
    if status.state == "failed":
        yield failed_for_good(status)
    if running is not None and running.request.operation != request.operation:
        yield f"{running.request.operation} {running.id} of {tag_list(running.request.tags)} is in progress"


def _free_host_bytes(backup: HostBackupStatus) -> int:
    """Return what backups may still take: memory that is pinned and unused, and what the host and the limit allow."""
    if (store := backup.shared_store) is not None:
        used, pinned, limit = store.used_bytes, store.total_bytes, store.limit_bytes
    else:
        used, pinned, limit = backup.bytes - backup.file_bytes, backup.capacity_bytes, backup.limit_bytes
    return max(0, min(limit - used, max(0, pinned - used) + available_host_bytes()))


def _free_file_bytes() -> int:
    try:
        disk = os.statvfs(ms.core_settings().file_dir)
    except OSError:  # no backup can be made there
        return 0
    return disk.f_bavail * disk.f_frsize
