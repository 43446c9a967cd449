"""The dialect of SGLang and tokenspeed, which slime, miles, NeMo-RL, verl and AReaL call."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from starlette.requests import Request

from memsaver_server.engine import DrainMode
from memsaver_server.http.requests import ERROR_RESPONSES, ServiceOf, fields_of, guard, takes, takes_in_query
from memsaver_server.http.service import answer
from memsaver_server.schemas import (
    AcceptedAnswer,
    MessageAnswer,
    NoFields,
    OperationAnswer,
    PauseFields,
    ReleaseFields,
    ResumeFields,
)

router = APIRouter(tags=["memory occupation"], dependencies=[Depends(guard)])
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"model": OperationAnswer},
    202: {"model": AcceptedAnswer, "description": "The operation continues in the background."},
    **ERROR_RESPONSES,
}


@router.get("/release_memory_occupation", responses=_RESPONSES, openapi_extra=takes_in_query(ReleaseFields))
@router.post("/release_memory_occupation", responses=_RESPONSES, openapi_extra=takes(ReleaseFields))
async def release_memory_occupation(
    request: Request, service: ServiceOf, fields: Annotated[ReleaseFields, Depends(fields_of(ReleaseFields))]
) -> JSONResponse:
    """Release the device memory of some or all tags to the driver. Answers when the device's own count shows it."""
    return answer(await service.release(request, fields), run_async=fields.run_async)


@router.get("/resume_memory_occupation", responses=_RESPONSES, openapi_extra=takes_in_query(ResumeFields))
@router.post("/resume_memory_occupation", responses=_RESPONSES, openapi_extra=takes(ResumeFields))
async def resume_memory_occupation(
    request: Request, service: ServiceOf, fields: Annotated[ResumeFields, Depends(fields_of(ResumeFields))]
) -> JSONResponse:
    """Bring back the memory of some or all released tags, at the same addresses."""
    return answer(await service.resume(request, fields), run_async=fields.run_async)


@router.get("/flush_cache", response_model=MessageAnswer, responses=ERROR_RESPONSES)
@router.post("/flush_cache", response_model=MessageAnswer, responses=ERROR_RESPONSES, openapi_extra=takes(NoFields))
async def flush_cache(service: ServiceOf, _fields: Annotated[NoFields, Depends(fields_of(NoFields))]) -> dict[str, Any]:
    """Forget cached prefixes, in any state of the memory."""
    await asyncio.to_thread(service.lifecycle.flush_cache)
    return _message("Cache flushed.")


@router.post(
    "/pause_generation", response_model=MessageAnswer, responses=ERROR_RESPONSES, openapi_extra=takes(PauseFields)
)
async def pause_generation(
    service: ServiceOf, fields: Annotated[PauseFields, Depends(fields_of(PauseFields))]
) -> dict[str, Any]:
    """Stop generating until ``/continue_generation``; requests that arrive meanwhile are held."""
    timeout_s = service.settings.drain_timeout_s if fields.timeout_s is None else fields.timeout_s
    await asyncio.to_thread(service.lifecycle.pause, _drain_mode(fields.mode), timeout_s)
    return _message("Generation paused.")


@router.post(
    "/continue_generation", response_model=MessageAnswer, responses=ERROR_RESPONSES, openapi_extra=takes(NoFields)
)
async def continue_generation(
    service: ServiceOf, _fields: Annotated[NoFields, Depends(fields_of(NoFields))]
) -> dict[str, Any]:
    """Generate again, at once or when all memory is resident."""
    closed_reason = service.lifecycle.continue_generation()
    return _message(
        f"Generation continues once possible: {closed_reason}." if closed_reason else "Generation continues."
    )


def _message(message: str) -> dict[str, Any]:
    return {"success": True, "message": message, "status": "ok"}


def _drain_mode(mode: str) -> DrainMode:
    if mode == "abort":
        return "abort"
    return "wait" if mode == "wait" else "keep"
