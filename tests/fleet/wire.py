"""The network between a coordinator and an engine, with faults: a proxy on a real socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

#: What becomes of a request: it is lost, with the connection or without a sign; or its answer is, once the engine has
#: acted; or it waits until ``heal``; or it is passed on.
Fault = Literal["reset", "silence", "reset_answer", "silence_answer", "delay", "none"]


@dataclass
class Rule:
    matches: Callable[[str], bool]
    fault: Fault
    times: int
    then: Callable[[], None]


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Wire:
    """One proxy. ``seen`` are the requests that came, as ``METHOD /path body``; ``left`` are those of ``answer`` whose
    sender has closed the connection."""

    def __init__(self, target: str, loop: asyncio.AbstractEventLoop) -> None:
        self._target = urlsplit(target)
        self._loop = loop
        self._rules: list[Rule] = []
        self._connections: set[asyncio.StreamWriter] = set()
        self._healed = asyncio.Event()
        self._replaced: list[tuple[bytes, bytes]] = []
        self._answers: list[tuple[str, Iterable[bytes]]] = []
        self._silent = False
        self._server: asyncio.Server | None = None
        self._port = 0
        self.seen: list[str] = []
        self.left: list[str] = []
        self._run(self._listen())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def on(
        self,
        part: str | Callable[[str], bool],
        fault: Fault,
        *,
        times: int = 1_000_000,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Apply ``fault`` to the next requests in whose text ``part`` occurs; call ``then`` at each."""
        matches = part if callable(part) else lambda request: part in request
        self._rules.append(Rule(matches, fault, times, then))

    def cut(self) -> None:
        """As if the engine's process had ended: connections are reset, new ones refused."""
        self._run(self._stop())

    def drop(self) -> None:
        """As ``cut``, from a rule."""
        self._loop.create_task(self._stop())

    def drop_waiting(self) -> None:
        """Reset the connections, and take new ones."""
        self._run(self._restart())

    def go_on(self) -> None:
        """Let requests go on that wait."""
        self._run(self._let_go())

    def silence(self) -> None:
        """As if the network had a hole: nothing is answered, nothing refused."""
        self._silent = True

    def rewrite(self, old: str, new: str) -> None:
        """Replace text in the answers by one that is not longer."""
        self._replaced.append((old.encode(), new.encode()))

    def answer(self, part: str, pieces: Iterable[bytes]) -> None:
        """Answer requests in whose text ``part`` occurs by these bytes in place of the engine, and then by nothing."""
        self._answers.append((part, pieces))

    def heal(self) -> None:
        """Undo all faults; requests that wait go on."""
        self._replaced.clear()
        self._answers.clear()
        self.left.clear()
        self._rules.clear()
        self._silent = False
        self._run(self._heal())

    def close(self) -> None:
        self._run(self._stop())

    def _run(self, call: object) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result(600)  # type: ignore[arg-type]

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, backlog=256)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._connections):
            writer.transport.abort()

    async def _restart(self) -> None:
        await self._stop()
        await self._listen()

    async def _let_go(self) -> None:
        self._healed.set()
        self._healed = asyncio.Event()

    async def _heal(self) -> None:
        await self._let_go()
        if self._server is None:
            await self._listen()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._open(writer), suppress(OSError, asyncio.IncompleteReadError):
            upstream, out = await asyncio.open_connection(self._target.hostname, self._target.port)
            with self._open(out):
                while True:
                    request = await _message(reader)
                    head, _, body = request.partition(b"\r\n\r\n")
                    text = f"{head.split(b' HTTP')[0].decode()} {body.decode()}"
                    self.seen.append(text)
                    fault = self._fault(text)
                    if fault in ("reset", "silence"):
                        await self._lose(fault)
                        return
                    pieces = next((pieces for part, pieces in self._answers if part in text), None)
                    if pieces is not None:
                        for piece in pieces:
                            writer.write(piece)
                            await writer.drain()
                        await reader.read()
                        self.left.append(text)
                        return
                    if fault == "delay":
                        await self._healed.wait()
                    out.write(request)
                    answer = await _message(upstream)
                    if fault in ("reset_answer", "silence_answer"):
                        await self._lose(fault)
                        return
                    writer.write(self._rewritten(answer))

    @contextmanager
    def _open(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._connections.add(writer)
        try:
            yield
        finally:
            self._connections.discard(writer)
            writer.transport.abort()

    def _rewritten(self, answer: bytes) -> bytes:
        for old, new in self._replaced:
            answer = answer.replace(old, new.ljust(len(old)))
        return answer

    async def _lose(self, fault: str) -> None:
        if fault.startswith("silence"):
            await self._healed.wait()

    def _fault(self, text: str) -> Fault | None:
        if self._silent:
            return "silence"
        for rule in self._rules:
            if rule.times and rule.matches(text):
                rule.times -= 1
                rule.then()
                return rule.fault
        return None


async def _message(reader: asyncio.StreamReader) -> bytes:
    """Read one request or answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return head + await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
