"""The ASGI application over a controller."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memsaver_core.contract.errors import ForbiddenError, MemsaverError, ServerEndsError, UnauthorizedError
from memsaver_server.controller import Answer, Controller
from memsaver_server.http.auth import caller_kind
from memsaver_server.http.fairness import FairnessMiddleware
from memsaver_server.http.service import Service, response_of, service_of
from memsaver_server.operation.departure import CLIENT_CLOSED, ClientGoneError
from memsaver_server.settings import Settings

logger = logging.getLogger("memsaver")


def application(
    controller: Controller[Any], settings: Settings, routers: Iterable[APIRouter], title: str, description: str
) -> FastAPI:
    """Return an application with these routes over ``controller``, which answers every error with the service's JSON.

    It starts the controller when it starts, and ends it when it ends.
    """
    service = Service(controller, settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await controller.start()
        yield
        await controller.end()

    app = FastAPI(
        title=title,
        version=version("memsaver"),
        description=description,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.memsaver = service
    app.add_middleware(FairnessMiddleware, queue=service.fair_queue, kind_of=partial(caller_kind, settings))
    app.add_middleware(ShutdownMiddleware, closing=controller.closing)
    # Not by include_router(), which would build each route again for each application: that takes 0.05 s.
    app.router.routes.extend(route for router in routers for route in router.routes)
    app.add_exception_handler(MemsaverError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(ClientGoneError, _answer_nobody)
    app.add_exception_handler(Exception, _answer_unexpected)
    return app


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, (ForbiddenError, UnauthorizedError)):
        service_of(request).controller.callers.refused[error.reason] += 1
    return response_of(Answer.failure(error))


async def _answer_http(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return response_of(Answer.error(error.status_code, kind, str(error.detail)), error.headers)


async def _answer_nobody(_request: Request, _error: Exception) -> JSONResponse:
    return JSONResponse(None, CLIENT_CLOSED)


async def _answer_unexpected(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    # uvicorn closes the connection after such an error; without the header the client's next request on it would fail.
    return response_of(Answer.failure(error), {"Connection": "close"})


class ShutdownMiddleware:
    """Answers a request that is cancelled once ``closing`` is set, as the server ends, unless its answer has begun: the
    ASGI server would answer with plain text."""

    def __init__(self, app: ASGIApp, closing: threading.Event) -> None:
        self._app = app
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except asyncio.CancelledError:
            if begun or scope["type"] != "http" or not self._closing.is_set():
                raise
            asked = f"{scope['method']} {scope['path']}"
            message = f"the server is shutting down before {asked} has ended; it may or may not be done"
            await response_of(Answer.failure(ServerEndsError(message)))(scope, receive, send)
