"""The coordinator is killed at each step; another one with its record carries on."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from memsaver_core import MemsaverError
from memsaver_core.contract.errors import IdempotencyKeyError
from memsaver_server.fleet import FileRecord, Fleet, FleetResult, RecordContent, RecordError, Selector
from memsaver_server.fleet.record import Known, MemoryRecord
from memsaver_server.operation.history import KEPT_S, MAX_KEPT
from tests.programs import Child
from tests.waiting import wait_until

from .conftest import LEASE_S, Sites
from .served_fleet import served
from .test_faults import check, is_there

#: When it dies: at this request to this engine, which is lost, or is carried out but not answered.
MOMENTS = {
    "asking": ("b", "GET /memory_occupation", "reset"),
    "preparing the first": ("a", '"prepare":true', "reset"),
    "the last is prepared": ("c", '"prepare":true', "reset_answer"),
    "committing": ("b", "/commit", "reset"),
    "one has committed": ("b", "/commit", "reset_answer"),
}


def coordinator(sites: Sites, folder: Path, verb: str, lease_s: float, **options: object) -> Child:
    """Start a coordinator of all engines with a record."""
    members = folder / "members.yaml"
    members.write_text(json.dumps([{"name": name, "url": site.wire.url} for name, site in sites.items()]))
    program = str(Path(__file__).with_name("coordinator.py"))
    return Child(program, str(members), str(folder / "record.json"), verb, str(lease_s), json.dumps(options))


def kill_at(sites: Sites, child: Child, engine: str, request: str, fault: str) -> None:
    sites[engine].wire.on(request, fault, times=1, then=child.process.kill)  # type: ignore[arg-type]


@pytest.mark.guards("the coordinator of a fleet ended in the middle, and engines stayed closed")
@pytest.mark.parametrize(("verb", "moment"), list(product(["release", "resume"], MOMENTS)))
def test_another_coordinator_carries_on(
    coordinate: Callable[..., Fleet], sites: Sites, tmp_path: Path, verb: str, moment: str
) -> None:
    record = FileRecord(tmp_path / "record.json")
    if verb == "resume":
        assert coordinate().release().success
    child = coordinator(sites, tmp_path, verb, 30)
    kill_at(sites, child, *MOMENTS[moment])
    assert child.process.wait(600) == -9
    results = coordinate(record=record).recover()
    before = "resume" if verb == "release" else "release"
    if moment == "asking":
        assert not results
    for result in results:
        check(result, sites, verb)
    done = moment in ("committing", "one has committed")
    wait_until(lambda: all(is_there(site, verb if done else before) for site in sites.values()))
    assert not coordinate(record=record).recover()


@pytest.mark.guards("the coordinator of a fleet ended in the middle, and engines stayed closed")
@pytest.mark.parametrize("verb", ["release", "resume"])
def test_engines_that_were_only_prepared_open_by_themselves(
    coordinate: Callable[..., Fleet], sites: Sites, tmp_path: Path, verb: str
) -> None:
    if verb == "resume":
        assert coordinate().release().success
    child = coordinator(sites, tmp_path, verb, LEASE_S / 4)
    kill_at(sites, child, *MOMENTS["the last is prepared"])
    assert child.process.wait(600) == -9
    wait_until(lambda: all(is_there(site, "resume" if verb == "release" else "release") for site in sites.values()))


def test_what_is_aborted_for_a_dead_coordinator_has_failed(sites: Sites, tmp_path: Path) -> None:
    """The audit log and the metrics called it cancelled, which nobody had asked for."""
    child = coordinator(sites, tmp_path, "release", 30)
    kill_at(sites, child, *MOMENTS["the last is prepared"])
    assert child.process.wait(600) == -9
    audit, record = tmp_path / "audit.log", FileRecord(tmp_path / "record.json")
    with served([site.member for site in sites.values()], record=record, audit_file=str(audit)):
        wait_until(lambda: audit.read_text().endswith("\n"))
    (line,) = map(json.loads, audit.read_text().splitlines())
    assert line["outcome"] == "failed"
    assert "the coordinator that had begun it is gone" in line["error"]


@pytest.mark.guards("the coordinator of a fleet ended in the middle, and engines stayed closed")
def test_a_commit_that_came_too_late_is_undone(coordinate: Callable[..., Fleet], sites: Sites, tmp_path: Path) -> None:
    child = coordinator(sites, tmp_path, "release", LEASE_S)
    sites["a"].wire.on("/commit", "delay", times=1)  # not committed before the lease has ended
    kill_at(sites, child, "b", "/commit", "reset_answer")
    assert child.process.wait(600) == -9
    sites["a"].wire.drop_waiting()
    wait_until(lambda: sites["a"].is_serving and sites["b"].is_released)
    (result,) = coordinate(record=FileRecord(tmp_path / "record.json")).recover()
    assert result.rolled_back
    assert "a failed while committing" in result.message
    assert all(site.is_serving for site in sites.values())


@pytest.mark.guards("the coordinator of a fleet ended in the middle, and engines stayed closed")
@pytest.mark.parametrize("request_", ["/abort", '"wait":true'])
def test_the_undo_is_carried_on(coordinate: Callable[..., Fleet], sites: Sites, tmp_path: Path, request_: str) -> None:
    sites["b"].engine.memory.fail("release", MemsaverError("no"))
    child = coordinator(sites, tmp_path, "release", 30)
    kill_at(sites, child, "b" if request_ == "/abort" else "c", request_, "reset")
    assert child.process.wait(600) == -9
    record = FileRecord(tmp_path / "record.json")
    (result,) = coordinate(record=record).recover()
    assert not result.success
    assert all(site.is_serving for site in sites.values())
    assert coordinate(record=record).release(operation_id=result.operation_id).success  # it was kept as succeeded
    assert all(site.is_released for site in sites.values())


def test_an_undo_that_is_carried_on_keeps_what_an_engine_kept(
    coordinate: Callable[..., Fleet], sites: Sites, tmp_path: Path
) -> None:
    """For another caller: the record does not say so. By itself the cache would come back as zeros."""
    for site in sites.values():
        site.engine.kv.fill_(7)
        site.http.post("/release_memory_occupation", json={"restore": {"kv_cache": "host"}}).raise_for_status()
    sites["b"].engine.memory.fail("resume", MemsaverError("no"))
    child = coordinator(sites, tmp_path, "resume", 30)
    kill_at(sites, child, "a", '"wait":true', "reset")
    assert child.process.wait(600) == -9
    fleet = coordinate(record=FileRecord(tmp_path / "record.json"))
    (result,) = fleet.recover()
    assert result.rolled_back, result.message
    assert fleet.resume().success
    assert [int(site.engine.kv.min()) for site in sites.values()] == [7, 7, 7]


def test_what_is_wanted_of_a_model_holds_for_an_engine_that_is_gone(
    coordinate: Callable[..., Fleet], sites: Sites, tmp_path: Path
) -> None:
    """Only the engine knew its model: an undo noted the wish anew, by its name and without options."""
    record = FileRecord(tmp_path / "record.json")
    with coordinate(record=record) as first:
        for name in sites:
            assert first.release(Selector(models=(f"model of {name}",)), mode="abort").success
    before = asyncio.run(record.load()).wanted
    child = coordinator(sites, tmp_path, "resume", 30)
    kill_at(sites, child, "a", "/commit", "reset_answer")
    assert child.process.wait(600) == -9
    sites["a"].wire.on("", "reset")
    fleet = coordinate(record=record)
    (result,) = fleet.recover()
    assert not result.success, result.message
    assert asyncio.run(record.load()).wanted == before


@pytest.mark.parametrize("moment", ["the last is prepared", "one has committed"])
def test_a_repeat_of_what_a_dead_coordinator_had_begun_gets_it_done(
    coordinate: Callable[..., Fleet], sites: Sites, tmp_path: Path, moment: str
) -> None:
    child = coordinator(sites, tmp_path, "release", 30)
    kill_at(sites, child, *MOMENTS[moment])
    assert child.process.wait(600) == -9
    record = FileRecord(tmp_path / "record.json")
    (operation_id,) = asyncio.run(record.load()).running
    result = coordinate(record=record).release(operation_id=operation_id)
    assert result.success, result.message
    assert all(site.is_released for site in sites.values())


@pytest.mark.guards("the coordinator of a fleet ended in the middle, and engines stayed closed")
def test_an_engine_that_drains_for_a_dead_coordinator_is_opened(
    coordinate: Callable[..., Fleet], sites: Sites, tmp_path: Path
) -> None:
    """It went on, and refused the repeat of the same call."""
    b, record, options = sites["b"], FileRecord(tmp_path / "record.json"), {"operation_id": "one", "timeout_s": 3600}
    child = coordinator(sites, tmp_path, "release", 30, **options)
    with ThreadPoolExecutor(1) as pool:
        with b.engine.request():
            for site in sites.values():
                wait_until(lambda site=site: site.http.get("/memory_occupation").json()["operation_id"])
            child.kill()
            fleet = coordinate(record=record)
            (result,) = fleet.recover()
            assert "All engines are as before" in result.message
            assert all(site.is_serving for site in sites.values())
            repeat = pool.submit(fleet.release, **options)
            wait_until(lambda: repeat.done() or not b.is_open)
        assert repeat.result().success, repeat.result().message
    assert all(site.is_released for site in sites.values())


def test_what_drains_for_another_caller_is_left_alone(
    coordinate: Callable[..., Fleet], sites: Sites, tmp_path: Path
) -> None:
    b, record = sites["b"], FileRecord(tmp_path / "record.json")
    with ThreadPoolExecutor(1) as pool:
        with b.engine.request():
            drains = pool.submit(b.http.post, "/release_memory_occupation", json={"timeout_s": 3600})
            wait_until(lambda: not b.is_open)
            child = coordinator(sites, tmp_path, "release", 30)
            for name in "ac":
                wait_until(lambda name=name: sites[name].http.get("/memory_occupation").json()["prepared"])
            child.kill()
            assert coordinate(record=record).recover()
        assert drains.result().is_success, drains.result().text
    assert [site.is_serving for site in sites.values()] == [True, False, True]


def test_an_id_is_its_request_after_a_restart(coordinate: Callable[..., Fleet], sites: Sites, tmp_path: Path) -> None:
    """It was answered "released" although another body had come, or a resume, and no memory was."""
    record = FileRecord(tmp_path / "record.json")
    assert coordinate(record=record).release(operation_id="one", tags=["kv_cache"]).success
    assert coordinate(record=record).resume().success
    fleet = coordinate(record=record)
    for call in (
        lambda: fleet.release(operation_id="one"),
        lambda: fleet.release(Selector(names=("a",)), operation_id="one", tags=["kv_cache"]),
        lambda: fleet.resume(operation_id="one", tags=["kv_cache"]),
    ):
        with pytest.raises(IdempotencyKeyError, match="'one' belongs to release one, a different request"):
            call()
    again = fleet.release(operation_id="one", tags=["kv_cache"])
    assert {engine.kind for engine in again.failed} == {"changed"}
    assert all(site.is_serving for site in sites.values())


def test_an_id_that_is_not_kept_any_more_is_new(
    coordinate: Callable[..., Fleet], sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was answered by what had been done under it, a day ago, for another request."""
    record = MemoryRecord()
    fleet = coordinate(record=record)
    assert fleet.release(operation_id="one").success
    monkeypatch.setattr("memsaver_server.fleet.record.KEPT_S", 0.0)
    assert fleet.resume(operation_id="one").resumed_bytes
    assert coordinate(record=record).release(operation_id="one").released_bytes
    assert coordinate(record=record).resume(operation_id="one").success
    assert all(site.is_serving for site in sites.values())


