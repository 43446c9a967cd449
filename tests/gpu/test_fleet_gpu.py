"""Two real vLLM engines, one on each of two GPUs, as a fleet over HTTP: released together, or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from memsaver_server.fleet import Member
from tests.fleet.moments import Moments
from tests.fleet.served_fleet import served
from tests.gpu.vllm_server import QUICK, completions, missing, post, prompt, serving
from tests.waiting import wait_until

MIB = 1 << 20
#: How long an engine may make no progress before its callers are told, and be silent before it counts as gone, seconds.
PATIENCE_S = 4
#: What a loaded engine may hold more or less than before, bytes.
DRIFT = 256 * MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@dataclass
class Engine:
    """A vLLM server; ``tokens`` are those of its first answers."""

    name: str
    http: httpx.Client
    process: subprocess.Popen[bytes]
    tokens: list[list[int]]

    @property
    def member(self) -> Member:
        return Member(self.name, str(self.http.base_url))

    @property
    def worker(self) -> int:
        """The process that holds the GPU."""
        return int(self.occupation()["ranks"][0]["pid"])

    def occupation(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get("/memory_occupation").raise_for_status().json()
        return answer

    def is_serving(self) -> bool:
        now = self.occupation()
        return bool(now["state"] == "resident" and now["admission"]["open"])


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    folder = tmp_path_factory.mktemp("logs")

    def start(stack: ExitStack, gpu: int) -> Engine:
        environment = {"CUDA_VISIBLE_DEVICES": str(gpu), "MEMSAVER_PHASE_TIMEOUT_S": str(PATIENCE_S)}
        arguments = ("--compilation-config", json.dumps(QUICK))
        http, process = stack.enter_context(serving(model, folder / f"vllm-{gpu}.log", *arguments, **environment))
        return Engine("ab"[gpu], http, process, completions(http))

    with ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:  # a start takes a minute
            a, b = pool.map(lambda gpu: start(stack, gpu), range(2))
        yield a, b


@pytest.fixture
def record() -> Moments:
    return Moments()


@pytest.fixture
def fleet(engines: tuple[Engine, Engine], record: Moments) -> Iterator[httpx.Client]:
    with served([engine.member for engine in engines], silence_s=PATIENCE_S, record=record) as http:
        yield http


def used() -> list[int]:
    figures = [torch.cuda.mem_get_info(device) for device in range(2)]
    return [total - free for free, total in figures]


def test_both_are_released_and_resumed(engines: tuple[Engine, Engine], fleet: httpx.Client) -> None:
    """Each GPU has its memory back when the answer comes; later tokens are the same."""
    assert len(fleet.get("/memory_occupation").json()["devices"]) == 2
    for _ in range(3):
        loaded = used()
        answer = post(fleet, "/release_memory_occupation")
        for row, before, after in zip(answer["engines"], loaded, used(), strict=True):
            assert row["success"]
            assert row["state"] == "released"
            assert before - after >= row["released_bytes"] - 64 * MIB > 1024 * MIB
        assert not any(engine.occupation()["admission"]["open"] for engine in engines)
        post(fleet, "/resume_memory_occupation")
        assert all(completions(engine.http) == engine.tokens for engine in engines)


def test_one_that_cannot_prepare_leaves_both_as_they_were(engines: tuple[Engine, Engine], fleet: httpx.Client) -> None:
    """Its requests do not end in time, which is known before anything is moved."""
    _, b = engines
    loaded = used()
    body = {"model": "m", "prompt": prompt(0), "max_tokens": 1900, "ignore_eos": True, "detokenize": False}
    with b.http.stream("POST", "/v1/completions", json={**body, "stream": True, "return_token_ids": True}) as answer:
        parts = answer.iter_raw()
        assert next(parts)
        refused = fleet.post("/release_memory_occupation", json={"timeout_s": 0.3})
        assert b"".join(parts).endswith(b"data: [DONE]\n\n")
    assert refused.status_code == 504, refused.text
    assert [(row["name"], row["phase"]) for row in refused.json()["engines"] if row["error"]] == [("b", "preparing")]
    assert all(abs(one - other) < DRIFT for one, other in zip(loaded, used(), strict=True))
    assert all(engine.is_serving() for engine in engines)
    assert all(completions(engine.http) == engine.tokens for engine in engines)


@pytest.mark.parametrize("what", ["service", "worker"])
@pytest.mark.guards("a fleet-wide sleep reached some engines, and there was no way back")
def test_one_that_stops_before_its_commit_does_not_keep_the_other_asleep(
    engines: tuple[Engine, Engine], fleet: httpx.Client, record: Moments, what: str
) -> None:
    """The answer says who failed, where and why; once it goes on, it is brought back as well."""
    a, b = engines
    loaded, pid = used(), b.process.pid if what == "service" else b.worker
    record.at("committing", lambda: os.kill(pid, signal.SIGSTOP))
    try:
        told = fleet.post("/release_memory_occupation", json={"timeout_s": 5})
        check_undone(told, a, loaded[0])
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(b.is_serving)
    assert completions(b.http) == b.tokens
    assert abs(used()[1] - loaded[1]) < DRIFT
    post(fleet, "/release_memory_occupation")  # nothing is left of it
    post(fleet, "/resume_memory_occupation")
    assert all(completions(engine.http) == engine.tokens for engine in engines)


@pytest.mark.guards("a fleet-wide sleep reached some engines, and there was no way back")
def test_one_whose_worker_is_killed_before_its_commit(
    engines: tuple[Engine, Engine], fleet: httpx.Client, record: Moments
) -> None:
    """The last test: the other engine is back, and stays so; the one that died is named until it is replaced."""
    a, b = engines
    loaded, worker = used(), b.worker
    record.at("committing", lambda: os.kill(worker, signal.SIGKILL))
    check_undone(fleet.post("/release_memory_occupation", json={"timeout_s": 5}), a, loaded[0])
    again = fleet.post("/release_memory_occupation", json={"timeout_s": 5})
    assert again.status_code >= 400
    assert "b failed" in again.json()["message"]
    assert a.is_serving()


def check_undone(told: httpx.Response, a: Engine, loaded: int) -> None:
    """The release was not carried out, because of engine b; engine a is back with its tokens."""
    assert told.status_code >= 400, told.text
    print(told.json()["message"])
    one, other = told.json()["engines"]
    assert (one["name"], one["state"], one["error"]) == ("a", "resident", "")
    assert (other["name"], other["phase"]) == ("b", "committing")
    assert f"b failed while committing: {other['error']}" in told.json()["message"]
    assert abs(used()[0] - loaded) < DRIFT
    assert completions(a.http) == a.tokens
