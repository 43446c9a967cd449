"""A served engine and co-tenants that compete for one device."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

from memsaver_core import _native
from tests.e2e.serving import serving
from tests.gpu.children import ON_CUDA
from tests.gpu.children import CoTenant as CudaTenant
from tests.service.program import Program
from tests.waiting import wait_until

from .kinds import on_cuda, on_host

QWEN2 = Path(__file__).parents[1] / "data" / "qwen2-1.5b" / "config.json"
MIB = 1 << 20
GIB = 1 << 30
CAPACITY = 64 * MIB  # of a host device, of which its engine takes 26 MiB

#: A resume that waits this long, instead of continuing once the memory is free, exceeds the client's timeout.
AN_HOUR = {"wait_for_memory_s": 3600}


class Tenant(Protocol):
    """A co-tenant of the device."""

    def leave(self, nbytes: int) -> int:
        """Take all free memory but ``nbytes``. Returns the bytes that are free now."""

    def let_go(self) -> int:
        """Free everything. Returns the bytes that are free now."""

    def kill(self) -> None:
        """End without freeing anything. Only for a tenant made by ``Rivals.killable``."""


class HostTenant:
    """This process as a co-tenant of a host device."""

    def __init__(self, device: str) -> None:
        self._saver = _native.Saver(driver="host", host_devices=[device], host_capacity=CAPACITY)
        self._held: list[int] = []

    def leave(self, nbytes: int) -> int:
        taken = self._free_bytes() - nbytes
        self._held.append(self._saver.allocate(0, "trainer", "discard", taken))
        return self._free_bytes()

    def let_go(self) -> int:
        while self._held:
            self._saver.free(self._held.pop())
        return self._free_bytes()

    def kill(self) -> None:
        raise NotImplementedError

    def _free_bytes(self) -> int:
        return int(self._saver.memory_info(0)[0])

    def __enter__(self) -> HostTenant:
        return self

    def __exit__(self, *exception: object) -> None:
        self.let_go()
        self._saver.close()


class KillableHostTenant(HostTenant):
    """Another process as a co-tenant of a host device."""

    def __init__(self, settings: dict[str, str]) -> None:
        super().__init__(settings["MEMSAVER_HOST_DEVICE"])
        self._settings = settings
        self._trainer: Program | None = None

    def leave(self, nbytes: int) -> int:
        self._trainer = Program("trainer", str(self._free_bytes() - nbytes), **self._settings)
        return self._free_bytes()

    def kill(self) -> None:
        assert self._trainer is not None
        self._trainer.kill()

    def __exit__(self, *exception: object) -> None:
        if self._trainer is not None:
            self._trainer.kill()
        super().__exit__(*exception)


@dataclass(frozen=True)
class Rivals:
    """A served engine, and how to make its co-tenants."""

    url: str
    tenant: Callable[[], Any]
    killable: Callable[[], Any]
    prompts: list[dict[str, Any]]
    engine_bytes: int  # the engine takes more
    little: int  # with this much free, nothing large fits
    weights: int  # with this much free, the weights fit and the KV cache does not
    too_little: int  # with this much free, the engine does not fit
    look: Callable[[httpx.Client], None]  # returns once the engine's wait for memory has read the device some times


@contextmanager
def rivals_on_host() -> Iterator[Rivals]:
    """A small engine of 26 MiB on a device of 64 MiB."""
    settings = {
        "MEMSAVER_DRIVER": "host",
        "MEMSAVER_HOST_DEVICE": f"shortage-{uuid.uuid4().hex[:8]}",
        "MEMSAVER_HOST_CAPACITY": str(CAPACITY),
    }
    program = Program(**settings)
    yield Rivals(
        url=program.said,
        tenant=lambda: HostTenant(settings["MEMSAVER_HOST_DEVICE"]),
        killable=lambda: KillableHostTenant(settings),
        prompts=[{"input_ids": [3, 5, 8], "sampling_params": {"max_new_tokens": 6, "temperature": 0}}],
        engine_bytes=25 * MIB,
        little=7 * MIB,
        weights=12 * MIB,
        too_little=16 * MIB,
        look=lambda _http: program.wait_for("memory_info", more_than=program.count("memory_info") + 5),
    )
    program.end()


def read_device(http: httpx.Client) -> None:
    """Read the device through the engine, as its wait does meanwhile; less than the engine needs is free."""
    for _ in range(20):
        assert http.get("/memory_occupation").json()["devices"][0]["free_bytes"] < 11 * GIB


@contextmanager
def rivals_on_cuda() -> Iterator[Rivals]:
    """A reference engine of about 12 GiB with CUDA graphs."""
    options = ("--random-weights", str(QWEN2), "--kv-cache-bytes", "8GiB", "--batch-sizes", "1,4")
    with serving(*options, changes=ON_CUDA) as server:
        yield Rivals(
            url=server.url,
            tenant=CudaTenant,
            killable=CudaTenant,
            prompts=[
                {"input_ids": list(range(3, 3 + length)), "sampling_params": {"max_new_tokens": 24, "temperature": 0}}
                for length in (4, 100, 600)
            ],
            engine_bytes=11 * GIB,
            little=GIB,
            weights=6 * GIB,
            too_little=7 * GIB,
            look=read_device,
        )
        assert server.end(signal.SIGTERM) == 0, server.log


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(rivals_on_host, id="host", marks=on_host),
        pytest.param(rivals_on_cuda, id="cuda", marks=on_cuda),
    ],
)
def rivals(request: pytest.FixtureRequest) -> Iterator[Rivals]:
    with request.param() as rivals:
        yield rivals


@pytest.fixture
def http(rivals: Rivals) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rivals.url, timeout=600) as http:
        http.post("/resume_memory_occupation", json={"wait": True}).raise_for_status()  # after a failed test
        yield http


@pytest.fixture
def tenant(rivals: Rivals) -> Iterator[Tenant]:
    with rivals.tenant() as tenant:
        yield tenant


@pytest.fixture
def tokens(rivals: Rivals, http: httpx.Client) -> Callable[[], list[list[int]]]:
    def ask() -> list[list[int]]:
        return [http.post("/generate", json=body).raise_for_status().json()["output_ids"] for body in rivals.prompts]

    return ask


@contextmanager
def resume_that_waits(http: httpx.Client) -> Iterator[Future[httpx.Response]]:
    """A resume that waits for memory while the block runs."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.post, "/resume_memory_occupation", json=AN_HOUR)
        with httpx.Client(base_url=http.base_url, timeout=600) as other:

            def waits() -> bool:
                assert not waiting.done(), waiting.result().text
                return bool(other.get("/operations").json()["operations"][0]["phase"] == "wait_for_memory")

            wait_until(waits)
            yield waiting


