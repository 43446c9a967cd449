"""Passes an engine's answer on as it comes, and a client's departure on to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from memsaver_server.fleet.turns.upstream import Headers

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed its connection; nobody reads an answer."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``. The request's body must have been read.

    Raises:
        ClientGoneError: the client went away first; ``work`` was cancelled, and has ended.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_departure(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class Relayed(Response):
    """An engine's answer, byte for byte. ``ended`` is called once, when it is through or the client is gone."""

    def __init__(self, upstream: httpx.Response, headers: Headers, ended: Callable[[], None]) -> None:
        self.background = None
        self.status_code = upstream.status_code
        self.raw_headers = headers
        self._upstream = upstream
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        relay, gone = asyncio.ensure_future(self._relay(send)), asyncio.ensure_future(_departure(receive))
        try:
            await asyncio.wait({relay, gone}, return_when=asyncio.FIRST_COMPLETED)
            if relay.done():
                relay.result()
        finally:
            for each in (relay, gone):
                each.cancel()
            await asyncio.gather(relay, gone, return_exceptions=True)
            # Before it has ended, this closes the connection, by which the engine learns of it.
            await self._upstream.aclose()
            self._ended()

    async def _relay(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._upstream.aiter_raw():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
