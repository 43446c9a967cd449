"""Requests for models, which a fleet passes on to the engine that serves them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from starlette.requests import Request

from memsaver_core.contract.errors import BadRequestError, NotFoundError
from memsaver_server.controller import Models
from memsaver_server.fleet.controller import FleetController
from memsaver_server.fleet.turns.slot import Slot
from memsaver_server.fleet.turns.turns import UnknownModelError
from memsaver_server.http.auth import reads_only
from memsaver_server.http.requests import REFUSED, body_of, failures, guard, json_of, query_of
from memsaver_server.http.service import controller_of

#: Calls below /v1 that change one engine: passed on, only one of a model's engines would get them, and report success.
_OF_ONE_ENGINE = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/runtime/")
_FleetOf = Annotated[FleetController, Depends(controller_of)]


def router(_models: Models) -> APIRouter:
    """Return the routes. They come last: one takes every path below /v1 that no other route has."""
    routes = APIRouter(tags=["models"], dependencies=[Depends(guard)])

    @routes.get("/v1/models", responses=failures(only=REFUSED))
    @reads_only
    async def models(controller: _FleetOf) -> dict[str, Any]:
        """The models of the fleet as OpenAI lists them, each with its engines."""
        return {"object": "list", "data": [_model(*each) for each in sorted(controller.turns.models.items())]}

    @routes.get("/v1/models/{model:path}", responses=failures({404: "No engine serves the model."}, only=REFUSED))
    @reads_only
    async def model(controller: _FleetOf, model: str) -> dict[str, Any]:
        """One model."""
        models = controller.turns.models
        if model not in models:
            raise UnknownModelError.of(model, models)
        return _model(model, models[model])

    @routes.post("/generate", include_in_schema=False)
    @routes.api_route("/v1/{path:path}", methods=["GET", "POST", "PUT", "DELETE"], include_in_schema=False)
    async def forward(request: Request, controller: _FleetOf) -> Response:
        """Pass a request on to an engine of its model, once that is ready; its answer comes back byte for byte."""
        if {".", ".."} & set(request.scope["path"].split("/")):  # may resolve to a route of the coordinator
            raise BadRequestError("the path has segments '.' or '..'; write it without them")
        if request.scope["path"].startswith(_OF_ONE_ENGINE):
            raise NotFoundError(f"a fleet has no call {request.scope['path']}; call each engine itself")
        body = await body_of(request)
        return await controller.proxy.forward(request, await _model_of(request, controller, body), body)

    return routes


def _model(name: str, slots: Iterable[Slot]) -> dict[str, Any]:
    engines = [{"name": slot.name, "url": slot.url, "state": slot.state} for slot in slots]
    return {"id": name, "object": "model", "created": 0, "owned_by": "memsaver", "engines": engines}


async def _model_of(request: Request, controller: FleetController, body: bytes) -> str:
    """Return the model that the request names in its body or query; a fleet with only one needs no name."""
    named = query_of(request, lambda name: name == "model").get("model")
    if named is None and body.lstrip()[:1] == b"{":
        named = (await json_of(request)).get("model")
    if isinstance(named, str) and named:
        return named
    models = sorted(controller.turns.models)
    if len(models) == 1:
        return models[0]
    known = ", ".join(map(repr, models)) or "none"
    raise BadRequestError(
        f"the request names no model; send 'model' in a JSON body or the query. The models are {known}"
    )
