"""The dialect of TensorRT-LLM: release, resume and status, with signed requests if a key is set."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.requests import Request

from memsaver_server.engine import Memory
from memsaver_server.http.auth import check_browser, check_key, has_valid_key, reads_only
from memsaver_server.http.errors import UnauthorizedError
from memsaver_server.http.request_signing import has_valid_signature, is_signed
from memsaver_server.http.requests import (
    ERROR_RESPONSES,
    REFUSED_RESPONSES,
    ReleaseOf,
    Responses,
    ResumeOf,
    ServiceOf,
    body_of,
    memory_call_limit,
    service_of,
    takes,
)
from memsaver_server.http.service import answer
from memsaver_server.http.unknown_fields import NamesIgnored
from memsaver_server.operation import Operation
from memsaver_server.schemas import OperationAnswer, PlanAnswer, ReleaseFields, ResumeFields
from memsaver_server.tag_selection import released_tags

#: TensorRT-LLM's names of the tag ``weights``.
WEIGHT_TAGS = ("model", "model_weights")
STATES = {"resident": "running", "releasing": "parking", "released": "parked", "resuming": "waking", "failed": "failed"}


class MemoryStatusAnswer(BaseModel):
    """TensorRT-LLM's view: ``running``, ``parking``, ``parked``, ``waking`` or ``failed``."""

    state: str
    parked_tags: list[str]


async def guard_signed(request: Request) -> None:
    """Require the key or a valid signature. The body is read before that only if the request is signed."""
    service = service_of(request)
    check_browser(request, service.settings)
    key = service.settings.api_key
    if key is None or has_valid_key(request, key) or not is_signed(request.headers):
        check_key(request, service.settings)
        return
    if request.url.query or "idempotency-key" in request.headers:
        raise UnauthorizedError(
            "the signature covers neither the query nor an Idempotency-Key; put all options into the body, or send "
            "'Authorization: Bearer KEY'",
            "signature",
        )
    body = await body_of(request, memory_call_limit(service.settings))
    if not has_valid_signature(
        key.get_secret_value(), request.method, request.url.path, request.headers, body, service.nonces
    ):
        raise UnauthorizedError(
            "the signature is wrong, expired or used before; sign each request anew with the key", "signature"
        )


router = APIRouter(route_class=NamesIgnored, tags=["runtime memory"], dependencies=[Depends(guard_signed)])
_RESPONSES: Responses = {200: {"model": OperationAnswer | PlanAnswer}, **ERROR_RESPONSES}


@router.post("/release_memory", responses=_RESPONSES, openapi_extra=takes(ReleaseFields))
async def release_memory(request: Request, service: ServiceOf, fields: ReleaseOf) -> JSONResponse:
    """Release memory, as ``/release_memory_occupation`` does."""
    ours = fields.model_copy(update={"tags": _translated(fields.tags, service.lifecycle.memory), "run_async": False})
    if ours.dry_run:
        return await service.plan(ours)
    return _answer(await service.release(request, ours))


@router.post("/resume_memory", responses=_RESPONSES, openapi_extra=takes(ResumeFields))
async def resume_memory(request: Request, service: ServiceOf, fields: ResumeOf) -> JSONResponse:
    """Resume memory, as ``/resume_memory_occupation`` does."""
    ours = fields.model_copy(update={"tags": _translated(fields.tags, service.lifecycle.memory), "run_async": False})
    if ours.dry_run:
        return await service.plan(ours)
    return _answer(await service.resume(request, ours))


@router.get("/memory_status", response_model=MemoryStatusAnswer, responses=REFUSED_RESPONSES)
@reads_only
async def memory_status(service: ServiceOf) -> dict[str, Any]:
    """The state of the memory and the released tags."""
    return {
        "state": STATES[service.lifecycle.state],
        "parked_tags": sorted(released_tags(service.lifecycle.memory.status())),
    }


def _translated(tags: list[str] | None, memory: Memory) -> list[str] | None:
    """Map TensorRT-LLM's names of the weights to ours, unless the engine has a tag of that name."""
    ours = {tag.tag for tag in memory.status().tags}
    return tags and ["weights" if tag in WEIGHT_TAGS and tag not in ours else tag for tag in tags]


def _answer(operation: Operation) -> JSONResponse:
    plain = answer(operation)
    if plain.status_code != 200:
        return plain
    return JSONResponse({"status": "success", **json.loads(bytes(plain.body))})
