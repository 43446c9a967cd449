"""HTTP to the engines, as a proxy speaks it: bytes are passed on as they are."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from weakref import WeakSet

import httpx

from memsaver_server import clock
from memsaver_server.client.requests import Target

#: Time limit of connecting to an engine, seconds. Generating has none.
CONNECT_S = 10.0
#: How long a connection waits for the next request, seconds: less than servers do, whose close could cross a request.
IDLE_S = 2.0
#: An address that is unused for so long may be gone: its connections are closed once a new address is used, seconds.
UNUSED_S = 60.0
#: Headers that concern one connection only.
_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
    *("te", "trailer", "transfer-encoding", "upgrade"),
}
#: Headers of a request that are made anew for the engine, or are about the page that sent it, which was checked.
_OWN = {"authorization", "content-length", "cookie", "expect", "host", "origin", "referer"}
#: Headers of an answer that are dropped: the coordinator's server adds its own.
_SERVER = {"date", "server"}

Headers = list[tuple[bytes, bytes]]


class Upstream:
    def __init__(self, url: str, api_key: str | None, verify: ssl.SSLContext | bool) -> None:
        self._target = target = Target(url, None, api_key, CONNECT_S, None)
        self._base = httpx.URL(target.base_url)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_S)
        self._transport = httpx.AsyncHTTPTransport(uds=target.uds, verify=target.verifies(verify), limits=limits)
        self._timeout = httpx.Timeout(None, connect=CONNECT_S).as_dict()
        self._key = [(name, value) for name, value in target.headers.items() if name == b"Authorization"]
        self._sending = 0
        self._answers: WeakSet[httpx.Response] = WeakSet()
        self.used = clock.monotonic()

    @property
    def is_idle(self) -> bool:
        return not self._sending and all(answer.is_closed for answer in self._answers)

    async def send(self, method: str, path: bytes, headers: Headers, content: bytes) -> httpx.Response:
        """Send a request; return the answer, whose body is not read yet and has to be closed. Raises
        httpx.TransportError if there is none."""
        request = httpx.Request(
            method,
            self._base.copy_with(raw_path=self._base.raw_path.rstrip(b"/") + path),
            headers=[*self._key, *headers],
            content=content,
            extensions={"timeout": self._timeout},
        )
        self._sending += 1
        try:
            answer = await self._transport.handle_async_request(request)
        finally:
            self._sending -= 1
        self._answers.add(answer)
        return answer

    async def close(self) -> None:
        await self._transport.aclose()


class Upstreams:
    """An ``Upstream`` for each engine that is called; ``verify`` as for the client."""

    def __init__(self, verify: ssl.SSLContext | bool) -> None:
        self._verify = verify
        self._known: dict[tuple[str, str | None], Upstream] = {}

    async def to(self, url: str, api_key: str | None) -> Upstream:
        key, now = (url, api_key), clock.monotonic()
        upstream = self._known.get(key)
        if upstream is None:
            unused = [each for each, one in self._known.items() if one.is_idle and one.used < now - UNUSED_S]
            closing = [self._known.pop(each).close() for each in unused]
            upstream = self._known[key] = Upstream(url, api_key, self._verify)
            await asyncio.gather(*closing)
        upstream.used = now
        return upstream

    async def close(self) -> None:
        for upstream in self._known.values():
            await upstream.close()


def request_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers of a client's request that its engine gets."""
    sent = [(name, value) for name, value in _without(headers, _OWN) if not name.lower().startswith(b"sec-")]
    if not any(name.lower() == b"accept-encoding" for name, _ in sent):  # httpx would add its own: compressed answers
        sent.append((b"accept-encoding", b"identity"))
    return sent


def _without(headers: Iterable[tuple[bytes, bytes]], left_out: set[str]) -> Headers:
    """Return the headers without those ``left_out``, and without those of one connection, which may name more."""
    given = [(name.decode("latin-1").lower(), name, value) for name, value in headers]
    named = b",".join(value for key, _, value in given if key == "connection").decode("latin-1").lower()
    hop = _HOP | left_out | {each.strip() for each in named.split(",")}
    return [(name, value) for key, name, value in given if key not in hop]


def answer_headers(headers: httpx.Headers, engine: str) -> Headers:
    """Return the headers of an engine's answer that the client gets, and the engine's name."""
    kept = _without(headers.raw, _SERVER)
    # A header may have only printable characters of Latin-1.
    shown = "".join(letter if letter.isprintable() else "?" for letter in engine.strip())
    return [*kept, (b"x-memsaver-engine", shown.encode("latin-1", "replace"))]
