"""Engines that share a GPU: no two resumes fight for the same bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import memsaver_core as ms
from memsaver_core import disk
from memsaver_server.fleet import Fleet, FleetResult
from tests.waiting import wait_until

from .conftest import Sites
from .light_engine import MIB
from .served_fleet import served


class Trainer:
    """A co-tenant of the device."""

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._held: torch.Tensor | None = None

    def fill_up_to(self, left: int) -> None:
        """Leave ``left`` bytes; returns once all engines have seen it."""
        (device,) = ms.read_devices()
        with ms.region("trainer"):
            size = device.total_bytes - device.used_bytes - left
            self._held = torch.empty(size // (2 * MIB) * 2 * MIB, dtype=torch.uint8, device=ms.torch_device())
        (device,) = ms.read_devices()
        free = device.total_bytes - device.used_bytes
        wait_until(lambda: all(site.free_bytes == free for site in self._sites.values()))

    def end(self) -> None:
        self._held = None


@pytest.fixture
def trainer(sites: Sites) -> Iterator[Trainer]:
    trainer = Trainer(sites)
    yield trainer
    trainer.end()


def test_resumes_that_do_not_fit_together_are_refused(fleet: Fleet, sites: Sites, trainer: Trainer) -> None:
    assert fleet.release().success
    trainer.fill_up_to(4 * MIB)
    result = fleet.resume()
    assert {engine.kind for engine in result.failed} == {"out_of_device_memory"}
    assert len(result.failed) == 3
    assert f"{6 * MIB} bytes are needed (a {2 * MIB}, b {2 * MIB}, c {2 * MIB})" in result.message
    assert not any('"prepare":true' in text and "resume" in text for site in sites.values() for text in site.wire.seen)
    assert all(site.is_released for site in sites.values())


def test_a_dry_run_names_what_does_not_fit_together(sites: Sites, trainer: Trainer) -> None:
    with served([site.member for site in sites.values()]) as http:
        assert http.post("/release_memory_occupation").is_success
        trainer.fill_up_to(4 * MIB)
        for waits, found in ((0, True), (30, False)):
            plan = http.post("/resume_memory_occupation", json={"dry_run": True, "wait_for_memory_s": waits}).json()
            assert any(f"{6 * MIB} bytes are needed" in each for each in plan["blockers"]) == found
        trainer.end()
        assert http.post("/resume_memory_occupation", json={"dry_run": True}).json()["blockers"] == []


def test_a_dry_run_adds_up_what_engines_need_of_a_disk(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda: 5 * MIB // 2)  # enough for each
    with served([site.member for site in sites.values()]) as http:
        for policy, blockers in (("file", 1), ("host", 0)):
            asked = {"dry_run": True, "restore": {"weights": policy}}
            found = http.post("/release_memory_occupation", json=asked).json()["blockers"]
            assert len(found) == blockers
        asked = {"dry_run": True, "restore": {"weights": "file"}, "selector": {"names": ["a"]}}
        assert http.post("/release_memory_occupation", json=asked).json()["blockers"] == []


def test_best_effort_resumes_in_turn_what_fits(fleet: Fleet, sites: Sites, trainer: Trainer) -> None:
    assert fleet.release().success
    trainer.fill_up_to(4 * MIB)
    result = fleet.resume(mode="best_effort")
    whole = [name for name, site in sites.items() if site.is_serving]
    assert whole
    assert [engine.name for engine in result.engines if engine.success] == whole
    assert {engine.kind for engine in result.failed} == {"out_of_device_memory"}
    assert all(sites[engine.name].is_released for engine in result.failed)
    trainer.end()
    assert [engine.name for engine in fleet.reconcile()] == [engine.name for engine in result.failed]
    assert all(site.is_serving for site in sites.values())


def test_resumes_wait_for_memory(coordinate: Callable[..., Fleet], sites: Sites, trainer: Trainer) -> None:
    fleet = coordinate()
    assert fleet.release().success
    trainer.fill_up_to(0)
    results: list[FleetResult] = []
    waiting = threading.Thread(target=lambda: results.append(fleet.resume(timeout_s=0, wait_for_memory_s=30)))
    waiting.start()
    polls = lambda: sum("GET /operations/" in text for site in sites.values() for text in site.wire.seen)  # noqa: E731
    wait_until(lambda: polls() >= 4)  # longer than an engine may be silent
    trainer.end()
    waiting.join()
    assert results[0].success, results[0].message


def test_a_reconciler_waits_for_no_memory(coordinate: Callable[..., Fleet], sites: Sites, trainer: Trainer) -> None:
    """It waited as long as the call that it repeats, with the locks that a release of the engine needs."""
    fleet = coordinate()
    assert fleet.release().success
    assert fleet.resume(wait_for_memory_s=3600).success
    assert sites["a"].http.post("/release_memory_occupation").is_success
    trainer.fill_up_to(0)
    assert [(each.name, each.kind) for each in fleet.reconcile()] == [("a", "out_of_device_memory")]
    trainer.end()
    assert [(each.name, each.success) for each in fleet.reconcile()] == [("a", True)]
