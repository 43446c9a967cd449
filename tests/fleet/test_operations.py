"""Releases and resumes of a fleet: all or none, and what the answers say."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from memsaver_core import MemsaverError
from memsaver_core.contract.reports import OperationReport
from memsaver_core.contract.requests import FleetMode as Mode
from memsaver_core.contract.requests import MemoryRequest
from memsaver_core.phases import PhaseLog
from memsaver_server import Settings, attach
from memsaver_server.fleet import (
    AsyncFleet,
    Fleet,
    FleetError,
    FleetResult,
    Member,
    MemoryRecord,
    RecordContent,
    Selector,
    StaticMembership,
)
from tests.waiting import wait_until

from .conftest import Sites
from .light_engine import LightEngine
from .served_fleet import TRUST


def states(result: FleetResult) -> dict[str, str]:
    return {engine.name: engine.state for engine in result.engines}


def test_all_are_released_and_resumed(fleet: Fleet, sites: Sites) -> None:
    released = fleet.release()
    assert released.success
    assert states(released) == dict.fromkeys("abc", "released")
    assert all(site.is_released for site in sites.values())
    assert [engine.released_bytes for engine in released.engines] == [2 << 20] * 3
    assert all(engine.operation_id and engine.seconds > 0 and engine.url for engine in released.engines)
    resumed = fleet.resume()
    assert resumed.success
    assert states(resumed) == dict.fromkeys("abc", "resident")
    assert all(site.is_serving for site in sites.values())
    assert [engine.resumed_bytes for engine in resumed.engines] == [2 << 20] * 3


def test_repeats_succeed(fleet: Fleet) -> None:
    for call in (fleet.release, fleet.release, fleet.resume, fleet.resume):
        assert call().success


@pytest.mark.guards("a fleet-wide sleep reached some engines, and there was no way back")
@pytest.mark.parametrize(("verb", "step"), [("release", "check_release"), ("resume", "reserve")])
def test_one_that_cannot_prepare_leaves_all_as_before(fleet: Fleet, sites: Sites, verb: str, step: str) -> None:
    if verb == "resume":
        fleet.release()
    before = states(fleet.release() if verb == "resume" else fleet.resume())
    sites["b"].engine.memory.fail(step, MemsaverError("no room for b"))
    result = getattr(fleet, verb)()
    assert not result.success
    assert not result.rolled_back
    assert states(result) == before
    assert [(engine.name, engine.phase, engine.error) for engine in result.failed] == [
        ("b", "preparing", "no room for b")
    ]
    assert "b failed while preparing: no room for b. All engines are as before" in result.message
    good = "is_released" if verb == "resume" else "is_serving"
    assert all(getattr(site, good) for site in sites.values())


def test_one_that_goes_on_preparing_after_its_answer_is_undone() -> None:
    """It was closed to all until its lease ended."""
    engine = LightEngine("slow")
    with ExitStack() as ending:
        attachment = ending.enter_context(attach(engine, settings=Settings(phase_timeout_s=0.2)))
        ending.callback(engine.close)
        engine.memory.hold("check_release")
        members = StaticMembership([Member("slow", attachment.url)])
        fleet = ending.enter_context(Fleet(members, verify=TRUST, lease_s=3600))
        result = fleet.release()
        assert [each.kind for each in result.failed] == ["phase_timeout"]
        engine.memory.heal()
        http = ending.enter_context(httpx.Client(base_url=attachment.url, timeout=600, verify=False))
        last = lambda: http.get("/operations").json()["operations"][0]  # noqa: E731
        wait_until(lambda: last()["finished_at"])
        assert last()["answer"]["error"]["type"] == "cancelled", "by the fleet, not by the end of its lease"
        assert http.get("/memory_occupation").json()["admission"]["open"]


@pytest.mark.guards("a fleet-wide sleep reached some engines, and there was no way back")
@pytest.mark.parametrize("verb", ["release", "resume"])
def test_one_that_fails_to_commit_is_undone_on_all(fleet: Fleet, sites: Sites, verb: str) -> None:
    before = states(fleet.release() if verb == "resume" else fleet.resume())
    sites["b"].engine.memory.fail(verb, MemsaverError("the driver refused"))
    result = getattr(fleet, verb)()
    assert not result.success
    assert result.rolled_back
    assert states(result) == before
    assert [(engine.name, engine.phase) for engine in result.failed] == [("b", "committing")]
    assert "b failed while committing: the driver refused" in result.message
    assert "all engines are as before" in result.message
    good = "is_released" if verb == "resume" else "is_serving"
    assert all(getattr(site, good) for site in sites.values())
    assert getattr(fleet, verb)().success  # and can be repeated


def test_one_that_fails_for_good_is_not_called_as_before(fleet: Fleet, sites: Sites) -> None:
    sites["b"].engine.memory.fail("release", MemsaverError("rank 1 has ended"), ends=True)
    result = fleet.release()
    assert states(result) == {"a": "resident", "b": "failed", "c": "resident"}
    assert not result.rolled_back
    assert "b failed while committing: rank 1 has ended" in result.message
    assert "undone, but not on b, which is failed" in result.message
    again = fleet.release()
    assert [engine.name for engine in again.failed] == ["b"]
    assert "All engines are as before" in again.message


def test_nothing_is_prepared_where_nobody_asked_for_it(fleet: Fleet, sites: Sites) -> None:
    sites["c"].wire.cut()
    result = fleet.release()
    assert [engine.phase for engine in result.failed] == ["asking"]
    assert result.message.endswith("As before are all but c, which is unknown")


def test_an_undo_leaves_released_what_was_released_before(fleet: Fleet, sites: Sites) -> None:
    assert fleet.release(Selector(names=("a",))).success
    assert fleet.release(Selector(names=("c",)), tags=["kv_cache"]).success
    sites["b"].engine.memory.fail("release", MemsaverError("no"))
    result = fleet.release()
    assert result.rolled_back
    assert [sites[name].engine.resident() for name in "abc"] == [set(), {"weights", "kv_cache"}, {"weights"}]


def hibernating(monkeypatch: pytest.MonkeyPatch, memory: Any, *, already: bool = False) -> list[bool]:
    """Have a light engine's memory hibernate; whether it is hibernated."""
    status, release, resume = memory.status, memory.release, memory.resume
    hibernated = [already]

    def release_all(request: MemoryRequest, *, log: PhaseLog) -> OperationReport:
        hibernated[0] = request.hibernate
        return release(request.model_copy(update={"hibernate": False}), log=log)

    def resume_all(request: MemoryRequest, *, log: PhaseLog) -> OperationReport:
        hibernated[0] = False
        return resume(request, log=log)

    monkeypatch.setattr(memory, "status", lambda: status().model_copy(update={"hibernated": hibernated[0]}))
    monkeypatch.setattr(memory, "release", release_all)
    monkeypatch.setattr(memory, "resume", resume_all)
    monkeypatch.setattr(memory, "hibernation_obstacles", list)
    return hibernated


