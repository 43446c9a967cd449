"""SGLang on several ranks: a stand-in for its scheduler in several processes, with real broadcasts between them.

A token depends on the memory of every rank: equal tokens mean equal content.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from memsaver_core.compat import torch_memory_saver
from memsaver_core.contract.errors import GroupFailedError
from memsaver_core.contract.requests import MemoryRequest
from memsaver_core.contract.status import RankStatus
from memsaver_core.ranks import protocol
from memsaver_core.ranks.connection import SocketChannel
from memsaver_core.ranks.rank import Rank
from memsaver_server.engine import DrainTimeoutError
from memsaver_server.integrations.adapter import engine as event_loop
from memsaver_server.integrations.adapter.engine import SchedulerMemory, SchedulerRank
from memsaver_server.integrations.sglang.engine import SglangScheduler
from memsaver_server.ranks.watch import is_stopped
from tests.waiting import wait_until

from . import sglang_ranks
from . import sglang_standin as standin

PROMPT = [5, 17, 60, 2]
#: Tensor-parallel ranks, pipeline stages.
SHAPES = [(2, 1), (1, 2), (2, 2)]


class Serving:
    """An engine and a client of its service."""

    def __init__(self, engine: sglang_ranks.Engine) -> None:
        self.engine = engine
        transport = httpx.HTTPTransport(uds=engine.uds, verify=False)
        self.http = httpx.Client(transport=transport, base_url="http://engine", timeout=600)
        self._names = map(str, itertools.count())
        wait_until(self._listens)

    def _listens(self) -> bool:
        try:
            return self.http.get("/livez").status_code == 200
        except httpx.ConnectError:
            return False

    def send(self, *, rid: str = "", replica: int = 0) -> str:
        name = rid or next(self._names)
        self.engine.send(standin.TokenizedGenerateReqInput(name, PROMPT), replica)
        return name

    def tokens(self, rid: str) -> list[int]:
        output: list[int] = self.engine.answer(rid).output_ids
        return output

    def generate(self) -> list[int]:
        return self.tokens(self.send())

    def stall(self) -> str:
        """A request that runs until `go_on`."""
        self.engine.send(standin.Stall(True))
        rid = self.send()
        self.engine.send(standin.Run(0, sglang_ranks.echo))
        self.engine.answer("echo")
        return rid

    def go_on(self) -> None:
        self.engine.send(standin.Stall(False))

    def call(self, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        content: dict[str, Any] = answer.json()
        return content

    def states(self) -> list[str]:
        return [rank["state"] for rank in self.http.get("/memory_occupation").json()["ranks"]]


@pytest.fixture(scope="module")
def zygote() -> Iterator[sglang_ranks.Zygote]:
    zygote = sglang_ranks.Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def serve(zygote: sglang_ranks.Zygote, tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    servings: list[Serving] = []

    def start(tp: int = 2, pp: int = 1, dp: int = 1, *, backup: bool = True, **environment: str) -> Serving:
        servings.append(Serving(zygote.fork(tmp_path, (tp, pp, dp), backup, environment)))
        return servings[-1]

    yield start
    for each in servings:
        each.http.close()
        each.engine.close()


@pytest.fixture
def standin_scheduler(monkeypatch: pytest.MonkeyPatch) -> standin.Scheduler:
    return standin.install(monkeypatch, torch_memory_saver)()


@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_release_resume_and_hibernate(serve: Callable[..., Serving], tp: int, pp: int) -> None:
    """On all ranks; each has the memory that it had."""
    serving = serve(tp, pp)
    expected = serving.generate()
    for hibernate in (False, True):
        report = serving.call("/release_memory_occupation", hibernate=hibernate)
        assert report["success"]
        assert serving.states() == ["released"] * tp * pp
        assert serving.http.get("/memory_occupation").json()["hibernated"] is hibernate
        refused = serving.engine.answer(serving.send())
        assert refused.finished_reason["status_code"] == 503
        serving.send(rid="HEALTH_CHECK_1")
        assert serving.engine.answer("") is None
        serving.call("/resume_memory_occupation")
        assert serving.states() == ["resident"] * tp * pp
        assert serving.generate() == expected


@pytest.mark.parametrize("tp", [1, 2])
def test_replicas(serve: Callable[..., Serving], tp: int) -> None:
    """They are released together, and each admits requests for itself."""
    serving = serve(tp, dp=2)
    expected = [serving.tokens(serving.send(replica=each)) for each in range(2)]
    for hibernate in (False, True):
        serving.call("/release_memory_occupation", hibernate=hibernate, verify="token")
        assert serving.states() == ["released"] * 2 * tp
        refused = [serving.engine.answer(serving.send(replica=each)) for each in range(2)]
        assert [each.finished_reason["status_code"] for each in refused] == [503, 503]
        serving.call("/flush_cache")
        serving.call("/resume_memory_occupation", verify="token")
        assert [serving.tokens(serving.send(replica=each)) for each in range(2)] == expected
    serving.engine.kill(2 * tp - 1)
    wait_until(lambda: serving.http.get("/livez").status_code == 503)
    assert f"rank {2 * tp - 1} (process" in serving.http.get("/readyz").json()["reason"]


def test_drains(serve: Callable[..., Serving]) -> None:
    """All ranks abort, set aside and continue the same requests in the same iteration."""
    serving = serve(2, MEMSAVER_WHILE_RELEASED="queue")
    expected = serving.generate()
    rid = serving.stall()
    held_up = serving.call("/release_memory_occupation", 504, timeout_s=0.2)
    assert held_up["error"]["pending"] == [rid]
    assert serving.states() == ["resident"] * 2
    serving.call("/release_memory_occupation", mode="keep")
    waiting = serving.send()
    serving.go_on()
    serving.call("/resume_memory_occupation")
    assert serving.tokens(rid) == expected
    assert serving.tokens(waiting) == expected
    rid = serving.stall()
    with ThreadPoolExecutor(1) as pool:
        releasing = pool.submit(serving.call, "/release_memory_occupation", timeout_s=60)
        wait_until(lambda: serving.http.get("/readyz").status_code == 503)
        serving.go_on()
        assert releasing.result()["success"]
    assert serving.tokens(rid) == expected
    serving.call("/resume_memory_occupation")
    rid = serving.stall()
    assert serving.call("/release_memory_occupation", 504, timeout_s=0)["error"]["pending"] == [rid]
    serving.call("/release_memory_occupation", mode="abort")
    assert serving.engine.answer(rid).to_finish
    serving.go_on()
    serving.call("/resume_memory_occupation")
    serving.call("/flush_cache")
    assert serving.generate() == expected


def test_drains_of_a_pipeline(serve: Callable[..., Serving]) -> None:
    """SGLang's own pause reaches one batch of a pipeline: the service does not use it there."""
    serving = serve(1, 2)
    expected = serving.generate()
    refused = serving.call("/release_memory_occupation", 409, mode="keep")
    assert "pipeline parallelism" in refused["message"]
    rid = serving.stall()
    serving.call("/release_memory_occupation", mode="abort")
    assert serving.engine.answer(rid).to_finish
    serving.go_on()
    serving.call("/resume_memory_occupation")
    assert serving.generate() == expected


