"""Two tensor-parallel ranks of a real SGLang server, which release, resume and hibernate together."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.engine_server import COUNTS, prompts
from tests.native import nccl
from tests.waiting import wait_until

from . import checkpoint
from .conftest import Start
from .server import ANSWER_S, Server, binds_all_ranks

#: One core for each rank, as SGLang counts them.
CORES = "|".join(str(core) for core in (sorted(os.sched_getaffinity(0)) * 2)[:2])
#: The same for two stages or replicas of two ranks each.
CORES_OF_FOUR = f"{CORES}|{CORES}" if binds_all_ranks() else CORES


@pytest.fixture(scope="module")
def served(start: Start) -> Server:
    """With a library that has NCCL's functions in the place of the one that a CPU build of torch lacks."""
    return start(
        *("--tp", "2", "--enable-weights-cpu-backup"),
        MEMSAVER_KV_CACHE_PIECE="64KiB",
        SGLANG_CPU_OMP_THREADS_BIND=CORES,
        LD_PRELOAD=str(nccl.library()),
    )


def test_both_release_and_resume(server: Server) -> None:
    server.check_cycles(server.generate)
    ranks = server.get("/memory_occupation").json()["ranks"]
    assert [each["rank"] for each in ranks] == [0, 1]
    assert {each["pid"] for each in ranks} == {each.pid for each in server.schedulers()}


def test_requests_in_flight_end_first(server: Server) -> None:
    expected = [server.generate(100, prompt) for prompt in prompts(4)]
    running = server.in_background(4, 100)
    server.own("/release_memory_occupation")
    assert [each.result(ANSWER_S) for each in running] == expected
    assert server.request().status_code == 503
    server.own("/resume_memory_occupation")
    assert [server.generate(100, prompt) for prompt in prompts(4)] == expected


def test_kept_requests_go_on(server: Server) -> None:
    expected = server.generate(300, prompts(1)[0])
    (running,) = server.in_background(1, 300)
    server.service("/release_memory_occupation", {"mode": "keep"})
    server.service("/resume_memory_occupation")
    assert running.result(ANSWER_S) == expected


def test_the_caches_of_both_get_smaller_and_larger(server: Server) -> None:
    expected = [server.generate(600, prompt) for prompt in prompts(2)]
    whole = server.get("/kv_cache").json()
    running = server.in_background(2, 600)
    half = server.service("/kv_cache", {"fraction": 0.5, "mode": "preempt"})["kv_cache"]
    assert half["bytes"] == pytest.approx(whole["bytes"] / 2, rel=0.01)
    assert [each.result(ANSWER_S) for each in running] == expected
    [tag] = [each for each in server.get("/memory_occupation").json()["tags"] if each["tag"] == "kv_cache"]
    assert tag["shrunk_bytes"] == pytest.approx(whole["bytes"], rel=0.1)  # half of each rank's
    server.check_cycles(server.generate)
    assert [server.generate(600, prompt) for prompt in prompts(2)] == expected
    server.service("/kv_cache", {"fraction": 1})
    assert [server.generate(600, prompt) for prompt in prompts(2)] == expected
    assert {**server.get("/kv_cache").json(), **COUNTS} == {**whole, **COUNTS}


def test_updates_of_discarded_weights(server: Server) -> None:
    expected = server.generate()
    for write in (server.write_weights, lambda: server.write_tensors(ranks=2)):
        server.service("/release_memory_occupation", {"restore": {"weights": "discard"}})
        server.own("/resume_memory_occupation", {"tags": ["weights"]})
        write()
        server.own("/resume_memory_occupation")
        assert server.generate() == expected


def test_updates_while_released(server: Server, tmp_path: Path) -> None:
    server.check_updates_while_released(checkpoint.write(tmp_path, seed=8), ranks=2)


def test_both_hibernate(server: Server) -> None:
    body = {"hibernate": True, "verify": "token"}
    expected = server.generate()
    for _ in range(2):
        server.service("/release_memory_occupation", body)
        assert server.get("/memory_occupation").json()["hibernated"] is True
        server.service("/resume_memory_occupation", {"verify": "token"})
        assert server.generate() == expected


def test_their_communicators_can_be_suspended(server: Server) -> None:
    """SGLang starts its ranks with NCCL_CUMEM_ENABLE=0 unless it is set. Ranks write over their own environment's
    place in memory, their helpers do not."""
    server.service("/release_memory_occupation", {"hibernate": True})
    for scheduler in server.schedulers():
        [helper] = [each for each in scheduler.children() if "memsaver" in each.exe()]
        assert helper.environ()["NCCL_CUMEM_ENABLE"] == "1"
        assert helper.environ()["NCCL_GRAPH_REGISTER"] == "0"


def test_the_death_of_one_ends_the_server(served: Server) -> None:
    """By SGLang; what waits for the ranks gets an error, and nothing hangs."""
    served.service("/release_memory_occupation")
    served.schedulers()[1].send_signal(signal.SIGKILL)
    wait_until(lambda: served.process.poll() is not None, ANSWER_S)  # it may first look for dumps for a minute


def test_pipelines(start: Start) -> None:
    """Four ranks: two stages of two."""
    server = start(
        *("--tp", "2", "--pp-size", "2", "--enable-weights-cpu-backup"),
        MEMSAVER_KV_CACHE_PIECE="64KiB",
        SGLANG_CPU_OMP_THREADS_BIND=CORES_OF_FOUR,
    )
    server.check_cycles(server.generate)
    assert [each["rank"] for each in server.get("/memory_occupation").json()["ranks"]] == [0, 1, 2, 3]
    expected = [server.generate(100, prompt) for prompt in prompts(4)]
    running = server.in_background(4, 100)
    server.service("/release_memory_occupation", {"hibernate": True})
    assert [each.result(ANSWER_S) for each in running] == expected
    server.service("/resume_memory_occupation")
    assert [server.generate(100, prompt) for prompt in prompts(4)] == expected
    for call, body in (("/release_memory_occupation", {"mode": "keep"}), ("/kv_cache", {"fraction": 0.5})):
        refused = server.service(call, body, status=409)
        assert "pipeline" in refused["message"]
