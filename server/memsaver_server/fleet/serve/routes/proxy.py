"""Requests for models, which are passed on to the engine that serves them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from starlette.requests import Request

from memsaver_server.fleet.serve.service import FleetService, FleetServiceOf
from memsaver_server.fleet.turns.errors import UnknownModelError
from memsaver_server.http.auth import reads_only
from memsaver_server.http.errors import BadRequestError
from memsaver_server.http.requests import ERROR_RESPONSES, REFUSED_RESPONSES, body_of, guard, json_of

router = APIRouter(tags=["models"], dependencies=[Depends(guard)])


@router.get("/v1/models", responses=REFUSED_RESPONSES)
@reads_only
async def models(service: FleetServiceOf) -> dict[str, Any]:
    """The models of the fleet as OpenAI lists them, each with its engines."""
    return {"object": "list", "data": [_model(service, name) for name in sorted(service.turns.models)]}


@router.get(
    "/v1/models/{model:path}",
    responses={**REFUSED_RESPONSES, 404: {**ERROR_RESPONSES[400], "description": "No engine serves the model."}},
)
@reads_only
async def model(service: FleetServiceOf, model: str) -> dict[str, Any]:
    """One model."""
    return _model(service, model)


@router.post("/generate", include_in_schema=False)
@router.api_route("/v1/{path:path}", methods=["GET", "POST", "PUT", "DELETE"], include_in_schema=False)
async def forward(request: Request, service: FleetServiceOf) -> Response:
    """Pass a request on to an engine of its model, once that is ready; its answer comes back byte for byte."""
    if {".", ".."} & set(request.scope["path"].split("/")):  # would lead to what the coordinator answers itself
        raise BadRequestError("the path has segments '.' or '..'; write it without them")
    body = await body_of(request)
    return await service.proxy.forward(request, await _model_of(request, service, body), body)


def _model(service: FleetService, name: str) -> dict[str, Any]:
    models = service.turns.models
    if name not in models:
        raise UnknownModelError(name, models)
    engines = [{"name": seat.name, "url": seat.url, "state": seat.state} for seat in models[name]]
    return {"id": name, "object": "model", "created": 0, "owned_by": "memsaver", "engines": engines}


async def _model_of(request: Request, service: FleetService, body: bytes) -> str:
    """Return the model that the request names in its body or query; a fleet with only one needs no name."""
    named = request.query_params.get("model")
    if named is None and body.lstrip()[:1] == b"{":
        named = (await json_of(request)).get("model")
    models = sorted(service.turns.models)
    if isinstance(named, str) and named:
        return named
    if len(models) == 1:
        return models[0]
    known = ", ".join(map(repr, models)) or "none"
    raise BadRequestError(
        f"the request names no model; send 'model' in a JSON body or the query. The models are {known}"
    )