def test_weights_without_a_backup(serve: Callable[..., Serving]) -> None:
    """SGLang's update rewrites each rank's weights; the buffers beside them come from each rank's own copy."""
    serving = serve(2, backup=False)
    expected = serving.generate()
    serving.call("/release_memory_occupation")
    serving.call("/resume_memory_occupation", tags=["weights"])
    serving.engine.send(
        standin.UpdateWeightsFromTensorReqInput(torch.arange(standin.VOCABULARY, dtype=torch.float64) + 1)
    )
    wait_until(lambda: all(tag["content"] == "ok" for tag in serving.http.get("/memory_occupation").json()["tags"]))
    serving.call("/resume_memory_occupation")
    assert serving.generate() == expected


def test_an_update_that_one_rank_cannot_take(serve: Callable[..., Serving]) -> None:
    """While the weights are released no rank takes it."""
    serving = serve(2)
    expected = serving.generate()
    table = torch.arange(standin.VOCABULARY, dtype=torch.float64).roll(1) + 1
    serving.call("/release_memory_occupation")
    serving.engine.send(standin.Run(1, sglang_ranks.fail_updates))
    serving.engine.send(standin.UpdateWeightsFromTensorReqInput(table, rid="update"))
    failed = serving.engine.answer("update")
    assert (failed.success, "rank 1" in failed.message, "a shard is missing" in failed.message) == (False, True, True)
    serving.call("/resume_memory_occupation")
    assert serving.generate() == expected
    serving.call("/release_memory_occupation")
    serving.engine.send(standin.Run(1, sglang_ranks.fail_no_updates))
    for part in (
        standin.BeginWeightUpdateReqInput(rid="begin"),
        standin.UpdateWeightsFromTensorReqInput(table, rid="again"),
        standin.EndWeightUpdateReqInput(rid="end"),
    ):
        serving.engine.send(part)
        assert serving.engine.answer(part.rid).success
    serving.call("/resume_memory_occupation")
    assert serving.generate() != expected


