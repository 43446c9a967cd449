"""The dialect of TensorRT-LLM: release, resume and status, with signed requests if a key is set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from starlette.requests import Request

from memsaver_core.contract.errors import UnauthorizedError
from memsaver_core.contract.model import Model, common
from memsaver_core.contract.requests import Verb
from memsaver_server.controller import Models
from memsaver_server.http.auth import check_browser, check_key, has_valid_key, reads_only
from memsaver_server.http.request_signing import has_valid_signature, is_signed
from memsaver_server.http.requests import REFUSED, CallRoute, body_of, failures, fields_of, operated, plain
from memsaver_server.http.service import ControllerOf, ServiceOf, response_of, service_of
from memsaver_server.operation.departure import CLIENT

#: TensorRT-LLM's names of the tag ``weights``.
WEIGHT_TAGS = ("model", "model_weights")
STATES = {"resident": "running", "releasing": "parking", "released": "parked", "resuming": "waking", "failed": "failed"}


class MemoryStatusAnswer(Model):
    """The state in TensorRT-LLM's words: ``running``, ``parking``, ``parked``, ``waking`` or ``failed``."""

    state: str
    parked_tags: list[str]


class ParkedEngine(MemoryStatusAnswer):
    name: str
    url: str


class FleetMemoryStatusAnswer(MemoryStatusAnswer):
    """The state of all engines in TensorRT-LLM's words, ``mixed``, or empty without engines; tags released on any."""

    engines: list[ParkedEngine]


async def guard_signed(request: Request) -> None:
    """Require the key or a valid signature. Before that the body is read only if the request is signed."""
    service = service_of(request)
    check_browser(request, service.settings)
    CLIENT.set(request.receive)
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
    body = await body_of(request, None)
    if not has_valid_signature(
        key.get_secret_value(), request.method, request.url.path, request.headers, body, service.nonces
    ):
        raise UnauthorizedError(
            "the signature is wrong, expired or used before; sign each request anew with the key", "signature"
        )


def router(models: Models) -> APIRouter:
    routes = APIRouter(route_class=CallRoute, tags=["runtime memory"], dependencies=[Depends(guard_signed)])
    responses = operated(models.done, models.failures)
    by_release, by_resume = Depends(fields_of(models.release)), Depends(fields_of(models.resume))

    async def operate(request: Request, service: ServiceOf, fields: Any, verb: Verb) -> JSONResponse:
        rows = await service.controller.rows(None)
        ours = frozenset[str]().union(*(row.tags for row in rows))
        tags = tuple("weights" if tag in WEIGHT_TAGS and tag not in ours else tag for tag in fields.tags)
        asked = plain(fields, models.asked(verb), tags=tags)
        if asked.is_answered_early:
            return await service.answer(request, asked)
        operation = await service.operate(request, asked)
        answer = service.controller.answer(operation)
        status = {"status": "success"} if operation.status == "succeeded" else {}  # else nothing was moved yet
        return response_of(replace(answer, body={**status, **answer.body}))

    @routes.post("/release_memory", responses=responses)
    async def release_memory(request: Request, service: ServiceOf, fields: Any = by_release) -> JSONResponse:
        """Release memory, as ``/release_memory_occupation`` does."""
        return await operate(request, service, fields, "release")

    @routes.post("/resume_memory", responses=responses)
    async def resume_memory(request: Request, service: ServiceOf, fields: Any = by_resume) -> JSONResponse:
        """Resume memory, as ``/resume_memory_occupation`` does."""
        return await operate(request, service, fields, "resume")

    @routes.get(
        "/memory_status",
        response_model=FleetMemoryStatusAnswer if models.several else MemoryStatusAnswer,
        responses=failures(only=REFUSED),
    )
    @reads_only
    async def memory_status(controller: ControllerOf) -> dict[str, Any]:
        """The state of the memory and the released tags."""
        rows = [
            {"name": row.name, "url": row.url, "state": STATES.get(row.state, row.state), "parked_tags": row.released}
            for row in await controller.rows(None)
        ]
        parked = sorted({tag for row in rows for tag in row["parked_tags"]})
        about = {"engines": rows} if models.several else {}
        return {"state": common(str(row["state"]) for row in rows), "parked_tags": parked, **about}

    return routes
