"""Two engines of one device whose KV caches balance themselves, beside a coordinator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import memsaver_core as ms
from memsaver_server import Settings, attach
from memsaver_server.engine import balance
from memsaver_server.fleet import Member
from tests.waiting import wait_until

from .light_engine import MIB, ElasticEngine
from .served_fleet import served


class Balanced:
    """Engines with a MiB of weights and a cache of 1 to 4 MiB."""

    def __init__(self, ending: ExitStack) -> None:
        self.ending = ending
        self.engines = {name: ElasticEngine(name, model=name) for name in "xy"}
        self.http: dict[str, httpx.Client] = {}
        for name, engine in self.engines.items():
            ending.callback(engine.close)
            url = ending.enter_context(attach(engine, settings=Settings(kv_cache="1MiB..4MiB"))).url
            self.http[name] = ending.enter_context(httpx.Client(base_url=url, timeout=600))

    @property
    def members(self) -> list[Member]:
        return [Member(name, str(http.base_url).rstrip("/"), model=name) for name, http in self.http.items()]

    def cache(self, name: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.http[name].get("/kv_cache").json()
        return answer


@pytest.fixture
def balanced() -> Iterator[Balanced]:
    with balance._rows(ms.read_devices()) as found:
        found.clear()  # of the engines of the last test
    with ExitStack() as ending:
        engines = Balanced(ending)
        for http in engines.http.values():
            wait_until(lambda http=http: http.get("/memory_occupation").json()["kv_cache"])
        yield engines


@contextmanager
def tenant(left: int) -> Iterator[None]:
    """While the block runs, so many bytes of the device are free."""
    (device,) = ms.read_devices()
    with ms.region("tenant"):
        size = device.total_bytes - device.used_bytes - left
        held = torch.empty(size, dtype=torch.uint8, device=ms.torch_device())
    yield
    del held


def path() -> Path:
    uuids = " ".join(sorted(device.uuid for device in ms.read_devices()))
    return Path(f"/dev/shm/memsaver-{os.getuid()}-balance-{sha256(uuids.encode()).hexdigest()[:16]}")


def rows() -> dict[str, balance.CacheRow]:
    with balance._rows(ms.read_devices()) as found:
        return dict(found)


def test_what_was_released_as_a_whole_comes_back_as_a_whole(balanced: Balanced) -> None:
    """It was a 503 for good, as each resume needed the memory of a cache that had grown."""
    with served(balanced.members) as http:
        released = http.post("/release_memory_occupation").json()
        assert [each["released_bytes"] for each in released["engines"]] == [5 * MIB, 5 * MIB]
        assert [balanced.cache(name)["bytes"] for name in "xy"] == [MIB, MIB]
        # No cache grows between the engines' resumes: they share a process, whose reserved memory goes with the first.
        with tenant(left=4 * MIB), balance._rows(ms.read_devices()):
            resumed = http.post("/resume_memory_occupation")
            assert resumed.is_success, resumed.text
        wait_until(lambda: [balanced.cache(name)["bytes"] for name in "xy"] == [4 * MIB, 4 * MIB])
        http.post("/release_memory_occupation")
        with tenant(left=3 * MIB):
            refused = http.post("/resume_memory_occupation")
        assert refused.status_code == 503
        assert 'or send "fleet_mode": "best_effort" with "kv_cache": "shrink"' in refused.json()["message"]


def test_a_cache_that_is_kept_is_as_large_as_before(balanced: Balanced) -> None:
    x = balanced.http["x"]
    assert x.post("/release_memory_occupation", json={"restore": {"kv_cache": "host"}}).is_success
    assert balanced.cache("x")["bytes"] == 4 * MIB


def test_a_resume_that_lacks_memory_is_given_it(balanced: Balanced) -> None:
    """What the other had taken it kept, although it used nothing of it."""
    y = balanced.http["y"]
    assert y.post("/release_memory_occupation").is_success
    with tenant(left=0):
        assert y.post("/resume_memory_occupation").status_code == 503
        wait_until(lambda: y.post("/resume_memory_occupation").is_success)
        assert balanced.cache("x")["bytes"] < 4 * MIB
        assert not any(row.resume for row in rows().values())


def test_a_limit_holds_until_the_next(balanced: Balanced) -> None:
    """The balancer took no notice of it."""
    x, engine = balanced.http["x"], balanced.engines["x"]
    with served(balanced.members) as http:
        limit = {"model_name": "x", "limit_bytes": 2 * MIB}
        assert http.post("/v1/runtime/models/kv-limit", json=limit).json()["applied"]
    assert (balanced.cache("x")["bytes"], balanced.cache("x")["limit_bytes"]) == (2 * MIB, 2 * MIB)
    assert x.get("/memory_occupation").json()["kv_cache"]["limit_bytes"] == 2 * MIB
    engine.needed = 2
    since = balance.time.monotonic()
    wait_until(lambda: any(row.at > since and row.bytes == 2 * MIB for row in rows().values()))
    assert all(row.wanted <= 2 * MIB for row in rows().values()), "it is full, and wants no more"
    with tenant(left=0):
        lifted = x.post("/kv_cache", json={"fraction": 1})
        assert (lifted.status_code, lifted.json()["kv_cache"]["bytes"]) == (200, 2 * MIB), lifted.text
    wait_until(lambda: balanced.cache("x")["bytes"] > 2 * MIB)
    assert balanced.cache("x")["limit_bytes"] is None
    engine.needed = 0


@pytest.mark.parametrize(
    "text", ['{"z": ["soon", 1, 2]}', '{"z": [1e999, -5, 1e99]}', "[", '{"z": 1}', "[1]", "\0\xff"]
)
def test_what_is_no_row_is_dropped(balanced: Balanced, text: str) -> None:
    """It ended the thread."""
    wait_until(lambda: len(rows()) == 2)
    path().write_text(text, encoding="latin-1")
    wait_until(lambda: len(rows()) == 2)


def test_the_last_engine_removes_the_file(balanced: Balanced) -> None:
    """It stayed until the machine was booted again."""
    wait_until(lambda: len(rows()) == 2)
    balanced.ending.close()
    wait_until(lambda: not path().exists())


def test_no_row_is_lost_while_others_remove_the_file() -> None:
    def repeat(name: str) -> None:
        for _ in range(200):
            with balance._rows([]) as found:
                found[name] = balance.CacheRow(balance.time.monotonic(), 1, 1)
            with balance._rows([]) as found:
                assert found.pop(name).bytes == 1

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(repeat, "abcd")) == [None] * 4