@pytest.mark.guards(
    "running out of memory or other resources killed the process",
    "health probes confused a sleeping engine with a dead one",
)
def test_resume_without_enough_memory(
    http: httpx.Client, tenant: Tenant, rivals: Rivals, tokens: Callable[[], list[list[int]]]
) -> None:
    """503 with figures; the engine is alive and not ready, with its backup intact; with memory the retry works."""
    before = tokens()
    released = http.post("/release_memory_occupation").raise_for_status().json()["released_bytes"]
    assert released > rivals.engine_bytes
    assert tenant.leave(rivals.little) < 2 * rivals.little
    for _ in range(3):  # retries change nothing
        response = http.post("/resume_memory_occupation")
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        error = response.json()["error"]
        assert (error["type"], response.json()["state"]) == ("out_of_device_memory", "released")
        assert error["needed_bytes"] > rivals.engine_bytes
        assert 0 <= error["free_bytes"] < 2 * rivals.little
    assert http.get("/livez").status_code == 200
    assert http.get("/readyz").status_code == 503
    assert http.post("/generate", json=rivals.prompts[0]).status_code == 503
    tags = http.get("/memory_occupation").json()["tags"]
    assert sum(tag["resident_bytes"] for tag in tags) == 0
    if isinstance(tenant, HostTenant):
        parked = http.get("/memory_status").json()["parked_tags"]
        assert parked == ["cuda_graph", "kv_cache", "weights", "workspace"]
    tenant.let_go()
    answer = http.post("/resume_memory_occupation").raise_for_status().json()
    assert (answer["state"], answer["resumed_bytes"]) == ("resident", released)
    assert tokens() == before


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_resume_waits_for_a_co_tenant_to_let_go(
    http: httpx.Client, tenant: Tenant, rivals: Rivals, tokens: Callable[[], list[list[int]]]
) -> None:
    """With `wait_for_memory_s` it succeeds once the memory is free, before the one-hour limit, without a retry."""
    before = tokens()
    http.post("/release_memory_occupation").raise_for_status()
    tenant.leave(rivals.little)
    with resume_that_waits(http) as waiting:
        assert http.get("/livez").status_code == 200
        tenant.let_go()
        answer = waiting.result().raise_for_status().json()
    assert answer["state"] == "resident"
    assert "wait_for_memory" in [phase["name"] for phase in answer["phases"]]
    assert tokens() == before