@pytest.mark.parametrize("fail", [sglang_ranks.fail_copies, sglang_ranks.fail_buffers])
def test_a_rank_that_fails(serve: Callable[..., Serving], fail: Callable[[Any], None]) -> None:
    """It is named, the others undo what they did, and the call can be repeated."""
    serving = serve(2, 2)
    expected = serving.generate()
    serving.engine.send(standin.Run(3, fail))
    assert serving.generate() == expected
    failed = serving.call("/release_memory_occupation", 500)
    assert "rank 3" in failed["message"]
    assert serving.states() == ["resident"] * 4
    assert serving.generate() == expected
    serving.call("/release_memory_occupation")
    assert serving.states() == ["released"] * 4
    serving.call("/resume_memory_occupation")
    assert serving.generate() == expected


def test_a_rank_touches_no_memory_before_its_loop_is_at_rest(
    monkeypatch: pytest.MonkeyPatch, standin_scheduler: standin.Scheduler
) -> None:
    """It waits until the iteration that the command came in is over, and reports it if that does not happen."""
    monkeypatch.setattr(event_loop, "ARRIVAL_S", 0.01)
    loop = event_loop.EventLoop(SglangScheduler(standin_scheduler))
    rank = SchedulerRank(loop)

    def failure() -> protocol.Failure | None:
        message = {"after": 1, "message": protocol.REQUESTS.encode(protocol.Introduce())}
        return protocol.ANSWERS.decode(rank.answer(message)).failure

    def late() -> bool:
        failed = failure()
        return failed is not None and "did not reach the next iteration" in failed.message

    assert late()
    standin_scheduler.process_input_requests([event_loop.Command(1, "")])
    assert late()
    standin_scheduler.request_receiver.recv_requests()
    assert failure() is None


def test_a_rank_reports_what_a_command_raised_after_the_next_one(standin_scheduler: standin.Scheduler) -> None:
    """Two callers may each have a command carried out before the rank is asked."""
    loop = event_loop.EventLoop(SglangScheduler(standin_scheduler))
    standin_scheduler.running_batch.reqs.append(standin.Req("running", PROMPT, 8))
    standin_scheduler.process_input_requests([event_loop.Command(1, "flush"), event_loop.Command(2, "")])
    standin_scheduler.request_receiver.recv_requests()
    with pytest.raises(DrainTimeoutError, match="running"):
        loop.wait_for(1)
    loop.wait_for(2)


