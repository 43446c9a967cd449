"""The dialect of AIBrix's runtime: a model sleeps and wakes by operations with an id, and a request wakes it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.requests import Request

from memsaver_core.contract.errors import NotFoundError
from memsaver_core.contract.model import Model
from memsaver_core.contract.requests import Bytes, Fields, FleetRelease, FleetResume, Selected
from memsaver_server.controller import Answer, Models
from memsaver_server.fleet.controller import FleetController
from memsaver_server.fleet.results import CallRow, EngineResult
from memsaver_server.http.auth import caller
from memsaver_server.http.requests import failures, fields_of, guard, takes
from memsaver_server.http.service import ServiceOf, controller_of, response_of
from memsaver_server.http.unknown_fields import NamesIgnored

FleetControllerOf = Annotated[FleetController, Depends(controller_of)]


class RuntimeWake(Fields):
    """AIBrix's wake."""

    model_name: Annotated[str, Field(max_length=256)]
    operation_id: Annotated[str, Field(max_length=64, pattern=r"^[\w.:-]*$")] = ""


class RuntimeSleep(RuntimeWake):
    """AIBrix's sleep; levels as vLLM's."""

    level: Annotated[int, Field(ge=1, le=2)] = 1


class RuntimeLimit(RuntimeWake):
    """AIBrix's limit of a model's KV cache."""

    limit_bytes: Bytes


class RuntimeAnswer(Model):
    """``applied``: this call did it; a repeat of an operation does not do it again."""

    status: Literal["success"]
    model_name: str
    operation_id: str
    applied: bool
    phase: Literal["sleeping", "active"]
    engines: list[EngineResult | CallRow]


def router(models: Models) -> APIRouter:
    responses = {200: {"model": RuntimeAnswer}, **failures(models.failures)}
    routes = APIRouter(
        route_class=NamesIgnored, tags=["runtime models"], dependencies=[Depends(guard)], responses=responses
    )
    by_sleep, by_wake, by_limit = (Depends(fields_of(model)) for model in (RuntimeSleep, RuntimeWake, RuntimeLimit))

    @routes.post("/v1/runtime/models/sleep", openapi_extra=takes(RuntimeSleep))
    async def sleep(request: Request, service: ServiceOf, fields: Any = by_sleep) -> JSONResponse:
        """Release the memory of a model's engines until the next request for it, or a wake."""
        restore: dict[str, Any] = {"restore": {"weights": "discard"}} if fields.level == 2 else {}
        return await operate(request, service, fields, FleetRelease(**_named(fields), **restore, wake_on_request=True))

    @routes.post("/v1/runtime/models/wake", openapi_extra=takes(RuntimeWake))
    async def wake(request: Request, service: ServiceOf, fields: Any = by_wake) -> JSONResponse:
        """Resume the memory of a model's engines."""
        return await operate(request, service, fields, FleetResume(**_named(fields)))

    @routes.post("/v1/runtime/models/kv-limit", openapi_extra=takes(RuntimeLimit))
    async def kv_limit(request: Request, controller: FleetControllerOf, fields: Any = by_limit) -> JSONResponse:
        """Make the KV cache of a model's engines smaller or larger while they serve, of each by itself."""
        asked = Selected(model=fields.model_name), fields.limit_bytes, fields.operation_id
        answer, applied = await controller.limit_kv_cache(*asked, client=caller(request))
        if answer.status != 200:
            return response_of(answer)
        return _done(fields, fields.operation_id, applied, "active", answer)

    async def operate(
        request: Request, service: ServiceOf, fields: RuntimeWake, asked: FleetRelease | FleetResume
    ) -> JSONResponse:
        try:
            known = bool(fields.operation_id) and service.controller.find(fields.operation_id).status == "succeeded"
        except NotFoundError:
            known = False
        operation = await service.operate(request, asked)
        answer = service.controller.answer(operation)
        if operation.status != "succeeded":
            return response_of(answer)
        applied = bool(answer.body["released_bytes"] or answer.body["resumed_bytes"]) and not known
        return _done(fields, operation.id, applied, "sleeping" if asked.operation == "release" else "active", answer)

    return routes


def _done(fields: RuntimeWake, operation_id: str, applied: bool, phase: str, answer: Answer) -> JSONResponse:
    named = {"model_name": fields.model_name, "operation_id": operation_id}
    done = {"status": "success", **named, "applied": applied, "phase": phase, "engines": answer.body["engines"]}
    return JSONResponse(done)


def _named(fields: RuntimeWake) -> dict[str, Any]:
    return {"model": fields.model_name, **({"operation_id": fields.operation_id} if fields.operation_id else {})}
