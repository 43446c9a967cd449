"""The requests that wait for one model, in the order in which they came."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from memsaver_server.fleet.turns.seat import Seat


class Line:
    """Use it in one event loop.

    Attributes:
        looked: its engines were looked at since somebody waits, so that what is free is known.
        short_since: since when no engine would fit, on the monotonic clock; None if one would.
    """

    def __init__(self) -> None:
        self.looked = False
        self.short_since: float | None = None
        self._waiting: deque[tuple[float, asyncio.Future[Seat]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def since(self) -> float:
        """When the request at its head came, on the monotonic clock."""
        return self._waiting[0][0]

    def join(self) -> asyncio.Future[Seat]:
        """Add a request; its turn is the future's result. A future that is cancelled leaves the line."""
        turn: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        entry = time.monotonic(), turn
        if not self._waiting:
            self.looked, self.short_since = False, None
        self._waiting.append(entry)
        turn.add_done_callback(lambda _: self._leave(entry))
        return turn

    def serve(self, seat: Seat) -> None:
        """Let all requests go to ``seat``."""
        while self._waiting:
            _, turn = self._waiting.popleft()
            if not turn.done():
                seat.in_flight += 1
                turn.set_result(seat)

    def fail(self, error: Exception) -> None:
        """Refuse all requests."""
        while self._waiting:
            _, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(error)

    def _leave(self, entry: tuple[float, asyncio.Future[Seat]]) -> None:
        if entry in self._waiting:
            self._waiting.remove(entry)
