"""An engine and its co-tenants that compete for one device, and an engine whose saver is switched off."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from memsaver_core import _native

from .program import PROMPT, Program, client, tokens
from .tensor_engine import ALL_TAGS, MIB

Start = Callable[..., Program]
CAPACITY = 64 * MIB  # of which an engine takes 26 MiB

#: Whoever sleeps such a wait out, instead of going on as soon as the memory is there, meets the client's time limit.
AN_HOUR = {"wait_for_memory_s": 3600}


def new_device() -> dict[str, str]:
    """Settings of processes that share a device of their own."""
    return {
        "MEMSAVER_DRIVER": "host",
        "MEMSAVER_HOST_DEVICE": f"shortage-{uuid.uuid4().hex[:8]}",
        "MEMSAVER_HOST_CAPACITY": str(CAPACITY),
    }


class CoTenant:
    """This process as a co-tenant of a device: takes memory part by part, and gives the last part back first."""

    def __init__(self, device: dict[str, str]) -> None:
        self._saver = _native.Saver(
            driver="host", host_devices=[device["MEMSAVER_HOST_DEVICE"]], host_capacity=CAPACITY
        )
        self._parts: list[int] = []

    def take(self, nbytes: int) -> None:
        self._parts.append(self._saver.allocate(0, "trainer", "discard", nbytes))

    def let_go(self) -> None:
        self._saver.free(self._parts.pop())

    def close(self) -> None:
        while self._parts:
            self.let_go()
        self._saver.close()


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
        engine.heal()  # whatever a test that failed has left
        http.post("/resume_memory_occupation", json={"wait": True}).raise_for_status()
        yield http


@pytest.fixture
def tenant(device: dict[str, str]) -> Iterator[CoTenant]:
    tenant = CoTenant(device)
    yield tenant
    tenant.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """Start programs on a device of the test's own."""
    programs: list[Program] = []
    own = new_device()

    def run(*arguments: str, **environment: str) -> Program:
        programs.append(Program(*arguments, **{**own, **environment}))
        return programs[-1]

    yield run
    for program in programs:
        if program.process.poll() is None:
            program.end()


