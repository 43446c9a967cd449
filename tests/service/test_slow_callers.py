"""Slow or numerous callers: they must not keep others from being served."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import resource
import select
import socket
from collections.abc import Callable, Iterator

import httpx
import pytest
import safetensors.torch

from memsaver_server.http import connection_limits
from memsaver_server.routes import dashboard
from tests.waiting import wait_until

from .tensor_engine import TensorEngine

Connect = Callable[[], socket.socket]
Serve = Callable[..., httpx.Client]
HEAD = b"POST /release_memory_occupation HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n"
CHUNKED = HEAD.replace(b"Content-Length: 100", b"Transfer-Encoding: chunked")


@pytest.fixture
def key() -> str | None:
    """The key that the service asks for; empty unless a test sets one."""
    return None


@pytest.fixture
def http(serve: Serve, key: str | None) -> httpx.Client:
    return serve(api_key=key)


@pytest.fixture
def connect(http: httpx.Client) -> Iterator[Connect]:
    """Open a connection to the served engine; all of them are closed at the end of the test."""
    opened: list[socket.socket] = []

    def run() -> socket.socket:
        opened.append(socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=600))
        return opened[-1]

    yield run
    for one in opened:
        one.close()


def was_dropped(one: socket.socket) -> bool:
    """Wait until the server closes the connection."""
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True


def all_of(one: socket.socket) -> bytes:
    """Everything that the server sends until it closes the connection."""
    said = b""
    try:
        while more := one.recv(65536):
            said += more
    except ConnectionResetError:
        pass
    return said


def has_news(one: socket.socket) -> bool:
    return bool(select.select([one], [], [], 0)[0])


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


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
    one.recv(65536)  # an answer or nothing
    assert http.get("/memory_occupation").json()["state"] == "resident"
    assert http.get("/operations").json()["operations"] == []


@pytest.mark.parametrize(("used", "sent"), [(False, b""), (False, b"GET"), (False, HEAD), (True, b"GET"), (True, HEAD)])
def test_headers_that_never_end_are_dropped(
    http: httpx.Client, connect: Connect, monkeypatch: pytest.MonkeyPatch, used: bool, sent: bytes
) -> None:
    """On a new connection, and on one that had an answer before."""
    monkeypatch.setattr(connection_limits, "HEADERS_S", 1.0)
    one = connect()
    if used:
        one.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            more = one.recv(65536)
            assert more, "it was dropped before its answer"
            answer += more
        assert answer.startswith(b"HTTP/1.1 200")
    one.sendall(sent)
    assert was_dropped(one)
    assert http.get("/livez").status_code == 200


def test_headers_have_their_own_bound(http: httpx.Client, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of one connection's headers applies while another one's body is being sent."""
    monkeypatch.setattr(connection_limits, "HEADERS_S", 1.0)
    slow = connect()
    slow.sendall(HEAD.replace(b"100", b"21") + b'\r\n{"tags": ["weig')
    assert was_dropped(connect())
    assert http.get("/memory_occupation").json()["state"] == "resident"
    slow.sendall(b'hts"]}')
    assert slow.recv(65536).startswith(b"HTTP/1.1 200")
    assert http.post("/resume_memory_occupation").status_code == 200


