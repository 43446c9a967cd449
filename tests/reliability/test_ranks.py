"""An engine of four processes: every step of an operation fails on every rank, in every way.

Afterwards all ranks are as before, or the group says that it has failed, and names the rank and the step.
"""

from __future__ import annotations

import glob
import itertools
import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from memsaver_core import MemsaverError, ReleaseOptions, ResumeOptions
from memsaver_core.errors import DriverError
from memsaver_core.ranks.connection import started
from memsaver_core.ranks.protocol import Plain
from memsaver_server import attach
from memsaver_server.engine import AdmissionClosedError
from memsaver_server.gate import Gate
from memsaver_server.ranks import Deadlines, GroupFailedError, RankMemory
from tests.reliability.rank_processes import KEPT, RANKS, Group, Zygote
from tests.waiting import wait_until

#: The steps as the ranks' messages call them, and as errors do.
RELEASE = {
    "PrepareRelease": "preparation",
    "release kept": "release of kept content",
    "SuspendCommunicators": "suspend of communicators",
    "release discarded": "release of discarded content",
    "lock": "lock",
    "checkpoint": "checkpoint",
}
RESUME = {
    "PrepareResume": "preparation",
    "restore": "restore",
    "unlock": "unlock",
    "ResumeCommunicators": "resume of communicators",
    "Resume": "resume",
}
STEPS = {**RELEASE, **RESUME}
#: A step that takes longer has hung. The steps take milliseconds; the machine may be busy.
HUNG_S = 3.0

Start = Callable[[], tuple[Group, RankMemory]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts an engine; all of them end with the tests of this file."""
    zygote = Zygote()
    groups: list[Group] = []
    prefix = f"ranks-{uuid.uuid4().hex[:8]}"
    numbers = itertools.count()

    def engine() -> tuple[Group, RankMemory]:
        folder = tmp_path_factory.getbasetemp() / f"{prefix}-{next(numbers)}"
        folder.mkdir()
        group = zygote.fork(folder)
        groups.append(group)
        return group, RankMemory(group.channel, deadlines=Deadlines(HUNG_S, HUNG_S, HUNG_S / 1.5, HUNG_S))

    yield engine
    for group in groups:
        group.kill()
    zygote.close()
    for path in glob.glob(f"/dev/shm/memsaver-{os.getuid()}-{prefix}-*"):
        os.unlink(path)


def operate(memory: RankMemory, step: str) -> None:
    if step in RELEASE:
        memory.release(ReleaseOptions(hibernate=True))
    else:
        memory.resume(ResumeOptions())


def kept(states: list[Plain]) -> list[Plain]:
    """The states without content that nothing promises to keep."""
    return [
        {**state, "content": {tag: digest for tag, digest in state["content"].items() if tag in KEPT}}
        for state in states
    ]


def each_case(check: Callable[..., None], *cases: Sequence[Any]) -> None:
    """Check every combination, all at once, as most of the time is waiting."""
    combinations = list(itertools.product(*cases))
    with ThreadPoolExecutor(len(combinations)) as pool:
        for case, ran in [(case, pool.submit(check, *case)) for case in combinations]:
            try:
                ran.result()
            except BaseException as error:
                error.add_note(f"rank, after the step took effect: {case}")
                raise


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.guards(
    "one rank or device failed while the others went on",
    "a rank did not come to a collective suspend, and the others waited for ever",
    "checkpointing one rank of several hung the next one",
)
def test_a_step_that_fails_is_undone_on_every_rank(start: Start, step: str) -> None:
    """Content included. The operation can be repeated, and undone."""

    def check(rank: int) -> None:
        group, memory = start()
        resident = group.look()
        for after in (False, True):
            if step in RESUME:
                memory.release(ReleaseOptions(hibernate=True))
            before = group.look()
            group.arm(rank, step, "error", after=after)
            with pytest.raises(DriverError, match=f"^rank {rank}: "):
                operate(memory, step)
            assert kept(group.look()) == kept(before)
            assert memory.status().state == ("resident" if step in RELEASE else "released")
            operate(memory, step)
            memory.resume(ResumeOptions())
            assert kept(group.look()) == kept(resident)
        group.kill()

    each_case(check, range(RANKS))


@pytest.mark.parametrize("kind", ["hang", "kill"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.guards(
    "one rank or device failed while the others went on",
    "an operation waited forever, and nothing said why",
    "a rank did not come to a collective suspend, and the others waited for ever",
    "checkpointing one rank of several hung the next one",
    "a rank was killed while memory was released, and probes went on saying that it was well",
)
def test_a_rank_that_hangs_or_dies_is_named_and_the_group_refuses_work(start: Start, step: str, kind: str) -> None:
    """With the step in which it did; what the other ranks hold is still told."""

    def check(rank: int, after: bool) -> None:
        group, memory = start()
        if step in RESUME:
            memory.release(ReleaseOptions(hibernate=True))
        group.arm(rank, step, kind, after=after)
        with pytest.raises(GroupFailedError) as failed:
            operate(memory, step)
        assert f"rank {rank} (process {group.pids[rank]})" in str(failed.value)
        assert f"the {STEPS[step]}" in str(failed.value)
        status = memory.status()
        assert (status.state, status.failure) == ("failed", str(failed.value))
        assert [each.alive for each in status.ranks] == [kind == "hang" or each != rank for each in range(RANKS)]
        assert sum(tag.bytes for tag in status.tags) >= (RANKS - 1) * (1 << 18)
        for refused in (lambda: memory.release(ReleaseOptions()), lambda: memory.resume(ResumeOptions())):
            with pytest.raises(MemsaverError) as again:
                refused()
            assert str(again.value) == str(failed.value)
        group.kill()

    each_case(check, range(RANKS), (False, True))


# -- over HTTP ---------------------------------------------------------------------------------------------------------


class Served:
    """An engine of several ranks, and a client of its service."""

    def __init__(self, group: Group, memory: RankMemory) -> None:
        self.group = group
        self.gate = Gate("four ranks")
        self.gate.memory = memory  # type: ignore[attr-defined]
        self._attachment = attach(self.gate)
        self.http = httpx.Client(base_url=self._attachment.url, timeout=60)

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
    assert served.http.get("/memory_occupation").json()["ranks"] == [
        {"rank": rank, "pid": pid, "alive": True, "state": "resident" if state == "resident" else "released"}
        for rank, pid in enumerate(served.group.pids)
    ]
    os.kill(served.group.pids[2], signal.SIGKILL)
    wait_until(lambda: served.http.get("/livez").status_code == 503)
    dead = f"rank 2 (process {served.group.pids[2]}) has ended"
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
    with pytest.raises(AdmissionClosedError, match=f"rank 2 .process {served.group.pids[2]}. has ended"):
        served.gate.request().__enter__()
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
        wait_until(lambda: served.http.get("/operations").json()["operations"])
        os.kill(served.group.pids[0], signal.SIGKILL)
        answer = waiting.result()
    assert answer.status_code == 500
    assert f"rank 0 (process {served.group.pids[0]}) has ended" in answer.json()["message"]


def test_the_rank_that_dies_in_an_operation_is_named_in_its_answer(served: Served) -> None:
    served.group.arm(3, "checkpoint", "hang", after=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.http.post, "/release_memory_occupation", json={"hibernate": True})
        wait_until(lambda: served.http.get("/memory_occupation").json()["ranks"][3]["state"] == "released")
        os.kill(served.group.pids[3], signal.SIGKILL)
        answer = waiting.result()
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "rank_failed"
    assert f"rank 3 (process {served.group.pids[3]}) has ended during the checkpoint" in answer.json()["message"]


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
