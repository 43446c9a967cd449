"""What a caller may take of the engine's process by connecting alone, before it has shown a key.

uvicorn bounds neither how many connections there are nor how long one may take to say what it wants; each is a file
descriptor of the engine.
"""

from __future__ import annotations

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

#: Connections at a time, at most. Of a process that may open few files they get no more than half.
MOST_CONNECTIONS = 4096
#: How long the line and the headers of a request may take from the first byte on, and a new connection to send that.
HEADERS_S = 30.0


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol, which drops connections over the bound and those whose headers never end."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.close()
        else:
            self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._expect_nothing()
        elif self._late is None:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._late = self.loop.call_later(HEADERS_S, self.transport.close)

    def _expect_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def most_connections() -> int:
    """How many connections there may be now."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MOST_CONNECTIONS, files // 2) if files != resource.RLIM_INFINITY else MOST_CONNECTIONS
