"""The dialect of SGLang and tokenspeed, which slime, miles, NeMo-RL, verl and AReaL call."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from starlette.requests import Request

from memsaver_server.engine import DrainMode
from memsaver_server.http.requests import (
    ERROR_RESPONSES,
    ReleaseOf,
    Responses,
    ResumeOf,
    ServiceOf,
    fields_of,
    guard,
    takes,
    takes_in_query,
)
from memsaver_server.http.serializers import message_answer
from memsaver_server.http.service import answer
from memsaver_server.http.unknown_fields import NamesIgnored
from memsaver_server.schemas import (
    AcceptedAnswer,
    Fields,
    MessageAnswer,
    OperationAnswer,
    PlanAnswer,
    ReleaseFields,
    ResumeFields,
    Seconds,
)
from memsaver_server.threads import in_thread


class PauseFields(Fields):
    """The fields of a pause. ``retract`` and ``in_place`` are SGLang's names for ``keep``."""

    mode: Literal["abort", "wait", "keep", "retract", "in_place"] = "abort"
    timeout_s: Seconds | None = None


class NoFields(Fields):
    """A body whose fields are ignored. If present it must be JSON."""


router = APIRouter(route_class=NamesIgnored, tags=["memory occupation"], dependencies=[Depends(guard)])
_RESPONSES: Responses = {
    200: {"model": OperationAnswer | PlanAnswer},
    202: {"model": AcceptedAnswer, "description": "The operation continues in the background."},
    **ERROR_RESPONSES,
}
_NoFieldsOf = Annotated[NoFields, Depends(fields_of(NoFields))]
_PauseOf = Annotated[PauseFields, Depends(fields_of(PauseFields))]


@router.get("/release_memory_occupation", responses=_RESPONSES, openapi_extra=takes_in_query(ReleaseFields))
@router.post("/release_memory_occupation", responses=_RESPONSES, openapi_extra=takes(ReleaseFields))
async def release_memory_occupation(request: Request, service: ServiceOf, fields: ReleaseOf) -> JSONResponse:
    """Release the device memory of some or all tags to the driver. Answers when the device's own count shows it."""
    if fields.dry_run:
        return await service.plan(fields)
    return answer(await service.release(request, fields), run_async=fields.run_async)


@router.get("/resume_memory_occupation", responses=_RESPONSES, openapi_extra=takes_in_query(ResumeFields))
@router.post("/resume_memory_occupation", responses=_RESPONSES, openapi_extra=takes(ResumeFields))
async def resume_memory_occupation(request: Request, service: ServiceOf, fields: ResumeOf) -> JSONResponse:
    """Bring back the memory of some or all released tags, at the same addresses."""
    if fields.dry_run:
        return await service.plan(fields)
    return answer(await service.resume(request, fields), run_async=fields.run_async)


@router.get("/flush_cache", response_model=MessageAnswer, responses=ERROR_RESPONSES)
@router.post("/flush_cache", response_model=MessageAnswer, responses=ERROR_RESPONSES, openapi_extra=takes(NoFields))
async def flush_cache(service: ServiceOf, _fields: _NoFieldsOf) -> JSONResponse:
    """Forget cached prefixes, in any state of the memory."""
    await in_thread(service.engine.flush_cache)
    return message_answer("Cache flushed.")


@router.post(
    "/pause_generation", response_model=MessageAnswer, responses=ERROR_RESPONSES, openapi_extra=takes(PauseFields)
)
async def pause_generation(service: ServiceOf, fields: _PauseOf) -> JSONResponse:
    """Stop generating until ``/continue_generation``; requests that arrive meanwhile are held."""
    mode: DrainMode = fields.mode if fields.mode in ("abort", "wait") else "keep"
    await service.pause(mode, fields.timeout_s)
    return message_answer("Generation paused.")


@router.post(
    "/continue_generation", response_model=MessageAnswer, responses=ERROR_RESPONSES, openapi_extra=takes(NoFields)
)
async def continue_generation(service: ServiceOf, _fields: _NoFieldsOf) -> JSONResponse:
    """Generate again, at once or when all memory is resident."""
    closed_reason = service.lifecycle.continue_generation()
    return message_answer(f"Generation continues{f' once possible: {closed_reason}' if closed_reason else ''}.")
