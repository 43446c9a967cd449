"""The ASGI application: composes the service and its routes over one engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Protocol

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Lifespan

from memsaver_core import MemsaverError
from memsaver_server.engine import Engine
from memsaver_server.http.errors import ErrorResponse, ForbiddenError, UnauthorizedError, error_response
from memsaver_server.http.fairness import FairnessMiddleware, FairQueue
from memsaver_server.http.requests import service_of
from memsaver_server.http.service import Service
from memsaver_server.http.shutdown import ShutdownMiddleware
from memsaver_server.routes import ROUTERS
from memsaver_server.settings import Settings

logger = logging.getLogger("memsaver")


def create_app(engine: Engine, settings: Settings | None = None) -> FastAPI:
    """Return the application that serves ``engine``; ``settings`` default to those of the environment.

    Serve it as it is, or mount it in an application of the engine's own.
    """
    service = Service(engine, settings or Settings())

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.monitor.start()
        yield
        service.close()

    routers = [router for router, capability in ROUTERS if isinstance(engine, capability)]
    about = "Give a GPU back while the inference engine that fills it stays alive."
    return compose(service, "memsaver", about, routers, lifespan)


class Composed(Protocol):
    """What an application needs of the state behind its routes."""

    fair_queue: FairQueue
    closing: threading.Event


def compose(
    service: Composed, title: str, description: str, routers: Iterable[APIRouter], lifespan: Lifespan[FastAPI]
) -> FastAPI:
    """Return an application with these routes over ``service``, which answers every error with the service's JSON."""
    app = FastAPI(
        title=title,
        version=version("memsaver"),
        description=description,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.memsaver = service
    app.add_middleware(FairnessMiddleware, queue=service.fair_queue)
    app.add_middleware(ShutdownMiddleware, closing=service.closing)
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(MemsaverError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(Exception, _answer_unexpected)
    return app


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, (ForbiddenError, UnauthorizedError)):
        service_of(request).metrics.refused[error.reason] += 1
    response = error_response(error)
    return JSONResponse(response.body(), response.status, headers=response.headers)


async def _answer_http(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    body = ErrorResponse(error.status_code, kind, str(error.detail)).body()
    return JSONResponse(body, error.status_code, error.headers)


async def _answer_invalid(_request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(ErrorResponse(400, "bad_request", f"cannot use the request: {error}").body(), 400)


async def _answer_unexpected(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    response = error_response(error)
    # uvicorn closes the connection after such an error; without the header the client's next request on it would fail.
    return JSONResponse(response.body(), response.status, headers={"Connection": "close"})
