"""The death of a process of an engine is an event, which is told over HTTP."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest

from memsaver_core.ranks.protocol import Plain
from memsaver_core.rendezvous import started
from memsaver_server import attach
from memsaver_server.engine import AdmissionClosedError
from memsaver_server.engine.gate import Gate
from memsaver_server.ranks import RankMemory
from tests.reliability.conftest import HASTY, Start
from tests.reliability.rank_engine import Group
from tests.waiting import wait_until


class Repaired(Gate):
    """Notes what it had to repair."""

    repairs: tuple[tuple[str, ...], ...] = ()

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> None:
        self.repairs = (*self.repairs, tuple(lost))


class Served:
    """An engine of several ranks, and a client of its service."""

    def __init__(self, group: Group, memory: RankMemory) -> None:
        self.group = group
        self.gate = Repaired("four ranks")
        self.gate.memory = memory  # type: ignore[attr-defined]
        self._attachment = attach(self.gate)
        self.http = httpx.Client(base_url=self._attachment.url, timeout=600, verify=False)

    def refusal(self) -> str:
        """Why the gate lets no request in, or an empty string."""
        try:
            with self.gate.request():
                return ""
        except AdmissionClosedError as closed:
            return str(closed)

    def operations(self) -> list[Any]:
        return list(self.http.get("/operations").json()["operations"])

    def close(self) -> None:
        self.http.close()
        self._attachment.close()


@pytest.fixture
def served(start: Start) -> Iterator[Served]:
    served = Served(*start())
    yield served
    served.close()


@pytest.mark.parametrize("state", ["resident", "released", "hibernated"])
@pytest.mark.guards("a rank was killed while memory was released, and probes went on saying that it was well")
def test_the_death_of_a_rank_is_told_without_an_operation(
    served: Served, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    """By probes, state, metrics and the log; admission is closed, and operations are refused."""
    if state != "resident":
        body = {"hibernate": state == "hibernated"}
        served.http.post("/release_memory_occupation", json=body).raise_for_status()
    assert served.http.get("/livez").status_code == 200
    resident = "resident" if state == "resident" else "released"
    told = {"alive": True, "state": resident, "stopped": False, "dp_rank": None}
    assert served.http.get("/memory_occupation").json()["ranks"] == [
        {"rank": rank, "pid": pid, **told} for rank, pid in enumerate(served.group.pids)
    ]
    os.kill(served.group.pids[2], signal.SIGKILL)
    wait_until(lambda: served.http.get("/livez").status_code == 503)
    dead = f"rank 2 (process {served.group.pids[2]}) has ended"
    wait_until(lambda: dead in served.refusal())  # the last thing that a death does
    for path in ("/livez", "/health", "/readyz"):
        answer = served.http.get(path)
        assert (answer.status_code, answer.json()["state"]) == (503, "failed")
        assert dead in answer.json()["reason"]
    occupation = served.http.get("/memory_occupation").json()
    assert occupation["state"] == "failed"
    assert [rank["alive"] for rank in occupation["ranks"]] == [True, True, False, True]
    metrics = served.http.get("/metrics").text
    assert 'memsaver_rank_alive{rank="2"} 0.0' in metrics
    assert 'memsaver_rank_alive{rank="3"} 1.0' in metrics
    assert 'memsaver_state{state="failed"} 1.0' in metrics
    assert [record.levelname for record in caplog.records if dead in record.getMessage()] == ["ERROR"]
    refused = served.http.post("/resume_memory_occupation")
    assert refused.status_code == 500
    assert dead in refused.json()["message"]


@pytest.mark.guards(
    "a rank was killed while memory was released, and probes went on saying that it was well",
    "an operation waited forever, and nothing said why",
)
def test_callers_that_wait_are_told_of_the_death(served: Served) -> None:
    """In a drain as in the middle of a release."""
    with ThreadPoolExecutor(1) as pool, served.gate.request("for ever"):
        waiting = pool.submit(served.http.post, "/release_memory_occupation", json={"timeout_s": 3600})
        wait_until(served.operations)
        os.kill(served.group.pids[0], signal.SIGKILL)
        answer = waiting.result()
    assert answer.status_code == 500
    assert f"rank 0 (process {served.group.pids[0]}) has ended" in answer.json()["message"]


def test_the_rank_that_dies_in_an_operation_is_named_in_its_answer(served: Served) -> None:
    served.group.arm(3, "checkpoint", "hang", after=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.http.post, "/release_memory_occupation", json={"hibernate": True})
        wait_until(lambda: any(each["phase"] == "hibernate" for each in served.operations()))
        os.kill(served.group.pids[3], signal.SIGKILL)
        answer = waiting.result()
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "rank_failed"
    assert f"rank 3 (process {served.group.pids[3]}) has ended during the checkpoint" in answer.json()["message"]


def test_why_a_stopped_rank_does_not_answer_is_told(start: Start) -> None:
    """The operation ends at its deadline, with the rank, the step and the cause."""
    with closing(Served(*start(deadlines=HASTY))) as served:
        pid = served.group.pids[1]
        os.kill(pid, signal.SIGSTOP)
        answer = served.http.post("/release_memory_occupation")
        assert answer.status_code == 500
        reason = f"rank 1 (process {pid}) has not begun it, because a signal or a debugger has stopped it"
        assert f"the preparation did not end: no answer in 3 s; {reason}; restart" in answer.json()["message"]
        assert reason in served.http.get("/livez").json()["reason"]


def test_processes_that_the_engine_names_are_watched(start: Start) -> None:
    """And a rank whose process cannot be seen from here is told as such."""
    group, _ = start()
    core = subprocess.Popen(["sleep", "3600"])

    class Far:
        """Another host: the ranks' process ids mean something else here."""

        def start(self, message: Plain) -> Future[list[Plain]]:
            def call() -> list[Plain]:
                answers = group.channel.start(message).result()
                for answer in answers if message["type"] == "Introduce" else ():
                    answer["fields"]["introduction"]["progress"]["mark"] = 0
                return answers

            return started(call)

    memory = RankMemory(Far(), {"engine core": core.pid})
    assert {rank.alive for rank in memory.status().ranks} == {None}
    core.kill()
    core.wait()
    wait_until(lambda: memory.failure)
    assert memory.failure == f"engine core (process {core.pid}) has ended; restart the engine"


@pytest.mark.guards("the prefix cache pointed to discarded pages", "one rank or device failed while the others went on")
def test_what_a_failed_release_has_lost_is_repaired(served: Served) -> None:
    """Memory that was discarded comes back when a later step fails, without its content; requests enter after that."""
    served.group.arm(1, "lock", "error", after=False)
    failed = served.http.post("/release_memory_occupation", json={"hibernate": True})
    assert failed.status_code == 500
    assert (failed.json()["error"]["phase"], failed.json()["state"]) == ("lock", "resident")
    assert served.gate.repairs == (("kv_cache", "t"),)
    with served.gate.request():
        pass
