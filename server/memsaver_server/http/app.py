"""The ASGI application: routes over one occupation over one engine."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

from memsaver_core.errors import MemsaverError
from memsaver_server.engine import (
    AdmissionClosedError,
    DrainTimeoutError,
    Engine,
    GeneratingEngine,
    UpdatableEngine,
)
from memsaver_server.http import errors
from memsaver_server.http.fairness import TakeTurns
from memsaver_server.http.service import Service
from memsaver_server.lifecycle import NotEnoughToReleaseError, NotResidentError
from memsaver_server.operation_queue import (
    ConflictError,
    IdempotencyKeyError,
    PhaseTimeoutError,
    TooManyOperationsError,
)
from memsaver_server.routes import dashboard, generate, memory, operations, probes, sglang, tensorrt_llm, vllm, weights
from memsaver_server.settings import Settings

logger = logging.getLogger("memsaver")

#: What has an answer of its own; everything else is an error of ours, logged in full and answered in brief.
_FORESEEN = (
    MemsaverError,
    AdmissionClosedError,
    DrainTimeoutError,
    NotEnoughToReleaseError,
    NotResidentError,
    ConflictError,
    IdempotencyKeyError,
    PhaseTimeoutError,
    TooManyOperationsError,
    errors.BadRequestError,
    errors.BodyTooLargeError,
    errors.ForbiddenError,
    errors.NotFoundError,
    errors.UnauthorizedError,
)


def create_app(engine: Engine, settings: Settings | None = None) -> FastAPI:
    """Return the application that serves ``engine``; ``settings`` come from the environment where they are not given.

    It can be served as it is, or mounted in an application of the engine's own.
    """
    service = Service(engine, settings or Settings())

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.readings.start()
        yield
        service.close()

    app = FastAPI(
        title="memsaver",
        description="Give a GPU back while the inference engine that fills it stays alive.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.memsaver = service
    app.add_middleware(TakeTurns, turns=service.turns)
    for route in (sglang, vllm, tensorrt_llm, memory, operations, probes, dashboard):
        app.include_router(route.router)
    if isinstance(engine, GeneratingEngine):
        app.include_router(generate.router)
    if isinstance(engine, UpdatableEngine):
        app.include_router(weights.router)
    for kind in _FORESEEN:
        app.add_exception_handler(kind, _answer_problem)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(Exception, _answer_unforeseen)
    return app


async def _answer_problem(_request: Request, error: Exception) -> JSONResponse:
    problem = errors.problem_of(error)
    return JSONResponse(problem.body(), problem.status, headers=problem.headers)


async def _answer_http(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return JSONResponse(
        errors.Problem(error.status_code, kind, str(error.detail)).body(), error.status_code, error.headers
    )


async def _answer_invalid(_request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(errors.Problem(400, "bad_request", f"cannot use the request: {error}").body(), 400)


async def _answer_unforeseen(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    problem = errors.problem_of(error)
    # uvicorn ends the connection after such an error: a caller that kept it for the next request would be cut off.
    return JSONResponse(problem.body(), problem.status, headers={"Connection": "close"})
