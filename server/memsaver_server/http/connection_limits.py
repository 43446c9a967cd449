"""Limits on connections, which cost the engine's process file descriptors before a caller has shown a key.

uvicorn limits neither their number nor the time that a request may take to arrive. At the limit, a new connection
replaces the one that has waited longest for its caller, and while nearly all have a request in progress, only probes
are answered: however many callers there are, an orchestrator sees that the engine lives.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

import h11
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from memsaver_core.contract.errors import RETRY_AFTER_S
from memsaver_server.controller import Answer
from memsaver_server.http.fairness import PROBES
from memsaver_server.metrics import CallerFigures

#: Concurrent connections at most, and no more than half of the files that the process may open.
MAX_CONNECTIONS = 4096
#: Of the connections that are allowed, one in so many is for probes if all others have a request in progress.
PROBE_SHARE = 64
#: Time limit for a request line and headers from their first byte on, and for the first byte of a connection.
HEADERS_S = 30.0
#: Minimum upload rate of a body: BODY_BYTES per BODY_S. There is no limit on its total time.
BODY_S = 30.0
BODY_BYTES = 64 << 10
#: Time limit for the rest of a body whose request is answered already.
REST_S = 5.0


class Connections:
    """The open connections of a service: busy ones, which have a request in progress, and those that wait for their
    caller: for a complete request head, or until it reads the answer."""

    def __init__(self, figures: CallerFigures) -> None:
        self.figures = figures
        #: In the order in which they began to wait.
        self._waiting: dict[LimitedProtocol, None] = {}
        self._busy: set[LimitedProtocol] = set()

    def note(self, connection: LimitedProtocol, *, waits: bool) -> None:
        """Record a connection that is new, or begins or ceases to wait for its caller."""
        if waits != (connection in self._waiting):
            self.forget(connection)
            if waits:
                self._waiting[connection] = None
            else:
                self._busy.add(connection)
            self._count()

    def forget(self, connection: LimitedProtocol) -> None:
        self._waiting.pop(connection, None)
        self._busy.discard(connection)
        self._count()

    def make_room(self) -> None:
        """Drop connections over the limit: those that have waited longest, which may include the newest one."""
        while self._waiting and len(self._waiting) + len(self._busy) > max_connections():
            next(iter(self._waiting)).drop("evicted")

    def is_crowded(self) -> bool:
        """Whether so few connections are left that only probes are answered."""
        most = max_connections()
        return len(self._busy) >= most - max(1, most // PROBE_SHARE)

    def _count(self) -> None:
        self.figures.open = {"waiting": len(self._waiting), "busy": len(self._busy)}


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with a limit on connections and time limits on requests."""

    _awaited: Literal["", "headers", "body", "rest"] = ""
    _timer: asyncio.TimerHandle | None = None
    _received = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = logging.getLogger("memsaver")  # not uvicorn's, whose handlers may block the event loop
        self.access_log = False
        self._counted: Connections = self.config.app.state.memsaver.connections  # type: ignore[union-attr]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._counted.note(self, waits=True)
        self._expect("headers")
        self._counted.make_room()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self.conn.their_state is h11.IDLE:
            self.app = partial(self._answer, self._counted.is_crowded())
        super().data_received(data)
        self._note()
        if self.conn.their_state is h11.IDLE:
            self._expect("headers")
        elif self.conn.their_state is h11.SEND_BODY:
            self._expect_body()
        else:
            self._expect("")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()
        if self.conn.their_state is h11.SEND_BODY:
            self._expect_body()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect("")
        self._counted.forget(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._note()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note()

    def drop(self, reason: str) -> None:
        """End the connection at once, without waiting until the caller has read what was sent to it."""
        self._counted.figures.ended[reason] += 1
        self._counted.forget(self)
        self.transport.abort()

    def _note(self) -> None:
        if not self.transport.is_closing():
            is_answering = self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY)
            self._counted.note(self, waits=self.flow.write_paused or not is_answering)

    async def _answer(self, crowded: bool, scope: Scope, receive: Receive, send: Send) -> None:
        """The application. While nearly all connections have a request in progress, only probes reach it.

        A request with two lengths is refused: a proxy in front of this server may have read the other one, and taken
        the rest for another caller's request (RFC 9112, section 6.3).
        """
        if crowded and scope["path"] not in PROBES:
            message = "too many requests are in progress; repeat later"
            refused = Answer.error(503, "too_many_connections", message, RETRY_AFTER_S)
        elif {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            message = "the request has both Content-Length and Transfer-Encoding; send one of them"
            refused = Answer.error(400, "bad_request", message)
        else:
            await self.config.loaded_app(scope, receive, send)
            return
        headers = {"Connection": "close", **refused.headers}
        await JSONResponse(refused.body, refused.status, headers)(scope, receive, send)

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
            limit_s = HEADERS_S if awaited == "headers" else REST_S
            self._timer = self.loop.call_later(limit_s, self.drop, f"{awaited}_late")

    def _check_rate(self, before: int) -> None:
        """Check the upload rate; ``before`` is the count of received bytes at the last check."""
        if self._received - before >= BODY_BYTES or self.flow.read_paused:  # paused: we do not read
            self._timer = self.loop.call_later(BODY_S, self._check_rate, self._received)
        elif self.cycle.response_started:
            self.drop("body_late")
        else:
            self._counted.figures.ended["body_late"] += 1
            wanted = f"send all of it, or at least {BODY_BYTES} bytes each {BODY_S:g} s"
            self._end_with(Answer.error(408, "body_late", f"the body was sent too slowly; {wanted}"))

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._end_with(Answer.error(400, "bad_request", msg))
        else:
            self.transport.abort()  # during or after an answer

    def _end_with(self, answer: Answer) -> None:
        """Send a last answer and close. Bypasses h11, which answers only requests that it could parse."""
        content = json.dumps(answer.body).encode()
        if self.cycle is not None:
            # The application may wait for the rest of the request; its answer must not follow this one.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        head = (
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + content)
        self.transport.close()


def max_connections() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MAX_CONNECTIONS, files // 2) if files != resource.RLIM_INFINITY else MAX_CONNECTIONS
