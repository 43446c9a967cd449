"""The dialect of vLLM, with fields in the query or in the body. AReaL and SkyRL call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.requests import Request

from memsaver_core.contract.errors import BadRequestError
from memsaver_core.contract.model import Model
from memsaver_core.contract.requests import ASKS_ONLY, Acts, DrainMode, Fields
from memsaver_server.controller import Answer, EngineRow, Models
from memsaver_server.http.auth import reads_only
from memsaver_server.http.requests import REFUSED, failures, fields_of, guard, joined, operated, plain, takes
from memsaver_server.http.service import ControllerOf, ServiceOf, response_of
from memsaver_server.http.unknown_fields import NamesIgnored

#: vLLM's tag for scheduling, which a sleep of level 0 stops.
SCHEDULING = "scheduling"
#: What a sleep of level 0, which moves no memory, takes.
_OF_A_PAUSE = frozenset({"level", "mode", "tags", "timeout_s", ASKS_ONLY, "wait", "selector", "model", "options"})


class Sleep(Fields):
    """vLLM's sleep. Level 0 pauses scheduling, 1 releases and keeps the weights, 2 releases and discards them; 3, an
    extension, is 1 with hibernation."""

    level: Annotated[int, Field(ge=0, le=3)] = 1
    mode: Annotated[DrainMode, Acts("service", lasting=True)] = "abort"


class SleepingAnswer(Model):
    is_sleeping: bool


class EngineFlag(Model):
    name: str
    url: str
    state: str
    flag: bool


class FleetSleepingAnswer(SleepingAnswer):
    """Whether any engine sleeps; ``flag`` says it of each."""

    engines: list[EngineFlag]


def release_of(fields: Any, models: Models) -> Any:
    """Return the release that a sleep asks for: level 2 discards the weights if they are among the tags."""
    restore = dict(fields.restore)
    if fields.level == 2 and (not fields.tags or "weights" in fields.tags):
        restore["weights"] = "discard"
    changes: dict[str, Any] = {"mode": fields.mode}
    if restore:
        changes["restore"] = restore
    if fields.level == 3:
        changes["hibernate"] = True
    return plain(fields, models.release, **changes)


def router(models: Models) -> APIRouter:
    """Return the routes of this dialect."""
    routes = APIRouter(route_class=NamesIgnored, tags=["sleep mode"], dependencies=[Depends(guard)])
    responses = operated(models.done | models.message, models.failures)
    sleeps = joined(Sleep, models.release)
    by_sleeps, by_release, by_resume, by_selected = (
        Depends(fields_of(each)) for each in (sleeps, models.release, models.resume, models.selected)
    )

    if not models.several:  # a fleet has these two from ray_serve, which takes Ray's body, too

        @routes.post("/sleep", responses=responses, openapi_extra=takes(sleeps))
        async def sleep_(request: Request, service: ServiceOf, fields: Any = by_sleeps) -> JSONResponse:
            """Level 0 pauses scheduling; 1 releases memory and keeps the weights on the host; 2 discards them; 3
            hibernates."""
            return await sleep(request, service, fields)

        @routes.post("/wake_up", responses=responses, openapi_extra=takes(models.resume))
        async def wake_up(request: Request, service: ServiceOf, fields: Any = by_resume) -> JSONResponse:
            """Resume memory, and scheduling when all of it is resident."""
            return await wake(request, service, fields)

    @routes.post("/release_kv_cache_memory", responses=responses, openapi_extra=takes(models.release))
    async def release_kv_cache_memory(request: Request, service: ServiceOf, fields: Any = by_release) -> JSONResponse:
        """Release only the KV cache; ``/wake_up?tags=kv_cache`` brings it back."""
        if fields.tags not in ((), ("kv_cache",)):
            raise BadRequestError("tags: this call releases kv_cache alone; use /release_memory_occupation for others")
        return await service.answer(request, plain(fields, models.release, tags=("kv_cache",)))

    async def is_sleeping(controller: ControllerOf, fields: Any = by_selected) -> dict[str, Any]:
        """Whether any memory is released or scheduling is paused. Clients of SGLang and tokenspeed call it too."""
        rows = await controller.rows(fields)
        about = {"engines": flags(rows, lambda row: row.asleep)} if models.several else {}
        return {"is_sleeping": any(row.asleep for row in rows), **about}

    asked = failures(models.failures, only=REFUSED)
    model = FleetSleepingAnswer if models.several else SleepingAnswer
    routes.get("/is_sleeping", response_model=model, responses=asked)(reads_only(is_sleeping))
    return routes


async def sleep(request: Request, service: ServiceOf, fields: Any) -> JSONResponse:
    """Answer a sleep."""
    if fields.level > 0:
        return await service.answer(request, release_of(fields, service.controller.models))
    if others := sorted(fields.model_fields_set - _OF_A_PAUSE):
        raise BadRequestError(f"a sleep of level 0 moves no memory, so {others[0]!r} has no effect; leave it out")
    if fields.asks_only:
        await service.controller.rows(fields)
        return response_of(Answer.message("Dry run: scheduling would be paused; memory stays."))
    return response_of(await service.controller.pause(fields, fields.mode, fields.timeout_s, asleep=True))


async def wake(request: Request, service: ServiceOf, fields: Any) -> JSONResponse:
    """Answer a wake-up. Only the tag ``scheduling`` undoes a sleep of level 0."""
    controller = service.controller
    tags = tuple(tag for tag in fields.tags if tag != SCHEDULING)
    if fields.tags and not tags:
        if fields.asks_only:
            await controller.rows(fields)
            return response_of(Answer.message("Dry run: scheduling would continue."))
        return response_of(await controller.continue_(fields, scheduling=True))
    resume = plain(fields, controller.models.resume, tags=tags)
    if resume.asks_only or resume.run_async:
        return await service.answer(request, resume)
    operation = await service.operate(request, resume)
    if operation.status == "succeeded":
        await controller.continue_(fields)
    return response_of(controller.answer(operation))


def flags(rows: Iterable[EngineRow], flag: Callable[[EngineRow], bool]) -> list[dict[str, Any]]:
    """Return what ``flag`` says of each engine."""
    return [{"name": row.name, "url": row.url, "state": row.state, "flag": flag(row)} for row in rows]
