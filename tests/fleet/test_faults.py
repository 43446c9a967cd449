"""Engines that fail, hang, are cut off or slow at each step: at the end all is done, or all is as before, or the answer
says which engine is not, and why. Never half in silence."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from memsaver_core import MemsaverError
from memsaver_server import clock
from memsaver_server.fleet import (
    AsyncFleet,
    FileRecord,
    Fleet,
    FleetResult,
    MemoryRecord,
    RecordContent,
    RecordError,
    Selector,
    StaticMembership,
)
from tests.waiting import wait_until

from .conftest import SILENCE_S, Site, Sites
from .moments import Moments
from .served_fleet import served

#: The steps of an operation, by a part of the request that each engine gets in it.
STEPS = {"asking": "GET /memory_occupation", "preparing": '"prepare":true', "committing": "/commit"}
#: Faults of the network to engine b, once or from then on.
FAULTS = ["reset once", "reset_answer once", "silence once", "silence_answer once", "dead", "cut off"]


def after(seconds: float, call: Callable[[], object]) -> None:
    """Have a thread call once so much time has passed on the clock by which the fleet's patience ends, too."""
    due, changed = clock.monotonic() + seconds, threading.Condition()

    def wait() -> None:
        with changed:
            while (left := due - clock.monotonic()) > 0:
                clock.wait(changed, left)
        call()

    threading.Thread(target=wait, daemon=True).start()


def inject(site: Site, step: str, fault: str) -> None:
    """Have the network fail at the first request of ``step``, and then as ``fault`` says."""
    if fault == "dead":
        site.wire.on(step, "reset", times=1, then=site.wire.drop)
    elif fault == "cut off":
        site.wire.on(step, "silence", times=1, then=site.wire.silence)
    else:
        site.wire.on(step, fault.split()[0], times=1)  # type: ignore[arg-type]


def is_there(site: Site, verb: str) -> bool:
    """Whether the engine is as ``verb`` leaves it, and whole."""
    return site.is_released if verb == "release" else site.is_serving


def check(result: FleetResult, sites: Sites, verb: str) -> None:
    """The answer is true, and names each engine that is not as the others."""
    back = "resume" if verb == "release" else "release"
    for engine in result.engines:
        resident = bool(sites[engine.name].engine.resident())
        assert engine.state in ("unknown", "prepared", "releasing", "resuming", "resident" if resident else "released")
    moved = {name for name, site in sites.items() if bool(site.engine.resident()) is (verb == "resume")}
    if result.success:
        assert moved == set(sites)
        return
    assert result.failed or "is gone" in result.message
    assert all(engine.error and engine.phase and engine.kind for engine in result.failed)
    for name in moved:
        assert f"{name}, which is " in result.message
    if result.rolled_back or "All engines are as before" in result.message:
        assert all(is_there(site, back) for site in sites.values())


def settle(fleet: Fleet, sites: Sites, verb: str, result: FleetResult) -> None:
    """Once the faults are over, all engines come to the same, without anybody's help but the coordinator's."""
    for site in sites.values():
        site.wire.heal()
        site.engine.memory.heal()
    to = verb if result.success else "resume" if verb == "release" else "release"

    def settled() -> bool:
        fleet.reconcile()
        return all(is_there(site, to) for site in sites.values())

    wait_until(settled, interval_s=0.1)


