"""Two engines on one device, too little host memory, a lost context, and an engine with memsaver disabled."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from .program import PROMPT, Program, client, tokens
from .tensor_engine import MIB

Start = Callable[..., Program]
CAPACITY = 64 * MIB  # of which an engine takes 26 MiB


def new_device() -> dict[str, str]:
    """Settings of processes that share a new device."""
    return {
        "MEMSAVER_DRIVER": "host",
        "MEMSAVER_HOST_DEVICE": f"shortage-{uuid.uuid4().hex[:8]}",
        "MEMSAVER_HOST_CAPACITY": str(CAPACITY),
    }


@pytest.fixture(scope="module")
def device() -> dict[str, str]:
    return new_device()


@pytest.fixture(scope="module")
def engine(device: dict[str, str]) -> Iterator[Program]:
    """An engine on the device."""
    program = Program(**device)
    yield program
    program.end()


@pytest.fixture
def http(engine: Program) -> Iterator[httpx.Client]:
    with client(engine) as http:
        engine.heal()  # what a failed test may have left
        http.post("/resume_memory_occupation", json={"wait": True}).raise_for_status()
        yield http


@pytest.fixture
def start() -> Iterator[Start]:
    """Start programs on a device of this test's own."""
    programs: list[Program] = []
    own = new_device()

    def run(*arguments: str, **environment: str) -> Program:
        programs.append(Program(*arguments, **{**own, **environment}))
        return programs[-1]

    yield run
    for program in programs:
        if program.process.poll() is None:
            program.end()


@pytest.mark.guards("two engines on one GPU hung")
def test_two_engines_do_not_wait_for_each_other(
    http: httpx.Client, engine: Program, start: Start, device: dict[str, str]
) -> None:
    """One engine releases and resumes while the other is held in the middle of an operation."""
    with client(start(**device)) as other:
        before = tokens(http), tokens(other)
        for path, call, state in (("release", "unmap", "releasing"), ("resume", "map", "resuming")):
            calls = engine.count(call)
            engine.hold(call)
            with ThreadPoolExecutor(1) as pool:
                under_way = pool.submit(http.post, f"/{path}_memory_occupation")
                engine.wait_for(call, more_than=calls)
                for _ in range(3):
                    assert other.post("/release_memory_occupation").json()["state"] == "released"
                    assert other.post("/resume_memory_occupation").json()["state"] == "resident"
                    assert tokens(other) == before[1]
                with client(engine) as observer:  # it was held all the time
                    assert observer.get("/memory_occupation").json()["state"] == state
                engine.heal()
                assert under_way.result().raise_for_status().json()["success"] is True
        assert (tokens(http), tokens(other)) == before


@pytest.mark.guards("a backup larger than host memory ended in the OOM killer")
def test_release_without_enough_host_memory(start: Start) -> None:
    """507 with figures before anything is unmapped; it stays resident and serves."""
    with client(start(MEMSAVER_HOST_BACKUP_LIMIT=str(MIB))) as http:
        before = tokens(http)
        response = http.post("/release_memory_occupation")
        assert response.status_code == 507
        error = response.json()["error"]
        assert (error["type"], response.json()["state"]) == ("out_of_host_memory", "resident")
        assert error["needed_bytes"] > error["free_bytes"] >= 0
        assert tokens(http) == before
        assert http.post("/release_memory_occupation", json={"tags": ["kv_cache"]}).status_code == 200


@pytest.mark.guards("health probes confused a sleeping engine with a dead one")
def test_a_lost_context_is_fatal_and_says_so(start: Start) -> None:
    """The process is neither alive nor ready, every answer says why, and it does not exit."""
    engine = start()
    with client(engine) as http:
        engine.fail("synchronize", "context_lost")
        response = http.post("/release_memory_occupation")
        assert response.status_code == 500
        assert (response.json()["error"]["type"], response.json()["state"]) == ("context_lost", "failed")
        for path in ("/livez", "/health", "/readyz"):
            assert http.get(path).status_code == 503
        assert http.get("/memory_occupation").json()["state"] == "failed"
        for path in ("/resume_memory_occupation", "/release_memory_occupation"):
            assert http.post(path).json()["error"]["type"] == "context_lost"
        assert http.post("/generate", json=PROMPT).status_code == 503


def test_a_well_known_tag_without_memory_is_success(start: Start) -> None:
    with client(start("bare")) as http:
        answer = http.post("/release_memory_occupation", json={"tags": ["cuda_graph", "workspace"]}).json()
        assert (answer["success"], answer["released_bytes"]) == (True, 0)
        assert http.get("/readyz").status_code == 200
        answer = http.post("/resume_memory_occupation", json={"tags": ["cuda_graph"]}).json()
        assert (answer["success"], answer["resumed_bytes"]) == (True, 0)


def test_a_saver_switched_off_changes_nothing(http: httpx.Client, start: Start) -> None:
    expected = tokens(http)
    with client(start(MEMSAVER_ENABLED="0")) as http:
        assert tokens(http) == expected
        for path in ("/release_memory_occupation", "/sleep", "/release_memory", "/resume_memory_occupation"):
            answer = http.post(path)
            assert answer.status_code == 200
            assert answer.json()["success"] is True
            assert answer.json()["released_bytes"] + answer.json()["resumed_bytes"] == 0
            assert "disabled" in answer.json()["message"]
            assert tokens(http) == expected
        assert http.get("/memory_occupation").json()["enabled"] is False
        assert http.get("/readyz").status_code == 200
