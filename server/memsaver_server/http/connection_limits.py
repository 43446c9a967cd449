"""Limits on connections, which cost the engine's process file descriptors before a caller has shown a key.

uvicorn limits neither their number nor the time that a request may take to arrive.
"""

from __future__ import annotations

import asyncio
import json
import resource
from http import HTTPStatus
from typing import Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from memsaver_server.http.errors import ErrorResponse

#: Concurrent connections at most, and no more than half of the files that the process may open.
MAX_CONNECTIONS = 4096
#: Time limit for a request line and headers from their first byte on, and for the first byte of a connection.
HEADERS_S = 30.0
#: Minimum upload rate of a body: BODY_BYTES per BODY_S. There is no limit on its total time.
BODY_S = 30.0
BODY_BYTES = 64 << 10
#: Time limit for the rest of a body whose request is answered already.
REST_S = 5.0


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with a limit on connections and time limits on requests."""

    _awaited: Literal["", "headers", "body", "rest"] = ""
    _timer: asyncio.TimerHandle | None = None
    _received = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            transport.close()
        else:
            self._expect("headers")

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
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

    def _expect(self, awaited: Literal["", "headers", "body", "rest"]) -> None:
        """Start the timer for what the caller has to send next, unless it runs already."""
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if awaited == "body":
            self._timer = self.loop.call_later(BODY_S, self._check_rate, self._received)
        elif awaited:
            # Not close(), which would wait until the caller has read all that was sent to it.
            self._timer = self.loop.call_later(HEADERS_S if awaited == "headers" else REST_S, self.transport.abort)

    def _check_rate(self, before: int) -> None:
        """Check the upload rate; ``before`` is the count of received bytes at the last check."""
        if self._received - before >= BODY_BYTES or self.flow.read_paused:  # paused: we do not read
            self._timer = self.loop.call_later(BODY_S, self._check_rate, self._received)
        elif self.cycle.response_started:
            self.transport.abort()
        else:
            wanted = f"send all of it, or at least {BODY_BYTES} bytes each {BODY_S:g} s"
            self._end_with(ErrorResponse(408, "body_late", f"the body was sent too slowly; {wanted}"))

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._end_with(ErrorResponse(400, "bad_request", msg))
        else:
            self.transport.abort()  # during or after an answer

    def _end_with(self, response: ErrorResponse) -> None:
        """Send a last answer and close. Bypasses h11, which answers only requests that it could parse."""
        content = json.dumps(response.body()).encode()
        if self.cycle is not None:
            # The application may wait for the rest of the request; its answer must not follow this one.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        head = (
            f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + content)
        self.transport.close()


def max_connections() -> int:
    """Return the limit on connections now."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MAX_CONNECTIONS, files // 2) if files != resource.RLIM_INFINITY else MAX_CONNECTIONS
