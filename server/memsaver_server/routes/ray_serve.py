"""The calls of Ray Serve LLM, which shares the path ``/sleep`` with vLLM: its body is
``{"model": NAME, "options": {...}}``, where vLLM's fields are in the query or the body itself."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import Field, ValidationError
from starlette.requests import Request

from memsaver_core.contract.errors import BadRequestError
from memsaver_core.contract.model import Model
from memsaver_core.contract.requests import Fields
from memsaver_server.controller import EngineRow, Models
from memsaver_server.http.auth import reads_only
from memsaver_server.http.requests import failures, fields_of, guard, joined, operated, takes
from memsaver_server.http.service import ControllerOf, ServiceOf, response_of
from memsaver_server.http.unknown_fields import NamesIgnored
from memsaver_server.routes import vllm


class Options(Fields):
    """Fields that Ray Serve LLM sends in ``options``."""

    options: dict[str, Any] = Field(default={}, description="Ray Serve LLM: the other fields, for the engine.")


class Pause(Options):
    """Ray Serve LLM's pause."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = True


class FleetPausedAnswer(Model):
    """Whether any engine is paused; ``flag`` says it of each."""

    is_paused: bool
    engines: list[vllm.EngineFlag]


def whole(fields: Any) -> Any:
    """Return the fields with those in ``options``, which override.

    Raises:
        BadRequestError: one has a wrong value, or does not exist.
    """
    given = {name: getattr(fields, name) for name in fields.model_fields_set - {"options"}}
    try:
        return type(fields).model_validate({**given, **fields.options, "options": {}})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise BadRequestError(f"cannot use the options: {wrong}") from None


def router(models: Models) -> APIRouter:
    """Return the routes of this dialect, those that it shares with vLLM's included."""
    routes = APIRouter(route_class=NamesIgnored, tags=["sleep mode"], dependencies=[Depends(guard)])
    sleeps, wakes = joined(vllm.Sleep, joined(Options, models.release)), joined(Options, models.resume)
    pauses, selects = joined(Pause, models.selected), joined(Options, models.selected)
    by_sleeps, by_wakes, by_pauses, by_selects = (Depends(fields_of(each)) for each in (sleeps, wakes, pauses, selects))
    done = operated(models.done | models.message, models.failures)
    called: dict[str, Any] = {"response_model": models.message, "responses": failures(models.failures)}
    asked = failures(models.failures, only=(400, 401, 403, 408, 413, 503))

    @routes.post("/sleep", responses=done, openapi_extra=takes(sleeps))
    async def sleep(request: Request, service: ServiceOf, fields: Any = by_sleeps) -> JSONResponse:
        """Level 0 pauses scheduling; 1 releases memory and keeps the weights on the host; 2 discards them; 3
        hibernates."""
        return await vllm.sleep(request, service, whole(fields))

    @routes.post("/wake_up", responses=done, openapi_extra=takes(wakes))
    @routes.post("/wakeup", responses=done, openapi_extra=takes(wakes))
    async def wake_up(request: Request, service: ServiceOf, fields: Any = by_wakes) -> JSONResponse:
        """Resume memory, and scheduling when all of it is resident."""
        return await vllm.wake(request, service, whole(fields))

    @routes.post("/is_sleeping", response_model=vllm.FleetSleepingAnswer, responses=asked, openapi_extra=takes(selects))
    @reads_only
    async def is_sleeping(controller: ControllerOf, fields: Any = by_selects) -> dict[str, Any]:
        """Whether any selected engine has memory released or scheduling paused."""
        rows = await controller.rows(fields)
        return {"is_sleeping": any(row.asleep for row in rows), "engines": vllm.flags(rows, lambda row: row.asleep)}

    @routes.get("/is_paused", response_model=FleetPausedAnswer, responses=asked)
    @routes.post("/is_paused", response_model=FleetPausedAnswer, responses=asked, openapi_extra=takes(selects))
    @reads_only
    async def is_paused(controller: ControllerOf, fields: Any = by_selects) -> dict[str, Any]:
        """Whether any selected engine accepts no requests although all its memory is resident."""

        def paused(row: EngineRow) -> bool:
            return row.asleep and row.state == "resident"

        rows = await controller.rows(fields)
        return {"is_paused": any(map(paused, rows)), "engines": vllm.flags(rows, paused)}

    @routes.post("/reset_prefix_cache", openapi_extra=takes(selects), **called)
    async def reset_prefix_cache(controller: ControllerOf, fields: Any = by_selects) -> JSONResponse:
        """Forget cached prefixes."""
        return response_of(await controller.flush(fields))

    @routes.post("/pause", openapi_extra=takes(pauses), **called)
    async def pause(controller: ControllerOf, fields: Any = by_pauses) -> JSONResponse:
        """Stop generating, and forget cached prefixes unless ``clear_cache`` is false."""
        given = whole(fields)
        paused = await controller.pause(given, given.mode, None)
        if paused.status != 200 or not given.clear_cache:
            return response_of(paused)
        flushed = await controller.flush(given)
        if flushed.status == 200:
            flushed.body["message"] = flushed.body["message"].replace("Cache", "Generation paused, cache", 1)
        return response_of(flushed)

    @routes.post("/resume", openapi_extra=takes(selects), **called)
    async def resume(controller: ControllerOf, fields: Any = by_selects) -> JSONResponse:
        """Generate again."""
        return response_of(await controller.continue_(fields))

    return routes
