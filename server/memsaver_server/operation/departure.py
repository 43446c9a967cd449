"""Cancels work once the client that waits for it has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import TypeVar, cast

from starlette.types import Receive

from memsaver_server.threads import first_of

_T = TypeVar("_T")

#: ASGI's ``receive`` of the request that the current task answers; unset in a task that answers none.
CLIENT: ContextVar[Receive] = ContextVar("CLIENT")
#: The status of a request whose client is gone, as some proxies log it.
CLIENT_CLOSED = 499


class ClientGoneError(Exception):
    """The client has closed its connection; nobody reads an answer."""


async def while_connected(work: Awaitable[_T], grace_s: float = 0.0, receive: Receive | None = None) -> _T:
    """Return the result of ``work``. Its client is that of ``receive``, by default of the request that the current task
    answers, if any; the body must have been read. Raises ClientGoneError ``grace_s`` seconds after the client has gone
    away: ``work`` was cancelled then, and has ended."""
    if (receive := receive or CLIENT.get(None)) is None:
        return await work
    async with first_of(work, _departure(receive)) as (task, _):
        if not task.done():
            await asyncio.wait({task}, timeout=grace_s)
        if not task.done():
            raise ClientGoneError
        return cast(_T, task.result())


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
