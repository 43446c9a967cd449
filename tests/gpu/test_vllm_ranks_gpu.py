"""Real vLLM on two GPUs: all ranks sleep, hibernate and wake together; the end of one is told at once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.gpu.vllm_server import QUICK, completions, missing, post, serving
from tests.waiting import wait_until

MIB = 1 << 20
NCCL = {"NCCL_GRAPH_REGISTER": "0", "NCCL_NVLS_ENABLE": "0"}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with serving(model, log, "-tp", "2", "--compilation-config", json.dumps(QUICK), **NCCL) as (client, _):
        yield client


def used() -> list[int]:
    figures = [torch.cuda.mem_get_info(device) for device in range(2)]
    return [total - free for free, total in figures]


def occupation(client: httpx.Client) -> dict[str, Any]:
    answer: dict[str, Any] = client.get("/memory_occupation").raise_for_status().json()
    return answer


def communicators(client: httpx.Client) -> int:
    """Bytes of the communicators that can be suspended."""
    tags = {tag["tag"]: tag["bytes"] for tag in occupation(client)["tags"]}
    return int(tags.get("communicators", 0))


@pytest.mark.guards("idle NCCL communicators held gigabytes while the engine slept")
def test_graphs_and_communicators_go_with_the_rest(served: httpx.Client) -> None:
    """With vLLM's own flags, its custom all-reduce included; tokens are the same afterwards."""
    before, held = completions(served), communicators(served)
    assert held > 0
    for _ in range(2):
        loaded = used()
        answer = post(served, "/release_memory_occupation")
        gone = [one - other for one, other in zip(loaded, used(), strict=True)]
        assert sum(gone) >= answer["released_bytes"] - 256 * MIB
        released = {tag["tag"]: tag["released_bytes"] for tag in answer["tags"]}
        assert released["communicators"] == held
        assert released["cuda_graph"] > 0
        post(served, "/resume_memory_occupation")
        assert completions(served) == before


@pytest.mark.guards("checkpointing one rank of several hung the next one")
def test_all_ranks_hibernate(served: httpx.Client) -> None:
    """What is left on each GPU is next to nothing, and tokens are the same afterwards."""
    before = completions(served)
    for _ in range(2):
        post(served, "/release_memory_occupation", verify="token")
        asleep = used()
        answer = post(served, "/release_memory_occupation", hibernate=True)
        assert {"lock", "hibernate"} <= {phase["name"] for phase in answer["phases"]}
        assert all(one - other > 300 * MIB for one, other in zip(asleep, used(), strict=True))  # the contexts
        post(served, "/resume_memory_occupation", verify="token")
        assert completions(served) == before


@pytest.mark.parametrize("when", ["resident", "releasing", "released", "hibernated", "resuming"])
@pytest.mark.guards("a rank was killed while memory was released, and probes went on saying that it was well")
def test_a_killed_worker_is_told_at_once(model: Path, tmp_path: Path, when: str) -> None:
    """By name, by every probe and to the callers that wait; no call hangs. The other rank's memory goes back."""
    empty = used()
    with serving(model, tmp_path / "log", "-tp", "2", "--enforce-eager", **NCCL) as (client, _):
        ranks = {rank["rank"]: rank["pid"] for rank in occupation(client)["ranks"]}
        if when not in ("resident", "releasing"):
            post(client, "/release_memory_occupation", hibernate=when == "hibernated")
        call = {"releasing": "/release_memory_occupation", "resuming": "/resume_memory_occupation"}.get(when)
        with ThreadPoolExecutor(1) as pool:
            waiting = None
            if call:
                os.kill(ranks[1], signal.SIGSTOP)  # the operation cannot end before the kill
                waiting = pool.submit(client.post, call, json={})
                wait_until(lambda: occupation(client)["state"] == when, 30)
            os.kill(ranks[1], signal.SIGKILL)
            wait_until(lambda: client.get("/livez").status_code == 503, 10, interval_s=0.01)
            if waiting is not None:
                failed = waiting.result(30)
                assert failed.status_code == 500
                assert f"rank 1 (process {ranks[1]}) has ended" in failed.text
        for path in ("/livez", "/readyz", "/health"):
            told = client.get(path)
            assert told.status_code == 503
            assert f"rank 1 (process {ranks[1]}) has ended" in told.text
        refused = client.post("/resume_memory_occupation", json={})
        assert refused.status_code == 500
        assert "rank 1" in refused.text
        assert [rank["alive"] for rank in occupation(client)["ranks"]][1] is False
        wait_until(lambda: all(now <= was + 256 * MIB for now, was in zip(used(), empty, strict=True)), interval_s=0.1)


def test_every_data_parallel_engine_is_released(model: Path, tmp_path: Path) -> None:
    """Two engines behind one server, one on each GPU."""
    arguments = ("--data-parallel-size", "2", "--enforce-eager")
    with serving(model, tmp_path / "log", *arguments) as (client, _):
        before, loaded = completions(client), used()
        post(client, "/release_memory_occupation")
        assert all(one - other > 1024 * MIB for one, other in zip(loaded, used(), strict=True))
        assert len(occupation(client)["ranks"]) == 2
        post(client, "/resume_memory_occupation")
        assert completions(client) == before
