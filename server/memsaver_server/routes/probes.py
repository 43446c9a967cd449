"""Liveness, readiness and metrics, for orchestrators, routers and scrapers."""

from __future__ import annotations

import asyncio
import platform
from importlib import metadata

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from memsaver_server.engine import AdmissionClosedError, GeneratingEngine
from memsaver_server.http.auth import reads_only
from memsaver_server.http.requests import ERROR_RESPONSES, REFUSED_RESPONSES, Responses, ServiceOf, guard, guard_probes
from memsaver_server.http.service import Service
from memsaver_server.lifecycle import Snapshot
from memsaver_server.ranks.watch import stopped_ranks
from memsaver_server.schemas import HealthAnswer


class VersionAnswer(BaseModel):
    """What serves. ``driver`` is memsaver's: ``cuda``, ``host`` or ``none``."""

    version: str
    python: str
    torch: str
    driver: str
    engine: str


router = APIRouter(tags=["probes"], dependencies=[Depends(guard_probes)])
_UNWELL: Responses = {
    401: ERROR_RESPONSES[401],
    503: {"model": HealthAnswer, "description": "It is not; ``reason`` says why."},
}
#: Time limit for the token of ``/health_generate``, seconds.
GENERATE_TIMEOUT_S = 20.0


@router.head("/livez", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/livez", response_model=HealthAnswer, responses=_UNWELL)
@router.get("/health", response_model=HealthAnswer, responses=_UNWELL)
async def alive(service: ServiceOf) -> JSONResponse:
    """Whether the process can serve, now or after a resume: a released engine is alive."""
    now = service.lifecycle.snapshot()
    return _health(now, _failed_reason(service, now))


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", response_model=HealthAnswer, responses=_UNWELL)
async def ready(service: ServiceOf) -> JSONResponse:
    """Whether the engine accepts requests now."""
    now = service.lifecycle.snapshot()
    return _health(now, _unready_reason(service, now))


@router.get("/health_generate", response_model=HealthAnswer, responses={**_UNWELL, 403: ERROR_RESPONSES[403]})
async def generates(service: ServiceOf, _key: None = Depends(guard)) -> JSONResponse:
    """Whether the engine generates a token now."""
    now = service.lifecycle.snapshot()
    reason = _unready_reason(service, now)
    if not reason and isinstance(service.engine, GeneratingEngine):
        one_token = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        try:
            await asyncio.wait_for(service.engine.generate(one_token), GENERATE_TIMEOUT_S)
        except asyncio.TimeoutError:
            reason = f"no token within {GENERATE_TIMEOUT_S:g} s"
        except AdmissionClosedError as closed:
            reason = str(closed)
        except Exception as error:
            reason = f"cannot generate: {type(error).__name__}: {error}"
        now = service.lifecycle.snapshot()
    return _health(now, reason)


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=PlainTextResponse, responses={401: ERROR_RESPONSES[401]})
async def metrics(service: ServiceOf) -> Response:
    """Prometheus metrics."""
    return Response(service.metrics.scrape(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version", response_model=VersionAnswer, responses=REFUSED_RESPONSES)
@reads_only
async def version(service: ServiceOf, _key: None = Depends(guard)) -> dict[str, str]:
    """Versions of what serves, for bug reports and rollouts."""
    return {
        "version": metadata.version("memsaver"),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "driver": service.lifecycle.snapshot().status.driver,
        "engine": service.engine.name,
    }


def _failed_reason(service: Service, now: Snapshot) -> str:
    """Return why the process can never serve again, or an empty string."""
    if now.state != "failed" and service.engine.is_alive():
        return ""
    return now.closed_reason or f"engine {service.engine.name!r} is dead"


def _unready_reason(service: Service, now: Snapshot) -> str:
    """Return why the engine accepts no requests now, or an empty string."""
    return _failed_reason(service, now) or now.closed_reason or stopped_ranks(now.status.ranks)


def _health(now: Snapshot, reason: str) -> JSONResponse:
    body = {"status": "unavailable" if reason else "ok", "state": now.state, "reason": reason}
    return JSONResponse(body, 503 if reason else 200)