def test_what_was_cancelled_stays_so_after_a_restart(
    coordinate: Callable[..., Fleet], sites: Sites, tmp_path: Path
) -> None:
    record = FileRecord(tmp_path / "record.json")
    fleet = coordinate(record=record)
    with sites["b"].engine.request():
        running = threading.Thread(target=fleet.release, kwargs={"operation_id": "one"})
        running.start()
        wait_until(lambda: fleet.progress and fleet.progress.engines.get("a") == "prepared")
        fleet.cancel("one")
        running.join()
    again = coordinate(record=record).release(operation_id="one")
    assert (again.success, "it was cancelled" in again.message) == (False, True)
    assert all(site.is_serving for site in sites.values())


def test_ids_are_dropped_when_they_are_old_or_too_many() -> None:
    known = Known(digest="x", verb="release", outcome="succeeded", at=time.time())
    old = known.model_copy(update={"at": known.at - KEPT_S - 1})
    content = RecordContent(ids={"old": old, **{str(number): known for number in range(MAX_KEPT)}})
    assert content.first("old", "y") == ""
    content = content.noting(str(MAX_KEPT), known)
    assert list(content.ids) == [str(number) for number in range(1, MAX_KEPT + 1)]
    assert (content.first("1", "x"), content.first("1", "y")) == ("", "release 1")


