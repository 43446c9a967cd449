"""Fairness on the event loop: many requests that come or end at once must not make a probe wait for all of them.

The loop serves whatever is ready in the order in which it became so. Sixty-four generations that a batch ends together
are twenty milliseconds of parsing and serializing, and who asks for ``/livez`` behind them waits that long. So requests
that come in crowds take turns, a few to each pass of the loop, and everybody else goes past them.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

#: How many get their turn in one pass of the loop.
TURNS = 2


class Turns:
    """Lets ``TURNS`` waiters go on in each pass of the event loop, in their order."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = TURNS

    async def wait(self) -> None:
        """Return when it is the caller's turn."""
        loop = asyncio.get_running_loop()
        if self._left == TURNS:  # the first of this pass; the next pass begins the count anew
            loop.call_soon(self._next_pass, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = TURNS
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled: its client went away
                turn.set_result(None)
                self._left -= 1
        if self._left < TURNS:
            loop.call_soon(self._next_pass, loop)


class TakeTurns:
    """Makes requests that do something take turns; those that only look go past them."""

    def __init__(self, app: ASGIApp, turns: Turns) -> None:
        self._app = app
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._turns.wait()
        await self._app(scope, receive, send)
