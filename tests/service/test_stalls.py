"""What the service answers while the device is stalled."""

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
from tests.waiting import wait_until

#: The driver calls of a release, by phase, and of a resume, all of them in its restore phase.
RELEASING = {
    "synchronize": "synchronize",
    "copy_to_host": "pause",
    "record": "pause",
    "wait": "pause",
    "unmap": "pause",
    "release": "pause",
}
RESUMING = ["create", "map", "allow_access", "copy_to_device", "record"]
PATHS = ["/memory_occupation", "/metrics", "/livez", "/readyz", "/operations"]


def stands_still(driver: Saver, call: str, before: int, work: Future[Any]) -> bool:
    """Whether ``work`` reaches a delayed call; False if it ends without one."""
    ended = False
    while driver.counts().get(call, 0) == before:
        if ended:
            return False
        ended = work.done()  # what it has reached in the background by then is counted by now
    return True


def answers_meanwhile(http: httpx.Client, driver: Saver) -> dict[str, httpx.Response]:
    """What is answered while the device is stalled; it continues afterwards."""
    try:
        return {path: http.get(path) for path in PATHS for _ in range(5)}
    finally:
        driver.heal()


def check_stalled(http: httpx.Client, driver: Saver, call: str, path: str, state: str, phase: str) -> None:
    """Stall ``call`` in the operation that ``path`` starts: everything else answers, and the operation then
    completes."""
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
@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_everything_else_answers_while_a_release_stalls(http: httpx.Client, driver: Saver, call: str) -> None:
    """While a driver call is held, status, metrics, probes and operations answer and name the phase."""
    check_stalled(http, driver, call, "/release_memory_occupation", "releasing", RELEASING[call])
    assert http.post("/resume_memory_occupation").status_code == 200


@pytest.mark.parametrize("call", RESUMING)
@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_everything_else_answers_while_a_resume_stalls(http: httpx.Client, driver: Saver, call: str) -> None:
    assert http.post("/release_memory_occupation").status_code == 200
    check_stalled(http, driver, call, "/resume_memory_occupation", "resuming", "restore")


@pytest.mark.parametrize("call", ["reserve", "create", "map"])
@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_everything_else_answers_while_an_allocation_stalls(http: httpx.Client, driver: Saver, call: str) -> None:
    """The engine may have to wait for the device; questions about the engine do not."""

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


#: Every call that can take long, also those that a process makes once.
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
    "stack_limit",
    "set_stack_limit",
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
@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_the_account_is_told_while_a_call_stands_still(tmp_path: Path, call: str) -> None:
    """Whichever driver call is held, at any point of a saver's life: the data of probes, metrics and status waits
    for none."""
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

    def resume() -> None:
        """Return once host memory is being unpinned, in the background: the account says before that it is gone."""
        unpinned = driver.counts().get("unregister_host", 0)
        driver.resume([])
        wait_until(lambda: driver.status()["host_backup"]["capacity_bytes"] == 0)
        wait_until(lambda: driver.counts().get("unregister_host", 0) > unpinned)

    life: list[Callable[[], Any]] = [
        lambda: allocate("host"),
        lambda: allocate("file"),
        lambda: allocate("zero"),
        lambda: driver.allocate(0, "host", "host", 4 * MIB),  # its content is zeros, which need no backup
        driver.synchronize,
        lambda: driver.release([], [], {}),
        lambda: driver.free(addresses["file"]),
        resume,
        lambda: driver.graph_memory(0),
        driver.trim_graph_memory,
        lambda: driver.release([], [], {}),
        lambda: driver.drop_backups(["zero"]),
        resume,
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
                    assert told.result(timeout=600)
            finally:
                driver.heal()
            work.result()
    assert stood_still, "no step makes this call"
    assert driver.audit() == []


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_the_last_reading_stands_while_the_device_does_not_answer(http: httpx.Client, driver: Saver) -> None:
    """Questions about memory do not wait for the device; the reported state is current all the same."""
    wait_until(lambda: http.get("/memory_occupation").json()["devices"])  # it was read once
    before = http.get("/memory_occupation").json()["devices"]
    calls = driver.counts()["memory_info"]
    driver.delay("memory_info", 3600)
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(ms.read_devices)
        try:
            wait_until(lambda: driver.counts()["memory_info"] != calls)
            answers = [http.get("/memory_occupation").json() for _ in range(3)]
            assert not stuck.done()  # all answers came while the device was stalled
        finally:
            driver.heal()
    assert all(answer["devices"][0]["total_bytes"] == before[0]["total_bytes"] for answer in answers)
    assert all(answer["state"] == "resident" for answer in answers)
