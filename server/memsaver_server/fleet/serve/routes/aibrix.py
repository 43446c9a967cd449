"""The dialect of AIBrix's runtime: a model sleeps and wakes by operations with an id, and a request wakes it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from memsaver_server.fleet.results import EngineResult
from memsaver_server.fleet.serve.answers import operation_body, operation_response
from memsaver_server.fleet.serve.fields import FleetReleaseFields, FleetResumeFields
from memsaver_server.fleet.serve.routes.memory import RESPONSES
from memsaver_server.fleet.serve.service import FleetService, FleetServiceOf
from memsaver_server.http.requests import Responses, fields_of, guard, takes
from memsaver_server.http.unknown_fields import NamesIgnored
from memsaver_server.schemas import Fields


class RuntimeFields(Fields):
    """AIBrix's wake."""

    model_config = ConfigDict(protected_namespaces=())

    model_name: Annotated[str, Field(max_length=256)]
    operation_id: Annotated[str, Field(max_length=64, pattern=r"^[\w.:-]*$")] = ""


class RuntimeSleepFields(RuntimeFields):
    """AIBrix's sleep; levels as vLLM's."""

    level: Annotated[int, Field(ge=1, le=2)] = 1


class RuntimeAnswer(BaseModel):
    """``applied``: this call did it; a repeat of an operation does not do it again."""

    model_config = ConfigDict(protected_namespaces=())

    status: Literal["success"]
    model_name: str
    operation_id: str
    applied: bool
    phase: Literal["sleeping", "active"]
    engines: list[EngineResult]


router = APIRouter(route_class=NamesIgnored, tags=["runtime models"], dependencies=[Depends(guard)])
_RESPONSES: Responses = {**RESPONSES, 200: {"model": RuntimeAnswer}}


@router.post("/v1/runtime/models/sleep", responses=_RESPONSES, openapi_extra=takes(RuntimeSleepFields))
async def sleep(
    request: Request,
    service: FleetServiceOf,
    fields: Annotated[RuntimeSleepFields, Depends(fields_of(RuntimeSleepFields))],
) -> JSONResponse:
    """Release the memory of a model's engines until the next request for it, or a wake."""
    restore: dict[str, Any] = {"weights": "discard"} if fields.level == 2 else {}
    release = FleetReleaseFields(
        model=fields.model_name, operation_id=fields.operation_id or None, restore=restore, wake_on_request=True
    )
    return await _operate(request, service, fields, release)


@router.post("/v1/runtime/models/wake", responses=_RESPONSES, openapi_extra=takes(RuntimeFields))
async def wake(
    request: Request, service: FleetServiceOf, fields: Annotated[RuntimeFields, Depends(fields_of(RuntimeFields))]
) -> JSONResponse:
    """Resume the memory of a model's engines."""
    resume = FleetResumeFields(model=fields.model_name, operation_id=fields.operation_id or None)
    return await _operate(request, service, fields, resume)


async def _operate(
    request: Request,
    service: FleetService,
    fields: RuntimeFields,
    asked: FleetReleaseFields | FleetResumeFields,
) -> JSONResponse:
    known = bool(fields.operation_id) and service.operations.get(fields.operation_id) is not None
    operation = await service.operate(request, asked)
    if operation.status != "succeeded":
        return operation_response(operation)
    body = operation_body(operation)
    moved = body["released_bytes"] or body["resumed_bytes"]
    return JSONResponse(
        {
            "status": "success",
            "model_name": fields.model_name,
            "operation_id": operation.key,
            "applied": bool(moved) and not known,
            "phase": "sleeping" if isinstance(asked, FleetReleaseFields) else "active",
            "engines": body["engines"],
        }
    )
