"""Callers that are slow, or many: what they keep from others."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterator

import httpx
import pytest

from memsaver_server import connections

Connect = Callable[[], socket.socket]
HEAD = b"POST /release_memory_occupation HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n"


@pytest.fixture
def connect(http: httpx.Client) -> Iterator[Connect]:
    """Open a connection to the served engine; all of them end with the test."""
    opened: list[socket.socket] = []

    def run() -> socket.socket:
        opened.append(socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=60))
        return opened[-1]

    yield run
    for one in opened:
        one.close()


def was_dropped(one: socket.socket) -> bool:
    """Wait until the server ends the connection."""
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True


def test_slow_bodies_hold_nothing(http: httpx.Client, connect: Connect) -> None:
    """A release whose body never ends is no operation: others release and resume meanwhile."""
    for _ in range(20):
        connect().sendall(HEAD + b'\r\n{"tags": [')
    for _ in range(3):
        assert http.post("/release_memory_occupation").json()["state"] == "released"
        assert http.post("/resume_memory_occupation").json()["state"] == "resident"
    assert len(http.get("/operations").json()["operations"]) == 6


def test_a_body_that_is_cut_off_changes_nothing(http: httpx.Client, connect: Connect) -> None:
    one = connect()
    one.sendall(HEAD + b'\r\n{"tags": ["weights"]}')
    one.shutdown(socket.SHUT_WR)
    one.recv(65536)  # an answer or none
    assert http.get("/memory_occupation").json()["state"] == "resident"
    assert http.get("/operations").json()["operations"] == []


@pytest.mark.parametrize(("used", "sent"), [(False, b""), (False, b"GET"), (False, HEAD), (True, b"GET"), (True, HEAD)])
def test_headers_that_never_end_are_dropped(
    http: httpx.Client, connect: Connect, monkeypatch: pytest.MonkeyPatch, used: bool, sent: bytes
) -> None:
    """On a new connection, and on one that had an answer before."""
    monkeypatch.setattr(connections, "HEADERS_S", 0.2)
    one = connect()
    if used:
        one.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += one.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200")
    one.sendall(sent)
    assert was_dropped(one)
    assert http.get("/livez").status_code == 200


def test_a_request_that_takes_its_time_is_not_dropped(
    http: httpx.Client, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only headers have a bound: another connection's runs out while this one's body is on its way."""
    monkeypatch.setattr(connections, "HEADERS_S", 0.2)
    slow = connect()
    slow.sendall(HEAD.replace(b"100", b"21") + b'\r\n{"tags": ["weig')
    assert was_dropped(connect())
    assert http.get("/memory_occupation").json()["state"] == "resident"
    slow.sendall(b'hts"]}')
    assert slow.recv(65536).startswith(b"HTTP/1.1 200")
    assert http.post("/resume_memory_occupation").status_code == 200


def test_connections_are_bounded(http: httpx.Client, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    assert http.get("/livez").status_code == 200  # this connection is one of them
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 10)
    before = len(os.listdir("/proc/self/fd"))
    held = [connect() for _ in range(9)]
    assert all(was_dropped(connect()) for _ in range(50))
    assert http.get("/livez").status_code == 200
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * 9 + 50 + 1  # both ends of nine, our end of the others
    held[0].close()
    while True:
        one = connect()
        one.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        try:
            if one.recv(65536).startswith(b"HTTP/1.1 200"):
                break
        except ConnectionResetError:
            pass  # the server has not seen yet that the other is gone


def test_connections_leave_the_engine_its_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 512), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _what, soft=soft: (soft, soft))
        assert connections.most_connections() == most
