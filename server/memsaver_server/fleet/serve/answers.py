"""Results of a fleet as the JSON of its service."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

from fastapi.responses import JSONResponse

from memsaver_core import MemsaverError
from memsaver_server.fleet.results import EngineStatus, FleetResult, FleetStatus
from memsaver_server.fleet.serve.observer import Observer
from memsaver_server.fleet.serve.operations import Operations, ServedOperation
from memsaver_server.http.errors import ErrorResponse, error_response

#: The status of an operation that failed, by kinds of failure that are the coordinator's; others are the engines' own.
_STATUSES = {"cannot_prepare": 409, "cancelled": 409, "unreachable": 502, "silent": 502, "hung": 504}


def operation_response(operation: ServedOperation, *, run_async: bool = False) -> JSONResponse:
    """Return the response to a caller of an operation that has ended; with ``run_async``, its address."""
    if run_async:
        accepted = {
            "success": True,
            "message": f"{operation.asked.verb} {operation.key} of the fleet continues in the background",
            "operation": operation.asked.verb,
            "operation_id": operation.key,
            "status": operation.status,
            "location": f"/operations/{operation.key}",
        }
        return JSONResponse(accepted, 202, headers={"Location": f"/operations/{operation.key}"})
    error = _error_of(operation)
    return JSONResponse(operation_body(operation), error.status if error else 200, error.headers if error else None)


def operation_body(operation: ServedOperation) -> dict[str, Any]:
    """Return the answer to an operation that has ended."""
    error, result = _error_of(operation), operation.result
    body = error.body() if error else {}
    if error:
        body["error"]["status"] = error.status
    if result is None:  # it was never begun
        return {**body, "operation": operation.asked.verb, "operation_id": operation.key, "engines": []}
    states = {engine.state for engine in result.engines}
    about = {
        "success": result.success,
        "message": result.message,
        "enabled": True,
        "operation": result.operation,
        "operation_id": operation.key,
        "state": states.pop() if len(states) == 1 else "mixed",
        "seconds": result.seconds,
        "released_bytes": sum(engine.released_bytes for engine in result.engines),
        "resumed_bytes": sum(engine.resumed_bytes for engine in result.engines),
        "tags": [],
        "phases": [],
        "devices": [],
        "mode": result.mode,
        "rolled_back": result.rolled_back,
        "engines": [engine.model_dump(mode="json") for engine in result.engines],
    }
    return {**body, **about}


def operation_status(operation: ServedOperation, operations: Operations) -> dict[str, Any]:
    """Return an operation in any status, in the shape of an engine's."""
    progress, result = operations.progress(operation), operation.result
    engines = progress.engines if progress else {}
    if result is not None:
        engines = {
            each.name: "done" if each.success else "failed" if each.error else "undone" for each in result.engines
        }
    return {
        "operation_id": operation.key,
        "operation": operation.asked.verb,
        "status": operation.status,
        "phase": progress.stage if progress else "",
        "stalled": None,
        "tags": list(operation.asked.tags) if operation.asked.tags else None,
        "client": operation.client,
        "callers": operation.callers,
        "created_at": operation.created_at,
        "started_at": operation.created_at,
        "finished_at": operation.finished_at,
        "seconds": result.seconds if result else progress.seconds if progress else 0.0,
        "progress": None,
        "phases": [],
        "answer": operation_body(operation) if operation.has_ended else None,
        "engines": engines,
    }


def occupation(observer: Observer, operations: Operations, requests: Mapping[str, int]) -> dict[str, Any]:
    """Return what the engines hold together, in the shape of an engine's own, and a row for each."""
    status = observer.status
    seen = [engine.occupation for engine in status.engines if engine.occupation is not None]
    is_open = any(one.admission.open for one in seen)
    running = [each.key for each in operations.recent() if not each.has_ended]
    backups = [one.host_backup.model_dump() for one in seen]
    return {
        "enabled": not seen or any(one.enabled for one in seen),
        "driver": _common(one.driver for one in seen),
        "state": status.state,
        "hibernated": bool(seen) and all(one.hibernated for one in seen),
        "engine": f"fleet of {len(status.engines)}",
        "model": ", ".join(sorted({engine.model for engine in status.engines if engine.model})),
        "admission": {"open": is_open, "reason": observer.trouble or ("" if is_open else "no engine accepts requests")},
        "operation_id": running[-1] if running else None,
        "prepared": None,
        "tags": _tags(status),
        "communicators": [],
        "shared_by_ranks": [],
        "devices": devices(status),
        "host_backup": {
            **{name: sum(one[name] for one in backups) for name in _BACKUP_FIELDS},
            "prepared": bool(backups) and all(one["prepared"] for one in backups),
        },
        "ranks": [],
        "engines": [_row(engine, requests.get(engine.name, 0)) for engine in status.engines],
        "wanted": [wish.model_dump(mode="json") for wish in status.wanted],
        "progress": status.progress.model_dump(mode="json") if status.progress else None,
    }


