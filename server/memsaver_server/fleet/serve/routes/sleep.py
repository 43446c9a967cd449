"""Sleep and wake, in the dialects of vLLM and of Ray Serve LLM, which share the path ``/sleep``.

vLLM's fields are in the query or the body; Ray's body is ``{"model": NAME, "options": {...}}``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request

from memsaver_server.fleet.results import EngineStatus
from memsaver_server.fleet.serve.answers import operation_response
from memsaver_server.fleet.serve.fields import FleetFields, FleetReleaseFields, FleetResumeFields, SelectedFields
from memsaver_server.fleet.serve.routes.every_engine import CALL_RESPONSES
from memsaver_server.fleet.serve.routes.memory import RESPONSES, ReleaseOf
from memsaver_server.fleet.serve.schemas import CallAnswer, FleetOperationAnswer
from memsaver_server.fleet.serve.service import FleetService, FleetServiceOf
from memsaver_server.http.auth import reads_only
from memsaver_server.http.errors import BadRequestError
from memsaver_server.http.requests import REFUSED_RESPONSES, Responses, fields_of, guard, takes
from memsaver_server.http.unknown_fields import NamesIgnored
from memsaver_server.routes.vllm import SCHEDULING, SleepFields, WakeFields

Options = Annotated[dict[str, Any], Field(description="Ray Serve LLM: the fields above, for the engine.")]
T = TypeVar("T", bound="WithOptions")


class WithOptions(FleetFields):
    """Fields that Ray Serve LLM sends in ``options``."""

    options: Options = Field(default_factory=dict)

    def whole(self: T) -> T:
        """Return the fields with those in ``options``, which override.

        Raises:
            BadRequestError: one has a wrong value.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set - {"options"}}
        try:
            return type(self).model_validate({**given, **self.options, "options": {}})
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise BadRequestError(f"cannot use the options: {wrong}") from None


class FleetSleepFields(SleepFields, WithOptions):
    """vLLM's sleep on all selected engines, or on none."""


class FleetWakeFields(WakeFields, WithOptions):
    """vLLM's wake-up on all selected engines, or on none."""


