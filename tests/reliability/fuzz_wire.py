"""Fuzz target: the whole service as bytes reach it, through the protocol class that serves connections.

An input's first byte says what follows (a capital: a key is set):

    a  bytes as they come from a connection, in as many pieces as the second byte says
    b  a request line without its version; headers, one a line, up to an empty one; a body, whose length is right
    c  an Idempotency-Key, sent with a release, with the same once more, and with another
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from memsaver_core.contract.requests import Resume
from memsaver_server import Settings, create_app
from memsaver_server.http.connection_limits import LimitedProtocol
from tests.reliability.fuzz_inputs import KEY, count, headers_on_the_wire, parts_of
from tests.service.surface import routes
from tests.service.tensor_engine import Memory, TensorEngine

SHARE = 0.2
#: Valid statuses of answers. 500 is not one.
STATUSES = {100, 200, 202, 307, 400, 401, 403, 404, 405, 408, 409, 413, 422, 503, 504, 507}
#: How long the caller of a complete request stays, which may be held until generation continues.
STAYS_S = 0.05
ROUTES = [f"{method} {path}".format(operation_id="7", name="page.js") for method, path in routes()]
LINES = [
    "Content-Length: 2",
    "Transfer-Encoding: chunked",
    "Expect: 100-continue",
    "Connection: close",
    "Host: localhost",
]
QUERIES = ["POST /sleep?level=0", "GET /release_memory_occupation?async=1", "POST /wake_up?tags=weights"]
SEEDS = [
    *(f"b{route}\n\n{{}}".encode() for route in (*ROUTES, *QUERIES)),
    *(f"B{route}\nAuthorization: Bearer {KEY}\n\n{{}}".encode() for route in ROUTES),
    *(f"a\x00GET /livez HTTP/1.1\r\n{line}\r\n\r\n{{}}".encode() for line in LINES),
    *(f"BPOST /sleep\n{line}\n\n".encode() for line in LINES),
    b"a\x04POST /sleep HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"A\x02POST /sleep HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nx\r\n\r\n",
    b"a\x01GET /livez HTTP/1.1\r\nHost: a\r\n\r\nGET /readyz HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.0\r\n\r\n",
    b"bGET /operations/%C3%A9%00\n\n",
    b"bGET /dashboard/%2e%2e%2fapp.py\n\n",
    b"c7",
    b"C\xe9 \xff",
    b"c",
]
DICTIONARY = [*ROUTES, *LINES, "Authorization: Bearer ", "Idempotency-Key: ", " HTTP/1.1\r\n", "\r\n\r\n", "\r\n"]


class Line(asyncio.Transport):
    """The caller's end of a connection: records what it receives, and closes streams that would never end."""

    def __init__(self) -> None:
        super().__init__()
        self.told = bytearray()
        self.statuses: list[int] = []
        self.is_paused = False
        self._is_closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"sockname": ("127.0.0.1", 30000), "peername": ("127.0.0.1", 40000)}.get(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.told += data
        if bytes(data).startswith(b"HTTP/1.1 "):
            self.statuses.append(int(data[9:12]))
            if b"text/event-stream" in bytes(data):
                asyncio.get_running_loop().call_soon(self.hang_up)

    def hang_up(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.get_protocol().connection_lost(None)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self.get_protocol().connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self._is_closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Served:
    """An application and the state that uvicorn keeps for it."""

    def __init__(self, engine: TensorEngine, key: str | None) -> None:
        self.app = create_app(engine, Settings(api_key=key, max_body_bytes=2048))
        self.lifecycle = self.app.state.memsaver.controller.lifecycle
        self.config = uvicorn.Config(self.app, http=LimitedProtocol, ws="none", log_config=None, access_log=False)
        self.config.load()
        self.state = ServerState()

    async def start(self) -> None:
        self.lifespan = self.app.router.lifespan_context(self.app)
        await self.lifespan.__aenter__()

    async def hear(self, pieces: list[bytes], stays: float | None) -> Line:
        """Serve one connection; the caller of a complete request stays so many seconds, None: to the answer."""
        line = Line()
        protocol = LimitedProtocol(self.config, self.state, {})
        line.set_protocol(protocol)
        protocol.connection_made(line)
        tasks = self.state.tasks
        for piece in pieces:
            while line.is_paused and tasks and not line.is_closing():
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if line.is_closing():
                break
            protocol.data_received(piece)
            await asyncio.sleep(0)
        if tasks and not (protocol.cycle is not None and protocol.cycle.more_body):
            await asyncio.wait(tasks, timeout=stays)
        line.hang_up()
        return line

    async def reopen(self) -> None:
        """Let all held requests go and resume all memory, which no request outlasts."""
        self.lifecycle.continue_generation()
        if self.lifecycle.operations.running is not None or self.lifecycle.snapshot().state != "resident":
            self.lifecycle.start(Resume(wait=True)).done.result()
        if self.state.tasks:
            await asyncio.wait(self.state.tasks)
        assert not self.state.connections


class Target:
    """One engine, served with a key and without one."""

    def __init__(self) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # no line for each invalid request
        self.engine = TensorEngine(Memory(weights_bytes=4096, kv_bytes=4096, bare=True))
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._note)
        self.problems: list[dict[str, Any]] = []
        self.repeats = 0
        self.served = [Served(self.engine, key) for key in (None, KEY)]
        for one in self.served:
            self.loop.run_until_complete(one.start())

    def read(self, data: bytes) -> int:
        kind, rest = data[:1], data[1:]
        served = self.served[kind.isupper()]
        if kind in b"aA":
            count("inputs")
            self._answers(served, cut(rest[1:], rest[0] % 16 if rest else 0))
        elif kind in b"bB":
            count("inputs")
            first, head, body = parts_of(rest, 1)
            self._answers(served, [request(first, head, body)])
        elif kind in b"cC" and b"\r" not in rest and b"\n" not in rest:
            count("inputs")
            self._repeats(served, rest)
        else:
            return -1
        return 0

    def _answers(self, served: Served, pieces: list[bytes], stays: float | None = STAYS_S) -> Line:
        before = self._seen(served)
        line, after = self.loop.run_until_complete(self._serve(served, pieces, stays))
        assert not self.problems, self.problems
        assert set(line.statuses) <= STATUSES, bytes(line.told)
        if served is self.served[1] and KEY.encode() not in b"".join(pieces):
            assert after == before
        count("understood" if {200, 202} & set(line.statuses) else "refused")
        return line

    async def _serve(self, served: Served, pieces: list[bytes], stays: float | None) -> tuple[Line, object]:
        line = await served.hear(pieces, stays)
        after = self._seen(served)
        await served.reopen()
        return line, after

    def _repeats(self, served: Served, key: bytes) -> None:
        """The same request under the same key is the same operation; a different one is refused."""
        self.repeats += 1  # no earlier input had the key
        head = b"Idempotency-Key: %d" % self.repeats + key + b"\nAuthorization: Bearer " + KEY.encode()
        ids = []
        statuses = []
        for tag in ("kv_cache", "kv_cache", "weights"):
            body = json.dumps({"tags": [tag]}).encode()
            line = self._answers(served, [request(b"POST /release_memory_occupation", head, body)], None)
            statuses += line.statuses
            answer = bytes(line.told).partition(b"\r\n\r\n")[2]
            ids.append(json.loads(answer).get("operation_id") if line.statuses == [200] else None)
        if headers_on_the_wire(b"", head) is None:
            assert statuses == [400, 400, 400]
        else:
            assert statuses == [200, 200, 422], statuses
            assert ids[0] == ids[1]

    def _seen(self, served: Served) -> object:
        """What a caller without the key must not change."""
        newest = [operation.id for operation in served.lifecycle.operations.recent()[:1]]
        return newest, self.engine.is_closed, self.engine.tokens_computed, self.engine.weights._version

    def _note(self, _loop: asyncio.AbstractEventLoop, problem: dict[str, Any]) -> None:
        self.problems.append(problem)


def cut(data: bytes, places: int) -> list[bytes]:
    size = len(data) // (places + 1) + 1
    return [data[start : start + size] for start in range(0, len(data), size)]


def request(first: bytes, head: bytes, body: bytes) -> bytes:
    lines = [first + b" HTTP/1.1", *(head.split(b"\n") if head else []), b"Content-Length: %d" % len(body)]
    if not any(line.lower().startswith(b"host:") for line in lines):
        lines.append(b"Host: localhost")
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