def devices(status: FleetStatus) -> list[dict[str, Any]]:
    """Return the GPUs of the fleet, each once, with what all its engines together hold of it."""
    found: dict[str, dict[str, Any]] = {}
    held: dict[str, dict[tuple[str, str], int]] = {}
    for engine in status.engines:
        for device in engine.occupation.devices if engine.occupation else ():
            found[device.uuid] = device.model_dump()
            sources = held.setdefault(device.uuid, {})
            for source in device.sources:
                if source.kind not in ("others", "unexplained"):
                    sources[source.kind, source.name] = sources.get((source.kind, source.name), 0) + source.bytes
    return [
        {**device, "index": index, "process_bytes": None, "sources": _sources(held[uuid], device["used_bytes"])}
        for index, (uuid, device) in enumerate(found.items())
    ]


def total(gpus: Collection[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all GPUs as one device, for one chart."""
    if not gpus:
        return []
    held: dict[tuple[str, str], int] = {}
    for source in (source for gpu in gpus for source in gpu["sources"]):
        held[source["kind"], source["name"]] = held.get((source["kind"], source["name"]), 0) + source["bytes"]
    sums = {name: sum(gpu[name] for gpu in gpus) for name in ("total_bytes", "used_bytes", "free_bytes")}
    sources = [{"kind": kind, "name": name, "bytes": size} for (kind, name), size in held.items()]
    name = f"{len(gpus)} device{'' if len(gpus) == 1 else 's'}"
    return [{"index": 0, "uuid": "", "name": name, **sums, "process_bytes": None, "sources": sources}]


_BACKUP_FIELDS = ("bytes", "capacity_bytes", "limit_bytes", "file_bytes", "unused_bytes")
_TAG_SIZES = [
    *("bytes", "resident_bytes", "released_bytes", "retained_bytes", "backed_up_bytes", "kept_bytes"),
    *("allocations", "chunks"),
]


def _error_of(operation: ServedOperation) -> ErrorResponse | None:
    """Return the error of an operation that failed; None if it did not."""
    error = operation.task.exception()
    if error is not None:
        return error_response(error)
    result = operation.task.result()
    if result.success:
        return None
    kind = "cancelled" if operation.cancelled else next((each.kind for each in result.failed if each.kind), "failed")
    status = next((_STATUSES.get(each.kind) or _status_of(each.kind) for each in result.failed), 500)
    headers = {"Retry-After": "1"} if status == 503 else {}
    return ErrorResponse(409 if operation.cancelled else status, kind, result.message, _failures(result), headers)


@cache
def _status_of(kind: str) -> int:
    """Return the status with which an engine answers an error of this kind; 500 for one that is not known."""
    found: list[type[MemsaverError]] = [MemsaverError]
    for each in found:
        found += each.__subclasses__()
    return next((each.status for each in found if each.kind == kind), 500)


def _failures(result: FleetResult) -> dict[str, Any]:
    return {"failed": [{"name": each.name, "type": each.kind, "message": each.error} for each in result.failed]}


def _row(engine: EngineStatus, requests: int) -> dict[str, Any]:
    tags = engine.occupation.tags if engine.occupation else []
    return {
        **engine.model_dump(mode="json", exclude={"occupation"}),
        "resident_bytes": sum(tag.resident_bytes for tag in tags),
        "released_bytes": sum(tag.released_bytes for tag in tags),
        "requests": requests,
    }


def _tags(status: FleetStatus) -> list[dict[str, Any]]:
    """Return the tags of all engines, those of one name added up."""
    same: dict[str, list[dict[str, Any]]] = {}
    for engine in status.engines:
        for tag in engine.occupation.tags if engine.occupation else ():
            same.setdefault(tag.tag, []).append(tag.model_dump())
    return [
        {
            "tag": name,
            "restore": _common(row["restore"] for row in rows),
            "state": _common(row["state"] for row in rows),
            "content": "lost" if any(row["content"] == "lost" for row in rows) else "ok",
            **{size: sum(row[size] for row in rows) for size in _TAG_SIZES},
        }
        for name, rows in sorted(same.items())
    ]


def _sources(held: Mapping[tuple[str, str], int], used: int) -> list[dict[str, Any]]:
    rows = [{"kind": kind, "name": name, "bytes": size} for (kind, name), size in held.items()]
    return [*rows, {"kind": "others", "name": "other processes", "bytes": max(0, used - sum(held.values()))}]


def _common(values: Iterable[str]) -> str:
    """Return the value that all have, or ``mixed``."""
    found = set(values)
    return found.pop() if len(found) == 1 else "mixed" if found else ""
