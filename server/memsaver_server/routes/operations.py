"""Operations: their list, one of them, its events, and cancelling it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field

from memsaver_core.contract.requests import Fields
from memsaver_server.controller import Controller, Models
from memsaver_server.http.auth import caller, reads_only
from memsaver_server.http.requests import REFUSED, CallRoute, failures, fields_of, guard
from memsaver_server.http.service import ControllerOf, ServiceOf, event_stream, key_of

_MISSING = failures({404: "No such operation is remembered."}, only=REFUSED)
_TOO_LATE = failures(
    {
        404: "No such operation is remembered.",
        409: "The operation moves memory already and will complete, or has ended.",
        504: "The operation is cancelled, but its present step cannot be interrupted.",
    },
    only=REFUSED,
)
_NoFields = Annotated[Fields, Depends(fields_of(Fields))]


class Abort(Fields):
    """How to abort."""

    force: bool = Field(
        default=False, description="Also if another Idempotency-Key prepared it; the audit log names both callers."
    )


_Abort = Annotated[Abort, Depends(fields_of(Abort))]


def router(models: Models) -> APIRouter:
    routes = APIRouter(route_class=CallRoute, tags=["operations"], dependencies=[Depends(guard)])

    @routes.get("/operations", response_model=models.operations, responses=failures(only=REFUSED))
    @reads_only
    async def operations(controller: ControllerOf) -> JSONResponse:
        """All remembered operations, newest first."""
        return JSONResponse({"operations": [controller.describe(each) for each in controller.operations.recent()]})

    @routes.get("/operations/{operation_id}", response_model=models.operation, responses=_MISSING)
    @reads_only
    async def operation(controller: ControllerOf, operation_id: str) -> JSONResponse:
        """One operation, in any status."""
        return JSONResponse(controller.describe(controller.operations.find(operation_id)))

    @routes.delete("/operations/{operation_id}", response_model=models.operation, responses=_TOO_LATE)
    async def cancel(request: Request, controller: ControllerOf, operation_id: str) -> JSONResponse:
        """Cancel an operation that does not move memory yet; answers once it has ended.

        Memory and admission are then as before, and its callers get an error of type ``cancelled``. Idempotent.
        """
        return await give_up(request, controller, operation_id, force=False)

    async def give_up(request: Request, controller: Controller[Any], operation_id: str, *, force: bool) -> JSONResponse:
        found = controller.operations.find(operation_id)
        await controller.cancel(found, caller(request), key_of(request), force=force)
        return JSONResponse(controller.describe(found))

    @routes.post(
        "/operations/{operation_id}/commit",
        response_model=models.done,
        responses=failures({404: "No such operation is remembered.", 409: "The operation is not prepared."}),
    )
    async def commit(request: Request, service: ServiceOf, operation_id: str, _fields: _NoFields) -> JSONResponse:
        """Do what was prepared, and answer as the release or the resume. Idempotent."""
        return await service.commit(request, service.controller.operations.find(operation_id))

    @routes.post(
        "/operations/{operation_id}/abort", response_model=models.operation, responses={**failures(), **_TOO_LATE}
    )
    async def abort(request: Request, controller: ControllerOf, operation_id: str, fields: _Abort) -> JSONResponse:
        """As ``DELETE /operations/{operation_id}``: undo the preparation of an operation that is not committed."""
        return await give_up(request, controller, operation_id, force=fields.force)

    @routes.get(
        "/operations/{operation_id}/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}, **_MISSING},
    )
    @reads_only
    async def operation_events(controller: ControllerOf, operation_id: str) -> StreamingResponse:
        """Server-sent events. Of an engine: ``phase`` when one begins, ``phase_done`` with its report, ``progress``,
        ``stalled`` if a phase makes none. Of a fleet: ``phase`` when a stage begins, ``engine`` when one engine's stage
        changes. Finally ``done``.
        """
        return event_stream(controller.events(controller.operations.find(operation_id)))

    return routes
