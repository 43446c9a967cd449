"""What the engines of a fleet hold together, in the shape of an engine's own account."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memsaver_core.contract.status import AdmissionStatus, Consumer, HostBackup, OccupiedDevice, TagOccupation
from memsaver_server.fleet.observer import Observer
from memsaver_server.fleet.results import EngineRow, EngineStatus, FleetOccupationAnswer, FleetStatus, common, count_of

_TAG_SIZES = [name for name, field in TagOccupation.model_fields.items() if field.annotation is int]


def occupation(observer: Observer, running: str | None, requests: Mapping[str, int]) -> FleetOccupationAnswer:
    """Return what the engines hold together, and a row for each. ``running`` is the oldest operation that runs,
    ``requests`` are those in flight through this coordinator, by engine."""
    status, silence = observer.status, observer.silence()
    seen = [engine.occupation for engine in status.engines if engine.occupation is not None]
    is_open = any(one.admission.open for one in seen)
    reason = observer.trouble or ("" if is_open else "no engine accepts requests")
    backups = [one.host_backup for one in seen]
    sizes = ("bytes", "capacity_bytes", "file_bytes", "unused_bytes")
    hosts = {one.host_id: one.host_bytes for one in seen}
    # Each engine may use most of its host, and together they have no more than that.
    limits = [
        min(sum(one.host_backup.limit_bytes for one in seen if one.host_id == host), size or sys.maxsize)
        for host, size in hosts.items()
    ]
    return FleetOccupationAnswer(
        enabled=not seen or any(one.enabled for one in seen),
        driver=common(one.driver for one in seen),
        state=status.state,
        hibernated=bool(seen) and all(one.hibernated for one in seen),
        engine=f"fleet of {len(status.engines)}",
        model=", ".join(sorted({engine.model for engine in status.engines if engine.model})),
        admission=AdmissionStatus(open=is_open, reason=reason),
        operation_id=running,
        updating=any(one.updating for one in seen),
        tags=_tags(status),
        devices=devices(status),
        host_backup=HostBackup(
            **{name: sum(getattr(one, name) for one in backups) for name in sizes},
            limit_bytes=sum(limits),
            prepared=bool(backups) and all(one.prepared for one in backups),
        ),
        host_bytes=sum(hosts.values()),
        engines=tuple(_row(one, requests.get(one.name, 0), silence.get(one.name, 0.0)) for one in status.engines),
        wanted=tuple(status.wanted),
        demands=tuple(status.demands),
        progress=status.progress,
    )


def devices(status: FleetStatus) -> tuple[OccupiedDevice, ...]:
    """Return the GPUs of the fleet, each once, with what all its engines together hold of it."""
    found: dict[str, OccupiedDevice] = {}
    held: dict[str, list[Consumer]] = {}
    for engine in status.engines:
        for device in engine.occupation.devices if engine.occupation else ():
            found[device.uuid] = device
            held.setdefault(device.uuid, []).extend(device.sources)
    of_all = {uuid: {"process_bytes": None, "sources": _own(held[uuid], found[uuid].used_bytes)} for uuid in found}
    return tuple(each.model_copy(update={"index": n, **of_all[uuid]}) for n, (uuid, each) in enumerate(found.items()))


def total(gpus: Sequence[OccupiedDevice]) -> list[dict[str, Any]]:
    """Return all GPUs as one device, as JSON, for one chart."""
    if not gpus:
        return []
    whole = OccupiedDevice(
        index=0,
        uuid="",
        name=count_of(gpus, "device"),
        process_bytes=None,
        total_bytes=sum(gpu.total_bytes for gpu in gpus),
        used_bytes=sum(gpu.used_bytes for gpu in gpus),
        free_bytes=sum(gpu.free_bytes for gpu in gpus),
        sources=_added(source for gpu in gpus for source in gpu.sources),
    )
    return [whole.model_dump(mode="json")]


def _own(sources: Iterable[Consumer], used: int) -> tuple[Consumer, ...]:
    """Return the consumers that engines count as theirs, and the rest."""
    own = _added(each for each in sources if each.kind not in ("others", "unexplained"))
    rest = max(0, used - sum(each.bytes for each in own))
    return (*own, Consumer(kind="others", name="other processes", bytes=rest))


def _added(sources: Iterable[Consumer]) -> tuple[Consumer, ...]:
    sums: dict[tuple[Any, str], int] = {}
    for each in sources:
        sums[each.kind, each.name] = sums.get((each.kind, each.name), 0) + each.bytes
    return tuple(Consumer(kind=kind, name=name, bytes=size) for (kind, name), size in sums.items())


def _row(engine: EngineStatus, requests: int, silent_s: float) -> EngineRow:
    tags = engine.occupation.tags if engine.occupation else ()
    silent = f"no answer for {silent_s:.0f} s" if silent_s else ""
    return EngineRow(
        **engine.model_dump(exclude={"occupation", "error"}),
        error=engine.error or silent,
        resident_bytes=sum(tag.resident_bytes for tag in tags),
        released_bytes=sum(tag.released_bytes for tag in tags),
        requests=requests,
    )


def _tags(status: FleetStatus) -> tuple[TagOccupation, ...]:
    same: dict[str, list[TagOccupation]] = {}
    for engine in status.engines:
        for tag in engine.occupation.tags if engine.occupation else ():
            same.setdefault(tag.tag, []).append(tag)
    return tuple(
        TagOccupation(
            tag=name,
            restore=common(row.restore for row in rows),
            state=common(row.state for row in rows),
            content="lost" if any(row.content == "lost" for row in rows) else "ok",
            **{size: sum(getattr(row, size) for row in rows) for size in _TAG_SIZES},
        )
        for name, rows in sorted(same.items())
    )
