"""Answers the requests that the end of the server cuts off, which the ASGI server would answer with plain text."""

from __future__ import annotations

import asyncio
import threading

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memsaver_core.contract.errors import ServerEndsError
from memsaver_server.controller import Answer


class ShutdownMiddleware:
    """Answers a request that is cancelled once ``closing`` is set, unless its answer has begun."""

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
            answer = Answer.failure(ServerEndsError(message))
            await JSONResponse(answer.body, answer.status)(scope, receive, send)
