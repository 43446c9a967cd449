"""The state behind the routes: a controller, and what a server remembers of its callers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, cast

from fastapi import Depends, Request
from fastapi.responses import JSONResponse, StreamingResponse

from memsaver_core.contract.errors import BadRequestError, ServerEndsError
from memsaver_core.contract.requests import Asked
from memsaver_server.controller import Answer, Controller, accepted
from memsaver_server.http.auth import caller
from memsaver_server.http.connection_limits import Connections
from memsaver_server.http.fairness import FairQueue
from memsaver_server.http.request_signing import NonceCache
from memsaver_server.operation.operation import Operation
from memsaver_server.settings import Settings

#: Longest Idempotency-Key, characters: thousands are kept for a day.
MAX_KEY = 255


class Service:
    """A controller, and the state of the server in front of it."""

    def __init__(self, controller: Controller[Any], settings: Settings) -> None:
        self.controller = controller
        self.settings = settings
        self.connections = Connections(controller.callers)
        self.nonces = NonceCache()
        self.fair_queue = FairQueue()

    async def operate(self, request: Request, asked: Asked) -> Operation:
        """Start an operation or join an equal one. Unless ``asked.run_async``, wait until it has ended or is prepared.
        Raises ServerEndsError if the server shuts down first, or as Controller.submit and Controller.attend."""
        operation: Operation = await self.controller.submit(asked, client=caller(request), key=key_of(request))
        if not asked.run_async:
            try:
                await self.controller.attend(operation, prepared=asked.prepare)
            except asyncio.CancelledError:
                if self.controller.closing.is_set():
                    verb, phase = operation.request.operation, operation.phase
                    raise ServerEndsError(
                        f"the server is shutting down while {verb} {operation.id} is in phase '{phase}'; the operation "
                        "continues while the process lives"
                    ) from None
                raise
        return operation

    async def answer(self, request: Request, asked: Asked) -> JSONResponse:
        """Carry out, start or plan an operation, as ``asked``; return the response. Raises as ``operate``."""
        if asked.dry_run:
            return response_of(await self.controller.plan(asked))
        operation = await self.operate(request, asked)
        return response_of(accepted(operation) if asked.run_async else self.controller.answer(operation))

    async def planned(self, asked: Any, what: str) -> JSONResponse | None:
        """Return the response to a dry run of a call that moves no memory; None if ``asked`` is no dry run."""
        if not asked.dry_run:
            return None
        await self.controller.rows(asked)
        return response_of(Answer.message(f"Dry run: {what}"))

    async def commit(self, request: Request, operation: Operation) -> JSONResponse:
        await self.controller.commit(operation, key_of(request))
        return response_of(self.controller.answer(operation))


def key_of(request: Request) -> str | None:
    """Return the caller's Idempotency-Key, or None; raise BadRequestError if it is too long to be kept."""
    key = request.headers.get("idempotency-key") or None
    if key is not None and len(key) > MAX_KEY:
        raise BadRequestError(f"the Idempotency-Key has {len(key)} characters; send at most {MAX_KEY}")
    return key


def response_of(answer: Answer, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(answer.body, answer.status, headers={**answer.headers, **(headers or {})})


def event_stream(events: AsyncIterator[tuple[str, Any]]) -> StreamingResponse:
    """Return the response that sends ``events``, an async generator of names and data, as server-sent events."""

    async def written() -> AsyncIterator[str]:
        async with aclosing(events):  # type: ignore[type-var]
            async for name, data in events:
                yield f"event: {name}\ndata: {json.dumps(data)}\n\n"

    return StreamingResponse(written(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def service_of(request: Request) -> Service:
    return cast(Service, request.app.state.memsaver)


# A coroutine although it awaits nothing: FastAPI runs plain functions in threads.
async def controller_of(request: Request) -> Controller[Any]:
    return service_of(request).controller


async def _service(request: Request) -> Service:
    return service_of(request)


ControllerOf = Annotated[Controller[Any], Depends(controller_of)]
ServiceOf = Annotated[Service, Depends(_service)]