def test_a_repeat_after_a_restart_acts_once(coordinate: Callable[..., Fleet], sites: Sites, tmp_path: Path) -> None:
    record = FileRecord(tmp_path / "record.json")
    for mode in ("all", "best_effort"):
        assert coordinate(record=record).release(operation_id=mode, mode=mode).success
        assert coordinate().resume(Selector(names=("b",))).success
        coordinate(record=record).release(operation_id=mode, mode=mode)
        assert sites["b"].is_serving
        assert coordinate(record=record).resume().success


def test_a_repeat_joins_what_engines_do_for_a_dead_coordinator(coordinate: Callable[..., Fleet], sites: Sites) -> None:
    """In mode best_effort it was answered as undone since, while it ran."""
    record, b = MemoryRecord(), sites["b"]

    def release() -> FleetResult:
        fleet = coordinate(record=record, silence_s=3600)
        return fleet.release(operation_id="one", mode="best_effort", timeout_s=3600)

    def calls() -> int:
        return sum("/release_memory_occupation" in text for text in b.wire.seen)

    with ThreadPoolExecutor(2) as pool:
        with b.engine.request():
            first = pool.submit(release)
            wait_until(lambda: calls() == 1)
            second = pool.submit(release)
            wait_until(lambda: second.done() or calls() == 2)
        assert second.result().success, second.result().message
        assert first.result().success
    assert all(site.is_released for site in sites.values())


