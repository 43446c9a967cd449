"""A served engine and a co-tenant that compete for one GPU."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import Server, serving
from tests.gpu.children import ON_CUDA, CoTenant

pytestmark = pytest.mark.gpu

QWEN2 = Path(__file__).parents[1] / "data" / "qwen2-1.5b" / "config.json"
GIB = 1 << 30

#: A resume that waits this long, instead of continuing once the memory is free, exceeds the client's timeout.
AN_HOUR = {"wait_for_memory_s": 3600}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """An engine of about 12 GiB."""
    options = ("--random-weights", str(QWEN2), "--kv-cache-bytes", "8GiB", "--batch-sizes", "1,4")
    with serving(*options, changes=ON_CUDA) as server:
        yield server
        assert server.end(signal.SIGTERM) == 0, server.log


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        yield http


@pytest.fixture
def tenant() -> Iterator[CoTenant]:
    with CoTenant() as tenant:
        yield tenant


@contextmanager
def resume_that_waits(http: httpx.Client) -> Iterator[Future[httpx.Response]]:
    """A resume that waits for memory while the block runs."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.post, "/resume_memory_occupation", json=AN_HOUR)
        while phase_of_the_last(http) != "wait_for_memory":
            assert not waiting.done(), waiting.result().text
        yield waiting


def tokens(http: httpx.Client) -> list[list[int]]:
    bodies = [
        {"input_ids": list(range(3, 3 + length)), "sampling_params": {"max_new_tokens": 24, "temperature": 0}}
        for length in (4, 100, 600)
    ]
    return [http.post("/generate", json=body).raise_for_status().json()["output_ids"] for body in bodies]


@pytest.mark.guards(
    "running out of memory or other resources killed the process",
    "health probes confused a sleeping engine with a dead one",
)
def test_resume_while_a_co_tenant_holds_the_memory(http: httpx.Client, tenant: CoTenant) -> None:
    """503 with figures; the engine is alive and not ready, with its backup intact; after the co-tenant freed its
    memory the retry gives the same tokens."""
    before = tokens(http)
    released = http.post("/release_memory_occupation").raise_for_status().json()["released_bytes"]
    assert released > 11 * GIB
    free = tenant.leave(GIB)
    assert free < 2 * GIB
    for _ in range(3):  # retries change nothing
        response = http.post("/resume_memory_occupation")
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        error = response.json()["error"]
        assert (error["type"], response.json()["state"]) == ("out_of_device_memory", "released")
        assert error["needed_bytes"] > 11 * GIB
        assert 0 <= error["free_bytes"] < 2 * GIB
    assert http.get("/livez").status_code == 200
    assert http.get("/readyz").status_code == 503
    assert http.post("/generate", json={"text": "now"}).status_code == 503
    occupation = http.get("/memory_occupation").json()
    assert sum(tag["resident_bytes"] for tag in occupation["tags"]) == 0
    tenant.let_go()
    answer = http.post("/resume_memory_occupation").raise_for_status().json()
    assert (answer["state"], answer["resumed_bytes"]) == ("resident", released)
    assert tokens(http) == before


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_resume_waits_for_a_co_tenant_to_let_go(http: httpx.Client, tenant: CoTenant) -> None:
    """With `wait_for_memory_s` the resume succeeds once the memory is free, long before the one-hour limit and
    without another request."""
    before = tokens(http)
    http.post("/release_memory_occupation").raise_for_status()
    tenant.leave(GIB)
    with resume_that_waits(http) as waiting:
        assert http.get("/livez").status_code == 200
        tenant.let_go()
        answer = waiting.result().raise_for_status().json()
    assert answer["state"] == "resident"
    assert "wait_for_memory" in [phase["name"] for phase in answer["phases"]]
    assert tokens(http) == before


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_resume_waits_for_a_co_tenant_that_is_killed(http: httpx.Client, tenant: CoTenant) -> None:
    """The memory of a killed co-tenant ends the wait, too."""
    before = tokens(http)
    http.post("/release_memory_occupation").raise_for_status()
    tenant.leave(GIB)
    with resume_that_waits(http) as waiting:
        tenant.kill()
        assert waiting.result().raise_for_status().json()["state"] == "resident"
    assert tokens(http) == before


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_resume_waits_on_while_too_little_is_let_go(http: httpx.Client, tenant: CoTenant) -> None:
    """Too little free memory does not end the wait; more of it later does."""
    before = tokens(http)
    http.post("/release_memory_occupation").raise_for_status()
    tenant.leave(7 * GIB)
    with CoTenant() as second:
        second.leave(GIB)
        with resume_that_waits(http) as waiting:
            assert second.let_go() < 11 * GIB
            for _ in range(20):  # each reads the device, as the wait does
                assert free_bytes(http) < 11 * GIB
            assert not waiting.done()
            tenant.let_go()
            assert waiting.result().raise_for_status().json()["state"] == "resident"
    assert tokens(http) == before


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_a_wait_that_ends_without_memory_changes_nothing(http: httpx.Client, tenant: CoTenant) -> None:
    """503 with figures; released tags and the reason for refusing requests are as before; the retry works."""
    before = tokens(http)
    http.post("/release_memory_occupation").raise_for_status()
    tenant.leave(GIB)
    asleep = http.get("/memory_occupation").json()
    response = http.post("/resume_memory_occupation", json={"wait_for_memory_s": 0.5})
    assert (response.status_code, response.json()["error"]["type"]) == (503, "out_of_device_memory")
    assert 0 <= response.json()["error"]["free_bytes"] < 2 * GIB
    phases = [phase["name"] for phase in response.json()["phases"]]
    assert (phases[:2], phases[-1]) == (["restore", "wait_for_memory"], "restore")
    occupation = http.get("/memory_occupation").json()
    for what in ("state", "admission", "operation_id", "tags"):
        assert occupation[what] == asleep[what]
    assert http.get("/livez").status_code == 200
    tenant.let_go()
    assert http.post("/resume_memory_occupation").json()["state"] == "resident"
    assert tokens(http) == before


@pytest.mark.guards(
    "running out of memory or other resources killed the process",
    "a request during sleep hung or used released memory",
)
def test_a_part_that_fits_comes_back_while_the_rest_does_not(http: httpx.Client, tenant: CoTenant) -> None:
    """The tag that fits is resumed, the other is refused, and no request is computed."""
    before = tokens(http)
    http.post("/release_memory_occupation").raise_for_status()
    tenant.leave(6 * GIB)
    assert http.post("/resume_memory_occupation", json={"tags": ["weights"]}).status_code == 200
    refused = http.post("/resume_memory_occupation", json={"tags": ["kv_cache"]})
    assert (refused.status_code, refused.json()["state"]) == (503, "released")
    states = {tag["tag"]: tag["state"] for tag in http.get("/memory_occupation").json()["tags"]}
    assert (states["weights"], states["kv_cache"], states["cuda_graph"]) == ("resident", "released", "released")
    assert http.post("/generate", json={"text": "now"}).status_code == 503
    tenant.let_go()
    http.post("/resume_memory_occupation").raise_for_status()
    assert tokens(http) == before


def phase_of_the_last(http: httpx.Client) -> str:
    return str(http.get("/operations").json()["operations"][0]["phase"])


def free_bytes(http: httpx.Client) -> int:
    return int(http.get("/memory_occupation").json()["devices"][0]["free_bytes"])
