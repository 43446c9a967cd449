"""Release and resume, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from memsaver_core import _native, communicators, disk, hibernation, library_caches, process
from memsaver_core.contract.errors import OutOfDeviceMemoryError, UnknownTagError, UnsupportedError
from memsaver_core.contract.phases import Phase
from memsaver_core.contract.policies import (
    COMMUNICATORS,
    WELL_KNOWN_TAGS,
    PolicyLike,
    keeps_any,
    parse_policy,
    policy_for,
)
from memsaver_core.contract.reports import OperationReport, TagReport
from memsaver_core.contract.requests import MemoryRequest, Tagged, Verb
from memsaver_core.contract.status import DeviceMemory, HostBackupStatus, Progress, Status, TagStatus
from memsaver_core.device_memory import read_devices
from memsaver_core.phases import PhaseLog, deltas

_T = TypeVar("_T")

#: Returns the host memory that this process may still take: what the kernel has available, within the cgroup.
available_host_bytes = _native.available_memory_bytes
#: Returns the memory of this machine, or of this process's cgroup if less.
total_host_bytes = _native.machine_memory_bytes

#: Bound on the wait for the device's own count to fall. With the drivers that were measured it falls at once.
SETTLE_TIMEOUT_SECONDS = 0.25

#: Device memory that a first operation may take for itself: streams, a kernel's module, and a share of what it backs
#: up. The page tables of newly pinned memory take 8 bytes on the device for each 4 KiB.
SETTLE_SLACK_BYTES = 16 << 20
SETTLE_SLACK_SHARE = 256


def check_tags(tags: Iterable[str] | None) -> list[str]:
    """Return ``tags`` without repeats; an empty list means all, as does None. Raises UnknownTagError if one is neither
    well known nor used by any region."""
    names = list(dict.fromkeys(tags or ()))
    if process.enabled():
        UnknownTagError.check(names, (*process.known_tags(), *WELL_KNOWN_TAGS))
    return names


def release(
    tags: Sequence[str] | None = None,
    *,
    restore: Mapping[str, PolicyLike] | None = None,
    trim: bool | None = None,
    hibernate: bool = False,
    log: PhaseLog | None = None,
) -> OperationReport:
    """Give the memory of ``tags`` back to the driver; content is kept as the policies say, addresses stay.

    Nothing may use the memory from this call until it is resumed. A tag that is released already is success. torch's
    caches go back, too: ``torch.cuda.empty_cache()`` and ``torch.cuda.ipc_collect()``.

    Args:
        tags: which; None or empty for all.
        restore: another policy for this release alone, by tag.
        trim: also give back what libraries keep for speed: cuBLAS workspaces (unless a CUDA graph is alive that may use
            them), the driver's cache for graphs, torch's cache of pinned host memory, each in a separate phase.
            By default only with ``hibernate``. Unused CUDA modules stay: only their loader can unload them.
        hibernate: at the end, give back the CUDA context itself; every CUDA call of this process then blocks until the
            resume.
        log: a log to append the phases to; the report then covers all phases in it.

    Raises:
        UnknownTagError: before anything was done.
        UnsupportedError: this process cannot be hibernated; or backups in host memory of ``tags`` would free nothing,
            because a device has no memory but the host's (a release of all tags leaves these resident, and fails only
            if there are no others); before anything was done.
        ContextLostError: this process was hibernated and can never be woken again.
        OutOfHostMemoryError, DiskFullError: the backups would not fit; nothing was unmapped.
        MemsaverError: a driver call failed. All is resident again, unless content that is not kept was already gone or
            the undo failed: then what was released stays released, and both a repeat and a resume work.
    """
    policies = {tag: parse_policy(policy) for tag, policy in (restore or {}).items()}
    return release_with(MemoryRequest(tags=_named(tags), restore=policies, trim=trim, hibernate=hibernate), log=log)


def release_with(request: MemoryRequest, *, log: PhaseLog | None = None) -> OperationReport:
    """As ``release``."""
    asked = names = check_tags(request.tags)
    overrides = {tag: policy.value for tag, policy in request.restore.items()}
    check_tags(list(overrides))
    if not process.enabled():
        return OperationReport(operation="release", enabled=False)
    hibernation.raise_if_lost()
    log = log or PhaseLog(read_devices)
    saver, backend = process.saver(), process.backend()
    if hibernation.is_hibernated():  # nothing is left to release
        return _report("release", names, {"tags": _tags_now(saver, names)}, log)
    if request.hibernate and (reasons := hibernation.obstacles()):
        raise UnsupportedError("this process cannot be hibernated: " + "; ".join(reasons) + "; nothing was released")
    if left := tags_left_resident(status().tags, request):
        names = [tag for tag in process.known_tags() if tag not in left]
    if request.communicators == "suspend" and communicators.found():
        raise UnsupportedError(
            "NCCL suspends a communicator on all of its ranks together: call memsaver_core.communicators.suspend() in "
            "the process of each; nothing was released"
        )
    if request.hibernate:
        hibernation.prepare()
    with log.phase(Phase.SYNCHRONIZE):
        saver.synchronize()
    with log.phase(Phase.PAUSE) as details:
        before = log.recent()
        disk.drop()  # disk space that was held for this release
        kept = any(keeps_any(overrides.get(tag["tag"], tag["restore"])) for tag in _tags_now(saver, names))
        result = saver.release(names, backend.dead_ranges(saver) if kept else [], overrides)
        _note_work(details, result, "backed_up_bytes")
        details["first_64_mib_seconds"] = result["first_memory_seconds"]
        backend.note_release([tag["tag"] for tag in result["tags"]])
    if request.trims:
        with log.phase(Phase.TRIM_WORKSPACES) as details:
            details["kept_for_graphs"] = float(not library_caches.free_workspaces())
    with log.phase(Phase.EMPTY_CACHE):
        backend.empty_cache()
    if request.trims:
        with log.phase(Phase.TRIM_GRAPHS):
            saver.trim_graph_memory()
        with log.phase(Phase.TRIM_PINNED) as details:
            details["host_bytes"] = float(library_caches.free_pinned_memory())
    with log.phase(Phase.IPC_COLLECT):
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()
    with log.phase(Phase.SETTLE):
        _settle(log, before, _total(result, "released_bytes"))
    if request.hibernate:
        with log.phase(Phase.HIBERNATE) as details:
            details.update(hibernation.hibernate())
    if left:
        result["tags"] += [{**tag, "already": False} for tag in _tags_now(saver, list(left))]
    return _report("release", asked, result, log)


def tags_left_resident(tags: Iterable[TagStatus], request: MemoryRequest) -> frozenset[str]:
    """Return those of ``tags``, all that there are, that the release leaves resident: it would keep their content in
    host memory, and their device has no other memory. Raises UnsupportedError if the request names one of them, or
    nothing else could be released."""
    there = [tag for tag in tags if tag.bytes and tag.tag != COMMUNICATORS and request.concerns(tag.tag)]
    in_host = (tag for tag in there if request.restore.get(tag.tag, tag.restore) in ("host", "mixed"))
    left = [tag.tag for tag in in_host if tag.integrated_bytes]
    if left and (request.tags or len(left) == len(there)):
        raise UnsupportedError(
            f"the device has no memory but the host's, so a backup of {', '.join(map(repr, left))} in host memory "
            "would free nothing; release it with the policy 'file' or 'discard'; nothing was released"
        )
    return frozenset(left)


def resume(tags: Sequence[str] | None = None, *, log: PhaseLog | None = None) -> OperationReport:
    """Bring back what is released under ``tags``, at the same addresses, with the content that the policies promise.

    All or nothing. None or empty means all tags; a tag that is resident already is success. A hibernated process wakes
    first, whatever the tags. The phases are appended to ``log``.

    Raises:
        UnknownTagError: before anything was done.
        OutOfDeviceMemoryError: the device has too little free memory; everything is as before and the call can be
            repeated.
        BackupError: content differs from what was kept; everything is as before.
        ContextLostError: this process was hibernated and can never be woken again.
        MemsaverError: a driver call failed; everything is as before.
    """
    return resume_with(Tagged(tags=_named(tags)), log=log)


def resume_with(request: Tagged, *, log: PhaseLog | None = None) -> OperationReport:
    """As ``resume``."""
    names = check_tags(request.tags)
    if not process.enabled():
        return OperationReport(operation="resume", enabled=False)
    hibernation.raise_if_lost()
    log = log or PhaseLog(read_devices)
    if hibernation.is_hibernated():
        with log.phase(Phase.WAKE) as details:
            details.update(hibernation.wake())
    with log.phase(Phase.RESTORE) as details:
        result = with_room(lambda: process.saver().resume(names))
        _note_work(details, result, "restored_bytes")
    return _report("resume", names, result, log)


def reserve_with(request: Tagged) -> None:
    """Take the device memory that ``resume_with(request)`` needs, and hold it without an address until the next resume,
    which then cannot run out of it, or ``give_back_reserved``. Does nothing while the process is hibernated. Raises as
    ``resume``; nothing is held then."""
    names = check_tags(request.tags)
    hibernation.raise_if_lost()
    if not process.enabled() or hibernation.is_hibernated():
        return
    with_room(lambda: process.saver().reserve(names))


def give_back_reserved() -> None:
    """Give back the memory that ``reserve_with`` holds and the disk space that is held for a release. What the driver
    refuses is tried again later."""
    disk.drop()
    if (saver := process.existing_saver()) is not None:
        saver.give_back_reserved()


def prepare_backup(*, wait: bool = False) -> None:
    """Pin the host memory that a release of everything needs, in the background, and compile kernels that this user's
    cache lacks, in a quarter of a second each. With ``wait``, return when it is done. Without this the first release is
    slower and packs nothing. Does nothing with MEMSAVER_PREPARE_BACKUP=0. Raises OutOfHostMemoryError, only with
    ``wait``, if host memory is short."""
    if not (process.enabled() and process.core_settings().prepare_backup):
        return
    saver = process.saver()
    saver.prepare_backup()
    if wait:
        saver.wait_until_prepared()


def status() -> Status:
    """Return what the saver holds now. Never waits for an operation in flight, calls no driver."""
    nccl_tags = () if (nccl := communicators.tag_status()) is None else (nccl,)
    state = "released" if nccl is not None and nccl.state == "released" else "resident"
    of_nccl: dict[str, Any] = {"communicators": communicators.statuses(), "shared": communicators.shared()}
    driver = process.driver_name()
    if (saver := process.existing_saver()) is None:
        return Status(enabled=process.enabled(), driver=driver, state=state, tags=nccl_tags, **of_nccl)
    now = saver.status()
    lost = hibernation.this_process.failure
    figures = {key: now[key] if now["operation"] else 0 for key in ("done_bytes", "total_bytes", "copied_bytes")}
    return Status(
        enabled=True,
        driver=driver,
        state="failed" if lost else state if now["state"] == "resident" else now["state"],
        failure=lost or now["failure"],
        tags=(*map(_tag_status, now["tags"]), *nccl_tags),
        host_backup=HostBackupStatus(**now["host_backup"]),
        progress=Progress(operation=now["operation"], seconds=now["operation_seconds"], **figures),
        hibernated=hibernation.is_hibernated(),
        reserved_by_device=now["reserved_by_device"],
        **of_nccl,
    )


def with_room(take: Callable[[], _T]) -> _T:
    """Return ``take()``, tried again without what torch caches if the device is short."""
    try:
        return take()
    except OutOfDeviceMemoryError:
        if not process.backend().make_room():
            raise
        return take()


def _tag_status(tag: dict[str, Any]) -> TagStatus:
    has_host_memory = process.backend().has_host_memory
    integrated = sum(size for index, size in tag["mapped_by_device"].items() if has_host_memory(index))
    return TagStatus(**tag, integrated_bytes=integrated)


def _tags_now(saver: _native.Saver, names: list[str]) -> list[dict[str, Any]]:
    return [
        {"tag": tag["tag"], "restore": tag["restore"], "state": tag["state"], "bytes": tag["bytes"], "already": True}
        for tag in saver.status()["tags"]
        if not names or tag["tag"] in names
    ]


def _settle(log: PhaseLog, before: tuple[DeviceMemory, ...] | None, released_bytes: int) -> None:
    """Wait until the devices' own counts have fallen by what was released, at most SETTLE_TIMEOUT_SECONDS. They may
    never fall: a co-tenant may take the memory at the same moment."""
    deadline, now = time.monotonic() + SETTLE_TIMEOUT_SECONDS, log.recent()
    while time.monotonic() < deadline:
        if before is None or now is None:
            return  # the devices cannot be read
        fallen = -sum(device.delta_bytes for device in deltas(before, now))
        if fallen >= released_bytes - released_bytes // SETTLE_SLACK_SHARE - SETTLE_SLACK_BYTES:
            return
        time.sleep(0.001)
        now = log.read()


def _total(result: dict[str, Any], key: str) -> int:
    return sum(int(tag[key]) for tag in result["tags"])


def _note_work(details: dict[str, float], result: dict[str, Any], copied: str) -> None:
    copied_bytes = _total(result, copied)
    details.update({name: value for name, value in result["work"].items() if value or name != "linked_bytes"})
    details["copied_bytes"] = copied_bytes
    if copied_bytes:
        details["gigabytes_per_second"] = copied_bytes / 1e9 / max(result["seconds"], 1e-9)


def _report(operation: Verb, names: list[str], result: dict[str, Any], log: PhaseLog) -> OperationReport:
    tags = {tag["tag"]: TagReport(**tag) for tag in result["tags"]}
    for name in names:
        if name not in tags:  # well known, with no memory under it
            restore = policy_for(name, None).value
            tags[name] = TagReport(tag=name, restore=restore, state="resident", already=True)
    return log.report(operation, tuple(tags[name] for name in names or tags))


def _named(tags: Sequence[str] | None) -> tuple[str, ...]:
    """Return the tags of a call; a single string is one tag."""
    return (tags,) if isinstance(tags, str) else tuple(tags or ())