@pytest.mark.parametrize("path", [b"/release_memory_occupation", b"/update_weights_from_tensor", b"/generate"])
@pytest.mark.parametrize("sent", [HEAD + b"\r\n", HEAD + b'\r\n{"tags": ', CHUNKED + b"\r\n" + chunk(b'{"tags": ')])
def test_a_body_that_stops_is_answered(
    http: httpx.Client,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: bytes,
    sent: bytes,
) -> None:
    """After a time limit by a 408 that says what is required. The connection is closed, and nothing has changed."""
    monkeypatch.setattr(connection_limits, "BODY_S", 0.2)
    one = connect()
    one.sendall(sent.replace(b"/release_memory_occupation", path))
    head, _, body = all_of(one).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert b"Connection: close" in head
    answer = httpx.Response(408, content=body).json()
    assert (answer["success"], answer["error"]["type"]) == (False, "body_late")
    assert "65536 bytes" in answer["message"]
    assert http.get("/memory_occupation").json()["state"] == "resident"
    assert http.get("/operations").json()["operations"] == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_body_that_trickles_is_answered(
    http: httpx.Client, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent byte by byte, a small body could take forever without ever being idle."""
    monkeypatch.setattr(connection_limits, "BODY_S", 0.02)
    one = connect()
    one.sendall(HEAD.replace(b"100", b"60000") + b"\r\n")
    for _ in range(50_000):  # together less than the minimum upload rate requires
        if has_news(one):
            break
        one.sendall(b" ")
        assert http.get("/livez").status_code == 200
    assert all_of(one).startswith(b"HTTP/1.1 408")


def test_a_large_body_may_take_longer(
    http: httpx.Client, connect: Connect, engine: TensorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow weights arrive in full, while bodies that stop are ended on other connections."""
    monkeypatch.setattr(connection_limits, "BODY_S", 1.0)
    monkeypatch.setattr(connection_limits, "BODY_BYTES", 1)
    payload = base64.b64encode(safetensors.torch.save({"weights": engine.weights.clone()}))
    slow = connect()
    slow.sendall(CHUNKED.replace(b"/release_memory_occupation", b"/update_weights_from_tensor") + b"\r\n")
    for _ in range(3):
        other = connect()
        other.sendall(HEAD + b"\r\n")

        def was_ended(other: socket.socket = other) -> bool:
            slow.sendall(chunk(b" "))
            assert http.get("/livez").status_code == 200
            return has_news(other)

        wait_until(was_ended)
        assert all_of(other).startswith(b"HTTP/1.1 408")
    slow.sendall(chunk(b'{"serialized_named_tensors": ["' + payload + b'"]}') + b"0\r\n\r\n")
    assert slow.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("key", ["the key"])
@pytest.mark.parametrize(
    "signed", [b"", b"x-trtllm-runtime-control-auth: sha256=0\r\n", b"x-trtllm-rl-control-auth: sha256=0\r\n"]
)
def test_slow_bodies_without_the_key_keep_nobody_out(
    http: httpx.Client, connect: Connect, monkeypatch: pytest.MonkeyPatch, signed: bytes
) -> None:
    """They take all allowed connections but the one for probes, and lose them."""
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", 10)
    monkeypatch.setattr(connection_limits, "BODY_S" if signed else "REST_S", 0.2)
    http.close()
    held = [connect() for _ in range(9)]
    for one in held:
        one.sendall(HEAD.replace(b"_occupation", b"") + signed + b"\r\n{")
    status = b"HTTP/1.1 408" if signed else b"HTTP/1.1 401"
    assert all(all_of(one).startswith(status) for one in held)
    assert httpx.get(http.base_url.join("/livez")).status_code == 200


@pytest.mark.parametrize("key", ["the key"])
def test_an_answer_that_came_before_the_body_ends_the_connection(
    http: httpx.Client, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon, however much of the body still comes."""
    monkeypatch.setattr(connection_limits, "REST_S", 0.02)
    one = connect()
    one.sendall(HEAD.replace(b"100", b"1000000000000") + b"\r\n")
    select.select([one], [], [], 60)
    assert one.recv(65536).startswith(b"HTTP/1.1 401")
    for _ in range(20_000):
        assert http.get("/livez").status_code == 200
        try:
            one.sendall(b" " * 1024)
        except ConnectionError:
            return
    pytest.fail("the connection never ended")


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error(
    http: httpx.Client, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged at debug level, with its path."""
    caplog.set_level(logging.DEBUG, "memsaver")
    paths = ["/release_memory_occupation", "/sleep", "/generate", "/update_weights_from_tensor"]
    for path in paths:
        one = connect()
        one.sendall(HEAD.replace(b"/release_memory_occupation", path.encode()) + b'\r\n{"tags": ')
        one.close()

    def told() -> bool:
        assert http.get("/livez").status_code == 200
        return all(any(path in record.getMessage() for record in caplog.records) for path in paths)

    wait_until(told)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert http.get("/operations").json()["operations"] == []


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> set[connection_limits.LimitedProtocol]:
    """The connections whose write buffer is full until their reader reads. Buffers are small, so that this comes
    soon."""
    found: set[connection_limits.LimitedProtocol] = set()
    made, pause = connection_limits.LimitedProtocol.connection_made, connection_limits.LimitedProtocol.pause_writing

    def connection_made(self: connection_limits.LimitedProtocol, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    def pause_writing(self: connection_limits.LimitedProtocol) -> None:
        pause(self)
        found.add(self)

    monkeypatch.setattr(connection_limits.LimitedProtocol, "connection_made", connection_made)
    monkeypatch.setattr(connection_limits.LimitedProtocol, "pause_writing", pause_writing)
    return found


def test_readers_that_never_read_hinder_nobody(
    full: set[connection_limits.LimitedProtocol],
    http: httpx.Client,
    connect: Connect,
    engine: TensorEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Event streams, the dashboard's feed and metrics: only their own writers wait."""
    monkeypatch.setattr(dashboard, "IDLE_INTERVAL_S", 0.0)
    monkeypatch.setattr(dashboard, "RUNNING_INTERVAL_S", 0.0)
    monkeypatch.setattr(dashboard, "TICK_S", 0.0)
    engine.block()
    busy = connect()
    prompt = b'{"input_ids": [3], "sampling_params": {"max_new_tokens": 1}}'
    busy.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(prompt) + prompt)
    engine.wait_until(lambda engine: engine.in_flight())
    release = {"async": True, "timeout_s": 3600}
    operation_id = http.post("/release_memory_occupation", json=release).json()["operation_id"]
    asked = [f"/operations/{operation_id}/events"] * 4 + ["/dashboard/feed"] * 4 + ["/metrics"] * 4
    readers = [connect() for _ in asked]
    for one, path in zip(readers, asked, strict=True):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode() * (1000 if path == "/metrics" else 1))

    def feeds_and_metrics_are_full() -> bool:
        assert http.get("/livez").status_code == 200
        return len(full) >= 8

    wait_until(feeds_and_metrics_are_full)
    assert http.get("/memory_occupation").json()["state"] == "releasing"
    assert http.get("/metrics").status_code == 200
    assert all(one.transport.get_write_buffer_size() < 1 << 20 for one in full)
    engine.unblock()
    wait_until(lambda: http.get(f"/operations/{operation_id}").json()["status"] != "running")
    assert http.post("/resume_memory_occupation").json()["state"] == "resident"
    assert http.post("/release_memory_occupation").json()["state"] == "released"


GET = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def connections(http: httpx.Client) -> dict[str, float]:
    """The metrics of connections, by a new one: the service may drop one that waits at any moment."""
    with httpx.Client(base_url=http.base_url, timeout=600, verify=False) as other:
        text = other.get("/metrics").text
    lines = [line for line in text.splitlines() if "_connections" in line and line[0] != "#"]
    return {name: float(value) for name, value in map(str.split, lines)}


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "])
def test_half_open_connections_give_way(
    http: httpx.Client, connect: Connect, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """At the limit the oldest of them is dropped for each new connection, so that probes are answered and none is
    reset; the service never holds more than the limit."""
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", 10)
    before = len(os.listdir("/proc/self/fd"))
    held = []
    for _ in range(50):
        held.append(connect())
        held[-1].sendall(sent)
        with httpx.Client(base_url=http.base_url, timeout=600, verify=False) as probe:
            assert probe.get("/livez").status_code == 200
    assert all(was_dropped(one) for one in held[:40])
    assert not any(has_news(one) for one in held[-8:])
    assert len(os.listdir("/proc/self/fd")) - before <= 50 + 10
    assert connections(http)['memsaver_ended_connections_total{reason="evicted"}'] >= 40


def test_a_request_in_progress_is_not_dropped_for_half_open_ones(
    http: httpx.Client, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", 10)
    slow = connect()
    slow.sendall(HEAD.replace(b"100", b"22") + b'\r\n{"tags": ["weig')
    wait_until(lambda: connections(http)['memsaver_connections{state="busy"}'] == 2)  # it, and the one that asks
    for _ in range(50):
        connect()
    wait_until(lambda: connections(http)['memsaver_connections{state="waiting"}'] <= 8)
    slow.sendall(b'hts"]} ')
    assert slow.recv(65536).startswith(b"HTTP/1.1 200")


def test_busy_connections_leave_room_for_probes(
    http: httpx.Client, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams may hold all others; a further request is refused by an answer."""
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", 10)
    streams = [connect() for _ in range(9)]
    for one in streams:
        one.sendall(GET % b"/dashboard/feed")
        assert one.recv(65536).startswith(b"HTTP/1.1 200")
    for _ in range(3):
        with httpx.Client(base_url=http.base_url, timeout=600, verify=False) as other:
            assert [other.get(path).status_code for path in ("/livez", "/readyz", "/metrics")] == [200] * 3
            refused = other.post("/release_memory_occupation")
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "too_many_connections")
        assert "Retry-After" in refused.headers
    streams[0].close()

    def answers() -> bool:
        with httpx.Client(base_url=http.base_url, timeout=600, verify=False) as other:
            return other.get("/memory_occupation").status_code == 200

    wait_until(answers)
    assert http.get("/operations").json()["operations"] == []


def test_connections_leave_the_engine_its_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 512), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _what, soft=soft: (soft, soft))
        assert connection_limits.max_connections() == most


@pytest.mark.parametrize("key", ["k" * 32])
def test_a_crowd_without_a_key_holds_up_neither_probes_nor_callers_with_one(
    http: httpx.Client, connect: Connect
) -> None:
    """Each connection has a hundred requests waiting; a probe and a caller's request overtake most of them."""
    crowd = 300
    with httpx.Client(base_url=http.base_url, timeout=600) as prober:

        def refused() -> int:
            lines = prober.get("/metrics").text.splitlines()
            return int(
                float(next((line.split()[-1] for line in lines if 'refused_requests_total{reason="no_key"' in line), 0))
            )

        ask = b"GET /memory_occupation HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        for _ in range(crowd):
            connect().sendall(100 * ask)
        wait_until(lambda: refused() > crowd)
        before = refused()
        assert refused() - before < crowd
        before = refused()
        with httpx.Client(base_url=http.base_url, timeout=600) as fresh:
            assert fresh.get("/livez").status_code == 200
        assert refused() - before < crowd
        before = refused()
        assert http.get("/memory_occupation", headers={"Authorization": f"Bearer {'k' * 32}"}).status_code == 200
        assert refused() - before < crowd
        assert refused() < 100 * crowd, "the crowd was served before"
