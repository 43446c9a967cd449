"""A TCP proxy that loses requests or answers, between a client and the real service."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal
from urllib.parse import urlsplit

Loss = Literal["connection", "answer"]


class FlakyProxy:
    """Forwards to ``target``, except for the next ``losses``.

    ``connection``: closed before the request is read. ``answer``: the request reaches the service, its answer is
    thrown away.

    Attributes:
        requests: how many requests reached the service.
    """

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._lock = threading.Lock()
        self.losses: list[Loss] = []
        self.requests = 0
        self.url = ""

    def handle(self, downstream: socket.socket) -> None:
        with self._lock:
            loss = self.losses.pop(0) if self.losses else None
        if loss == "connection":
            return
        request = _read_message(downstream)
        with self._lock:
            self.requests += 1
        with socket.create_connection(self._target) as upstream:
            # One exchange for each connection, so that every attempt of a client is counted.
            upstream.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            answer = b"".join(iter(lambda: upstream.recv(65536), b""))
        if loss is None:
            downstream.sendall(answer)


def _read_message(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
    )
    while len(body) < length:
        body += connection.recv(65536)
    kept = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
    return b"\r\n".join(kept) + b"\r\n\r\n" + body


@contextmanager
def flaky_proxy(target: str) -> Iterator[FlakyProxy]:
    """Run a proxy to ``target`` while the block runs."""
    proxy = FlakyProxy(target)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                proxy.handle(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    with Server(("127.0.0.1", 0), Handler) as server:
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()
