"""Which callers are accepted, and what they are told."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable

import httpx
import pytest
from fastapi.routing import iter_route_contexts

from memsaver_core.contract.errors import ConfigurationError
from memsaver_server import Settings, attach, create_app
from tests.waiting import wait_until

from .surface import OPEN, seen
from .tensor_engine import KV_BYTES, TensorEngine

Serve = Callable[..., httpx.Client]
#: Unpaired surrogates, which JSON allows and UTF-8 does not: as an escape, and as invalid bytes.
HALVES = [rb"\ud800", rb"a\uDFFFb", rb"\ude00\ud83d", b"\xed\xa0\x80"]

#: What the read-only key may GET.
READS = {"/memory_occupation", "/operations", "/operations/{operation_id}", "/operations/{operation_id}/events"}
READS |= {"/dashboard/feed", "/is_sleeping", "/kv_cache", "/memory_status", "/version", *OPEN}


def calls(engine: TensorEngine) -> list[tuple[str, str]]:
    """Method and path of each call, according to the service's routes."""
    routes = iter_route_contexts(create_app(engine).routes)
    return sorted((method, str(route.path)) for route in routes for method in route.methods or ())


def test_all_calls_are_known(http: httpx.Client, engine: TensorEngine) -> None:
    """The routes found here include all that the service describes."""
    described = http.get("/openapi.json").json()["paths"]
    assert {(method.upper(), path) for path in described for method in described[path]} <= set(calls(engine))
    assert {path for _, path in calls(engine)} >= OPEN


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer", "Basic the key", "the key", "Bearer \xe9"])
def test_without_the_key_nothing_happens(serve: Serve, engine: TensorEngine, given: str | None) -> None:
    """On every route, except the ones listed above that need no key."""
    http = serve(api_key="the key")
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    for method, path in calls(engine):
        response = http.request(method, path, headers=headers)
        assert (response.status_code == 401) == (path not in OPEN), (method, path)
        if response.status_code == 401:
            assert response.json()["success"] is False
    right = {"Authorization": "Bearer the key"}
    assert http.get("/memory_occupation", headers=right).json()["state"] == "resident"
    assert http.get("/operations", headers=right).json()["operations"] == []


