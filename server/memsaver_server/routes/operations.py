"""Operations: their list, one of them, its events, and cancelling it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, StreamingResponse

from memsaver_server.http.auth import caller, reads_only
from memsaver_server.http.requests import (
    ERROR_RESPONSES,
    REFUSED_RESPONSES,
    Responses,
    ServiceOf,
    fields_of,
    guard,
    takes,
)
from memsaver_server.http.serializers import event, operation_answer, operation_status, phase_answer, progress, stalled
from memsaver_server.http.service import Service, event_stream
from memsaver_server.operation import Operation
from memsaver_server.schemas import NoFields, OperationAnswer, OperationsAnswer, OperationStatusAnswer

router = APIRouter(tags=["operations"], dependencies=[Depends(guard)])
_MISSING: Responses = {
    **REFUSED_RESPONSES,
    404: {**ERROR_RESPONSES[400], "description": "No such operation is remembered."},
}
_TOO_LATE: Responses = {
    409: {**ERROR_RESPONSES[409], "description": "It unmaps or maps memory already and will complete, or has ended."},
    504: {**ERROR_RESPONSES[504], "description": "It is cancelled, but in a step that is not interrupted."},
}
_NoFieldsOf = Annotated[NoFields, Depends(fields_of(NoFields))]
#: Poll interval of an event stream, seconds.
TICK_S = 0.1


@router.get("/operations", response_model=OperationsAnswer, responses=REFUSED_RESPONSES)
@reads_only
async def operations(service: ServiceOf) -> dict[str, Any]:
    """All remembered operations, newest first."""
    return {"operations": [operation_status(operation) for operation in service.lifecycle.operations.recent()]}


@router.get("/operations/{operation_id}", response_model=OperationStatusAnswer, responses=_MISSING)
@reads_only
async def operation(service: ServiceOf, operation_id: str) -> dict[str, Any]:
    """One operation, in any status."""
    return operation_status(service.find(operation_id))


@router.delete("/operations/{operation_id}", response_model=OperationStatusAnswer, responses={**_MISSING, **_TOO_LATE})
async def cancel(request: Request, service: ServiceOf, operation_id: str) -> dict[str, Any]:
    """Cancel an operation that is queued, drains, is prepared, or waits for memory or a weight update; answers once it
    has ended.

    Memory and admission are then as before, and its callers get an error of type ``cancelled``. Idempotent.
    """
    operation = service.find(operation_id)
    service.lifecycle.operations.cancel(operation, caller(request))
    await service.cancelled(operation)
    return operation_status(operation)


@router.post(
    "/operations/{operation_id}/commit",
    response_model=OperationAnswer,
    responses={**ERROR_RESPONSES, **_MISSING, 409: {**ERROR_RESPONSES[409], "description": "It is not prepared."}},
    openapi_extra=takes(NoFields),
)
async def commit(service: ServiceOf, operation_id: str, _fields: _NoFieldsOf) -> JSONResponse:
    """Do what was prepared, and answer as the release or the resume. Idempotent."""
    return await service.commit(operation_id)


@router.post(
    "/operations/{operation_id}/abort",
    response_model=OperationStatusAnswer,
    responses={**ERROR_RESPONSES, **_MISSING, **_TOO_LATE},
    openapi_extra=takes(NoFields),
)
async def abort(request: Request, service: ServiceOf, operation_id: str, _fields: _NoFieldsOf) -> dict[str, Any]:
    """As ``DELETE /operations/{operation_id}``: undo the preparation of an operation that is not committed."""
    return await cancel(request, service, operation_id)


@router.get(
    "/operations/{operation_id}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}, **_MISSING},
)
@reads_only
async def operation_events(service: ServiceOf, operation_id: str) -> StreamingResponse:
    """Server-sent events: ``phase`` when one begins, ``phase_done`` with its report, ``progress``, ``stalled`` if a
    phase makes none, and finally ``done``.
    """
    return event_stream(_events(service, service.find(operation_id)))


async def _events(service: Service, operation: Operation) -> AsyncIterator[str]:
    sent = 0  # phases
    current = ""
    last_progress: dict[str, Any] | None = None
    stalled_in = ""
    ended = operation.ended()
    while not service.closing.is_set():
        done = operation.done.done()
        phases = operation.phases
        for phase in phases[sent:]:
            yield event("phase_done", phase_answer(phase))
        sent = len(phases)
        if operation.phase and operation.phase != current:
            current = operation.phase
            yield event("phase", {"name": current})
        now = progress(operation)
        if now is not None and now != last_progress:
            last_progress = now
            yield event("progress", now)
        stall = stalled(operation)
        if stall is not None and stall["phase"] != stalled_in:
            stalled_in = stall["phase"]
            yield event("stalled", stall)
        if done:
            yield event("done", operation_answer(operation))
            return
        await asyncio.wait({ended}, timeout=TICK_S)
