"""TensorRT-LLM's dialect: release, resume and status, signed with HMAC headers where a key is set."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from starlette.requests import Request

from memsaver_server.engine import Memory
from memsaver_server.http.auth import bearer_is_right, check_key, check_origin
from memsaver_server.http.errors import UnauthorizedError
from memsaver_server.http.request_signing import is_signed, signature_is_right
from memsaver_server.http.requests import (
    PROBLEMS,
    Limit,
    ServiceOf,
    body_of,
    fields_of,
    limit_of,
    service_of,
    takes,
)
from memsaver_server.http.service import answer
from memsaver_server.lifecycle import released_tags
from memsaver_server.operation_queue import Operation
from memsaver_server.schemas import MemoryStatusAnswer, OperationAnswer, ReleaseFields, ResumeFields

#: TensorRT-LLM's own names of what is called ``weights`` here.
WEIGHT_TAGS = ("model", "model_weights")
STATES = {"resident": "running", "releasing": "parking", "released": "parked", "resuming": "waking", "failed": "failed"}

#: For a body whose sender has not shown the key itself. The tags of an engine take some hundred bytes.
SIGNED = Limit(64 << 10, "send a larger one with 'Authorization: Bearer KEY'")


async def guard_signed(request: Request) -> None:
    """Let callers pass whose request carries the key, or is signed with it.

    Only a body that is said to be signed is read before that is known, and little of it: anybody may say so.
    """
    asked = service_of(request)
    check_origin(request, asked.settings)
    key = asked.settings.api_key
    if key is None or bearer_is_right(request, key.get_secret_value()) or not is_signed(request.headers):
        check_key(request, asked.settings)
        return
    body = await body_of(request, min(SIGNED, limit_of(asked.settings), key=lambda limit: limit.bytes))
    if not signature_is_right(
        key.get_secret_value(), request.method, request.url.path, request.headers, body, asked.nonces
    ):
        raise UnauthorizedError("the signature is wrong, late or used before; sign each request anew with the key")


router = APIRouter(tags=["runtime memory"], dependencies=[Depends(guard_signed)])
_RESPONSES: dict[int | str, dict[str, Any]] = {200: {"model": OperationAnswer}, **PROBLEMS}


@router.post("/release_memory", responses=_RESPONSES, openapi_extra=takes(ReleaseFields))
async def release_memory(
    request: Request, service: ServiceOf, fields: Annotated[ReleaseFields, Depends(fields_of(ReleaseFields))]
) -> JSONResponse:
    """Release memory, as ``/release_memory_occupation`` does."""
    ours = fields.model_copy(update={"tags": _translated(fields.tags, service.occupation.memory), "run_async": False})
    return _answer(await service.release(request, ours))


@router.post("/resume_memory", responses=_RESPONSES, openapi_extra=takes(ResumeFields))
async def resume_memory(
    request: Request, service: ServiceOf, fields: Annotated[ResumeFields, Depends(fields_of(ResumeFields))]
) -> JSONResponse:
    """Resume memory, as ``/resume_memory_occupation`` does."""
    ours = fields.model_copy(update={"tags": _translated(fields.tags, service.occupation.memory), "run_async": False})
    return _answer(await service.resume(request, ours))


@router.get("/memory_status", response_model=MemoryStatusAnswer, responses={401: PROBLEMS[401], 403: PROBLEMS[403]})
async def memory_status(service: ServiceOf) -> dict[str, Any]:
    """What is parked now."""
    return {
        "state": STATES[service.occupation.state],
        "parked_tags": sorted(released_tags(service.occupation.memory.status())),
    }


def _translated(tags: list[str] | None, memory: Memory) -> list[str] | None:
    """Call the weights by our name, unless the engine has a tag of the other name."""
    ours = {tag.tag for tag in memory.status().tags}
    return tags and ["weights" if tag in WEIGHT_TAGS and tag not in ours else tag for tag in tags]


def _answer(operation: Operation) -> JSONResponse:
    plain = answer(operation)
    if plain.status_code != 200:
        return plain
    return JSONResponse({"status": "success", **json.loads(bytes(plain.body))})