@pytest.mark.parametrize("expects", [b"", b"Expect: 100-continue\r\n"])
def test_without_the_key_no_body_is_waited_for(serve: Serve, engine: TensorEngine, expects: bytes) -> None:
    http = serve(api_key="the key")
    for method, path in calls(engine):
        if method == "POST":
            with socket.create_connection((http.base_url.host, http.base_url.port), timeout=600) as one:
                one.sendall(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n".encode() + expects + b"\r\n")
                assert one.recv(65536).startswith(b"HTTP/1.1 401"), path


@pytest.mark.parametrize("chunked", [False, True])
def test_of_a_body_that_is_said_to_be_signed_little_is_read(serve: Serve, chunked: bool) -> None:
    """Any caller can claim a signature."""
    http = serve(api_key="the key")
    body = b" " * (64 << 10) + b"{}"
    for header in ("x-trtllm-runtime-control-auth", "x-trtllm-rl-control-auth"):
        for path in ("/release_memory", "/resume_memory"):
            response = http.post(path, content=iter([body]) if chunked else body, headers={header: "sha256=0"})
            assert response.status_code == 413
            assert "larger than 65536 bytes" in response.json()["message"]
    both = {"x-trtllm-rl-control-auth": "sha256=0", "Authorization": "Bearer the key"}
    assert http.post("/resume_memory", content=body[2:], headers=both).status_code == 200


@pytest.mark.parametrize("key", ["clé", "voilà", "Å"])
def test_with_the_key_everything_works(serve: Serve, key: str) -> None:
    http = serve(api_key=key)
    headers = {b"Authorization": f"Bearer {key}".encode()}
    assert http.post("/release_memory_occupation", headers=headers).status_code == 200
    assert http.post("/wake_up", headers=headers).status_code == 200


def test_another_site_s_page_is_refused(http: httpx.Client) -> None:
    headers = {"Sec-Fetch-Site": "cross-site"}
    assert http.get("/release_memory_occupation", headers=headers).status_code == 403
    assert http.get("/memory_occupation", headers={"Sec-Fetch-Site": "same-origin"}).json()["state"] == "resident"


def state(http: httpx.Client) -> str:
    return str(http.get("/memory_occupation").json()["state"])


#: Methods and paths of calls that change something, of every dialect.
CHANGES = [
    *(("POST", path) for path in ("/release_memory_occupation", "/release_memory", "/sleep", "/pause_generation")),
    *(("GET", path) for path in ("/release_memory_occupation", "/resume_memory_occupation", "/flush_cache")),
]
FIREFOX = "Mozilla/5.0 (X11; Linux x86_64; rv:153.0) Gecko/20100101 Firefox/153.0"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "https://site.example", "Sec-Fetch-Site": "same-origin"},
        {"Referer": "http://localhost:8080/page"},
        {"Referer": "http://site.example/", "Sec-Fetch-Site": "none"},
        {"Sec-Purpose": "prefetch;prerender", "Sec-Fetch-Site": "none"},
        {"Purpose": "prefetch"},
    ],
)
def test_a_foreign_page_changes_nothing(http: httpx.Client, headers: dict[str, str]) -> None:
    """Whatever else the request says."""
    for method, path in CHANGES:
        response = http.request(method, path, headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (403, "forbidden")
    assert state(http) == "resident"


def test_our_own_page_may_change_things(http: httpx.Client) -> None:
    own = str(http.base_url).rstrip("/")
    for headers in ({"Origin": own}, {"Referer": f"{own}/", "Origin": own.upper()}, {"Sec-Fetch-Site": "same-origin"}):
        assert http.post("/release_memory_occupation", headers=headers).json()["state"] == "released"
        assert http.post("/resume_memory_occupation", headers=headers).json()["state"] == "resident"


def test_a_browser_says_which_page_calls(serve: Serve) -> None:
    """To a name over plain HTTP it may send neither Sec-Fetch-Site nor Origin nor Referer with a GET."""
    http = serve(hosts="engine")
    headers = {"Host": "engine", "User-Agent": FIREFOX}
    assert http.get("/release_memory_occupation", headers=headers).status_code == 403
    assert http.get("/memory_occupation", headers=headers).json()["state"] == "resident"
    assert http.get("/flush_cache", headers={**headers, "Referer": "http://engine/"}).status_code == 200
    assert http.get("/flush_cache", headers={**headers, "User-Agent": "curl/8"}).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1:1", "LOCALHOST:30000", "[::1]:30000", "127.8.9.10"])
def test_a_local_server_is_called_by_address(http: httpx.Client, host: str) -> None:
    assert http.get("/memory_occupation", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *(
            "attacker.example:30000",
            "127.0.0.1.attacker.example",
            "localhost.example",
            "a.localhost",
            "engine",
            "10.1.2.3",
        ),
        *("[::ffff:127.0.0.1]:30000", "[::ffff:7f00:1]:30000", "0.0.0.0:30000", "[::]:30000", "[::1", "2130706433"),
    ],
)
def test_a_name_that_leads_here_is_refused(http: httpx.Client, host: str) -> None:
    """DNS rebinding: a site whose name resolves to this machine sends requests that a browser considers same-origin."""
    for path in ("/release_memory_occupation", "/release_memory", "/sleep"):
        response = http.post(path, headers={"Host": host})
        assert response.status_code == 403
        assert "MEMSAVER_API_KEY" in response.json()["message"]
    assert http.get("/memory_occupation").json()["state"] == "resident"


def test_names_can_be_configured(serve: Serve) -> None:
    http = serve(hosts="Engine, gpu-1.example")
    for host in ("engine:30000", "GPU-1.example", "localhost"):
        assert http.post("/flush_cache", headers={"Host": host}).status_code == 200
    assert http.post("/flush_cache", headers={"Host": "gpu-2.example"}).status_code == 403


def test_with_a_key_any_name_will_do(serve: Serve) -> None:
    http = serve(api_key="the key")
    headers = {"Host": "engine.example", "Authorization": "Bearer the key"}
    assert http.get("/memory_occupation", headers=headers).status_code == 200


