"""A device that stands still: what the service says meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import memsaver_core as ms
from memsaver_core._native import Saver
from tests.unit.saver_memory import MIB, fill

#: What a release does to the device, by the phase that it is in; and a resume, all of it while it restores.
RELEASING = {
    "synchronize": "synchronize",
    "copy_to_host": "pause",
    "record": "pause",
    "wait": "pause",
    "unmap": "pause",
    "release": "pause",
}
RESUMING = ["create", "map", "allow_access", "copy_to_device", "fill_zero"]
PATHS = ["/memory_occupation", "/metrics", "/livez", "/readyz", "/operations"]


def stands_still(driver: Saver, call: str, before: int, work: Future[Any]) -> bool:
    """Whether ``work`` comes to a call that is delayed; False where it ends without one."""
    while driver.counts().get(call, 0) == before:
        if work.done():
            return False
    return True


def answers_meanwhile(http: httpx.Client, driver: Saver) -> dict[str, httpx.Response]:
    """What is answered while the device stands still; it goes on after that."""
    try:
        return {path: http.get(path) for path in PATHS for _ in range(5)}
    finally:
        driver.heal()


def check_stalled(http: httpx.Client, driver: Saver, call: str, path: str, state: str, phase: str) -> None:
    """Stall ``call`` of the operation that ``path`` starts; everything else answers, and the operation then ends."""
    before = driver.counts().get(call, 0)
    driver.delay(call, 3600)
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(http.post, path)
        assert stands_still(driver, call, before, work)
        answers = answers_meanwhile(http, driver)
        assert answers["/memory_occupation"].json()["state"] == state
        assert (answers["/livez"].status_code, answers["/readyz"].status_code) == (200, 503)
        assert answers["/operations"].json()["operations"][0]["phase"] == phase
        assert work.result().status_code == 200


@pytest.mark.parametrize("call", RELEASING)
def test_everything_else_answers_while_a_release_stalls(http: httpx.Client, driver: Saver, call: str) -> None:
    """S3: while a driver's call stands still, status, metrics, probes and operations answer, and name the phase."""
    check_stalled(http, driver, call, "/release_memory_occupation", "releasing", RELEASING[call])
    assert http.post("/resume_memory_occupation").status_code == 200


@pytest.mark.parametrize("call", RESUMING)
def test_everything_else_answers_while_a_resume_stalls(http: httpx.Client, driver: Saver, call: str) -> None:
    """S3: as for a release."""
    assert http.post("/release_memory_occupation").status_code == 200
    check_stalled(http, driver, call, "/resume_memory_occupation", "resuming", "restore")


@pytest.mark.parametrize("call", ["reserve", "create", "map"])
def test_everything_else_answers_while_an_allocation_stalls(http: httpx.Client, driver: Saver, call: str) -> None:
    """S3: the engine may wait for the device; who asks about the engine does not."""

    def allocate() -> torch.Tensor:
        with ms.region(f"stalls-{call}"):
            return torch.ones(MIB)

    before = driver.counts().get(call, 0)
    driver.delay(call, 3600)
    with ThreadPoolExecutor(1) as pool:
        allocating = pool.submit(allocate)
        assert stands_still(driver, call, before, allocating)
        answers = answers_meanwhile(http, driver)
        assert answers["/memory_occupation"].json()["state"] == "resident"
        assert {answers[path].status_code for path in PATHS} == {200}
        assert float(allocating.result().sum()) == MIB


#: Every call that can take its time, those included that a process makes once.
CALLS = [
    "device_info",
    "memory_info",
    "reserve",
    "create",
    "release",
    "map",
    "allow_access",
    "unmap",
    "synchronize",
    "trim_graph_memory",
    "graph_memory",
    "create_stream",
    "copy_to_host",
    "copy_to_device",
    "fill_zero",
    "digest",
    "record",
    "done",
    "wait",
    "stream_wait",
    "register_host",
    "unregister_host",
]


@pytest.mark.parametrize("call", CALLS)
def test_the_account_is_told_while_a_call_stands_still(tmp_path: Path, call: str) -> None:
    """S3: whatever the driver does not come back from, in whatever a saver does in its life: what probes, metrics and
    status are made of waits for none of it.
    """
    driver = Saver(
        driver="host",
        host_capacity=64 * MIB,
        file_folder=str(tmp_path),
        retention="free",
        verify="full",
    )
    addresses: dict[str, int] = {}

    def allocate(policy: str) -> None:
        addresses[policy] = driver.allocate(0, policy, policy, 4 * MIB)
        fill(addresses[policy], 4 * MIB, 1)

    life: list[Callable[[], Any]] = [
        lambda: allocate("host"),
        lambda: allocate("file"),
        lambda: allocate("zero"),
        driver.synchronize,
        lambda: driver.release([], [], {}),
        lambda: driver.free(addresses["file"]),
        lambda: driver.resume([]),
        lambda: driver.graph_memory(0),
        driver.trim_graph_memory,
        lambda: driver.release([], [], {}),
        lambda: driver.drop_backups(["zero"]),
        lambda: driver.resume([]),
        lambda: driver.free(addresses["host"]),
        lambda: allocate("host"),
        lambda: driver.set_file_folder(str(tmp_path)),
    ]
    stood_still = 0
    with ThreadPoolExecutor(2) as pool:
        for step in life:
            before = driver.counts().get(call, 0)
            driver.delay(call, 3600)
            work = pool.submit(step)
            try:
                if stands_still(driver, call, before, work):
                    stood_still += 1
                    told = pool.submit(lambda: [driver.status(), driver.known_tags(), driver.devices()])
                    assert told.result(timeout=30)
            finally:
                driver.heal()
            work.result()
    assert stood_still, "no step makes this call"
    assert driver.audit() == []


def test_the_last_reading_stands_while_the_device_does_not_answer(http: httpx.Client, driver: Saver) -> None:
    """S3: whoever asks what is occupied does not wait for the device; the state is told as it is now all the same."""
    before = http.get("/memory_occupation").json()["devices"]
    assert before
    calls = driver.counts()["memory_info"]
    driver.delay("memory_info", 5.0)
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(ms.read_devices)
        while driver.counts()["memory_info"] == calls:
            pass
        answers = [http.get("/memory_occupation").json() for _ in range(3)]
        assert not stuck.done()  # all of them came while the device was silent
        driver.heal()
    assert all(answer["devices"][0]["total_bytes"] == before[0]["total_bytes"] for answer in answers)
    assert all(answer["state"] == "resident" for answer in answers)
