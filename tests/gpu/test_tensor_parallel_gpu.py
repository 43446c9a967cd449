"""The reference engine on two GPUs: graphs with captured all-reduces replay after a release and a hibernation."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from memsaver_server import attach
from memsaver_server.reference.engine import TransformersEngine
from tests.gpu.children import two_devices
from tests.gpu.test_engine_gpu import GIB, QWEN2
from tests.waiting import wait_until

pytestmark = [pytest.mark.gpu, two_devices]

PROMPT = {"input_ids": list(range(300)), "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}}
KV_BYTES = 4 * GIB


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    engine = TransformersEngine(random_weights=QWEN2, kv_cache_bytes=KV_BYTES, tensor_parallel=2, batch_sizes=(1, 4))
    assert engine.describe()["graph_batch_sizes"] == [1, 4]
    with attach(engine) as attachment, httpx.Client(base_url=attachment.url, timeout=300) as client:
        yield client
    engine.close()


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


@pytest.mark.parametrize("body", [{"verify": "token"}, {"verify": "token", "hibernate": True}])
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
def test_a_killed_rank_is_told(http: httpx.Client) -> None:
    """While it may wait in an all-reduce; no call hangs."""
    pid = http.get("/memory_occupation").json()["ranks"][1]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: http.get("/livez").status_code == 503)
    assert f"rank 1 (process {pid})" in http.get("/livez").json()["reason"]
    assert http.post("/generate", json=PROMPT).status_code >= 500
