"""What a caller may take of the engine's process by connecting alone, before it has shown a key.

uvicorn bounds neither how many connections there are nor how long one may take to say what it wants; each is a file
descriptor of the engine.
"""

from __future__ import annotations

import asyncio
import json
import resource
from http import HTTPStatus
from typing import Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from memsaver_server.http.errors import Problem

#: Connections at a time, at most. Of a process that may open few files they get no more than half.
MOST_CONNECTIONS = 4096
#: How long the line and the headers of a request may take from the first byte on, and a new connection to send that.
HEADERS_S = 30.0
#: In each such time a body must bring so many bytes, or its end. Weights may take their hours; a few bytes may not.
BODY_S = 30.0
BODY_BYTES = 64 << 10
#: How long the rest of a body may take whose request is answered already.
REST_S = 5.0


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol, which drops connections over the bound and those that do not say all they began to say."""

    _owed: Literal["", "headers", "body", "rest"] = ""
    _clock: asyncio.TimerHandle | None = None
    _arrived = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.close()
        else:
            self._expect("headers")

    def data_received(self, data: bytes) -> None:
        self._arrived += len(data)
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._expect("headers")
        elif self.conn.their_state is h11.SEND_BODY:
            self._expect_body()
        else:
            self._expect("")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._expect_body()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect("")
        super().connection_lost(exc)

    def _expect_body(self) -> None:
        self._expect("rest" if self.conn.our_state is h11.DONE else "body")

    def _expect(self, owed: Literal["", "headers", "body", "rest"]) -> None:
        """Give the caller the time that there is for what it owes, from when it first owed it."""
        if owed == self._owed:
            return
        self._owed = owed
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        if owed == "body":
            self._clock = self.loop.call_later(BODY_S, self._look_at_body, self._arrived)
        elif owed:
            # Not close(), which would wait until the caller has read what it was sent.
            self._clock = self.loop.call_later(HEADERS_S if owed == "headers" else REST_S, self.transport.abort)

    def _look_at_body(self, before: int) -> None:
        """Let the body go on where enough of it came since ``before``; end it where it does not come."""
        if self._arrived - before >= BODY_BYTES or self.flow.read_paused:  # paused: it is us who do not read
            self._clock = self.loop.call_later(BODY_S, self._look_at_body, self._arrived)
        elif self.cycle.response_started:
            self.transport.abort()
        else:
            wanted = f"send the whole of it, or at least {BODY_BYTES} bytes each {BODY_S:g} s"
            self._end_with(Problem(408, "body_late", f"the body did not come; {wanted}"))

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, wherever in a request that begins."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._end_with(Problem(400, "bad_request", msg))
        else:
            self.transport.abort()  # in the middle of an answer, or behind it

    def _end_with(self, problem: Problem) -> None:
        """Send the last answer of this connection; past h11, which answers only requests that it could read."""
        content = json.dumps(problem.body()).encode()
        if self.cycle is not None:
            # The application, which may wait for the rest, shall answer nothing any more.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        head = (
            f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + content)
        self.transport.close()


def most_connections() -> int:
    """How many connections there may be now."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MOST_CONNECTIONS, files // 2) if files != resource.RLIM_INFINITY else MOST_CONNECTIONS