def test_a_resume_waits_for_an_update_beyond_its_limit(
    fleet: Fleet, sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine had said that it waits, and was given up as one that does not answer."""
    assert fleet.release().success
    b, go_on = sites["b"], threading.Event()
    monkeypatch.setattr(b.engine, "updates_asleep", True, raising=False)
    with ThreadPoolExecutor(1) as pool:
        with b.attachment.lifecycle.writing(version="v2"):
            resuming = pool.submit(fleet.resume, Selector(names=("b",)), timeout_s=0, weights_version="v2")
            wait_until(lambda: resuming.done() or "wait_for_weights" in b.http.get("/operations").text)
            after(4 * SILENCE_S, go_on.set)
            assert go_on.wait(600)
        assert resuming.result().success
    assert b.is_serving


def test_what_an_engine_does_beyond_its_limit_is_named(fleet: Fleet, sites: Sites) -> None:
    assert fleet.release().success
    sites["b"].engine.memory.hold("reserve")
    (failed,) = fleet.resume(timeout_s=0).failed
    sites["b"].engine.memory.heal()
    assert (failed.name, failed.phase, failed.kind) == ("b", "preparing", "hung")
    assert "is not done with its resume after" in failed.error
    assert "that is in phase 'reserve'" in failed.error


def run(fleet: Fleet, verb: str) -> FleetResult:
    return getattr(fleet, verb)(timeout_s=0.3)


@pytest.mark.guards("a fleet-wide sleep reached some engines, and there was no way back")
@pytest.mark.parametrize(("verb", "step", "fault"), list(product(["release", "resume"], STEPS, FAULTS)))
def test_the_network_fails_at_each_step(fleet: Fleet, sites: Sites, verb: str, step: str, fault: str) -> None:
    if verb == "resume":
        assert fleet.release().success
    inject(sites["b"], STEPS[step], fault)
    result = run(fleet, verb)
    check(result, sites, verb)
    if fault in ("dead", "cut off"):
        assert [engine.name for engine in result.failed] == ["b"]
        assert result.failed[0].phase == step
    elif fault.startswith("reset"):
        assert result.success
    settle(fleet, sites, verb, result)


@pytest.mark.parametrize(
    ("verb", "undoing", "fault"),
    list(product(["release", "resume"], ["/abort", "GET /memory_occupation", '"wait":true'], ["dead", "cut off"])),
)
def test_the_network_fails_while_a_commit_is_undone(
    fleet: Fleet, sites: Sites, verb: str, undoing: str, fault: str
) -> None:
    if verb == "resume":
        assert fleet.release().success
    sites["b"].engine.memory.fail(verb, MemsaverError("no"))
    away = sites["b"] if undoing == "/abort" else sites["c"]
    sites["c"].wire.on("/commit", "delay", times=1, then=lambda: inject(away, undoing, fault))
    after(0.2, sites["c"].wire.go_on)
    result = run(fleet, verb)
    assert not result.success
    check(result, sites, verb)
    settle(fleet, sites, verb, result)


@pytest.mark.parametrize(
    ("verb", "step"),
    [("release", "check_release"), ("release", "release"), ("resume", "reserve"), ("resume", "resume")],
)
@pytest.mark.parametrize("kind", ["fails", "hangs", "is slow"])
def test_an_engine_fails_at_each_step(fleet: Fleet, sites: Sites, verb: str, step: str, kind: str) -> None:
    if verb == "resume":
        assert fleet.release().success
    memory = sites["b"].engine.memory
    if kind == "fails":
        memory.fail(step, MemsaverError("no"))
    else:
        memory.hold(step)
    if kind == "is slow":
        after(0.3, memory.heal)
    result = run(fleet, verb)
    check(result, sites, verb)
    assert result.success == (kind == "is slow")
    settle(fleet, sites, verb, result)


@pytest.mark.guards("the coordinator of a fleet ended in the middle, and engines stayed closed")
@pytest.mark.parametrize("verb", ["release", "resume"])
def test_leases_end_before_the_commit(coordinate: Callable[..., Fleet], sites: Sites, verb: str) -> None:
    fleet = coordinate(silence_s=10)  # else it would send the commit again before the lease has ended
    if verb == "resume":
        assert fleet.release().success

    def arrive() -> None:
        """The commit of b arrives after its lease has ended."""
        wait_until(lambda: is_there(sites["b"], "resume" if verb == "release" else "release"))
        sites["b"].wire.go_on()

    late = threading.Thread(target=arrive)
    sites["b"].wire.on("/commit", "delay", times=1, then=late.start)
    result = run(fleet, verb)
    late.join()
    assert [(engine.name, engine.kind) for engine in result.failed] == [("b", "lease_ended")]
    assert result.rolled_back
    check(result, sites, verb)
    settle(fleet, sites, verb, result)


def test_a_coordinator_that_did_not_run_takes_no_engine_for_silent(sites: Sites) -> None:
    """It finds the answers, and the end of its patience, at the same moment."""

    async def run() -> None:
        members = StaticMembership([site.member for site in sites.values()])
        async with AsyncFleet(members, silence_s=0.5) as fleet:
            asking = asyncio.create_task(fleet.status())
            while not all(site.wire.seen for site in sites.values()):
                await asyncio.sleep(0)
            time.sleep(1)  # which is the fault
            assert [engine.error for engine in (await asking).engines] == [""] * len(sites)

    asyncio.run(run())


def test_a_record_that_cannot_be_written_moves_nothing(coordinate: Callable[..., Fleet], sites: Sites) -> None:
    class Full(MemoryRecord):
        async def save(self, content):  # type: ignore[no-untyped-def]
            if any(running.stage == "committing" for running in content.running.values()):
                raise RecordError("the disk is full")
            await super().save(content)

    fleet = coordinate(record=Full())
    with pytest.raises(Exception, match="the disk is full"):
        fleet.release()
    assert all(site.is_serving for site in sites.values())


def test_what_was_answered_as_not_done_is_not_done_later(
    coordinate: Callable[..., Fleet], sites: Sites, tmp_path: Path
) -> None:
    """It was answered "the record cannot be written", and carried out by the reconciler seconds later."""
    obstacle = tmp_path / "record.json.new"
    obstacle.mkdir()
    fleet = coordinate(record=FileRecord(tmp_path / "record.json"))
    with pytest.raises(RecordError, match="cannot be written"):
        fleet.release(operation_id="one", mode="best_effort")
    assert not fleet.reconcile()
    assert not fleet.status().wanted
    assert all(site.is_serving for site in sites.values())
    obstacle.rmdir()
    assert not fleet.reconcile()
    assert fleet.release(Selector(names=("a",)), operation_id="one").success  # the id stands for nothing yet


def test_what_an_engine_kept_is_kept_by_an_undo(fleet: Fleet, sites: Sites) -> None:
    assert fleet.release(Selector(names=("a", "c"))).success
    assert fleet.release(Selector(names=("b",)), restore={"weights": "discard"}).success
    sites["b"].engine.memory.fail("resume", MemsaverError("no"))
    result, again = fleet.resume(), fleet.resume()
    for site in sites.values():
        site.write()
    assert (result.rolled_back, again.success) == (True, True), (result.message, again.message)
    assert [engine.lost for engine in result.engines] == [(), ("weights",), ()]


@pytest.mark.parametrize("at", ["Infinity", "1e400", "NaN"])
def test_a_record_with_a_time_that_is_none_is_refused_as_it_is(sites: Sites, tmp_path: Path, at: str) -> None:
    """It was read, and then written so that it could not be read any more."""
    path = tmp_path / "record.json"
    content = f'{{"ids": {{"k": {{"digest": "", "verb": "release", "outcome": "succeeded", "at": {at}}}}}}}'
    path.write_text(content)
    with served([site.member for site in sites.values()], record=FileRecord(path)) as http:
        refused = http.post("/release_memory_occupation")
        assert (refused.status_code, "finite number" in refused.text) == (503, True), refused.text
    assert path.read_text() == content


def test_an_undo_does_not_need_the_record(coordinate: Callable[..., Fleet], sites: Sites) -> None:
    """What is wanted cannot be read: what each engine had kept is kept all the same, and nothing is left half done."""

    class Unreadable(Moments):
        broken = False

        async def load(self) -> RecordContent:
            if self.broken:
                raise RecordError("it is no JSON")
            return await super().load()

    record = Unreadable()
    fleet = coordinate(record=record)
    for site in sites.values():
        site.engine.kv.fill_(7)
    assert fleet.release(restore={"kv_cache": "host"}).success  # by itself it would come back as zeros
    sites["b"].engine.memory.fail("resume", MemsaverError("no"))
    record.at("committing", lambda: setattr(record, "broken", True))
    result = fleet.resume()
    assert result.rolled_back, result.message
    assert all(site.is_released for site in sites.values())
    record.broken = False
    assert fleet.resume().success
    assert [int(site.engine.kv.min()) for site in sites.values()] == [7, 7, 7]


def test_an_engine_that_dies_after_its_commit_is_no_success(coordinate: Callable[..., Fleet], sites: Sites) -> None:
    """It counted as released, and the operation as a success."""
    record = Moments()
    lost = lambda: sites["b"].wire.on("GET /memory_occupation", "reset", times=2)  # noqa: E731
    record.at("committing", lost)
    result = coordinate(record=record).release(operation_id="one")
    assert [(engine.name, engine.kind, engine.state) for engine in result.failed] == [("b", "unreachable", "unknown")]
    assert "b failed while committing: no answer" in result.message
    assert [wanted.state for wanted in asyncio.run(record.load()).wanted] == ["released"]
    assert all(site.is_released for site in sites.values())


def test_what_another_has_undone_on_all_engines_is_not_wanted(coordinate: Callable[..., Fleet], sites: Sites) -> None:
    """While one coordinator commits, all is moved back, as another one with its record does."""
    record = Moments()
    fleet = coordinate(record=record, silence_s=3600)
    arrived = threading.Semaphore(0)

    def delay_confirmation() -> None:
        for site in sites.values():
            site.wire.on("GET /memory_occupation", "delay", times=1, then=arrived.release)

    record.at("committing", delay_confirmation)
    with ThreadPoolExecutor(1) as pool:
        releasing = pool.submit(fleet.release, operation_id="one")
        for _ in sites:
            arrived.acquire()
        for site in sites.values():
            site.http.post("/resume_memory_occupation").raise_for_status()
            site.wire.go_on()
        assert {engine.kind for engine in releasing.result().failed} == {"changed"}
    content = asyncio.run(record.load())
    assert (content.wanted, content.ids["one"].outcome) == ((), "failed")
    assert not fleet.reconcile()
    assert all(site.is_serving for site in sites.values())
