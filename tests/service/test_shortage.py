"""An engine and a trainer that compete for one device, and an engine whose saver is switched off."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.programs import Child

from .tensor_engine import ALL_TAGS, MIB

PROMPT = {"input_ids": [3, 5, 8], "sampling_params": {"max_new_tokens": 6, "temperature": 0}}
Start = Callable[..., "Program"]


class Program(Child):
    """A run of ``served.py``, and its first line of output."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        super().__init__(str(Path(__file__).with_name("served.py")), *arguments, **environment)
        self.said = self.read_line()
        assert self.said, "the program did not start"

    def fail(self, call: str, kind: str) -> None:
        """Make the next ``call`` of its driver fail."""
        assert self.ask(f"{call} {kind}") == "planned"


@pytest.fixture
def start() -> Iterator[Start]:
    programs: list[Program] = []

    def run(*arguments: str, **environment: str) -> Program:
        programs.append(Program(*arguments, **environment))
        return programs[-1]

    yield run
    for program in programs:
        if program.process.poll() is None:
            program.end()


@pytest.fixture
def device() -> dict[str, str]:
    """A device of 64 MiB that processes share: the engine takes 26 of them."""
    return {
        "MEMSAVER_DRIVER": "host",
        "MEMSAVER_HOST_DEVICE": f"shortage-{uuid.uuid4().hex[:8]}",
        "MEMSAVER_HOST_CAPACITY": str(64 * MIB),
    }


def client(program: Program) -> httpx.Client:
    return httpx.Client(base_url=program.said, timeout=60)


def tokens(http: httpx.Client) -> list[int]:
    return http.post("/generate", json=PROMPT).json()["output_ids"]


def test_resume_without_enough_memory(start: Start, device: dict[str, str]) -> None:
    """R3: 503 with the figures; still released with the backup intact; the retry works once the trainer lets go."""
    with client(start(**device)) as http:
        before = tokens(http)
        http.post("/release_memory_occupation").raise_for_status()
        trainer = start("trainer", str(56 * MIB), **device)
        response = http.post("/resume_memory_occupation")
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        error = response.json()["error"]
        assert (error["type"], response.json()["state"]) == ("out_of_device_memory", "released")
        assert error["needed_bytes"] > error["free_bytes"] >= 0
        assert http.get("/memory_status").json()["parked_tags"] == ALL_TAGS
        assert http.post("/generate", json=PROMPT).status_code == 503
        assert http.get("/livez").status_code == 200
        trainer.end()
        assert http.post("/resume_memory_occupation").status_code == 200
        assert tokens(http) == before


def test_resume_waits_for_a_trainer_to_let_go(start: Start, device: dict[str, str]) -> None:
    with client(start(**device)) as http, ThreadPoolExecutor(1) as pool:
        before = tokens(http)
        http.post("/release_memory_occupation").raise_for_status()
        trainer = start("trainer", str(56 * MIB), **device)
        body = {"wait_for_memory_s": 60}
        waiting = pool.submit(http.post, "/resume_memory_occupation", json=body)
        with client_of(http) as other:
            while "wait_for_memory" not in phases_of_the_first(other):
                pass
        trainer.end()
        assert waiting.result().json()["state"] == "resident"
        assert tokens(http) == before


def test_release_without_enough_host_memory(start: Start, device: dict[str, str]) -> None:
    """B5: 507 with the figures before anything is unmapped; still resident, and serving."""
    with client(start(**device, MEMSAVER_HOST_BACKUP_LIMIT=str(MIB))) as http:
        before = tokens(http)
        response = http.post("/release_memory_occupation")
        assert response.status_code == 507
        error = response.json()["error"]
        assert (error["type"], response.json()["state"]) == ("out_of_host_memory", "resident")
        assert error["needed_bytes"] > error["free_bytes"] >= 0
        assert tokens(http) == before
        assert http.post("/release_memory_occupation", json={"tags": ["kv_cache"]}).status_code == 200


def test_a_lost_context_is_fatal_and_says_so(start: Start, device: dict[str, str]) -> None:
    """R11: the process is neither alive nor ready, every answer says why, and it still does not die."""
    engine = start(**device, MEMSAVER_FAULT_INJECTION="1")
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


def test_a_well_known_tag_without_memory_is_success(start: Start, device: dict[str, str]) -> None:
    with client(start("bare", **device)) as http:
        answer = http.post("/release_memory_occupation", json={"tags": ["cuda_graph", "workspace"]}).json()
        assert (answer["success"], answer["released_bytes"]) == (True, 0)
        assert http.get("/readyz").status_code == 200
        answer = http.post("/resume_memory_occupation", json={"tags": ["cuda_graph"]}).json()
        assert (answer["success"], answer["resumed_bytes"]) == (True, 0)


def test_a_saver_switched_off_changes_nothing(start: Start, device: dict[str, str]) -> None:
    with client(start(**device)) as http:
        expected = tokens(http)
    with client(start(MEMSAVER_ENABLED="0", MEMSAVER_DRIVER="host")) as http:
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


def client_of(http: httpx.Client) -> httpx.Client:
    return httpx.Client(base_url=http.base_url, timeout=60)


def phases_of_the_first(http: httpx.Client) -> set[str]:
    operations = http.get("/operations").json()["operations"]
    return {operations[0]["phase"], *(phase["name"] for phase in operations[0]["phases"])} if operations else set()
