"""Liveness, readiness and metrics, for orchestrators, routers and scrapers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from memsaver_core.contract.status import HealthAnswer
from memsaver_server.controller import Controller, Models
from memsaver_server.http.auth import reads_only
from memsaver_server.http.requests import REFUSED, Responses, failures, guard, guard_probes
from memsaver_server.http.service import ControllerOf, response_of

_UNWELL: Responses = {
    **failures(only=(401,)),
    503: {"model": HealthAnswer, "description": "Not alive, not ready or no token; ``reason`` says why."},
}


def router(models: Models) -> APIRouter:
    routes = APIRouter(tags=["probes"], dependencies=[Depends(guard_probes)])

    @routes.head("/livez", include_in_schema=False)
    @routes.head("/health", include_in_schema=False)
    @routes.get("/livez", response_model=HealthAnswer, responses=_UNWELL)
    @routes.get("/health", response_model=HealthAnswer, responses=_UNWELL)
    async def alive(controller: ControllerOf) -> JSONResponse:
        """Whether the process can serve, now or after a resume: a released engine is alive, and so is a coordinator
        without engines."""
        return _health(controller, ready=False)

    @routes.head("/readyz", include_in_schema=False)
    @routes.get("/readyz", response_model=HealthAnswer, responses=_UNWELL)
    async def ready(controller: ControllerOf) -> JSONResponse:
        """Whether requests are accepted now."""
        return _health(controller, ready=True)

    @routes.get("/health_generate", response_model=models.generates, responses={**_UNWELL, **failures(only=REFUSED)})
    async def generates(controller: ControllerOf, _key: None = Depends(guard)) -> JSONResponse:
        """Whether the engine, or every engine, generates a token now."""
        return response_of(await controller.generates())

    @routes.head("/metrics", include_in_schema=False)
    @routes.get("/metrics", response_class=PlainTextResponse, responses=failures(only=(401,)))
    async def metrics(controller: ControllerOf) -> Response:
        """Prometheus metrics."""
        return Response(controller.scrape(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/version", response_model=dict[str, str], responses=failures(only=REFUSED))
    @reads_only
    async def version(controller: ControllerOf, _key: None = Depends(guard)) -> dict[str, str]:
        """Versions of what serves, for bug reports and rollouts. An engine's ``driver`` is memsaver's: ``cuda``,
        ``host`` or ``none``."""
        return controller.version()

    return routes


def _health(controller: Controller[Any], *, ready: bool) -> JSONResponse:
    health = controller.health(ready=ready)
    return JSONResponse(health.model_dump(), 503 if health.reason else 200)
