"""Forwards a request to the engine whose model it names, once that is ready."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress

import anyio
import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from memsaver_core.contract.errors import AdmissionClosedError, BadRequestError, MemsaverError
from memsaver_server.client.requests import read_json
from memsaver_server.fleet.answers import UnreadableError, content_of
from memsaver_server.fleet.connection import key_advice
from memsaver_server.fleet.observer import Observer
from memsaver_server.fleet.turns.slot import Slot
from memsaver_server.fleet.turns.turns import NoTurnError, Turns
from memsaver_server.fleet.turns.upstream import Headers, Upstreams, answer_headers, request_headers
from memsaver_server.operation.departure import ClientGoneError, while_connected

#: How often one request is sent to engines that turn out to be not ready.
ATTEMPTS = 8
#: How long a client may read nothing of its answer, seconds: meanwhile its engine cannot make room for another.
UNREAD_S = 60.0


class BadGatewayError(MemsaverError, kind="bad_gateway", status=502):
    """The engine broke off before it answered."""


class Proxy:
    def __init__(self, turns: Turns, observer: Observer, upstreams: Upstreams) -> None:
        self._turns = turns
        self._observer = observer
        self._upstreams = upstreams

    async def forward(self, request: Request, model: str, body: bytes) -> Response:
        """Return the answer of an engine of ``model``. Raises as Turns.enter, or BadGatewayError if the engine does not
        answer, although it may have begun to compute, BadRequestError, or ClientGoneError."""
        return await while_connected(self._forward(request, model, body))

    async def _forward(self, request: Request, model: str, body: bytes) -> Response:
        path = _path(request)
        for _ in range(ATTEMPTS):
            slot = await self._turns.enter(model)
            with ExitStack() as turn:
                turn.callback(self._turns.leave, slot)
                answer = await self._send(request, path, slot, body)
                if wrong := _wrong(answer.status_code):
                    await answer.aclose()
                    raise BadGatewayError(f"engine {slot.name} {wrong}")
                headers = answer_headers(answer.headers, slot.name)
                if answer.status_code != AdmissionClosedError.status:
                    return Relayed(answer, headers, turn.pop_all().close)
                try:
                    content = await content_of(answer)
                except (httpx.TransportError, UnreadableError) as error:
                    why = f"refuses the request, and its reason cannot be read: {error}"
                    raise BadGatewayError(f"engine {slot.name} {why}") from error
                if not _is_refusal(content):
                    response = Response(content, answer.status_code)
                    response.raw_headers = headers
                    return response
                slot.state, slot.reason = "closed", "it refuses requests"
            # It was released, but not by the coordinator. Nothing was generated, so the request may be sent again.
            await self._observer.look([slot.name])
        raise NoTurnError(f"{slot.name} says that it is ready, but refuses requests")

    async def _send(self, request: Request, path: bytes, slot: Slot, body: bytes) -> httpx.Response:
        upstream = await self._upstreams.to(slot.url, self._observer.keys.get(slot.name))
        try:
            return await upstream.send(request.method, path, request_headers(request.headers.raw), body)
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            slot.state, slot.reason = "dead", f"it gave no answer: {reason}"
            raise BadGatewayError(f"engine {slot.name} at {slot.url} gave no answer: {reason}") from error


def _path(request: Request) -> bytes:
    raw: bytes = request.scope["raw_path"].split(b"?")[0]
    query: bytes = request.scope["query_string"]
    if b"#" in raw + query:  # https://www.rfc-editor.org/rfc/rfc9112#name-request-target
        raise BadRequestError("a request's target has no fragment; send it without # and what follows")
    return raw + b"?" + query if query else raw


def _wrong(status: int) -> str:
    """Return why an answer of this status is not passed on; empty if it is."""
    if status in (401, 403):  # because of our key: the client's is not passed on
        return f"refuses the request{key_advice(status)}"
    return "" if 200 <= status < 600 else f"answered with status {status}, which HTTP does not have"


def _is_refusal(content: bytes) -> bool:
    """Return whether the engine's service says that admission is closed."""
    try:
        return bool(read_json(content)["error"]["type"] == AdmissionClosedError.kind)
    except (ValueError, KeyError, TypeError):
        return False


class Relayed(Response):
    """An engine's answer, byte for byte. ``ended`` is called once: when it is sent, or the client is gone or stuck."""

    def __init__(self, upstream: httpx.Response, headers: Headers, ended: Callable[[], None]) -> None:
        self.background = None
        self.status_code = upstream.status_code
        self.raw_headers = headers
        self._upstream = upstream
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # If the answer breaks off, the server closes the client's connection, by which the client learns of it.
            with suppress(ClientGoneError, TimeoutError, httpx.TransportError):
                await while_connected(self._relay(send), receive=receive)
        finally:
            # If the answer has not ended, this closes the connection, by which the engine learns of it.
            await self._upstream.aclose()
            self._ended()

    async def _relay(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._upstream.aiter_raw():
            with anyio.fail_after(UNREAD_S):  # no task for each chunk, as wait_for makes with Python 3.11
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