@pytest.mark.parametrize("later", [(), ("b",)])
def test_a_repeat_does_not_undo_what_was_asked_since(
    coordinate: Callable[..., Fleet], sites: Sites, later: tuple[str, ...]
) -> None:
    """The coordinator had died while it carried out the first in mode best_effort, and was asked for another then."""

    class Begun(MemoryRecord):
        async def save(self, content: RecordContent) -> None:
            if all(known.outcome == "begun" for known in content.ids.values()):
                await super().save(content)

    dead, record = Begun(), MemoryRecord()
    assert coordinate(record=dead).release(operation_id="one", mode="best_effort").success
    asyncio.run(record.save(asyncio.run(dead.load())))
    fleet = coordinate(record=record)
    assert fleet.release(operation_id="one", mode="best_effort").success
    asyncio.run(record.save(asyncio.run(dead.load())))
    assert fleet.resume(Selector(names=later), operation_id="two").success
    before = asyncio.run(record.load()).wanted
    again = coordinate(record=record).release(operation_id="one", mode="best_effort")
    assert [(engine.name, engine.kind) for engine in again.failed] == [(name, "changed") for name in later or "abc"]
    assert asyncio.run(record.load()).wanted == before
    assert [site.is_serving for site in sites.values()] == [name in (later or "abc") for name in "abc"]


