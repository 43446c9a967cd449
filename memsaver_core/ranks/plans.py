"""What an operation would do on this rank, and whether it could: nothing is changed to find out.

A check here refuses only what the operation itself would refuse. It finds it before any rank has done anything.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping

import memsaver_core as ms
from memsaver_core import _native, communicators, hibernation, process
from memsaver_core.contract.errors import OutOfDeviceMemoryError, OutOfHostMemoryError
from memsaver_core.contract.policies import COMMUNICATORS, RestorePolicy
from memsaver_core.contract.requests import MemoryRequest, Tagged
from memsaver_core.contract.status import Status, TagStatus
from memsaver_core.ranks.protocol import Plan


def reserve(request: Tagged) -> None:
    """As ``memsaver_core.reserve_with``; while the process is hibernated, only check that the memory is free."""
    plan_resume(request)
    ms.reserve_with(request)


def plan_release(request: MemoryRequest, *, exact: bool = False) -> Plan:
    """Return what a release would do; for ``exact`` see ``Prepare``.

    Raises:
        ContextLostError: as ``memsaver_core.release``.
        OutOfHostMemoryError: the backups would not fit, in host memory or on disk.
    """
    tags, status = _look(request.tags)
    free = _free_host_bytes(status)
    expected = sum(tag.expected_bytes for tag in tags if _policy(tag, request) in (RestorePolicy.HOST, "mixed"))
    needed = _to_fit(expected, 0 if exact else free)
    if needed > free:
        raise OutOfHostMemoryError(
            f"the backups need {needed} bytes of host memory, and {free} may be used; release fewer tags, discard "
            "some, or raise MEMSAVER_HOST_BACKUP_LIMIT",
            needed,
            free,
        )
    to_file = (tag for tag in tags if _policy(tag, request) == RestorePolicy.FILE)
    _check_disk(sum(max(0, tag.resident_bytes - tag.backed_up_bytes) for tag in to_file))
    away = status.hibernated
    return Plan(
        tag_bytes={tag.tag: tag.resident_bytes for tag in tags},
        host_bytes_needed=needed,
        host_bytes_free=free,
        communicators=() if away else communicators.found(),
        obstacles=tuple(hibernation.obstacles(suspending=True)) if request.hibernate and not away else (),
    )


def plan_resume(request: Tagged) -> Plan:
    """Return what a resume would do.

    Raises:
        ContextLostError: as ``memsaver_core.resume``.
        OutOfDeviceMemoryError: a device has less free memory than the tags need.
    """
    tags, status = _look(request.tags)
    needed = missing_by_device(tags, status)
    free = _free_device_bytes()
    if _short(needed, free) is not None and not status.hibernated and process.backend().make_room():
        free = _free_device_bytes()
    device = _short(needed, free)
    if device is not None:
        raise OutOfDeviceMemoryError(
            f"device {device} has too little free memory to resume [{needed[device]} bytes needed, {free[device]} "
            "free]; everything stays released with its backup; let other processes free memory and repeat",
            needed[device],
            free[device],
            device,
        )
    return Plan(
        tag_bytes={tag.tag: tag.released_bytes for tag in tags},
        device_bytes_needed=needed,
        device_bytes_free=free,
        communicators=communicators.statuses(),
    )


def missing_by_device(tags: Iterable[TagStatus], status: Status) -> Counter[int]:
    """Return what a resume of ``tags`` needs of each device besides what is reserved."""
    needed = Counter({index: -size for index, size in status.reserved_by_device.items()})
    for tag in tags:
        one = len(tag.bytes_by_device) == 1
        for index, size in tag.bytes_by_device.items():
            if tag.released_bytes and size:
                needed[index] += tag.released_bytes if one else max(0, size - tag.mapped_by_device.get(index, 0))
    return needed


def free_file_bytes() -> int | None:
    """Return what is free for backups in files; None if no backup can be made there."""
    try:
        disk = os.statvfs(ms.core_settings().file_dir)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize


def _look(names: tuple[str, ...]) -> tuple[list[TagStatus], Status]:
    hibernation.raise_if_lost()
    status = ms.status()
    tags = [tag for tag in status.tags if tag.tag != COMMUNICATORS]
    return [tag for tag in tags if not names or tag.tag in names], status


def _policy(tag: TagStatus, request: MemoryRequest) -> str:
    return request.restore.get(tag.tag, tag.restore)


def _to_fit(needed: int, free: int) -> int:
    """Return ``needed``, if it exceeds ``free`` without what torch holds free: that is not backed up, and asking for it
    takes time."""
    if needed <= free:
        return needed
    return max(0, needed - sum(size for _, size in process.backend().dead_ranges(process.saver())))


def _check_disk(needed: int) -> None:
    """Raise OutOfHostMemoryError if backup files need more than is free."""
    if needed == 0:
        return
    free = free_file_bytes()
    if free is None:  # the release itself reports why
        return
    needed = _to_fit(needed, free)
    if needed > free:
        raise OutOfHostMemoryError(
            f"the backups need {needed} bytes on the file system of {ms.core_settings().file_dir}, and {free} are "
            "free; free disk space, or set MEMSAVER_FILE_DIR to a larger file system",
            needed,
            free,
        )


def _free_host_bytes(status: Status) -> int:
    if status.host_backup.shared_store is not None:  # what it lacks shows only while content is saved
        return 1 << 62
    return status.host_backup.room_bytes(_native.available_memory_bytes())


def _free_device_bytes() -> dict[int, int]:
    return {device.index: device.total_bytes - device.used_bytes for device in ms.read_devices()}


def _short(needed: Mapping[int, int], free: Mapping[int, int]) -> int | None:
    """Return the first device that has too little free memory."""
    return next((device for device, size in needed.items() if size > free.get(device, size)), None)