def test_the_read_only_key_changes_nothing(serve: Serve, engine: TensorEngine) -> None:
    """On every route; it reads status, operations, metrics and the dashboard, also if probes are protected."""
    http = serve(api_key="the key", read_key="another", protect_probes=True)
    http.headers["Authorization"] = "Bearer another"
    before = seen(engine)
    allowed = set()
    for method, path in calls(engine):
        with http.stream(method, path) as response:
            reading = path in READS and method in ("GET", "HEAD")
            assert (response.status_code == 403) == (not reading), (method, path)
            if response.status_code == 403:
                response.read()
                assert response.json()["error"]["reason"] == "read_only"
            else:
                allowed.add(path)
    assert seen(engine) == before
    assert allowed == READS
    for path in ("/metrics", "/livez", "/readyz"):
        assert http.get(path, headers={"Authorization": "Bearer a third"}).status_code == 401
    assert http.post("/flush_cache", headers={"Authorization": "Bearer the key"}).status_code == 200


@pytest.mark.parametrize("address", ["192.0.2.1", "0.0.0.0", "[2001:db8::1]", "[::ffff:192.0.2.1]", "testserver"])
def test_in_another_application_it_needs_a_key_beyond_loopback(engine: TensorEngine, address: str) -> None:
    """The connection's own address counts; of a server that tells none that is known to be local, none is."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    outer = FastAPI()
    outer.mount("/open", create_app(engine, Settings(api_key=None)))
    outer.mount("/closed", create_app(engine, Settings(api_key="the key")))
    http = TestClient(outer, base_url=f"http://{address}")
    before = seen(engine)
    for method, path in calls(engine):
        if path not in OPEN:
            response = http.request(method, f"/open{path}", headers={"Host": "localhost"})
            assert (response.status_code, response.json()["error"]["type"]) == (403, "forbidden"), (method, path)
    assert seen(engine) == before
    assert http.post("/closed/flush_cache", headers={"Authorization": "Bearer the key"}).status_code == 200
    local = TestClient(outer, base_url="http://[::1]")
    assert local.post("/open/flush_cache").status_code == 200


def test_refused_callers_are_counted(serve: Serve) -> None:
    """By reason, in the metrics."""
    local, guarded = serve(), serve(api_key="the key", read_key="another")
    for headers in ({"Host": "a.example"}, {"Origin": "null"}, {"Purpose": "prefetch"}):
        local.post("/flush_cache", headers=headers)
    for authorization in ("", "Bearer wrong", "Bearer another"):
        guarded.post("/flush_cache", headers={"Authorization": authorization} if authorization else {})
    guarded.post("/release_memory", headers={"x-trtllm-rl-control-auth": "sha256=00"})
    for http, reasons in (
        (local, {"other_host", "other_site", "prefetch"}),
        (guarded, {"no_key", "wrong_key", "read_only", "signature"}),
    ):
        lines = set(http.get("/metrics").text.splitlines())
        assert {f'memsaver_refused_requests_total{{reason="{reason}"}} 1.0' for reason in reasons} <= lines


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused(serve: Serve, engine: TensorEngine, chunked: bool) -> None:
    """By every call that takes a body; the answer names the setting."""
    http = serve(max_body_bytes=4096, max_update_bytes=8192)
    largest = {"/update_weights_from_tensor": (8192, "MEMSAVER_MAX_UPDATE_BYTES")}
    takers = {path for method, path in calls(engine) if method == "POST"}
    for method, path in calls(engine):
        if path not in takers or (method == "GET" and path in READS):
            continue
        most, setting = largest.get(path, (4096, "MEMSAVER_MAX_BODY_BYTES"))
        start = b'{"tags": ["nothing"], "padding": "'
        body = start + b"x" * (most + 1 - len(start) - 2) + b'"}'
        response = http.request(method, path, content=iter([body]) if chunked else body)
        assert response.status_code == 413, (method, path)
        assert setting in response.json()["message"]
        assert str(most) in response.json()["message"]
    assert http.get("/memory_occupation").json()["state"] == "resident"
    assert http.get("/operations").json()["operations"] == []
    assert http.get("/readyz").status_code == 200


def test_a_body_of_just_the_limit_is_read(serve: Serve) -> None:
    http = serve(max_body_bytes=4096, max_update_bytes=8192)
    for path, most in (("/release_memory_occupation", 4096), ("/update_weights_from_tensor", 8192)):
        start = b'{"tags": ["nothing"], "serialized_named_tensors": ["'
        assert http.post(path, content=start + b"x" * (most - len(start) - 3) + b'"]}').status_code == 400


@pytest.mark.parametrize("half", HALVES)
def test_text_that_no_answer_could_repeat_is_refused(serve: Serve, engine: TensorEngine, half: bytes) -> None:
    """In any field of any call, and in field names."""
    http = serve()
    fields = [b"tags", b"text", b"rid", b"model_path", b"serialized_named_tensors", b"mode", b"other"]
    values = [b'"%s"', b'["%s"]', b'{"%s": "host"}', b'[{"a": ["%s"]}]']
    bodies = [b'{"input_ids": [3], "%s": %s}' % (name, value % half) for name in fields for value in values]
    bodies.append(b'{"%s": 1}' % half)
    for method, path in calls(engine):
        if method == "POST":
            for body in bodies:
                response = http.post(path, content=body)
                assert response.status_code == 400, (path, body)
                assert "not JSON" in response.json()["message"]
    assert http.get("/memory_occupation").json()["state"] == "resident"
    assert http.get("/operations").json()["operations"] == []


def test_text_outside_of_bodies_can_always_be_repeated(http: httpx.Client, engine: TensorEngine) -> None:
    """Paths, queries and headers are bytes that decode to any text; no answer fails on it."""
    half = "%ED%A0%80"
    headers = dict.fromkeys(("User-Agent", "Idempotency-Key", "Accept", "Content-Type"), b"\xed\xa0\x80")
    for method, path in calls(engine):
        address = path.replace("{operation_id}", half).replace("{name}", half)
        for name in ("tags", "mode", "level", "model_path", "serialized_named_tensors", "wait", half):
            if path != "/dashboard/feed":  # an endless stream
                response = http.request(method, f"{address}?{name}={half}", headers=headers)
                assert response.status_code != 500, (method, path, response.text)
                if "json" in response.headers["content-type"] and method != "HEAD":
                    assert isinstance(response.json(), dict)


def test_no_answer_holds_a_traceback(http: httpx.Client, engine: TensorEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("the cache is gone")

    monkeypatch.setattr(engine, "flush_cache", broken)
    response = http.get("/flush_cache")
    assert response.status_code == 500
    assert response.json()["message"] == "RuntimeError: the cache is gone"
    assert "Traceback" not in response.text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.invalid"])
def test_beyond_loopback_needs_a_key(engine: TensorEngine, host: str) -> None:
    with pytest.raises(ConfigurationError, match="MEMSAVER_API_KEY"):
        attach(engine, host=host, settings=Settings(api_key=None))


def test_each_operation_leaves_one_line(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memsaver.audit"):
        http.post("/release_memory_occupation", json={"tags": ["kv_cache"]}, headers={"User-Agent": "trainer/1"})
        http.post("/resume_memory_occupation")

    def lines() -> list[dict[str, object]]:
        return [json.loads(record.message) for record in caplog.records if record.name == "memsaver.audit"]

    wait_until(lambda: len(lines()) == 2)
    release, resume = lines()
    assert (release["event"], resume["event"]) == ("release", "resume")
    assert release["client"] == "127.0.0.1 trainer/1"
    assert release["tags"] == ["kv_cache"]
    assert release["outcome"] == "success"
    assert release["released_bytes"] >= KV_BYTES
    assert release["seconds"] > 0


def test_the_read_only_key_names_no_coordinator(serve: Serve) -> None:
    http = serve(api_key="the key", read_key="the other")
    for key, named in (("the other", ""), ("the key", "somebody")):
        headers = {"Authorization": f"Bearer {key}", "Memsaver-Coordinator": "somebody"}
        assert http.get("/memory_occupation", headers=headers).json()["coordinator"] == named