def test_what_a_coordinator_that_runs_has_prepared_is_left_to_it(
    coordinate: Callable[..., Fleet], sites: Sites, tmp_path: Path
) -> None:
    """A command with its record gave it up."""
    path = tmp_path / "record.json"
    with (
        served([site.member for site in sites.values()], record=FileRecord(path), name="one") as http,
        ThreadPoolExecutor(1) as pool,
    ):
        with sites["b"].engine.request():
            releasing = pool.submit(http.post, "/release_memory_occupation", json={"timeout_s": 3600})
            for name in "ac":
                wait_until(lambda name=name: sites[name].http.get("/memory_occupation").json()["prepared"])
            fleet = coordinate(record=FileRecord(path))
            for call in (lambda: fleet.resume(Selector(names=("c",))), fleet.recover):
                with pytest.raises(
                    RecordError, match="has operations of memsaver-coordinator one, which runs: call that"
                ):
                    call()
            assert [engine.state for engine in fleet.status().engines] == ["prepared", "releasing", "prepared"]
        assert releasing.result().is_success, releasing.result().text
    assert fleet.resume().success


def test_an_undo_that_another_coordinator_had_begun_is_followed(coordinate: Callable[..., Fleet], sites: Sites) -> None:
    """It was refused, as the other coordinator's caller had another patience."""
    record, memory = MemoryRecord(), sites["c"].engine.memory
    sites["b"].engine.memory.fail("release", MemsaverError("no"))
    memory.hold("resume")
    before = memory.reached.get("resume", 0)

    def undos() -> int:
        return sum(each["operation"] == "resume" for each in sites["c"].http.get("/operations").json()["operations"])

    known = undos()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(coordinate(record=record, silence_s=3600).release, timeout_s=3600)
        wait_until(lambda: memory.reached.get("resume", 0) > before)
        content = asyncio.run(record.load())
        earlier = {key: each.model_copy(update={"sent": None}) for key, each in content.running.items()}  # version
        asyncio.run(record.save(content.model_copy(update={"running": earlier})))
        second = pool.submit(coordinate(record=record, silence_s=3600).recover)
        wait_until(lambda: second.done() or undos() == known + 2)
        memory.heal()
        first.result()  # all as before, or all but the engine on which the second's undo runs at its look
        assert [each.rolled_back for each in second.result()] == [True]
    assert all(site.is_serving for site in sites.values())


def paused(sites: Sites, request_: str, act: Callable[[], FleetResult]) -> Future[FleetResult]:
    """Have a coordinator act, and stop at this request to b until the wire goes on, as if its host did not run."""
    arrived = threading.Event()
    sites["b"].wire.on(request_, "delay", times=1, then=arrived.set)
    acting = ThreadPoolExecutor(1).submit(act)
    wait_until(lambda: arrived.is_set() or acting.done())
    return acting


def test_an_end_that_is_noted_late_does_not_undo_a_later_wish(coordinate: Callable[..., Fleet], sites: Sites) -> None:
    """By a coordinator that did not run while another one ended its operation and was given the next."""
    record = MemoryRecord()
    late = coordinate(record=record, silence_s=3600)
    acting = paused(sites, "/commit", lambda: late.release(operation_id="one"))
    fleet = coordinate(record=record)
    (ended,) = fleet.recover()
    assert ended.success, ended.message
    assert fleet.resume(Selector(names=("a",))).success
    before = asyncio.run(record.load())
    sites["b"].wire.go_on()
    acting.result()
    assert asyncio.run(record.load()) == before
    assert not fleet.reconcile()
    assert [site.is_serving for site in sites.values()] == [True, False, False]


def test_an_end_that_is_noted_late_does_not_end_a_repeat(coordinate: Callable[..., Fleet], sites: Sites) -> None:
    """Of the same id, which the other coordinator carries out."""
    record = MemoryRecord()
    late = coordinate(record=record, silence_s=3600)
    acting = paused(sites, '"prepare":true', lambda: late.release(operation_id="one"))
    sites["c"].engine.memory.hold("release")
    repeating = paused(sites, "/commit", lambda: coordinate(record=record).release(operation_id="one"))
    before = asyncio.run(record.load())
    assert before.running["one"].stage == "committing"
    late.cancel("one")
    acting.result()
    assert asyncio.run(record.load()) == before
    sites["b"].wire.go_on()
    sites["c"].engine.memory.heal()
    assert repeating.result().success
    assert asyncio.run(record.load()).wanted[-1].operation_id == "one"
