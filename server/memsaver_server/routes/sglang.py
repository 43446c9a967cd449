"""The dialect of SGLang and tokenspeed, which slime, miles, NeMo-RL, verl and AReaL call."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from starlette.requests import Request

from memsaver_server.engine import DrainMode
from memsaver_server.http.requests import (
    ERROR_RESPONSES,
    Responses,
    ServiceOf,
    fields_of,
    guard,
    takes,
    takes_in_query,
)
from memsaver_server.http.serializers import message_answer
from memsaver_server.http.unknown_fields import NamesIgnored
from memsaver_server.schemas import (
    AcceptedAnswer,
    Fields,
    MessageAnswer,
    NoFields,
    OperationAnswer,
    PlanAnswer,
    Seconds,
)
from memsaver_server.threads import in_thread
from memsaver_server.two_phases import PreparedAnswer, TwoPhaseReleaseFields, TwoPhaseResumeFields


class PauseFields(Fields):
    """The fields of a pause. ``retract`` and ``in_place`` are SGLang's names for ``keep``."""

    mode: Literal["abort", "wait", "keep", "retract", "in_place"] = "abort"
    timeout_s: Seconds | None = None


router = APIRouter(route_class=NamesIgnored, tags=["memory occupation"], dependencies=[Depends(guard)])
_RESPONSES: Responses = {
    200: {"model": OperationAnswer | PlanAnswer | PreparedAnswer},
    202: {"model": AcceptedAnswer, "description": "The operation continues in the background."},
    **ERROR_RESPONSES,
    404: {**ERROR_RESPONSES[400], "description": "No operation of the id to commit is remembered."},
}
_ReleaseOf = Annotated[TwoPhaseReleaseFields, Depends(fields_of(TwoPhaseReleaseFields))]
_ResumeOf = Annotated[TwoPhaseResumeFields, Depends(fields_of(TwoPhaseResumeFields))]
_NoFieldsOf = Annotated[NoFields, Depends(fields_of(NoFields))]
_PauseOf = Annotated[PauseFields, Depends(fields_of(PauseFields))]


@router.get("/release_memory_occupation", responses=_RESPONSES, openapi_extra=takes_in_query(TwoPhaseReleaseFields))
@router.post("/release_memory_occupation", responses=_RESPONSES, openapi_extra=takes(TwoPhaseReleaseFields))
async def release_memory_occupation(request: Request, service: ServiceOf, fields: _ReleaseOf) -> JSONResponse:
    """Release the device memory of some or all tags to the driver. Answers when the device's own count shows it.

    In two phases: ``prepare`` closes admission, drains and checks, and answers with an operation that ``commit`` does,
    and that ``POST /operations/{operation_id}/abort`` or the end of its lease undoes.
    """
    if fields.dry_run:
        return await service.plan(fields)
    return await service.in_phases(request, fields)


@router.get("/resume_memory_occupation", responses=_RESPONSES, openapi_extra=takes_in_query(TwoPhaseResumeFields))
@router.post("/resume_memory_occupation", responses=_RESPONSES, openapi_extra=takes(TwoPhaseResumeFields))
async def resume_memory_occupation(request: Request, service: ServiceOf, fields: _ResumeOf) -> JSONResponse:
    """Bring back the memory of some or all released tags, at the same addresses.

    In two phases: ``prepare`` takes the device memory, so that the ``commit`` cannot run out of it.
    """
    if fields.dry_run:
        return await service.plan(fields)
    return await service.in_phases(request, fields)


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
