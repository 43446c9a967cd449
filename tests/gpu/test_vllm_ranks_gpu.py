"""Real vLLM in several processes: all ranks sleep, hibernate and wake together; the end of one is told at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.gpu.children import process_mib, two_devices, with_new_nccl
from tests.gpu.vllm_server import QUICK, complete, completions, missing, post, serving
from tests.waiting import wait_until

MIB = 1 << 20
#: Of an engine when one of its ranks is killed.
STATES = ("resident", "releasing", "released", "hibernated", "resuming")
NCCL = {"NCCL_GRAPH_REGISTER": "0", "NCCL_NVLS_ENABLE": "0"}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    arguments = ("-tp", "2", "--compilation-config", json.dumps(QUICK))
    with serving(model, log, *arguments, MEMSAVER_KV_CACHE_PIECE="32MiB", **NCCL) as (client, _):
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


@two_devices
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


@two_devices
def test_the_cache_of_both_ranks_shrinks_and_grows(served: httpx.Client) -> None:
    """And keeps its size while both are asleep."""
    before, loaded = completions(served), used()
    size = post(served, "/kv_cache", fraction=0.5)["kv_cache"]["bytes"]
    assert all(one - other > 0.9 * size for one, other in zip(loaded, used(), strict=True))
    assert completions(served) == before
    post(served, "/release_memory_occupation")
    post(served, "/resume_memory_occupation")
    assert served.get("/kv_cache").json()["bytes"] == size
    assert completions(served) == before
    assert post(served, "/kv_cache", fraction=1)["kv_cache"]["bytes"] > 1.9 * size
    assert completions(served) == before


@two_devices
@with_new_nccl
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


@pytest.fixture(scope="module")
def doomed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, httpx.Client]]:
    """An engine for each state in which a rank is killed. All start at once, which takes as long as one."""
    folder = tmp_path_factory.mktemp("log")
    # Engines that profile memory at the same time would disturb each other.
    arguments = ("-tp", "2", "--enforce-eager", "--kv-cache-memory-bytes", str(1024 * MIB))
    with ExitStack() as servers, ThreadPoolExecutor(len(STATES)) as pool:

        def start(state: str) -> tuple[httpx.Client, subprocess.Popen[bytes]]:
            return servers.enter_context(serving(model, folder / f"{state}.log", *arguments, **NCCL))

        started = dict(zip(STATES, pool.map(start, STATES), strict=True))
        yield {state: client for state, (client, _) in started.items()}
        for _, process in started.values():
            process.terminate()  # before any is waited for


def held_mib(pids: Iterable[int]) -> float:
    return sum(process_mib(pid, device) for pid in pids for device in range(torch.cuda.device_count()))


@two_devices
@pytest.mark.parametrize(
    "when", [pytest.param(state, marks=with_new_nccl if state == "hibernated" else ()) for state in STATES]
)
@pytest.mark.guards("a rank was killed while memory was released, and probes went on saying that it was well")
def test_a_killed_worker_is_told_at_once(doomed: dict[str, httpx.Client], when: str) -> None:
    """By name, by every probe and to the callers that wait; no call hangs. The other rank's memory goes back."""
    client = doomed[when]
    ranks = {rank["rank"]: rank["pid"] for rank in occupation(client)["ranks"]}
    assert held_mib(ranks.values()) > 0
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
    wait_until(lambda: held_mib(ranks.values()) == 0, interval_s=0.1)


def test_every_data_parallel_engine_is_released(model: Path, tmp_path: Path) -> None:
    """Two engines behind one server; on a machine with one GPU both are on it."""
    # Engines that profile memory at the same time would disturb each other.
    arguments = ["--data-parallel-size", "2", "--enforce-eager", "--kv-cache-memory-bytes", str(1024 * MIB)]
    if torch.cuda.device_count() < 2:
        arguments.append("--device-ids=+0,-0")  # vLLM refuses the same text twice
    with serving(model, tmp_path / "log", *arguments) as (client, _):
        before, ranks = completions(client), occupation(client)["ranks"]
        assert len(ranks) == 2
        loaded = [held_mib([rank["pid"]]) for rank in ranks]
        post(client, "/release_memory_occupation")
        assert all(one - held_mib([rank["pid"]]) > 1024 for one, rank in zip(loaded, ranks, strict=True))
        post(client, "/resume_memory_occupation")
        assert completions(client) == before


def test_an_engine_serves_while_the_other_sleeps(model: Path, tmp_path: Path) -> None:
    """Two engines of one server, on one GPU. The one that is awake answers as before, as both do afterwards."""
    arguments = ["--data-parallel-size", "2", "--enforce-eager", "--kv-cache-memory-bytes", str(1024 * MIB)]
    if torch.cuda.device_count() < 2:
        arguments.append("--device-ids=+0,-0")
    with serving(model, tmp_path / "log", *arguments) as (client, _):
        before = completions(client)
        for asleep in (0, 1):
            post(client, "/release_memory_occupation", dp_ranks=[asleep])
            states = {rank["dp_rank"]: rank["state"] for rank in occupation(client)["ranks"]}
            assert states == {asleep: "released", 1 - asleep: "resident"}
            with ThreadPoolExecutor(8) as pool:
                assert all(len(answer) == 24 for answer in pool.map(lambda _: complete(client, 0), range(8)))
            assert completions(client) == before
            post(client, "/resume_memory_occupation", dp_ranks=[asleep])
        assert completions(client) == before