def test_no_rank_iterates_at_a_standstill(standin_scheduler: standin.Scheduler) -> None:
    """The first one rests; all others wait for its broadcast."""
    loop = event_loop.LeadingLoop(SglangScheduler(standin_scheduler))
    thread = threading.Thread(target=standin_scheduler.run_event_loop, daemon=True)
    thread.start()
    with loop.standstill() as number:
        loop.wait_for(number)
        iterated = loop.submit(lambda: True)
        assert not loop.is_done(iterated, 0.1)
    assert iterated.result(600)
    standin_scheduler.received.put(standin.Exit())
    thread.join(600)
    assert not thread.is_alive()


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_scheduler_that_comes_to_no_iteration_fails_its_ranks(
    standin_scheduler: standin.Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits in a collective for a rank that a signal has stopped, which is named."""
    monkeypatch.setattr(event_loop, "COMMAND_S", 0.1)
    loop = event_loop.LeadingLoop(SglangScheduler(standin_scheduler))

    def answer(message: Any) -> Any:
        return Rank().answer(message["message"])

    memory = SchedulerMemory(loop, SocketChannel(answer, []))
    with subprocess.Popen(["sleep", "600"]) as other:
        stopped = RankStatus(rank=1, pid=other.pid, alive=True, state="resident")
        monkeypatch.setattr(memory, "rank_statuses", lambda: (stopped,))
        other.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(other.pid))
        with pytest.raises(GroupFailedError, match=rf"next iteration.*rank 1 .process {other.pid}."):
            memory.release(MemoryRequest())
        other.kill()
    assert "kill -CONT" in memory.failure
    with pytest.raises(GroupFailedError):
        memory.run("flush")


def test_a_command_waits_for_the_operation_in_progress(
    standin_scheduler: standin.Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release may take longer than a command may."""
    releasing, go_on = threading.Event(), threading.Event()

    def answer(message: Any) -> Any:
        if isinstance(protocol.REQUESTS.decode(message["message"]), protocol.Move):
            releasing.set()
            go_on.wait(600)
        return Rank().answer(message["message"])

    loop = event_loop.LeadingLoop(SglangScheduler(standin_scheduler))
    memory = SchedulerMemory(loop, SocketChannel(answer, []))
    thread = threading.Thread(target=standin_scheduler.run_event_loop, daemon=True)
    thread.start()
    with ThreadPoolExecutor(2) as pool:
        release = pool.submit(memory.release, MemoryRequest())
        assert releasing.wait(600)
        with monkeypatch.context() as hurried:
            hurried.setattr(event_loop, "COMMAND_S", 0.1)
            flush = pool.submit(memory.run, "flush")
            assert not wait([flush], 0.5).done
        go_on.set()
        release.result()
        flush.result()
    memory.resume(MemoryRequest())
    standin_scheduler.received.put(standin.Exit())
    thread.join(600)


@pytest.mark.guards(
    "a rank was killed while memory was released, and probes went on saying that it was well",
    "an operation waited forever, and nothing said why",
)
@pytest.mark.parametrize("released", [True, False])
def test_a_rank_that_is_killed(serve: Callable[..., Serving], released: bool) -> None:
    """It is reported without an operation, and to a caller that waits."""
    serving = serve(2)
    dead = f"rank 1 (process {serving.engine.pids[1]}) has ended"
    with ThreadPoolExecutor(1) as pool:
        if released:
            serving.call("/release_memory_occupation")
        else:
            serving.stall()
            waiting = pool.submit(serving.call, "/release_memory_occupation", 500, timeout_s=3600)
            wait_until(lambda: serving.http.get("/readyz").status_code == 503)
        serving.engine.kill(1)
        wait_until(lambda: serving.http.get("/livez").status_code == 503)
        assert dead in serving.http.get("/readyz").json()["reason"]
        answer = serving.call("/resume_memory_occupation", 500) if released else waiting.result()
    assert dead in answer["message"]
