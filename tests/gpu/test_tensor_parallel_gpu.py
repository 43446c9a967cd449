"""The reference engine on two GPUs: graphs with captured all-reduces replay after a release and a hibernation."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.serving import serving
from tests.gpu.children import two_devices, with_new_nccl
from tests.gpu.test_engine_gpu import GIB, QWEN2
from tests.waiting import wait_until

pytestmark = [pytest.mark.gpu, two_devices]

PROMPT = {"input_ids": list(range(300)), "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}}
KV_BYTES = 4 * GIB
SERVE = (
    *("--random-weights", str(QWEN2), "--kv-cache-bytes", "4GiB", "--batch-sizes", "1,4"),
    *("--max-len", "2048", "--tensor-parallel", "2"),
)


@contextmanager
def served() -> Iterator[httpx.Client]:
    """A server of two ranks, which ends in peace whatever was done to it."""
    with (
        serving(*SERVE, changes={"MEMSAVER_DRIVER": "cuda"}) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        yield client
        assert server.end() == 0, server.log


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with served() as client:
        yield client


def post(http: httpx.Client, path: str, body: object = None) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def tokens(http: httpx.Client) -> list[int]:
    post(http, "/flush_cache")
    generated: list[int] = post(http, "/generate", PROMPT)["output_ids"]
    return generated


def used_bytes(http: httpx.Client) -> list[int]:
    return [device["used_bytes"] for device in http.get("/memory_occupation").json()["devices"]]


HIBERNATED = pytest.param({"verify": "token", "hibernate": True}, marks=with_new_nccl)


@pytest.mark.parametrize("body", [{"verify": "token"}, HIBERNATED])
def test_both_gpus_are_given_back(http: httpx.Client, body: dict[str, object]) -> None:
    before, full = tokens(http), used_bytes(http)
    assert len(full) == 2
    for _ in range(3):
        post(http, "/release_memory_occupation", body)
        left = used_bytes(http)
        print(f"{body}: MiB left on each GPU: {[each >> 20 for each in left]} of {[each >> 20 for each in full]}")
        assert all(was - now > KV_BYTES for was, now in zip(full, left, strict=True))
        post(http, "/resume_memory_occupation", {"verify": "token"})
        assert tokens(http) == before


@pytest.mark.guards("a rank was killed while memory was released, and probes went on saying that it was well")
@pytest.mark.parametrize("released", [None, {}, pytest.param({"hibernate": True}, marks=with_new_nccl)])
def test_a_killed_rank_is_told(released: dict[str, bool] | None) -> None:
    """While rank 0 may wait for it in an all-reduce, and while memory is released; no call hangs."""
    with served() as http:
        tokens(http)
        if released is not None:
            post(http, "/release_memory_occupation", released)
        pid = http.get("/memory_occupation").json()["ranks"][1]["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: http.get("/livez").status_code == 503)
        assert f"rank 1 (process {pid})" in http.get("/livez").json()["reason"]
        assert http.post("/generate", json=PROMPT).status_code >= 500