@pytest.mark.guards(
    "running out of memory or other resources killed the process",
    "a process was killed in the middle of an operation",
)
def test_resume_waits_for_a_co_tenant_that_is_killed(
    http: httpx.Client, rivals: Rivals, tokens: Callable[[], list[list[int]]]
) -> None:
    """The memory of a killed co-tenant counts as free, and ends the wait."""
    before = tokens()
    http.post("/release_memory_occupation").raise_for_status()
    with rivals.killable() as tenant:
        tenant.leave(rivals.little)
        with resume_that_waits(http) as waiting:
            tenant.kill()
            assert waiting.result().raise_for_status().json()["state"] == "resident"
    assert tokens() == before


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_resume_waits_on_while_too_little_is_let_go(
    http: httpx.Client, tenant: Tenant, rivals: Rivals, tokens: Callable[[], list[list[int]]]
) -> None:
    """Too little free memory does not end the wait; more of it later does."""
    before = tokens()
    http.post("/release_memory_occupation").raise_for_status()
    tenant.leave(rivals.too_little)
    with rivals.tenant() as second:
        second.leave(rivals.little)
        with resume_that_waits(http) as waiting:
            assert second.let_go() < rivals.engine_bytes
            rivals.look(http)
            assert not waiting.done()
            tenant.let_go()
            assert waiting.result().raise_for_status().json()["state"] == "resident"
    assert tokens() == before


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_a_wait_that_ends_without_memory_changes_nothing(
    http: httpx.Client, tenant: Tenant, rivals: Rivals, tokens: Callable[[], list[list[int]]]
) -> None:
    """503 with figures; released tags and the reason for refusing requests are as before; the retry works."""
    before = tokens()
    http.post("/release_memory_occupation").raise_for_status()
    free = tenant.leave(rivals.little)
    asleep = http.get("/memory_occupation").json()
    for _ in range(2):
        response = http.post("/resume_memory_occupation", json={"wait_for_memory_s": 3})
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        error = response.json()["error"]
        assert (error["type"], response.json()["state"]) == ("out_of_device_memory", "released")
        assert error["needed_bytes"] > error["free_bytes"] >= 0
        assert error["free_bytes"] < 2 * rivals.little
        if isinstance(tenant, HostTenant):
            assert error["free_bytes"] == free == rivals.little
        # It tried, waited, and tried again.
        phases = [phase["name"] for phase in response.json()["phases"]]
        assert (phases[:2], phases[-1]) == (["restore", "wait_for_memory"], "restore")
        occupation = http.get("/memory_occupation").json()
        for what in ("state", "admission", "operation_id", "tags"):
            assert occupation[what] == asleep[what]
    assert http.post("/generate", json=rivals.prompts[0]).status_code == 503
    assert http.get("/livez").status_code == 200
    tenant.let_go()
    assert http.post("/resume_memory_occupation").json()["state"] == "resident"
    assert tokens() == before


@pytest.mark.guards(
    "running out of memory or other resources killed the process",
    "a request during sleep hung or used released memory",
)
def test_a_part_that_fits_comes_back_while_the_rest_does_not(
    http: httpx.Client, tenant: Tenant, rivals: Rivals, tokens: Callable[[], list[list[int]]]
) -> None:
    """The tag that fits is resumed, the other is refused, and no request is computed."""
    before = tokens()
    http.post("/release_memory_occupation").raise_for_status()
    tenant.leave(rivals.weights)
    assert http.post("/resume_memory_occupation", json={"tags": ["weights"]}).status_code == 200
    refused = http.post("/resume_memory_occupation", json={"tags": ["kv_cache"]})
    assert (refused.status_code, refused.json()["state"]) == (503, "released")
    states = {tag["tag"]: tag["state"] for tag in http.get("/memory_occupation").json()["tags"]}
    assert (states["weights"], states["kv_cache"], states["cuda_graph"]) == ("resident", "released", "released")
    assert http.post("/generate", json=rivals.prompts[0]).status_code == 503
    tenant.let_go()
    http.post("/resume_memory_occupation").raise_for_status()
    assert tokens() == before
