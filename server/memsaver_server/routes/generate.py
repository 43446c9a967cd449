"""Generation, if the engine offers it, with SGLang's request and answer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from starlette.requests import Request

from memsaver_core.contract.errors import BadRequestError
from memsaver_server.controller import Models
from memsaver_server.http.requests import CallRoute, failures, guard, json_of
from memsaver_server.http.service import ServiceOf
from memsaver_server.http.unknown_fields import check_names
from memsaver_server.operation.departure import while_connected

_SAMPLING = {"max_new_tokens": {"type": "integer", "minimum": 0}, "temperature": {"type": "number", "minimum": 0}}
_FIELDS = {
    "text": {"type": "string"},
    "input_ids": {"type": "array", "items": {"type": "integer"}},
    "sampling_params": {"type": "object", "properties": _SAMPLING},
    "rid": {"type": "string"},
    "stream": {"type": "boolean", "enum": [False]},
}
_CONTENT = {"application/json": {"schema": {"type": "object", "properties": _FIELDS}}}


def router(_models: Models) -> APIRouter:
    routes = APIRouter(route_class=CallRoute, tags=["generation"], dependencies=[Depends(guard)])

    @routes.post("/generate", responses=failures(), openapi_extra={"requestBody": {"content": _CONTENT}})
    async def generate(request: Request, service: ServiceOf) -> JSONResponse:
        """Generate ``text`` and ``output_ids`` from ``text`` or ``input_ids``. 503 while the engine accepts no
        requests."""
        asked: dict[str, Any] = await json_of(request)
        request.state.memsaver_ignored = check_names([name for name in asked if asked[name] is not None], _FIELDS)
        if asked.get("stream"):
            raise BadRequestError("stream is not supported: the answer comes whole. Send the request without it")
        generated = await while_connected(service.controller.generate(asked))
        await service.fair_queue.wait()  # a whole batch may end at once
        return JSONResponse(generated)

    return routes
