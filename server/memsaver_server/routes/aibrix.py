"""The dialect of AIBrix's runtime: a model sleeps and wakes by operations with an id, and a request wakes it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.requests import Request

from memsaver_core.contract.model import Model
from memsaver_core.contract.requests import AskedOfFleet, Bytes, Fields, FleetRelease, FleetResize, FleetResume
from memsaver_server.controller import Models
from memsaver_server.fleet.results import EngineResult
from memsaver_server.http.requests import CallRoute, failures, fields_of, guard
from memsaver_server.http.service import ServiceOf, response_of


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
    engines: list[EngineResult]


def router(models: Models) -> APIRouter:
    responses = {200: {"model": RuntimeAnswer}, **failures(models.failures)}
    routes = APIRouter(
        route_class=CallRoute, tags=["runtime models"], dependencies=[Depends(guard)], responses=responses
    )
    by_sleep, by_wake, by_limit = (Depends(fields_of(model)) for model in (RuntimeSleep, RuntimeWake, RuntimeLimit))

    @routes.post("/v1/runtime/models/sleep")
    async def sleep(request: Request, service: ServiceOf, fields: Any = by_sleep) -> JSONResponse:
        """Release the memory of a model's engines until the next request for it, or a wake."""
        restore: dict[str, Any] = {"restore": {"weights": "discard"}} if fields.level == 2 else {}
        return await operate(request, service, fields, FleetRelease(**_named(fields), **restore, wake_on_request=True))

    @routes.post("/v1/runtime/models/wake")
    async def wake(request: Request, service: ServiceOf, fields: Any = by_wake) -> JSONResponse:
        """Resume the memory of a model's engines."""
        return await operate(request, service, fields, FleetResume(**_named(fields)))

    @routes.post("/v1/runtime/models/kv-limit")
    async def kv_limit(request: Request, service: ServiceOf, fields: Any = by_limit) -> JSONResponse:
        """Make the KV cache of a model's engines smaller or larger while they serve, of each by itself."""
        return await operate(request, service, fields, FleetResize(**_named(fields), bytes=fields.limit_bytes))

    async def operate(request: Request, service: ServiceOf, fields: RuntimeWake, asked: AskedOfFleet) -> JSONResponse:
        known = [each for each in service.controller.operations.recent() if each.status == "succeeded"]
        operation = await service.operate(request, asked)
        answer = service.controller.answer(operation)
        if operation.status != "succeeded":
            return response_of(answer)
        moved = answer.body["released_bytes"] or answer.body["resumed_bytes"]
        done = {
            "status": "success",
            "model_name": fields.model_name,
            "operation_id": operation.id,
            "applied": bool(moved) and operation not in known,
            "phase": "sleeping" if asked.operation == "release" else "active",
            "engines": answer.body["engines"],
        }
        return JSONResponse(done)

    return routes


def _named(fields: RuntimeWake) -> dict[str, Any]:
    return {"model": fields.model_name, **({"operation_id": fields.operation_id} if fields.operation_id else {})}
