"""Reports of the core as the JSON of the service."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

from memsaver_core.reports import DeviceMemory, HostBackupStatus, OperationReport, PhaseReport, TagStatus
from memsaver_server.backup_schemas import HostBackupAnswer
from memsaver_server.device_monitor import Sample
from memsaver_server.dry_run import Plan
from memsaver_server.engine import Engine, model_name_of
from memsaver_server.http.errors import error_response
from memsaver_server.lifecycle import Lifecycle
from memsaver_server.memory_breakdown import break_down
from memsaver_server.operation import Operation
from memsaver_server.ranks.watch import is_rank_stopped
from memsaver_server.schemas import DeviceAnswer, MeteredDeviceAnswer, TagStatusAnswer


def operation_answer(operation: Operation) -> dict[str, Any]:
    """Return the answer to the caller of an operation that has ended, in success or failure."""
    if operation.error is not None:
        about = {
            "operation": operation.request.operation,
            "operation_id": operation.id,
            "state": operation.state,
            "seconds": operation.seconds,
            "phases": [phase_answer(phase) for phase in operation.phases],
        }
        response = error_response(operation.error)
        body = response.body()
        body["error"]["status"] = response.status  # for readers of the operation, whose own status is 200
        if operation.failed_phase:
            body["error"].setdefault("phase", operation.failed_phase)
        return {**body, **about}
    report = operation.report
    assert report is not None
    return {
        "success": True,
        "message": _message(report),
        "enabled": report.enabled,
        "operation": report.operation,
        "operation_id": operation.id,
        "state": operation.state,
        "seconds": report.seconds,
        "released_bytes": report.released_bytes,
        "resumed_bytes": report.resumed_bytes,
        "tags": [asdict(tag) for tag in report.tags],
        "phases": [phase_answer(phase) for phase in report.phases],
        "devices": [_fields(MeteredDeviceAnswer, device) for device in report.devices],
    }


def accepted_answer(operation: Operation) -> dict[str, Any]:
    return {
        "success": True,
        "message": f"{operation.request.operation} {operation.id} continues in the background",
        "operation": operation.request.operation,
        "operation_id": operation.id,
        "status": operation.status,
        "location": f"/operations/{operation.id}",
    }


def plan_answer(plan: Plan) -> dict[str, Any]:
    """Return the answer to a dry run."""
    would = f"would {_planned(plan)}" if any(tag.bytes for tag in plan.tags) else f"nothing to {plan.operation}"
    return {
        "success": True,
        "message": f"dry run: {would}" if not plan.blockers else f"dry run: would fail: {'; '.join(plan.blockers)}",
        "dry_run": True,
        "operation": plan.operation,
        "tags": [asdict(tag) for tag in plan.tags],
        "host": asdict(plan.host),
        "file": asdict(plan.file),
        "devices": [{"index": index, **asdict(room)} for index, room in plan.devices.items()],
        "blockers": list(plan.blockers),
    }


def prepared_answer(operation: Operation, plan: Plan, expected_s: float | None) -> dict[str, Any]:
    """Return the answer to the caller of an operation that is prepared to do ``plan``."""
    path = f"/{plan.operation}_memory_occupation"
    return {
        "success": True,
        "message": f"prepared to {_planned(plan)}. POST {path} with commit={operation.id} does it; POST "
        f"/operations/{operation.id}/abort undoes the preparation, as does the end of the lease",
        "prepared": True,
        **_prepared_state(operation),
        "expected_s": expected_s,
        "tags": [asdict(tag) for tag in plan.tags],
    }


def _prepared_state(operation: Operation) -> dict[str, Any]:
    assert operation.lease is not None
    return {
        "operation_id": operation.id,
        "operation": operation.request.operation,
        "lease_s": operation.lease.seconds_left(),
    }


def operation_status(operation: Operation) -> dict[str, Any]:
    """Return an operation in any status."""
    return {
        "operation_id": operation.id,
        "operation": operation.request.operation,
        "status": operation.status,
        "phase": operation.phase,
        "stalled": stalled(operation),
        "tags": list(operation.request.tags) or None,
        "client": operation.client,
        "callers": operation.callers,
        "created_at": operation.created_at,
        "started_at": operation.started_at,
        "finished_at": operation.finished_at,
        "seconds": operation.elapsed_s(),
        "progress": progress(operation),
        "phases": [phase_answer(phase) for phase in operation.phases],
        "answer": operation_answer(operation) if operation.has_ended else None,
    }


def stalled(operation: Operation) -> dict[str, Any] | None:
    """Return the phase in which an operation stalls and for how long, or None."""
    stall = operation.stall()
    return None if stall is None else asdict(stall)


def progress(operation: Operation) -> dict[str, Any] | None:
    """Return the progress of a running operation as the core counts it, or None while nothing is copied."""
    now = operation.memory.status().progress
    if not operation.is_running or now.operation != operation.request.operation:
        return None
    rate = now.done_bytes / now.seconds if now.seconds > 0 else 0.0
    return {
        "done_bytes": now.done_bytes,
        "total_bytes": now.total_bytes,
        "copied_bytes": now.copied_bytes,
        "gb_per_s": rate / 1e9,
        "seconds_left": (now.total_bytes - now.done_bytes) / rate if rate else None,
    }


def message_answer(message: str) -> JSONResponse:
    return JSONResponse({"success": True, "message": message, "status": "ok"})


def event(name: str, data: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def occupation_answer(lifecycle: Lifecycle, engine: Engine, sample: Sample) -> dict[str, Any]:
    """Return what the process holds now, with the devices as in ``sample``."""
    now = lifecycle.snapshot()
    status = now.status
    return {
        "enabled": status.enabled,
        "driver": status.driver,
        "state": now.state,
        "hibernated": status.hibernated,
        "engine": engine.name,
        "model": model_name_of(engine),
        "admission": {"open": not now.closed_reason, "reason": now.closed_reason},
        "operation_id": now.running.id if now.running else None,
        "prepared": _prepared_state(now.running) if now.running and now.running.status == "prepared" else None,
        "tags": [_tag_status(tag, lost=tag.tag in now.unwritten) for tag in status.tags],
        "communicators": [asdict(each) for each in status.communicators],
        "shared_by_ranks": list(status.shared),
        "devices": [_occupied(device, sample) for device in sample.devices],
        "host_backup": _host_backup(status.host_backup),
        "ranks": [{**asdict(rank), "stopped": is_rank_stopped(rank)} for rank in status.ranks],
    }


def _planned(plan: Plan) -> str:
    moved = _readable(sum(tag.bytes for tag in plan.tags))
    names = ", ".join(tag.tag for tag in plan.tags if tag.bytes)
    return f"{plan.operation} {f'{moved} of {names}' if names else 'nothing'}"


def _message(report: OperationReport) -> str:
    if not report.enabled:
        return f"memsaver is disabled in this process: nothing to {report.operation}"
    release = report.operation == "release"
    if moved := report.released_bytes if release else report.resumed_bytes:
        names = ", ".join(tag.tag for tag in report.tags if tag.released_bytes or tag.resumed_bytes)
        return f"{'released' if release else 'resumed'} {_readable(moved)} of {names} in {report.seconds:.3f} s"
    if any(tag.bytes for tag in report.tags):
        return f"{'released' if release else 'resident'} already: nothing to {report.operation}"
    return f"no memory under these tags: nothing to {report.operation}"


def _readable(size: int) -> str:
    value = float(size)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:g} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def phase_answer(phase: PhaseReport) -> dict[str, Any]:
    return {
        "name": phase.name,
        "seconds": phase.seconds,
        "devices": [_fields(DeviceAnswer, device) for device in phase.devices],
        "details": dict(phase.details),
    }


def _fields(model: type[BaseModel], source: object) -> dict[str, Any]:
    """Return the attributes of ``source`` that are fields of ``model``."""
    return {name: getattr(source, name) for name in model.model_fields}


def _host_backup(backup: HostBackupStatus) -> dict[str, Any]:
    store = backup.shared_store
    return {**_fields(HostBackupAnswer, backup), "shared_store": asdict(store) if store is not None else None}


def _tag_status(tag: TagStatus, *, lost: bool) -> dict[str, Any]:
    names = [name for name in TagStatusAnswer.model_fields if name != "content"]
    return {**{name: getattr(tag, name) for name in names}, "content": "lost" if lost else "ok"}


def _occupied(device: DeviceMemory, sample: Sample) -> dict[str, Any]:
    return {
        **asdict(device),
        "free_bytes": device.total_bytes - device.used_bytes,
        "sources": [asdict(consumer) for consumer in break_down(device, sample)],
    }
