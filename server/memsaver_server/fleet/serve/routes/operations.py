"""Operations of the fleet: their list, one of them, its events, and giving it up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse

from memsaver_server.fleet.serve.answers import operation_body, operation_status
from memsaver_server.fleet.serve.operations import ServedOperation
from memsaver_server.fleet.serve.schemas import FleetOperationsAnswer, FleetOperationStatusAnswer
from memsaver_server.fleet.serve.service import FleetService, FleetServiceOf
from memsaver_server.http.auth import reads_only
from memsaver_server.http.errors import NotFoundError
from memsaver_server.http.requests import ERROR_RESPONSES, REFUSED_RESPONSES, Responses, guard
from memsaver_server.http.serializers import event
from memsaver_server.http.service import event_stream

router = APIRouter(tags=["operations"], dependencies=[Depends(guard)])
_MISSING: Responses = {
    **REFUSED_RESPONSES,
    404: {**ERROR_RESPONSES[400], "description": "No such operation is remembered."},
}
_TOO_LATE: Responses = {
    409: {**ERROR_RESPONSES[409], "description": "It moves memory already and will complete, or has ended."}
}
#: Poll interval of an event stream, seconds.
TICK_S = 0.1


@router.get("/operations", response_model=FleetOperationsAnswer, responses=REFUSED_RESPONSES)
@reads_only
async def operations(service: FleetServiceOf) -> dict[str, Any]:
    """All remembered operations, newest first."""
    return {"operations": [operation_status(each, service.operations) for each in service.operations.recent()]}


@router.get("/operations/{operation_id}", response_model=FleetOperationStatusAnswer, responses=_MISSING)
@reads_only
async def operation(service: FleetServiceOf, operation_id: str) -> dict[str, Any]:
    """One operation, in any status."""
    return operation_status(_find(service, operation_id), service.operations)


@router.post(
    "/operations/{operation_id}/abort",
    response_model=FleetOperationStatusAnswer,
    responses={**_MISSING, **_TOO_LATE},
)
@router.delete(
    "/operations/{operation_id}", response_model=FleetOperationStatusAnswer, responses={**_MISSING, **_TOO_LATE}
)
async def cancel(service: FleetServiceOf, operation_id: str) -> dict[str, Any]:
    """Give up an operation that does not move memory yet; every engine is then as before. Idempotent."""
    found = _find(service, operation_id)
    await service.operations.cancel(found)
    return operation_status(found, service.operations)


@router.get(
    "/operations/{operation_id}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}, **_MISSING},
)
@reads_only
async def operation_events(service: FleetServiceOf, operation_id: str) -> StreamingResponse:
    """Server-sent events: ``phase`` when a stage begins, ``engine`` when one engine's stage changes, finally
    ``done``."""
    return event_stream(_events(service, _find(service, operation_id)))


def _find(service: FleetService, operation_id: str) -> ServedOperation:
    found = service.operations.get(operation_id)
    if found is None:
        raise NotFoundError(f"no operation {operation_id!r} is remembered; GET /operations lists those that are")
    return found


async def _events(service: FleetService, operation: ServedOperation) -> AsyncIterator[str]:
    stage = ""
    engines: dict[str, str] = {}
    while not service.closing.is_set():
        ended = operation.has_ended
        now = operation_status(operation, service.operations)
        if now["phase"] and now["phase"] != stage:
            stage = now["phase"]
            yield event("phase", {"name": stage})
        for name, each in now["engines"].items():
            if engines.get(name) != each:
                engines[name] = each
                yield event("engine", {"name": name, "stage": each})
        if ended:
            yield event("done", operation_body(operation))
            return
        await asyncio.wait({operation.task}, timeout=TICK_S)
