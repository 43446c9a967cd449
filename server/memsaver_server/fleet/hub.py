"""Hands events to everybody who watches."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memsaver_server.fleet.results import FleetEvent

#: Events that wait for one watcher; a slower one loses the oldest.
_WAITING = 10_000


class Queue:
    """The events of one watcher. Use it in one event loop."""

    def __init__(self) -> None:
        self._events: deque[FleetEvent] = deque(maxlen=_WAITING)
        self._some = asyncio.Event()

    def put(self, event: str, engine: str = "", **data: Any) -> None:
        """Append an event; never waits."""
        self._events.append(FleetEvent(at=time.time(), event=event, engine=engine, data=data))
        self._some.set()

    async def next(self, source: asyncio.Task[None]) -> FleetEvent | None:
        """Return the next event, or None once ``source`` has ended; raises its error."""
        while not self._events:
            self._some.clear()
            waiting = asyncio.ensure_future(self._some.wait())
            try:
                await asyncio.wait({waiting, source}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
            if source.done():
                source.result()
                return None
        return self._events.popleft()


class Hub:
    """Use it in one event loop."""

    def __init__(self) -> None:
        self._queues: set[Queue] = set()

    def publish(self, event: str, engine: str = "", **data: Any) -> None:
        """Hand an event to all watchers; never waits."""
        for queue in self._queues:
            queue.put(event, engine, **data)

    @contextmanager
    def watcher(self) -> Iterator[Queue]:
        """Yield the queue of a new watcher."""
        queue = Queue()
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)
