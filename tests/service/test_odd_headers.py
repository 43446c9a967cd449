"""Malformed headers on every route are refused or ignored."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import suppress

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memsaver_server.http import request_signing
from tests.amount import amount

from .surface import OPEN, routes, seen
from .tensor_engine import TensorEngine

KEY = "the key"
EXAMPLES = amount(2, long=100)
#: Headers that some layer reads, and one that none does.
NAMES = [
    *("Idempotency-Key", "Authorization", "Host", "User-Agent", "Accept", "Accept-Encoding", "Cookie", "Origin"),
    *("Content-Type", "Content-Encoding", "Connection", "Upgrade", "Range", "If-None-Match", "Last-Event-ID"),
    *("Sec-Fetch-Site", "X-Api-Key", "X-Forwarded-For", "X-Forwarded-Host", "X-Http-Method-Override", "Traceparent"),
    *(*request_signing.BODY_HEADERS, request_signing.TIMESTAMP_HEADER, request_signing.NONCE_HEADER),
    "X-Nobody-Reads",
]
#: Headers that determine where the request ends; with a wrong one it may never end.
FRAMING = ["Content-Length", "Transfer-Encoding", "Expect"]
VALUES = [
    *(b"", b" ", b"\t", b"\x00", b"\x7f", b"\xff\xfe", "é".encode(), "日本".encode(), b"a\rb", b"\x1b[2J", b"%00%0a"),
    *(b"0", b"1", b"-1", b"+1", b"1e3", b"0x1", b"99999999999999999999", "٣".encode(), b"1, 1", b"2;q=0", b"null"),
    *(b"x" * 9_000, b"x" * 70_000, b"," * 5_000, b"[::1", b"[", b"a:b:c", b"@", b"/", b"..", b"localhost.", b"*"),
    *(b"sha256=", b"sha256=00"),
    *(b"chunked", b"chunked, chunked", b"gzip", b"100-continue", b"close", b"keep-alive", b"websocket", b"h2c"),
    *(b"application/json; charset=utf-7", b"multipart/form-data", b"text/html", b"cross-site", b"0" * 32),
]
#: Values that could be mistaken for the key, or for a reason not to require it.
ALMOST = [
    *((b"Authorization", b"Bearer" + end) for end in (b"", b" ", b" the", b" the key2", b"\tthe key", b" the key, x")),
    *((b"Authorization", value) for value in (b"the key", b"Basic dGhlIGtleQ==", b"Bearer null")),
    *((name, b"Bearer the key") for name in (b"X-Api-Key", b"Cookie", b"Proxy-Authorization", b"Authorization2")),
    *((name.encode(), b"the key") for name in (*request_signing.BODY_HEADERS, "X-Api-Key")),
    *((name, b"127.0.0.1") for name in (b"X-Forwarded-For", b"X-Real-Ip", b"Host")),
]
odd_value = st.one_of(
    st.sampled_from(VALUES),
    st.binary(max_size=40).map(lambda value: value.replace(b"\r", b"").replace(b"\n", b"")),
)
odd_name = st.one_of(
    st.sampled_from([name.encode() for name in NAMES]),
    st.binary(min_size=1, max_size=8).map(lambda name: b"X-" + name.replace(b"\r", b"").replace(b"\n", b"")),
)
odd_headers = st.lists(st.one_of(st.tuples(odd_name, odd_value), st.sampled_from(ALMOST)), min_size=1, max_size=4)
odd_framing = st.lists(
    st.tuples(
        st.sampled_from([name.encode() for name in FRAMING]),
        odd_value.filter(lambda value: value.strip(b" \t0") != b""),  # an empty body is valid
    ),
    min_size=1,
    max_size=2,
)
Headers = list[tuple[bytes, bytes]]


def ask(http: httpx.Client, method: str, path: str, headers: Headers, *, ends: bool = True) -> int:
    """Send a request that is not JSON, and return the status; 0 if the server closed the connection without an
    answer.

    If the request may have no end, the caller disconnects after it, and the server must notice.
    """
    names = {name.lower() for name, _ in headers}
    plain = {b"Host": b"127.0.0.1", b"Content-Length": b"1"}
    lines = [name + b": " + value for name, value in plain.items() if name.lower() not in names]
    lines += [name + b": " + value for name, value in headers]
    target = path.replace("{operation_id}", "none").replace("{name}", "page.js")
    with socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=600) as one:
        try:
            one.sendall(b"\r\n".join([f"{method} {target} HTTP/1.1".encode(), *lines, b"", b"{"]))
            if not ends:
                with suppress(OSError):  # the server closed it first
                    one.shutdown(socket.SHUT_WR)
            answer = b""
            while b"\r\n\r\n" not in answer and (more := one.recv(65536)):
                answer += more
        except ConnectionError:  # it refused without reading the rest, and so its answer was lost
            return 400
    return int(answer[9:12]) if answer else 0


LENGTHS = [b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"transfer-encoding: chunked\r\ncontent-length: 0"]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("path", ["/release_memory_occupation", "/livez", "/no_such_path"])
def test_a_request_with_two_lengths_is_refused(http: httpx.Client, lengths: bytes, path: str) -> None:
    """Also by the connection: what one reader takes for the rest of the body, another takes for the next request."""
    hidden = b"POST /release_memory_occupation HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    with socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=600) as one:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
        one.sendall(head + lengths + b"\r\n\r\n0\r\n\r\n" + hidden)
        answer = b""
        with suppress(ConnectionResetError):
            while more := one.recv(65536):
                answer += more
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer.lower()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "bad_request"
    assert http.get("/memory_occupation").json()["state"] == "resident"


def is_alive(http: httpx.Client) -> bool:
    return http.get("/livez").status_code == 200


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("caller", ["needs no key", "has the key", "has no key"])
def test_odd_headers_change_nothing(serve: Callable[..., httpx.Client], engine: TensorEngine, caller: str) -> None:
    """No 500 and no hang; a refused request changes nothing, and without the key every route that needs one refuses."""
    http = serve(api_key=None if caller == "needs no key" else KEY)
    own: Headers = [(b"Authorization", f"Bearer {KEY}".encode())] if caller == "has the key" else []
    client = httpx.Client(base_url=http.base_url, headers={"Authorization": f"Bearer {KEY}"}, timeout=600, verify=False)
    client.get("/health_generate").raise_for_status()  # from now on its prefix is cached
    sent = 0
    for method, path in routes():

        @given(headers=odd_headers, framing=odd_framing)
        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def is_answered(method: str, path: str, headers: Headers, framing: Headers) -> None:
            nonlocal sent
            for odd, ends in ((headers, True), (framing, False)):
                before = seen(engine)
                status = ask(http, method, path, own + odd, ends=ends)
                assert is_alive(client)
                assert status or not ends
                assert status != 500
                if caller == "has no key" and path not in OPEN:
                    assert not 200 <= status < 300
                if 200 <= status < 300:  # accepted: no header mattered, or the body had no length
                    client.post("/resume_memory").raise_for_status()
                    client.post("/continue_generation").raise_for_status()
                else:
                    assert seen(engine) == before
                sent += 1

        is_answered(method, path)
    assert sent > 100
    client.close()
