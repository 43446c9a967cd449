"""The dialect of vLLM, with fields in the query or in the body. AReaL and SkyRL call it; and at a fleet Ray Serve LLM,
which shares the path ``/sleep``: its body is ``{"model": NAME, "options": {...}}``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import Field, ValidationError
from starlette.requests import Request

from memsaver_core.contract.errors import BadRequestError
from memsaver_core.contract.model import Model
from memsaver_core.contract.requests import OF_EVERY_OPERATION, SCHEDULING, Acts, DrainMode, Fields
from memsaver_server.controller import Controller, EngineState, Models
from memsaver_server.http.auth import reads_only
from memsaver_server.http.requests import REFUSED, CallRoute, failures, fields_of, guard, joined, operated, plain, wrong
from memsaver_server.http.service import ControllerOf, ServiceOf, response_of

#: The error responses of a POST that only reads.
_ASKED = (400, 401, 403, 408, 413, 503)
#: The fields that a sleep of level 0 takes, which moves no memory.
_OF_A_PAUSE = {"level", "mode", "tags", "timeout_s", "selector", "model", "options"} | OF_EVERY_OPERATION - {
    "run_async"
}


class Sleep(Fields):
    """vLLM's sleep. Level 0 pauses scheduling, 1 releases and keeps the weights, 2 releases and discards them; 3, an
    extension, is 1 with hibernation."""

    level: Annotated[int, Field(ge=0, le=3)] = 1
    mode: Annotated[DrainMode, Acts("service", lasting=True)] = "abort"


class Options(Fields):
    """Fields that Ray Serve LLM sends in ``options``."""

    options: dict[str, Any] = Field(default={}, description="Ray Serve LLM: the other fields, for the engine.")


class Pause(Options):
    """Ray Serve LLM's pause."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = True


class SleepingAnswer(Model):
    is_sleeping: bool


class EngineFlag(Model):
    name: str
    url: str
    state: str
    flag: bool


class FleetSleepingAnswer(SleepingAnswer):
    """Whether any engine sleeps; ``flag`` is that of each."""

    engines: list[EngineFlag]


class FleetPausedAnswer(Model):
    """Whether any engine is paused; ``flag`` is that of each."""

    is_paused: bool
    engines: list[EngineFlag]


def release_of(fields: Any, models: Models) -> Any:
    """Return the release that a sleep asks for: level 2 discards the weights if they are among the tags."""
    restore = dict(fields.restore)
    if fields.level == 2 and fields.concerns("weights"):
        restore["weights"] = "discard"
    changes: dict[str, Any] = {"mode": fields.mode}
    if restore:
        changes["restore"] = restore
    if fields.level == 3:
        changes["hibernate"] = True
    return plain(fields, models.release, **changes)


def with_options(fields: Any) -> Any:
    """Return the fields with those in ``options``, which override; raise BadRequestError if one has a wrong value."""
    if not isinstance(fields, Options) or not fields.options:
        return fields
    given = {name: getattr(fields, name) for name in fields.model_fields_set - {"options"}}
    try:
        return with_options(type(fields).model_validate({**given, **fields.options}))  # these may have options, too
    except ValidationError as error:
        raise BadRequestError(f"cannot use the options: {wrong(error)}") from None


