"""Who may call, and what a caller is told."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import httpx
import pytest

from memsaver_core.errors import ConfigurationError
from memsaver_server import Settings, attach

from .tensor_engine import TensorEngine

Serve = Callable[..., httpx.Client]
GUARDED = [
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/sleep",
    "/wake_up",
    "/release_memory",
    "/generate",
]


@pytest.mark.parametrize("path", GUARDED)
@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer", "Basic the key", "the key", "Bearer \xe9"])
def test_without_the_key_nothing_happens(serve: Serve, path: str, given: str | None) -> None:
    http = serve(api_key="the key")
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    response = http.post(path, headers=headers)
    assert response.status_code == 401
    assert response.json()["success"] is False
    occupation = http.get("/memory_occupation", headers={"Authorization": "Bearer the key"})
    assert occupation.json()["state"] == "resident"


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


@pytest.mark.parametrize("host", ["127.0.0.1:1", "LOCALHOST:30000", "[::1]:30000", "a.localhost", "10.1.2.3", "engine"])
def test_a_local_server_is_called_by_address(http: httpx.Client, host: str) -> None:
    assert http.get("/memory_occupation", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["attacker.example:30000", "127.0.0.1.attacker.example", "localhost.example"])
def test_a_name_that_leads_here_is_refused(http: httpx.Client, host: str) -> None:
    """A site whose name leads to this machine sends what a browser takes for requests of the same origin."""
    for path in ("/release_memory_occupation", "/release_memory", "/sleep"):
        response = http.post(path, headers={"Host": host})
        assert response.status_code == 403
        assert "MEMSAVER_API_KEY" in response.json()["message"]
    assert http.get("/memory_occupation").json()["state"] == "resident"


def test_with_a_key_any_name_will_do(serve: Serve) -> None:
    http = serve(api_key="the key")
    headers = {"Host": "engine.example", "Authorization": "Bearer the key"}
    assert http.get("/memory_occupation", headers=headers).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused(serve: Serve, chunked: bool) -> None:
    http = serve(max_body_bytes=4096)
    body = json.dumps({"tags": ["weights"], "padding": "x" * 5000}).encode()
    response = http.post("/release_memory_occupation", content=iter([body]) if chunked else body)
    assert response.status_code == 413
    assert http.get("/memory_occupation").json()["state"] == "resident"


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
    lines = [json.loads(record.message) for record in caplog.records if record.name == "memsaver.audit"]
    assert [line["event"] for line in lines] == ["release", "resume"]
    assert lines[0]["client"] == "127.0.0.1 trainer/1"
    assert lines[0]["tags"] == ["kv_cache"]
    assert lines[0]["outcome"] == "success"
    assert lines[0]["released_bytes"] >= 16 << 20
    assert lines[0]["seconds"] > 0
