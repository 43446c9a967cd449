"""What an operation would do on this rank, and whether it is possible; nothing is changed. A check here refuses only
what the operation itself would refuse, but before any rank has done anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import memsaver_core as ms
from memsaver_core import _native, communicators, disk, hibernation, process
from memsaver_core.contract.errors import OutOfDeviceMemoryError, OutOfHostMemoryError
from memsaver_core.contract.policies import COMMUNICATORS, keeps_any
from memsaver_core.contract.reports import DeviceRoom, DiskRoom, PlannedTag, Room
from memsaver_core.contract.requests import MemoryRequest, Tagged
from memsaver_core.contract.status import DeviceMemory, Status, TagStatus
from memsaver_core.ranks.protocol import Plan
from memsaver_core.release_resume import tags_left_resident


def reserve(request: Tagged) -> None:
    """As ``memsaver_core.reserve_with``; while the process is hibernated, only check that the memory is free."""
    plan_resume(request)
    ms.reserve_with(request)


def plan_release(request: MemoryRequest, *, exact: bool = False, reserve_disk: bool = False) -> Plan:
    """Return what a release would do; for ``exact`` see ``Prepare``. With ``reserve_disk``, take the disk space of its
    backups until the release, or ``give_back_reserved``. Raises ContextLostError; OutOfHostMemoryError, DiskFullError
    or UnsupportedError as the release itself would."""
    tags, status = _look(request.tags)
    left = tags_left_resident(tags, request)
    host, file = backup_rooms([planned_release(tag, request) for tag in tags if tag.tag not in left], status)
    most = most_for(host, status)
    needed = _to_fit(host.needed_bytes, 0 if exact else most)
    if needed > most:
        raise OutOfHostMemoryError(
            f"the backups need {needed} bytes of host memory, and {most} may be used; release fewer tags, "
            "discard some, or raise MEMSAVER_HOST_BACKUP_LIMIT",
            needed,
            most,
        )
    if (on_disk := _to_fit(file.needed_bytes, file.free_bytes)) > file.free_bytes:
        raise disk.full(on_disk, file.free_bytes)
    if reserve_disk:
        disk.reserve(_to_fit(file.needed_bytes, 0))
    away = status.hibernated
    return Plan(
        host_bytes_needed=needed,
        communicators=() if away else communicators.found(),
        obstacles=tuple(hibernation.obstacles(suspending=True)) if request.hibernate and not away else (),
    )


def plan_resume(request: Tagged) -> Plan:
    """Return what a resume would do; raise ContextLostError, or OutOfDeviceMemoryError if a device is short."""
    tags, status = _look(request.tags)

    def short() -> DeviceRoom | None:
        return next((room for room in device_rooms(tags, status, ms.read_devices()) if room.is_short), None)

    room = short()
    if room is not None and not status.hibernated and process.backend().make_room():
        room = short()
    if room is not None:
        raise OutOfDeviceMemoryError(
            f"device {room.index} has too little free memory to resume [{room.needed_bytes} bytes needed, "
            f"{room.free_bytes} free]; everything stays released with its backup; let other processes free memory and "
            "repeat",
            room.needed_bytes,
            room.free_bytes,
            room.index,
        )
    return Plan(communicators=communicators.statuses())


def planned_release(tag: TagStatus, request: MemoryRequest) -> PlannedTag:
    """Return what the release does to a tag."""
    override = request.restore.get(tag.tag)
    restore = tag.restore if override is None else override.value
    backup = tag.expected_file_bytes if restore == "file" else tag.expected_bytes
    return PlannedTag(
        tag=tag.tag,
        restore=restore if tag.resident_bytes else tag.restore,
        bytes=sum(tag.mapped_by_device.values()),
        backup_bytes=backup if keeps_any(restore) else 0,
    )


def backup_rooms(tags: Iterable[PlannedTag], status: Status) -> tuple[Room, DiskRoom]:
    """Return what the backups of a release need of host memory and of disk, and what is free there. Content that other
    processes have in the shared store needs no more, but that shows only while content is saved."""
    needed: Counter[str] = Counter()
    for tag in tags:
        needed["file" if tag.restore == "file" else "host"] += tag.backup_bytes
    host = Room(needed_bytes=needed["host"], free_bytes=status.host_backup.room_bytes(_native.available_memory_bytes()))
    if not needed["file"]:
        return host, DiskRoom(needed_bytes=0, free_bytes=0)
    return host, DiskRoom(needed_bytes=needed["file"], free_bytes=disk.free_bytes(), disk=disk.number())


def most_for(host: Room, status: Status) -> int:
    """Return the most bytes of backups that a release may keep. In a shared store, other processes may have the same
    content, or give up theirs, so only backups larger than the whole store surely have no room."""
    store = status.host_backup.shared_store
    return host.free_bytes if store is None else store.limit_bytes


def device_rooms(tags: Iterable[TagStatus], status: Status, devices: Iterable[DeviceMemory]) -> list[DeviceRoom]:
    """Return what a resume of ``tags`` needs of each device besides what is reserved, and what is free there."""
    needed = Counter({index: -size for index, size in status.reserved_by_device.items()})
    for tag in tags:
        one = len(tag.bytes_by_device) == 1
        for index, size in tag.bytes_by_device.items():
            if tag.released_bytes and size:
                there = tag.mapped_by_device.get(index, 0) + tag.shrunk_by_device.get(index, 0)
                needed[index] += tag.released_bytes if one else max(0, size - there)
    free = {device.index: device.unused_bytes for device in devices}
    return [
        DeviceRoom(index=index, needed_bytes=max(0, size), free_bytes=free.get(index, 0))
        for index, size in sorted(needed.items())
    ]


def _look(names: tuple[str, ...]) -> tuple[list[TagStatus], Status]:
    hibernation.raise_if_lost()
    status = ms.status()
    tags = [tag for tag in status.tags if tag.tag != COMMUNICATORS]
    return [tag for tag in tags if not names or tag.tag in names], status


def _to_fit(needed: int, free: int) -> int:
    """Return ``needed``; if it exceeds ``free``, less what torch holds free. That takes time to find."""
    if needed <= free:
        return needed
    return max(0, needed - sum(size for _, size in process.backend().dead_ranges(process.saver())))