def router(models: Models) -> APIRouter:
    """Return the routes of vLLM's dialect; of a fleet with those of Ray Serve LLM."""
    routes = APIRouter(route_class=CallRoute, tags=["sleep mode"], dependencies=[Depends(guard)])
    responses = operated(models.done | models.message, models.failures)
    sleeps, wakes, selects = (
        joined(Options, each) if models.several else each for each in (models.release, models.resume, models.selected)
    )
    by_sleeps, by_release, by_wakes, by_selects = (
        Depends(fields_of(each)) for each in (joined(Sleep, sleeps), models.release, wakes, selects)
    )

    @routes.post("/sleep", responses=responses)
    async def sleep(request: Request, service: ServiceOf, fields: Any = by_sleeps) -> JSONResponse:
        """Level 0 pauses scheduling; 1 releases memory and keeps the weights on the host; 2 discards them; 3
        hibernates."""
        fields = with_options(fields)
        if fields.level > 0:
            return await service.answer(request, release_of(fields, models))
        if others := sorted(fields.model_fields_set - _OF_A_PAUSE):
            raise BadRequestError(f"a sleep of level 0 moves no memory, so {others[0]!r} has no effect; leave it out")
        if planned := await service.planned(fields, "scheduling would be paused; memory stays."):
            return planned
        return response_of(await service.controller.pause(fields, fields.mode, fields.timeout_s, asleep=True))

    @routes.post("/wake_up", responses=responses)
    async def wake_up(request: Request, service: ServiceOf, fields: Any = by_wakes) -> JSONResponse:
        """Resume memory, and scheduling when all of it is resident."""
        controller, fields = service.controller, with_options(fields)
        tags = tuple(tag for tag in fields.tags if tag != SCHEDULING)
        if fields.tags and not tags:  # only this tag undoes a sleep of level 0
            if planned := await service.planned(fields, "scheduling would continue."):
                return planned
            return response_of(await controller.continue_(fields, scheduling=True))
        resume = plain(fields, models.resume, tags=tags)
        if resume.is_answered_early:
            return await service.answer(request, resume)
        operation = await service.operate(request, resume)
        if operation.status == "succeeded" and (continued := await controller.continue_(fields)).status != 200:
            return response_of(continued)
        return response_of(controller.answer(operation))

    @routes.post("/release_kv_cache_memory", responses=responses)
    async def release_kv_cache_memory(request: Request, service: ServiceOf, fields: Any = by_release) -> JSONResponse:
        """Release only the KV cache; ``/wake_up?tags=kv_cache`` brings it back."""
        if fields.tags not in ((), ("kv_cache",)):
            raise BadRequestError("tags: this call releases kv_cache alone; use /release_memory_occupation for others")
        return await service.answer(request, plain(fields, models.release, tags=("kv_cache",)))

    asked = failures(models.failures, only=REFUSED)
    model = FleetSleepingAnswer if models.several else SleepingAnswer

    @routes.get("/is_sleeping", response_model=model, responses=asked)
    @reads_only
    async def is_sleeping(controller: ControllerOf, fields: Any = by_selects) -> dict[str, Any]:
        """Whether any memory is released or scheduling is paused. Clients of SGLang and tokenspeed call it too."""
        found = await _flags(controller, fields, "is_sleeping", lambda row: row.asleep)
        return found if models.several else {"is_sleeping": found["is_sleeping"]}

    if models.several:
        routes.post("/wakeup", responses=responses)(wake_up)
        routes.post("/is_sleeping", response_model=model, responses=failures(models.failures, only=_ASKED))(is_sleeping)
        _add_calls_of_ray_serve(routes, models, by_selects)
    return routes


def _add_calls_of_ray_serve(routes: APIRouter, models: Models, by_selects: Any) -> None:
    by_pauses = Depends(fields_of(joined(Pause, models.selected)))
    called: dict[str, Any] = {"response_model": models.message, "responses": failures(models.failures)}
    asked = failures(models.failures, only=_ASKED)

    @routes.get("/is_paused", response_model=FleetPausedAnswer, responses=asked)
    @routes.post("/is_paused", response_model=FleetPausedAnswer, responses=asked)
    @reads_only
    async def is_paused(controller: ControllerOf, fields: Any = by_selects) -> dict[str, Any]:
        """Whether any selected engine accepts no requests although all its memory is resident."""
        return await _flags(controller, fields, "is_paused", lambda row: row.asleep and row.state == "resident")

    @routes.post("/reset_prefix_cache", **called)
    async def reset_prefix_cache(controller: ControllerOf, fields: Any = by_selects) -> JSONResponse:
        """Forget cached prefixes."""
        return response_of(await controller.flush(fields))

    @routes.post("/pause", **called)
    async def pause(controller: ControllerOf, fields: Any = by_pauses) -> JSONResponse:
        """Stop generating, and forget cached prefixes unless ``clear_cache`` is false."""
        given = with_options(fields)
        paused = await controller.pause(given, given.mode, None)
        if paused.status != 200 or not given.clear_cache:
            return response_of(paused)
        flushed = await controller.flush(given)
        if flushed.status == 200:
            flushed.body["message"] = flushed.body["message"].replace("Cache", "Generation paused, cache", 1)
        return response_of(flushed)

    @routes.post("/resume", **called)
    async def resume(controller: ControllerOf, fields: Any = by_selects) -> JSONResponse:
        """Generate again."""
        return response_of(await controller.continue_(fields))


async def _flags(
    controller: Controller[Any], fields: Any, name: str, flag: Callable[[EngineState], bool]
) -> dict[str, Any]:
    """Return the ``flag`` of each engine, and under ``name`` whether any has it."""
    rows = await controller.rows(fields)
    engines = [{"name": row.name, "url": row.url, "state": row.state, "flag": flag(row)} for row in rows]
    return {name: any(each["flag"] for each in engines), "engines": engines}
