"""Liveness, readiness and metrics of the coordinator."""

from __future__ import annotations

import platform
from importlib import metadata

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from memsaver_server.fleet.serve.service import FleetServiceOf
from memsaver_server.http.auth import reads_only
from memsaver_server.http.requests import ERROR_RESPONSES, REFUSED_RESPONSES, Responses, guard, guard_probes
from memsaver_server.schemas import HealthAnswer

router = APIRouter(tags=["probes"], dependencies=[Depends(guard_probes)])
_UNWELL: Responses = {
    401: ERROR_RESPONSES[401],
    503: {"model": HealthAnswer, "description": "It is not; ``reason`` says why."},
}


@router.head("/livez", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/livez", response_model=HealthAnswer, responses=_UNWELL)
@router.get("/health", response_model=HealthAnswer, responses=_UNWELL)
async def alive(service: FleetServiceOf) -> JSONResponse:
    """Whether the coordinator runs. A fleet without engines is alive."""
    return _health(service.observer.status.state, "")


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", response_model=HealthAnswer, responses=_UNWELL)
async def ready(service: FleetServiceOf) -> JSONResponse:
    """Whether the members can be read and an engine answers: a request then has its turn."""
    observer = service.observer
    answers = any(engine.alive for engine in observer.status.engines)
    return _health(observer.status.state, observer.trouble or ("" if answers else "no engine answers"))


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=PlainTextResponse, responses={401: ERROR_RESPONSES[401]})
async def metrics(service: FleetServiceOf) -> Response:
    """Prometheus metrics."""
    return Response(service.metrics.scrape(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version", responses=REFUSED_RESPONSES)
@reads_only
async def version(_key: None = Depends(guard)) -> dict[str, str]:
    """Versions of what serves."""
    return {"version": metadata.version("memsaver"), "python": platform.python_version()}


def _health(state: str, reason: str) -> JSONResponse:
    body = {"status": "unavailable" if reason else "ok", "state": state, "reason": reason}
    return JSONResponse(body, 503 if reason else 200)
