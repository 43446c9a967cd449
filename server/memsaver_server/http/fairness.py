"""Fairness on the event loop: neither a batch of requests nor a crowd of callers may delay all others.

The loop serves ready tasks in order. When a batch of 64 generations ends, parsing and serializing them takes 20 ms,
for which a later ``/livez`` would wait. So a few requests proceed in each iteration of the loop: probes at once, and
by turns callers without a valid key, those who sign, requests that change something, and all others. A connection has
one request in progress at a time, so each kind is served fairly by connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Literal, get_args

from starlette.types import ASGIApp, Receive, Scope, Send

#: Requests that proceed in one iteration of the event loop.
REQUESTS_PER_ITERATION = 2
PROBES = frozenset({"/livez", "/health", "/readyz", "/metrics"})
#: The kinds of requests. Without a valid key, one is ``signed`` if it has a signature, valid or not, else ``unknown``.
Kind = Literal["reads", "changes", "signed", "unknown"]


class FairQueue:
    """Lets ``REQUESTS_PER_ITERATION`` waiters proceed in each iteration of the event loop: the kinds by turns."""

    def __init__(self) -> None:
        #: By kind, the one whose turn is next first.
        self._waiting: dict[Kind, deque[asyncio.Future[None]]] = {kind: deque() for kind in get_args(Kind)}
        self._left = REQUESTS_PER_ITERATION

    async def wait(self, kind: Kind = "changes") -> None:
        loop = asyncio.get_running_loop()
        if self._left == REQUESTS_PER_ITERATION:  # the first of this iteration: reset the count in the next
            loop.call_soon(self._next_iteration, loop)
        if self._left and not any(self._waiting.values()):
            self._left -= 1
            return
        proceed = loop.create_future()
        self._waiting[kind].append(proceed)
        await proceed

    def _next_iteration(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = REQUESTS_PER_ITERATION
        while self._left and (kind := next((each for each, waiting in self._waiting.items() if waiting), None)):
            of_kind = self._waiting[kind] = self._waiting.pop(kind)  # this kind is the last one from now on
            proceed = of_kind.popleft()
            if not proceed.done():  # cancelled: its client disconnected
                proceed.set_result(None)
                self._left -= 1
        if self._left < REQUESTS_PER_ITERATION:
            loop.call_soon(self._next_iteration, loop)


class FairnessMiddleware:
    """Queues all requests but probes, by kind."""

    def __init__(self, app: ASGIApp, queue: FairQueue, kind_of: Callable[[Scope], Kind]) -> None:
        self._app = app
        self._queue = queue
        self._kind_of = kind_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope.get("path") not in PROBES:
            await self._queue.wait(self._kind_of(scope))
        await self._app(scope, receive, send)