@contextmanager
def resume_that_waits(http: httpx.Client) -> Iterator[Future[httpx.Response]]:
    """A resume that waits for memory while the block runs."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.post, "/resume_memory_occupation", json=AN_HOUR)
        with httpx.Client(base_url=http.base_url, timeout=60) as other:
            while not is_waiting(other):
                assert not waiting.done(), waiting.result().text
            yield waiting


def is_waiting(http: httpx.Client) -> bool:
    return http.get("/operations").json()["operations"][0]["phase"] == "wait_for_memory"


def test_resume_without_enough_memory(http: httpx.Client, tenant: CoTenant) -> None:
    """R3: 503 with the figures; still released with the backup intact; the retry works once the trainer lets go."""
    before = tokens(http)
    http.post("/release_memory_occupation").raise_for_status()
    tenant.take(56 * MIB)
    response = http.post("/resume_memory_occupation")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    error = response.json()["error"]
    assert (error["type"], response.json()["state"]) == ("out_of_device_memory", "released")
    assert error["needed_bytes"] > error["free_bytes"] >= 0
    assert http.get("/memory_status").json()["parked_tags"] == ALL_TAGS
    assert http.post("/generate", json=PROMPT).status_code == 503
    assert http.get("/livez").status_code == 200
    tenant.let_go()
    assert http.post("/resume_memory_occupation").status_code == 200
    assert tokens(http) == before


def test_resume_waits_for_a_trainer_to_let_go(http: httpx.Client, tenant: CoTenant) -> None:
    """R3: the answer comes when the memory is there, an hour before the wait is over."""
    before = tokens(http)
    http.post("/release_memory_occupation").raise_for_status()
    tenant.take(56 * MIB)
    with resume_that_waits(http) as waiting:
        tenant.let_go()
        answer = waiting.result().raise_for_status().json()
    assert answer["state"] == "resident"
    assert "wait_for_memory" in [phase["name"] for phase in answer["phases"]]
    assert tokens(http) == before


def test_resume_waits_on_while_too_little_is_let_go(http: httpx.Client, tenant: CoTenant, engine: Program) -> None:
    """R3: what is not enough ends no wait; what is added to it later does."""
    before = tokens(http)
    http.post("/release_memory_occupation").raise_for_status()
    for part in (48 * MIB, 8 * MIB):
        tenant.take(part)
    with resume_that_waits(http) as waiting:
        tenant.let_go()
        engine.wait_for("memory_info", more_than=engine.count("memory_info") + 5)  # it has seen the 16 MiB
        assert not waiting.done()
        tenant.let_go()
        assert waiting.result().raise_for_status().json()["state"] == "resident"
    assert tokens(http) == before


def test_resume_waits_for_a_trainer_that_is_killed(http: httpx.Client, device: dict[str, str]) -> None:
    """R3, S5: what a co-tenant held that ends without a word counts as free, and ends the wait."""
    before = tokens(http)
    http.post("/release_memory_occupation").raise_for_status()
    trainer = Program("trainer", str(56 * MIB), **device)
    with resume_that_waits(http) as waiting:
        trainer.kill()
        assert waiting.result().raise_for_status().json()["state"] == "resident"
    assert tokens(http) == before


def test_a_wait_that_ends_without_memory_changes_nothing(http: httpx.Client, tenant: CoTenant) -> None:
    """R3: after the wait 503 with the figures; what is released and why nothing is let in are as before; the retry
    works."""
    before = tokens(http)
    http.post("/release_memory_occupation").raise_for_status()
    tenant.take(56 * MIB)
    asleep = http.get("/memory_occupation").json()
    for _ in range(2):
        response = http.post("/resume_memory_occupation", json={"wait_for_memory_s": 0.2})
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        error = response.json()["error"]
        assert (error["type"], response.json()["state"]) == ("out_of_device_memory", "released")
        assert error["needed_bytes"] > error["free_bytes"] == 8 * MIB
        # It looked, waited, and looked again.
        phases = [phase["name"] for phase in response.json()["phases"]]
        assert (phases[:2], phases[-1]) == (["restore", "wait_for_memory"], "restore")
        occupation = http.get("/memory_occupation").json()
        for what in ("state", "admission", "operation_id", "tags"):
            assert occupation[what] == asleep[what]
    assert http.post("/generate", json=PROMPT).status_code == 503
    assert http.get("/livez").status_code == 200
    tenant.let_go()
    assert http.post("/resume_memory_occupation").json()["state"] == "resident"
    assert tokens(http) == before


def test_two_engines_do_not_wait_for_each_other(
    http: httpx.Client, engine: Program, start: Start, device: dict[str, str]
) -> None:
    """S1: one engine goes and comes back while the other stands still in the middle of an operation of its own."""
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
                with client(engine) as observer:  # it stood still all the while
                    assert observer.get("/memory_occupation").json()["state"] == state
                engine.heal()
                assert under_way.result().raise_for_status().json()["success"] is True
        assert (tokens(http), tokens(other)) == before


def test_release_without_enough_host_memory(start: Start) -> None:
    """B5: 507 with the figures before anything is unmapped; still resident, and serving."""
    with client(start(MEMSAVER_HOST_BACKUP_LIMIT=str(MIB))) as http:
        before = tokens(http)
        response = http.post("/release_memory_occupation")
        assert response.status_code == 507
        error = response.json()["error"]
        assert (error["type"], response.json()["state"]) == ("out_of_host_memory", "resident")
        assert error["needed_bytes"] > error["free_bytes"] >= 0
        assert tokens(http) == before
        assert http.post("/release_memory_occupation", json={"tags": ["kv_cache"]}).status_code == 200


def test_a_lost_context_is_fatal_and_says_so(start: Start) -> None:
    """R11: the process is neither alive nor ready, every answer says why, and it still does not die."""
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