class RayPauseFields(WithOptions):
    """Ray Serve LLM's pause."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = True


class EngineFlag(BaseModel):
    name: str
    url: str
    state: str
    flag: bool


class FleetSleepingAnswer(BaseModel):
    """Whether any engine sleeps; ``flag`` says it of each."""

    is_sleeping: bool
    engines: list[EngineFlag]


class FleetPausedAnswer(BaseModel):
    """Whether any engine is paused; ``flag`` says it of each."""

    is_paused: bool
    engines: list[EngineFlag]


router = APIRouter(route_class=NamesIgnored, tags=["sleep mode"], dependencies=[Depends(guard)])
_BOTH: Responses = {**RESPONSES, 200: {"model": FleetOperationAnswer | CallAnswer}}
_ASKED: Responses = {**REFUSED_RESPONSES, **{status: CALL_RESPONSES[status] for status in (400, 404, 408, 413, 503)}}
_SelectedOf = Annotated[WithOptions, Depends(fields_of(WithOptions))]


@router.post("/sleep", responses=_BOTH, openapi_extra=takes(FleetSleepFields))
async def sleep(
    request: Request, service: FleetServiceOf, fields: Annotated[FleetSleepFields, Depends(fields_of(FleetSleepFields))]
) -> JSONResponse:
    """Level 0 pauses scheduling; 1 releases memory and keeps the weights on the host; 2 discards them; 3 hibernates."""
    asked = fields.whole()
    if asked.level == 0:
        query = {"level": 0, "mode": asked.mode, "dry_run": asked.dry_run}
        return await service.call(asked, "Scheduling paused", "POST", "/sleep", query=query)
    release = FleetReleaseFields(
        **_shared(asked),
        mode=asked.mode,
        timeout_s=asked.timeout_s,
        restore=asked.restore,
        hibernate=asked.level == 3,
    )
    return await service.answer(request, release)


@router.post("/wake_up", responses=_BOTH, openapi_extra=takes(FleetWakeFields))
@router.post("/wakeup", responses=_BOTH, openapi_extra=takes(FleetWakeFields))
async def wake_up(
    request: Request, service: FleetServiceOf, fields: Annotated[FleetWakeFields, Depends(fields_of(FleetWakeFields))]
) -> JSONResponse:
    """Resume memory, and scheduling when all of it is resident."""
    asked = fields.whole()
    tags = [tag for tag in asked.tags or [] if tag != SCHEDULING]
    if asked.tags and not tags:
        return await service.call(asked, "Scheduling continues", "POST", "/wake_up", query={"tags": [SCHEDULING]})
    resume = FleetResumeFields(**{**_shared(asked), "tags": tags}, wait_for_memory_s=asked.wait_for_memory_s)
    if asked.dry_run:
        return await service.plan(resume)
    operation = await service.operate(request, resume)
    if operation.status == "succeeded":
        await service.call(asked, "Scheduling continues", "POST", "/continue_generation", {})
    return operation_response(operation)


@router.post("/release_kv_cache_memory", responses=_BOTH, openapi_extra=takes(FleetReleaseFields))
async def release_kv_cache_memory(request: Request, service: FleetServiceOf, fields: ReleaseOf) -> JSONResponse:
    """Release only the KV cache; ``/wake_up?tags=kv_cache`` brings it back."""
    return await service.answer(request, fields.model_copy(update={"tags": ["kv_cache"], "run_async": False}))


@router.get("/is_sleeping", response_model=FleetSleepingAnswer, responses=_ASKED)
@router.post("/is_sleeping", response_model=FleetSleepingAnswer, responses=_ASKED, openapi_extra=takes(WithOptions))
@reads_only
async def is_sleeping(service: FleetServiceOf, fields: _SelectedOf) -> dict[str, Any]:
    """Whether any selected engine has memory released or scheduling paused."""
    rows = await _flags(service, fields, lambda engine: not _is_open(engine))
    return {"is_sleeping": any(row["flag"] for row in rows), "engines": rows}


@router.get("/is_paused", response_model=FleetPausedAnswer, responses=_ASKED)
@router.post("/is_paused", response_model=FleetPausedAnswer, responses=_ASKED, openapi_extra=takes(WithOptions))
@reads_only
async def is_paused(service: FleetServiceOf, fields: _SelectedOf) -> dict[str, Any]:
    """Whether any selected engine accepts no requests although all its memory is resident."""
    rows = await _flags(service, fields, lambda engine: not _is_open(engine) and engine.state == "resident")
    return {"is_paused": any(row["flag"] for row in rows), "engines": rows}


@router.post(
    "/reset_prefix_cache", response_model=CallAnswer, responses=CALL_RESPONSES, openapi_extra=takes(WithOptions)
)
async def reset_prefix_cache(service: FleetServiceOf, fields: _SelectedOf) -> JSONResponse:
    """Forget cached prefixes."""
    return await service.call(fields, "Cache flushed", "POST", "/flush_cache")


@router.post("/pause", response_model=CallAnswer, responses=CALL_RESPONSES, openapi_extra=takes(RayPauseFields))
async def pause(
    service: FleetServiceOf, fields: Annotated[RayPauseFields, Depends(fields_of(RayPauseFields))]
) -> JSONResponse:
    """Ray Serve LLM: stop generating, and forget cached prefixes unless ``clear_cache`` is false."""
    asked = fields.whole()
    paused = await service.call(asked, "Generation paused", "POST", "/pause_generation", {"mode": asked.mode})
    if paused.status_code != 200 or not asked.clear_cache:
        return paused
    return await service.call(asked, "Generation paused, cache flushed", "POST", "/flush_cache")


@router.post("/resume", response_model=CallAnswer, responses=CALL_RESPONSES, openapi_extra=takes(WithOptions))
async def resume(service: FleetServiceOf, fields: _SelectedOf) -> JSONResponse:
    """Ray Serve LLM: generate again."""
    return await service.call(fields, "Generation continues", "POST", "/continue_generation", {})


def _shared(asked: FleetSleepFields | FleetWakeFields) -> dict[str, Any]:
    names = ("tags", "wait", "dry_run", "selector", "model", "fleet_mode", "operation_id")
    return {name: getattr(asked, name) for name in names}


async def _flags(service: FleetService, fields: SelectedFields, flag: Any) -> list[dict[str, Any]]:
    await service.observer.glance()
    engines = service.engines_of(fields)
    return [{"name": each.name, "url": each.url, "state": each.state, "flag": flag(each)} for each in engines]


def _is_open(engine: EngineStatus) -> bool:
    return engine.occupation is not None and engine.occupation.admission.open
