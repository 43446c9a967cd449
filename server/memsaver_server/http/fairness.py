"""Fairness on the event loop: a batch of requests must not delay a probe until all of them are served.

The loop serves ready tasks in order. When a batch of 64 generations ends, parsing and serializing them takes 20 ms,
for which a later ``/livez`` would wait. So a few requests of a batch proceed in each iteration of the loop, and all
other requests overtake them.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

#: Requests that proceed in one iteration of the event loop.
REQUESTS_PER_ITERATION = 2


class FairQueue:
    """Lets ``REQUESTS_PER_ITERATION`` waiters proceed in each iteration of the event loop, first come first served."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = REQUESTS_PER_ITERATION

    async def wait(self) -> None:
        """Return when the caller may proceed."""
        loop = asyncio.get_running_loop()
        if self._left == REQUESTS_PER_ITERATION:  # the first of this iteration: reset the count in the next
            loop.call_soon(self._next_iteration, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        proceed = loop.create_future()
        self._waiting.append(proceed)
        await proceed

    def _next_iteration(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = REQUESTS_PER_ITERATION
        while self._waiting and self._left:
            proceed = self._waiting.popleft()
            if not proceed.done():  # cancelled: its client disconnected
                proceed.set_result(None)
                self._left -= 1
        if self._left < REQUESTS_PER_ITERATION:
            loop.call_soon(self._next_iteration, loop)


class FairnessMiddleware:
    """Queues POST requests; all others overtake them."""

    def __init__(self, app: ASGIApp, queue: FairQueue) -> None:
        self._app = app
        self._queue = queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._queue.wait()
        await self._app(scope, receive, send)