def test_the_repeat_of_a_hibernation_is_no_success_if_the_engine_is_only_released(
    fleet: Fleet, sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    hibernated = hibernating(monkeypatch, sites["a"].engine.memory)
    a = Selector(names=("a",))
    assert fleet.release(a, hibernate=True, operation_id="asleep").success
    assert hibernated == [True]
    assert fleet.resume(a).success
    assert fleet.release(a).success
    again = fleet.release(a, hibernate=True, operation_id="asleep")
    assert [(engine.name, engine.kind) for engine in again.failed] == [("a", "changed")]


def test_an_undo_hibernates_again_what_was_hibernated(
    fleet: Fleet, sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By somebody who had asked the engine itself, so that no wish of the fleet says so."""
    for site in sites.values():
        assert site.http.post("/release_memory_occupation").is_success
    hibernated = hibernating(monkeypatch, sites["a"].engine.memory, already=True)
    sites["b"].engine.memory.fail("resume", MemsaverError("no"))
    result = fleet.resume()
    assert (result.success, result.rolled_back) == (False, True)
    assert all(site.is_released for site in sites.values())
    assert hibernated == [True]


def test_a_closed_fleet_leaves_no_caller_waiting(coordinate: Callable[..., Fleet], sites: Sites) -> None:
    """Calls in progress end first, what is watched ends, and later calls are refused."""
    fleet = coordinate()
    with ThreadPoolExecutor(3) as pool:
        with sites["b"].engine.request():
            releasing = pool.submit(fleet.release, timeout_s=600)
            watching = pool.submit(list, fleet.watch())
            wait_until(lambda: fleet.progress and fleet.progress.engines.get("a") == "prepared")
            closing = pool.submit(fleet.close)
            wait_until(watching.done)
            with pytest.raises(FleetError, match="closed"):
                fleet.status()
            assert not closing.done()
        assert releasing.result().success
        closing.result()
    fleet.close()
    assert watching.result()
    with pytest.raises(FleetError, match="closed"):
        list(fleet.watch())


def test_a_fleet_that_cannot_be_made_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(TypeError, match="no_such_option"):
        Fleet(StaticMembership([]), no_such_option=1)  # type: ignore[call-arg]
    assert threading.active_count() == before


def test_best_effort_does_what_it_can(fleet: Fleet, sites: Sites) -> None:
    sites["b"].engine.memory.fail("release", MemsaverError("no"))
    sites["c"].wire.cut()
    result = fleet.release(mode="best_effort")
    assert not result.success
    assert result.message.startswith("released on 1 of 3 engines; ")
    assert states(result) == {"a": "released", "b": "resident", "c": "unknown"}
    assert {engine.name: engine.kind for engine in result.failed} == {"b": "error", "c": "unreachable"}


def test_selectors(fleet: Fleet, sites: Sites) -> None:
    assert [engine.name for engine in fleet.status(Selector(names=("c", "a"))).engines] == ["a", "c"]
    assert [engine.name for engine in fleet.status(Selector(models=("model of b",))).engines] == ["b"]
    gpus = fleet.status().engines[0].gpus
    assert len(fleet.status(Selector(gpus=gpus)).engines) == 3
    assert not fleet.status(Selector(hosts=("elsewhere",))).engines
    with pytest.raises(FleetError, match=r'no engine of the fleet matches {"labels":{"role":"none"}}$'):
        fleet.release(Selector(labels={"role": "none"}))
    assert fleet.release(Selector(models=("model of b",))).success
    assert [site.is_serving for site in sites.values()] == [True, False, True]
    with pytest.raises(FleetError, match="the fleet has no engine 'typo'; nothing was done"):
        fleet.release(Selector(names=("a", "typo")))
    assert sites["a"].is_serving


def test_wrong_arguments_are_refused(fleet: Fleet, sites: Sites) -> None:
    with pytest.raises(FleetError, match="no option 'at_least'"):
        fleet.release(at_least=1)
    with pytest.raises(FleetError, match="unknown mode"):
        fleet.release(mode="some")  # type: ignore[arg-type]
    with pytest.raises(FleetError, match="no option 'dry_run'"):  # on which only the fleet's address acts
        fleet.release(dry_run=True)
    with pytest.raises(FleetError, match="send tags instead of at_least_bytes"):
        fleet.release(at_least_bytes=1)
    assert all(site.is_serving for site in sites.values())
    result = fleet.release(tags=["wieghts"])
    assert {engine.kind for engine in result.failed} == {"unknown_tag"}
    assert "All engines are as before" in result.message


def test_requests_in_flight_are_drained_on_all(fleet: Fleet, sites: Sites) -> None:
    with sites["b"].engine.request():
        result = fleet.release(timeout_s=0.2)
        assert [(engine.name, engine.kind) for engine in result.failed] == [("b", "drain_timeout")]
    assert all(site.is_serving for site in sites.values())


def test_leases_are_renewed_while_others_drain(coordinate: Callable[..., Fleet], sites: Sites) -> None:
    fleet = coordinate(lease_s=0.8)
    request = sites["b"].engine.request()
    with request:
        releasing = threading.Thread(target=lambda: results.append(fleet.release()))
        results: list[FleetResult] = []
        releasing.start()
        prepares = lambda: sum('"prepare":true' in text for text in sites["a"].wire.seen)  # noqa: E731
        wait_until(lambda: prepares() >= 4)  # more than one lease ago
    releasing.join()
    assert results[0].success, results[0].message


def test_cancelling_leaves_all_as_before(fleet: Fleet, sites: Sites) -> None:
    results: list[FleetResult] = []
    with sites["b"].engine.request():
        releasing = threading.Thread(target=lambda: results.append(fleet.release(operation_id="x1")))
        releasing.start()
        wait_until(lambda: fleet.progress and fleet.progress.engines.get("a") == "prepared")
        cancelled = fleet.cancel("x1")
    releasing.join()
    assert results == [cancelled]
    assert "it was cancelled" in cancelled.message
    assert all(site.is_serving for site in sites.values())
    with pytest.raises(FleetError):
        fleet.cancel("x1")


def test_it_can_be_cancelled_until_the_commit_is_noted(sites: Sites) -> None:
    """A cancel that came while the record was written was accepted, and the operation carried out."""

    class Cancels(MemoryRecord):
        async def save(self, content: RecordContent) -> None:
            await super().save(content)
            if any(running.stage == "committing" for running in content.running.values()):
                cancels.append(asyncio.create_task(fleet.cancel("x1")))
                await asyncio.sleep(0)

    async def release() -> None:
        async with fleet:
            result = await fleet.release(operation_id="x1")
            assert "it was cancelled" in result.message
            assert await cancels[0] == result

    cancels: list[asyncio.Task[FleetResult]] = []
    fleet = AsyncFleet(StaticMembership([site.member for site in sites.values()]), record=Cancels())
    asyncio.run(release())
    assert all(site.is_serving for site in sites.values())


def test_what_another_has_prepared_is_neither_joined_nor_undone(coordinate: Callable[..., Fleet], sites: Sites) -> None:
    """Its owner is named. A second coordinator committed it, and one that gave up aborted it."""
    first, second = coordinate(), coordinate()
    results: list[FleetResult] = []
    with sites["b"].engine.request():
        releasing = threading.Thread(target=lambda: results.append(first.release(timeout_s=60)))
        releasing.start()
        wait_until(lambda: first.progress and first.progress.engines.get("a") == "prepared")
        for _ in range(2):
            refused = second.release(Selector(names=("a",)), timeout_s=60)
            (failed,) = refused.failed
            assert (failed.kind, failed.state) == ("conflict", "prepared")
            assert "is prepared by 127.0.0.1 memsaver-coordinator " in failed.error
            assert "All engines are as before" in refused.message
        assert not second.recover()
        progress = first.progress
        assert progress is not None
        assert progress.engines["a"] == "prepared"
    releasing.join()
    assert results[0].success, results[0].message
    assert all(site.is_released for site in sites.values())


def test_a_fleet_leaves_alone_what_a_caller_has_prepared(fleet: Fleet, sites: Sites) -> None:
    body, key = {"prepare": True, "lease_s": 60}, {"Idempotency-Key": "of a caller"}
    found = sites["b"].http.post("/release_memory_occupation", json=body, headers=key).json()["operation_id"]
    result = fleet.release()
    assert [(engine.name, engine.kind) for engine in result.failed] == [("b", "conflict")]
    assert f"release {found} of all tags is prepared by " in result.failed[0].error
    assert [sites["a"].is_serving, sites["c"].is_serving] == [True, True]
    committed = sites["b"].http.post(f"/operations/{found}/commit", headers=key)
    assert committed.json()["state"] == "released"


def test_what_waits_for_its_turn_can_be_cancelled(fleet: Fleet, sites: Sites) -> None:
    results: list[FleetResult] = []
    sites["b"].engine.memory.hold("release")
    first = threading.Thread(target=lambda: results.append(fleet.release(operation_id="first")))
    first.start()
    wait_until(lambda: fleet.progress and fleet.progress.stage == "committing")
    with pytest.raises(FleetError, match="moves memory already"):
        fleet.cancel("first")
    second = threading.Thread(target=lambda: results.append(fleet.resume(operation_id="second")))
    second.start()
    third = threading.Thread(target=lambda: results.append(_cancelled(fleet, "second")))
    third.start()
    wait_until(lambda: len(fleet.operations()) == 2)
    sites["b"].engine.memory.heal()
    for thread in (first, second, third):
        thread.join()
    assert [result.operation_id for result in results if result.success] == ["first"]
    assert sum("it was cancelled" in result.message for result in results) == 2
    assert all(site.is_released for site in sites.values())


def _cancelled(fleet: Fleet, operation_id: str) -> FleetResult:
    wait_until(lambda: any(one.operation_id == operation_id for one in fleet.operations()))
    return fleet.cancel(operation_id)


def test_an_engine_that_leaves_meanwhile_is_not_left_half_done(sites: Sites, tmp_path: Path) -> None:
    path = tmp_path / "members.yaml"
    path.write_text("\n".join(f"- {{name: {name}, url: '{site.wire.url}'}}" for name, site in sites.items()))
    results: list[FleetResult] = []
    with Fleet(StaticMembership(path)) as fleet:
        with sites["b"].engine.request():
            releasing = threading.Thread(target=lambda: results.append(fleet.release()))
            releasing.start()
            wait_until(lambda: fleet.progress and fleet.progress.engines.get("c") == "prepared")
            path.write_text(f"- {{name: a, url: '{sites['a'].wire.url}'}}")
            assert [engine.name for engine in fleet.status().engines] == ["a"]
        releasing.join()
    assert results[0].success, results[0].message
    assert all(site.is_released for site in sites.values())


def test_who_is_selected_is_decided_when_its_turn_comes(sites: Sites, tmp_path: Path) -> None:
    """It acted on the engines that had the label before it waited for their locks, and left out the others."""
    path = tmp_path / "members.yaml"

    def label(**of_each: str) -> None:
        lines = (f"- {{name: {n}, url: '{sites[n].wire.url}', labels: {{r: {r}}}}}" for n, r in of_each.items())
        path.write_text("\n".join(lines))

    label(a="x", b="x", c="y")
    asked = lambda: [sum("/memory_occupation" in text for text in sites[name].wire.seen) for name in "ab"]  # noqa: E731
    with Fleet(StaticMembership(path)) as fleet, ThreadPoolExecutor(2) as pool:
        assert fleet.release(Selector(names=("c",))).success
        sites["b"].wire.on("/commit", "delay", times=1)
        releasing = pool.submit(fleet.release, Selector(names=("a", "b")))
        wait_until(lambda: fleet.progress and fleet.progress.stage == "committing")
        before = asked()
        resuming = pool.submit(fleet.resume, Selector(labels={"r": "x"}))
        wait_until(lambda: all(now > then for now, then in zip(asked(), before, strict=True)))
        fleet.status()  # asks the engines as well: the resume has its answers, and waits for locks
        label(a="y", b="x", c="x")
        sites["b"].wire.go_on()
        assert releasing.result().success
        assert sorted(states(resuming.result())) == ["b", "c"]
    assert [site.is_serving for site in sites.values()] == [False, True, True]


def test_a_repeat_under_the_same_id_acts_once(fleet: Fleet, sites: Sites) -> None:
    first = fleet.release(operation_id="once", mode="best_effort")
    assert fleet.release(operation_id="once", mode="best_effort") == first
    assert all(site.is_released for site in sites.values())


@pytest.mark.parametrize("mode", ["all", "best_effort"])
@pytest.mark.parametrize("restarted", [False, True])
def test_the_repeat_of_what_a_later_call_has_undone_is_no_success(
    coordinate: Callable[..., Fleet], sites: Sites, mode: Mode, restarted: bool
) -> None:
    """It was "released" although another caller had resumed, as long as the coordinator was the same process."""
    record = MemoryRecord()
    fleet = coordinate(record=record)
    assert fleet.release(operation_id="once", mode=mode).success
    assert fleet.resume(Selector(names=("a",)), operation_id="later").success
    again = (coordinate(record=record) if restarted else fleet).release(operation_id="once", mode=mode)
    assert {engine.name: engine.kind for engine in again.failed} == {"a": "changed"}
    assert [site.is_serving for site in sites.values()] == [True, False, False]


def test_the_repeat_of_a_resume_is_no_success_with_weights_of_another_version(fleet: Fleet, sites: Sites) -> None:
    """It was, so that a trainer that had lost its answer took the old weights to be there."""
    for site in sites.values():
        with site.attachment.lifecycle.writing(version="v1"):
            pass
    assert fleet.resume(weights_version="v1", operation_id="once").success
    with sites["b"].attachment.lifecycle.writing(version="v2"):
        pass
    again = fleet.resume(weights_version="v1", operation_id="once")
    assert {engine.name: engine.kind for engine in again.failed} == {"b": "wrong_weights_version"}
    assert "its weights are of version 'v2', and a resume demanded 'v1'" in again.message


@pytest.mark.parametrize("named", ["köln:1", "龍" * 64])
@pytest.mark.parametrize("mode", ["all", "best_effort"])
def test_an_id_may_have_letters_of_any_alphabet(fleet: Fleet, sites: Sites, mode: Mode, named: str) -> None:
    """Every engine "gave an answer that cannot be read", as no header could carry the id; or refused a long one."""
    result = fleet.release(operation_id=named, mode=mode)
    assert result.success, result.message
    assert all(site.is_released for site in sites.values())


@pytest.mark.parametrize("mode", ["all", "best_effort"])
def test_a_repeat_of_what_has_failed_is_carried_out(fleet: Fleet, sites: Sites, mode: Mode) -> None:
    for _ in range(2):
        sites["b"].engine.memory.fail("release", MemsaverError("no"))
        assert not fleet.release(operation_id="again", mode=mode).success
        assert [site.is_serving for site in sites.values()] == [mode == "all", True, mode == "all"]
    assert fleet.release(operation_id="again", mode=mode).success
    assert all(site.is_released for site in sites.values())


def test_a_repeat_does_again_what_was_undone_since(fleet: Fleet, sites: Sites) -> None:
    """Without the fleet. An engine that had succeeded answered the repeat by that, whatever its memory was."""
    sites["b"].engine.memory.fail("release", MemsaverError("no"))
    assert not fleet.release(operation_id="again", mode="best_effort").success
    assert sites["a"].http.post("/resume_memory_occupation").is_success
    assert fleet.release(operation_id="again", mode="best_effort").success
    assert all(site.is_released for site in sites.values())


@pytest.mark.parametrize("put_back_s", [0, 3600])
@pytest.mark.parametrize("mode", ["all", "best_effort"])
def test_a_repeat_of_what_has_failed_does_not_undo_a_later_call(
    fleet: Fleet, sites: Sites, mode: Mode, put_back_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It released again what had succeeded, and another caller had resumed; or did so once a clock was put back."""
    sites["b"].engine.memory.fail("release", MemsaverError("no"))
    assert not fleet.release(operation_id="one", mode=mode).success
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - put_back_s)
    if mode == "all":
        assert fleet.release(Selector(names=("c",)), operation_id="between").success
    assert fleet.resume(Selector(names=("a",)), operation_id="two").success
    before = fleet.status()
    again = fleet.release(operation_id="one", mode=mode)
    assert {engine.name: engine.kind for engine in again.failed} == {"a": "changed", "b": "changed"}
    assert "a later call was about these engines, or some of them; use a new id to release them" in again.message
    assert [site.is_serving for site in sites.values()] == [True, True, False]
    assert fleet.status().wanted == before.wanted
    assert fleet.release(operation_id="three", mode=mode).success


def test_a_later_call_about_other_engines_or_tags_does_not_keep_a_repeat(fleet: Fleet, sites: Sites) -> None:
    sites["b"].engine.memory.fail("release", MemsaverError("no"))
    both = Selector(names=("a", "b"))
    assert not fleet.release(both, tags=["kv_cache"], operation_id="one").success
    assert fleet.release(Selector(names=("c",)), operation_id="two").success
    assert fleet.release(tags=["weights"], operation_id="three").success
    again = fleet.release(both, tags=["kv_cache"], operation_id="one")
    assert again.success, again.message
    assert all(site.is_released for site in sites.values())


def test_engines_that_cannot_prepare_are_refused(fleet: Fleet, sites: Sites) -> None:
    sites["b"].wire.rewrite('"prepared":null,', "")
    result = fleet.release()
    assert [(engine.name, engine.kind) for engine in result.failed] == [("b", "cannot_prepare")]
    assert not any("release_memory" in text for site in sites.values() for text in site.wire.seen)
    assert fleet.release(mode="best_effort").success


def test_a_key_for_the_fleet_and_keys_for_engines(sites: Sites) -> None:
    from memsaver_server import Settings, attach

    with (
        attach(sites["a"].engine, settings=Settings(api_key="one")) as first,
        attach(sites["b"].engine, settings=Settings(api_key="two")) as second,
    ):
        members = [Member("a", first.url), Member("b", second.url, api_key="two")]
        with Fleet(StaticMembership(members), api_key="one") as fleet:
            assert fleet.release().success
            assert fleet.resume().success
        with Fleet(StaticMembership(members), api_key="wrong") as fleet:
            assert [(engine.name, engine.kind) for engine in fleet.release().failed] == [("a", "unauthorized")]
