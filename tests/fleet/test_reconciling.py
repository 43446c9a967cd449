"""Engines that come late or come back, and those that are gone."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

from memsaver_core import MemsaverError
from memsaver_core.contract.errors import IdempotencyKeyError, ServerEndsError
from memsaver_core.contract.requests import AskedOfFleet, FleetRelease, FleetResume, Tagged
from memsaver_server import attach, clock
from memsaver_server.fleet import (
    AsyncFleet,
    FileRecord,
    Fleet,
    FleetEvent,
    FleetResult,
    Member,
    MemoryRecord,
    RecordContent,
    RecordError,
    Running,
    Selector,
    StaticMembership,
    Wanted,
)
from memsaver_server.fleet.operation import FleetOperation
from memsaver_server.fleet.record import Prepared
from tests.waiting import wait_until

from .conftest import SILENCE_S, Sites
from .light_engine import TAGS, LightEngine
from .served_fleet import TRUST, served


def replace(path: Path, text: str) -> None:
    """Write a file that is being watched: it is never read half written."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def listed(path: Path, sites: Sites, names: str) -> StaticMembership:
    """Members from a file that lists these."""
    replace(path, json.dumps([{"name": name, "url": sites[name].wire.url} for name in names]))
    return StaticMembership(path)


@pytest.mark.guards("an engine that joined a sleeping fleet late was awake, and a dead one was passed over in silence")
def test_a_late_engine_is_brought_to_what_is_wanted(sites: Sites, tmp_path: Path) -> None:
    path = tmp_path / "members.yaml"
    with Fleet(listed(path, sites, "ab"), silence_s=SILENCE_S) as fleet:
        assert fleet.release().success
        assert sites["c"].is_serving
        listed(path, sites, "abc")
        (brought,) = fleet.reconcile()
        assert (brought.name, brought.success, brought.state) == ("c", True, "released")
        assert sites["c"].is_released
        assert not fleet.reconcile()
        assert {engine.wanted for engine in fleet.status().engines} == {"released"}


@pytest.mark.guards("an engine that joined a sleeping fleet late was awake, and a dead one was passed over in silence")
def test_a_dead_engine_is_told(fleet: Fleet, sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    assert fleet.release().success
    sites["b"].wire.cut()
    with caplog.at_level(logging.INFO, "memsaver"):
        for _ in range(2):
            (told,) = fleet.reconcile()
            assert (told.name, told.kind, told.state) == ("b", "unreachable", "unknown")
        wait_until(lambda: any("engine b" in message for message in caplog.messages))  # written by a thread
    status = fleet.status()
    assert [(engine.alive, engine.state, bool(engine.error)) for engine in status.engines] == [
        (True, "released", False),
        (False, "unknown", True),
        (True, "released", False),
    ]
    assert [engine.name for engine in fleet.release().failed] == ["b"]
    sites["b"].wire.heal()
    with caplog.at_level(logging.INFO, "memsaver"):
        assert not fleet.reconcile()
        wait_until(lambda: "engine b is as wanted now" in caplog.messages)
    assert sum("engine b" in message for message in caplog.messages) == 2


def test_an_engine_that_comes_back_resident_is_released(fleet: Fleet, sites: Sites) -> None:
    assert fleet.release().success
    sites["b"].http.post("/resume_memory_occupation").raise_for_status()  # as a new process is
    assert [engine.name for engine in fleet.reconcile()] == ["b"]
    assert sites["b"].is_released


@pytest.fixture
def with_workspace(sites: Sites) -> Iterator[tuple[Fleet, list[LightEngine], list[httpx.Client]]]:
    """Two engines with a tag that no client knows."""
    with ExitStack() as ending:
        engines = [LightEngine(name, more=("workspace",)) for name in ("v", "w")]
        attachments = [ending.enter_context(attach(engine)) for engine in engines]
        for engine in engines:
            ending.callback(engine.close)
        members = [Member(engine.name, each.url) for engine, each in zip(engines, attachments, strict=True)]
        fleet = ending.enter_context(Fleet(StaticMembership(members), verify=TRUST))
        opened = [httpx.Client(base_url=each.url, timeout=600, verify=False) for each in attachments]
        yield fleet, engines, [ending.enter_context(each) for each in opened]


def holds(http: httpx.Client, engine: LightEngine) -> tuple[bool, set[str]]:
    return http.get("/memory_occupation").json()["admission"]["open"], engine.resident()


@pytest.mark.parametrize("mode", ["all", "best_effort"])
def test_what_no_caller_names_stays_with_what_is_resumed(with_workspace: Any, mode: Any) -> None:
    """A release of everything and resumes by tag, as trainers call them: seconds later the workspace was released
    again, and every engine closed."""
    fleet, engines, https = with_workspace
    for _ in range(2):
        assert fleet.release(mode=mode).success
        for tag in ("weights", "kv_cache"):
            assert fleet.resume(tags=[tag], mode=mode).success
        for done in (["kv_cache"], ["weights"]):
            assert not fleet.reconcile()
            assert [holds(*each) for each in zip(https, engines, strict=True)] == [(True, {*TAGS, "workspace"})] * 2
            assert fleet.release(tags=done, mode=mode).success
            assert not fleet.reconcile()
            assert [engine.resident() for engine in engines] == [{*TAGS, "workspace"} - set(done)] * 2
            assert fleet.resume(tags=done, mode=mode).success


@pytest.mark.parametrize("why", ["undone", "come back"])
def test_what_the_coordinator_has_named_comes_back_unnamed(with_workspace: Any, why: str) -> None:
    """An engine stayed closed once an undo or the reconciler had released its workspace by name."""
    fleet, engines, https = with_workspace
    assert fleet.release().success
    assert fleet.resume(tags=["weights"]).success
    if why == "undone":
        engines[1].memory.fail("resume", MemsaverError("no"))
        assert not fleet.resume(tags=["kv_cache"]).success
    else:
        https[1].post("/resume_memory_occupation").raise_for_status()  # as a new process is
        assert [each.name for each in fleet.reconcile()] == ["w"]
    assert [engine.resident() for engine in engines] == [{"weights"}] * 2
    assert fleet.resume(tags=["kv_cache"]).success
    assert not fleet.reconcile()
    assert [holds(*each) for each in zip(https, engines, strict=True)] == [(True, {*TAGS, "workspace"})] * 2


def test_parts_that_are_resumed_by_tag_stay_as_each_was_asked_for(with_workspace: Any) -> None:
    """One engine's resume by tags decided what was wanted of others, or its own was not noted because of them."""
    fleet, engines, https = with_workspace
    v, w = (Selector(names=(name,)) for name in ("v", "w"))
    everything = {*TAGS, "workspace"}
    for selector, tag in ((None, ""), (w, "kv_cache"), (None, "weights"), (v, "kv_cache")):
        assert (fleet.resume(selector, tags=[tag]) if tag else fleet.release()).success
    assert not fleet.reconcile()
    assert [holds(*each) for each in zip(https, engines, strict=True)] == [(True, everything)] * 2
    assert fleet.release(w, tags=["kv_cache"]).success
    assert not fleet.reconcile()
    assert [engine.resident() for engine in engines] == [everything, everything - {"kv_cache"}]

    assert fleet.release().success
    assert fleet.release(w, tags=["weights"], operation_id="of-a-trainer").success
    assert fleet.resume(v, tags=["weights"]).success
    engines[1].memory.fail("resume", MemsaverError("no"))
    failed = fleet.resume(tags=["kv_cache"], mode="best_effort").failed
    assert [engine.name for engine in failed] == ["w"]
    assert [each.name for each in fleet.reconcile()] == ["w"]
    assert not fleet.reconcile()
    assert [engine.resident() for engine in engines] == [everything, {"kv_cache"}]
    assert any(wish.operation_id == "of-a-trainer" for wish in fleet.status().wanted)


def test_weights_that_a_caller_excluded_are_not_served(
    fleet: Fleet, sites: Sites, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that had missed an update was refused, and resumed by the reconciler seconds later."""
    for name, version in (("a", "v2"), ("b", "v2"), ("c", "v1")):
        with sites[name].attachment.lifecycle.writing(version=version):
            pass
    assert fleet.release().success
    resumed = fleet.resume(mode="best_effort", weights_version="v2")
    assert [(engine.name, engine.kind) for engine in resumed.failed] == [("c", "wrong_weights_version")]
    sites["b"].http.post("/release_memory_occupation").raise_for_status()
    assert [(each.name, each.kind) for each in fleet.reconcile()] == [("b", ""), ("c", "wrong_weights_version")]
    assert [site.is_serving for site in sites.values()] == [True, True, False]
    assert [each.name for each in fleet.reconcile()] == ["c"]
    sites["c"].http.post("/resume_memory_occupation").raise_for_status()  # to be updated, or as it has started anew
    for _ in range(2):
        assert [(each.name, each.kind, each.state) for each in fleet.reconcile()] == [
            ("c", "wrong_weights_version", "resident")
        ]
    assert [bool(engine.error) for engine in fleet.status().engines] == [False, False, True]
    with sites["c"].attachment.lifecycle.writing(version="v2"):
        pass
    assert not fleet.reconcile()
    wait_until(lambda: "engine c is as wanted now" in caplog.messages)
    for why in ("the resume demands", "it serves no request: its weights are of version 'v1'"):
        assert sum(message.startswith(f"engine c: {why}") for message in caplog.messages) == 1


def test_a_version_that_a_resume_of_a_model_demands(fleet: Fleet, sites: Sites) -> None:
    """Members are listed without their models."""
    b = sites["b"]
    with b.attachment.lifecycle.writing(version="v2"):
        pass
    assert fleet.resume(Selector(models=("model of b",)), weights_version="v2").success
    with b.attachment.lifecycle.writing(version="v1"):
        pass
    b.http.post("/release_memory_occupation").raise_for_status()
    assert [(each.name, each.kind) for each in fleet.reconcile()] == [("b", "wrong_weights_version")]
    assert not b.is_serving


def test_content_that_is_lost_is_logged_once(fleet: Fleet, sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    assert fleet.release(Selector(names=("b",)), restore={"weights": "discard"}).success
    assert not fleet.reconcile(), "it is asleep, as it is wanted"
    assert fleet.resume().success
    for _ in range(2):
        found = [(each.name, each.kind, each.lost) for each in fleet.reconcile()]
        assert found == [("b", "admission_closed", ("weights",))]
    sites["b"].write()
    assert not fleet.reconcile()
    wait_until(lambda: "engine b is as wanted now" in caplog.messages)
    why = "engine b: it serves no request: the content of weights was discarded by a release; write it by "
    assert sum(message.startswith(why) for message in caplog.messages) == 1


def test_an_engine_that_has_failed_is_not_said_to_have_other_weights(fleet: Fleet, sites: Sites) -> None:
    sites["b"].engine.memory.fail("release", MemsaverError("rank 1 has ended"), ends=True)
    assert not fleet.release().success
    found = [(each.name, each.kind) for each in fleet.reconcile()]
    assert found == [("b", "context_lost")]  # as the engine itself says of every operation


def test_a_request_wakes_weights_of_the_version_that_was_demanded(sites: Sites) -> None:
    """By a resume of one tag or of all; a resume or a release of the weights without a version ends it."""
    a = sites["a"]
    with a.attachment.lifecycle.writing(version="v2"):
        pass

    def asked() -> int:
        return http.post("/v1/completions", json={"model": "model of a"}).status_code

    with served([a.member]) as http:
        for tags in ([], ["kv_cache"]):
            demand = {"weights_version": "v2", "tags": tags}
            http.post("/resume_memory_occupation", json=demand).raise_for_status()
            http.post("/release_memory_occupation", json={"wake_on_request": True}).raise_for_status()
            assert asked() == 404  # by the engine, which has no such path
            assert a.is_serving
            now = http.get("/memory_occupation").json()
            assert [each["version"] for each in now["demands"]] == ["v2"]
            assert not any("weights_version" in wish["options"] for wish in now["wanted"]), "it stands once"
            with a.attachment.lifecycle.writing(version="v3"):
                pass
            wait_until(lambda: asked() == 503)
            http.post("/release_memory_occupation", json={"tags": ["weights"]}).raise_for_status()
            http.post("/resume_memory_occupation", json={"tags": ["weights"]}).raise_for_status()
            wait_until(lambda: asked() == 404)
            with a.attachment.lifecycle.writing(version="v2"):
                pass


def test_a_version_is_demanded_whatever_becomes_of_other_tags(sites: Sites) -> None:
    """A release and a resume of the cache alone ended it, as they replaced the wish of the resume that demanded it."""
    record, a = MemoryRecord(), sites["a"]

    def asked() -> int:
        return http.post("/v1/completions", json={"model": "model of a"}).status_code

    with a.attachment.lifecycle.writing(version="v2"):
        pass
    cache = {"tags": ["kv_cache"]}
    with served([a.member], record=record) as http:
        for body in ({**cache, "weights_version": "v2"}, cache, {**cache, "wake_on_request": True}):
            path = "/resume_memory_occupation" if "weights_version" in body else "/release_memory_occupation"
            http.post(path, json=body).raise_for_status()
            http.post("/resume_memory_occupation", json=cache).raise_for_status()
        assert asked() == 404  # by the engine, which has no such path
        with a.attachment.lifecycle.writing(version="v3"):
            pass
        wait_until(lambda: asked() == 503)
    with served([a.member], record=record) as http:
        assert asked() == 503
        http.post("/resume_memory_occupation").raise_for_status()
        wait_until(lambda: asked() == 404)
    assert asyncio.run(record.load()).demands == ()


def test_a_version_is_demanded_of_an_engine_that_could_not_be_undone(fleet: Fleet, sites: Sites) -> None:
    """The reconciler resumed it without the version."""
    a = sites["a"]
    for site in sites.values():
        with site.attachment.lifecycle.writing(version="v2"):
            pass
    assert fleet.resume(weights_version="v2").success
    sites["b"].engine.memory.fail("release", MemsaverError("no"))
    a.wire.on('"wait":true', "reset")
    assert not fleet.release().success
    assert a.is_released
    a.wire.heal()
    assert [each.name for each in fleet.reconcile()] == ["a"]
    assert '"weights_version":"v2"' in next(each for each in reversed(a.wire.seen) if "/resume_memory" in each)
    with a.attachment.lifecycle.writing(version="v1"):
        pass
    assert [bool(engine.error) for engine in fleet.status().engines] == [True, False, False]


def test_a_wake_that_could_not_be_undone_leaves_its_engine_to_the_next_request(sites: Sites) -> None:
    """The engine was kept released, as if a caller had released it for good."""
    a = sites["a"]
    with served([a.member]) as http:
        until_asked = {"wake_on_request": True, "restore": {"kv_cache": "host"}}
        http.post("/release_memory_occupation", json=until_asked).raise_for_status()
        before = http.get("/memory_occupation").json()["wanted"]
        a.wire.on("/commit", "reset_answer")
        a.wire.on("POST /release_memory_occupation", "reset")
        assert http.post("/v1/completions", json={"model": "model of a"}).status_code == 503
        assert http.get("/memory_occupation").json()["wanted"] == before
        a.wire.heal()
        a.http.post("/release_memory_occupation", json={"wait": True}).raise_for_status()
        wait_until(lambda: http.get("/memory_occupation").json()["engines"][0]["state"] == "released")
        wait_until(lambda: http.post("/v1/completions", json={"model": "model of a"}).status_code == 404)
        assert a.is_serving


@pytest.mark.parametrize("asked", [FleetRelease, FleetResume])
def test_a_turn_gives_way_to_a_release_that_a_caller_made_since(sites: Sites, asked: type[AskedOfFleet]) -> None:
    """It waited for the caller's: a resume took the memory back, a release had the next request take it."""
    a, record = sites["a"], MemoryRecord()
    selected = {"selector": Selector(names=("a",))}

    async def turn() -> FleetResult:
        async with AsyncFleet(StaticMembership([a.member]), record=record) as fleet:
            assert (await fleet.run(FleetRelease(**selected))).success
            return await fleet.start(FleetOperation.of(asked(**selected, wait=True), "", "turns", "turns")).outcome()

    result = asyncio.run(turn())
    assert "has to resume it" in result.message
    assert a.is_released
    [wish] = asyncio.run(record.load()).wanted
    assert (wish.state, wish.until_asked) == ("released", False)


def test_a_turn_gives_way_to_a_demand_that_a_caller_made_since(sites: Sites) -> None:
    a = sites["a"]
    selected = {"selector": Selector(names=("a",))}
    with a.attachment.lifecycle.writing(version="v2"):
        pass

    async def turn() -> FleetResult:
        async with AsyncFleet(StaticMembership([a.member])) as fleet:
            assert (await fleet.run(FleetResume(**selected, weights_version="v2"))).success
            assert (await fleet.run(FleetRelease(**selected, wake_on_request=True))).success
            return await fleet.start(FleetOperation.of(FleetResume(**selected), "", "turns", "turns")).outcome()

    assert "callers demand other weights" in asyncio.run(turn()).message
    assert a.is_released


@pytest.mark.parametrize("mode", ["all", "best_effort"])
def test_what_waits_for_another_operation_can_be_cancelled(sites: Sites, mode: str) -> None:
    """The answer came when the other had ended, or was that memory moves already."""
    a, b = sites["a"], sites["b"]
    with served([a.member, b.member]) as http, ThreadPoolExecutor(2) as pool:
        b.engine.memory.hold("release")
        before = b.engine.memory.reached.get("release", 0)
        first = pool.submit(http.post, "/release_memory_occupation", json={"selector": {"names": ["b"]}})
        wait_until(lambda: b.engine.memory.reached.get("release", 0) > before)
        named = {"operation_id": "second", "fleet_mode": mode, "wait": True, "timeout_s": 3600}
        second = pool.submit(http.post, "/release_memory_occupation", json=named)
        wait_until(lambda: http.get("/operations/second").is_success)
        assert http.delete("/operations/second").json()["status"] == "cancelled"
        assert second.result().json()["error"]["type"] == "cancelled"
        b.engine.memory.heal()
        assert first.result().is_success, first.result().text
        assert (a.is_serving, b.is_released) == (True, True)


def test_the_last_wish_for_an_engine_and_a_tag_counts(fleet: Fleet, sites: Sites) -> None:
    assert fleet.release().success
    assert fleet.resume(Selector(names=("a",))).success
    assert fleet.release(Selector(names=("a", "b")), tags=["kv_cache"]).success
    for site in sites.values():
        site.http.post("/resume_memory_occupation").raise_for_status()
    fleet.reconcile()
    assert [sites[name].engine.resident() for name in "abc"] == [{"weights"}, set(), set()]


def test_an_engine_with_an_operation_of_its_own_is_left_alone(fleet: Fleet, sites: Sites) -> None:
    assert fleet.release().success
    sites["b"].engine.memory.hold("resume")
    sites["b"].http.post("/resume_memory_occupation", json={"async": True}).raise_for_status()
    assert not fleet.reconcile()


def test_it_reconciles_when_members_change(sites: Sites, tmp_path: Path) -> None:
    path = tmp_path / "members.yaml"
    members = listed(path, sites, "a")

    async def run() -> None:
        async with AsyncFleet(members, record=MemoryRecord(), silence_s=SILENCE_S) as fleet:
            assert (await fleet.release()).success
            keeping = asyncio.create_task(fleet.keep(interval_s=60))
            listed(path, sites, "ac")
            while not sites["c"].is_released:
                assert not keeping.done()
                await asyncio.sleep(0.02)
            keeping.cancel()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_no_error_ends_the_reconciling(sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    class Buggy(StaticMembership):
        def __init__(self) -> None:
            super().__init__([sites["a"].member])
            self.bugs = ["members", "members", "changed"]

        async def members(self) -> list[Member]:
            return await super().members() if "members" not in self.bugs else self._fail("members")

        async def changed(self) -> None:
            return await super().changed() if "changed" not in self.bugs else self._fail("changed")

        def _fail(self, name: str) -> NoReturn:
            self.bugs.remove(name)
            raise TypeError(f"a bug in {name}")

    members = Buggy()

    async def run() -> None:
        record = MemoryRecord()
        async with AsyncFleet(StaticMembership([sites["a"].member]), record=record) as other:
            assert (await other.release()).success
        sites["a"].http.post("/resume_memory_occupation").raise_for_status()
        async with AsyncFleet(members, record=record, silence_s=SILENCE_S) as fleet:
            keeping = asyncio.create_task(fleet.keep(interval_s=0.05))
            while members.bugs or len(caplog.messages) < 2 or not sites["a"].is_released:
                assert not keeping.done()
                await asyncio.sleep(0.02)
            keeping.cancel()

    with caplog.at_level(logging.ERROR, "memsaver"):
        asyncio.run(asyncio.wait_for(run(), 30))
    assert [message.rsplit(": ", 1)[1] for message in caplog.messages] == ["a bug in members", "a bug in changed"]


def test_watching(fleet: Fleet, sites: Sites) -> None:
    events = fleet.watch(interval_s=0.05)
    seen: list[FleetEvent] = []

    def see(event: str, engine: str = "") -> FleetEvent:
        while not seen or (seen[-1].event, seen[-1].engine) != (event, engine):
            seen.append(next(events))
        return seen[-1]

    for name in "abc":
        see("joined", name)
    sites["a"].engine.memory.hold("release")
    sites["a"].http.post("/release_memory_occupation", json={"async": True}).raise_for_status()
    assert see("progress", "a").data["operation"] == "release"
    sites["a"].engine.memory.heal()
    wait_until(lambda: sites["a"].is_released)
    see("state", "a")
    assert fleet.release().success
    stages = [event.data["stage"] for event in seen if event.event == "operation"]
    assert see("result").data["success"]
    stages = [event.data["stage"] for event in seen if event.event == "operation"]
    assert stages == ["preparing", "committing"]
    sites["b"].wire.cut()
    assert "no answer" in see("dead", "b").data["error"]
    sites["b"].wire.heal()
    assert see("back", "b").data["state"] == "released"
    events.close()


def test_watching_tells_who_leaves(sites: Sites, tmp_path: Path) -> None:
    path = tmp_path / "members.yaml"
    with Fleet(listed(path, sites, "ab")) as fleet:
        events = fleet.watch(interval_s=0.05)
        assert {next(events).engine for _ in range(4)} == {"a", "b"}
        listed(path, sites, "a")
        assert [(event.event, event.engine) for event in [next(events)]] == [("left", "b")]
        replace(path, "[")
        assert "cannot be read" in next(events).data["error"]
        events.close()


def test_a_fleet_of_nothing(coordinate: Callable[..., Fleet]) -> None:
    with Fleet(StaticMembership([])) as fleet:
        assert fleet.status().state == ""
        assert fleet.reconcile() == []


def test_an_end_that_could_not_be_written_counts(coordinate: Callable[..., Fleet], sites: Sites) -> None:
    """What was told as done is not undone for an older wish, and the end is written as soon as that is possible."""

    class Full(MemoryRecord):
        full = False

        async def save(self, content: RecordContent) -> None:
            if self.full and not content.running:
                raise RecordError("the disk is full")
            await super().save(content)

    record = Full()
    fleet = coordinate(record=record)
    assert fleet.release().success
    assert fleet.resume().success
    record.full = True
    assert fleet.release().success
    assert not fleet.reconcile()
    assert all(site.is_released for site in sites.values())
    assert asyncio.run(record.load()).running
    record.full = False
    assert not fleet.reconcile()
    content = asyncio.run(record.load())
    assert not content.running
    assert content.wanted[-1].state == "released"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"version": 2}', "version is 2, but should be 1"),
        (
            '{"wanted": [{"state": "asleep"}]}',
            "wanted.0.selector is missing; wanted.0.state is 'asleep', but should be 'released'",
        ),
        ('{"wanted": [', "it is not JSON (EOF while parsing"),
        ("5", "the whole is 5, but should be an object"),
    ],
)
def test_a_strange_record_is_told_in_one_sentence(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(RecordError) as refused:
        asyncio.run(FileRecord(path).load())
    assert f"the record {path} cannot be read: {why}" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(refused.value).endswith("; repair or remove it")


class NoEngine(BaseHTTPRequestHandler):
    """Something else that answers at the address of a member."""

    encoding, content = "gzip", b"no gzip."

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Encoding", self.encoding)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *_arguments: object) -> None:
        pass


class OtherJson(NoEngine):
    encoding, content = "identity", b'{"tags": "none", "driver": "host"}'


@pytest.mark.parametrize(
    ("handler", "kind", "why"),
    [
        (NoEngine, "unreadable", "an answer that cannot be read"),
        (OtherJson, "unreadable", "did not answer as a memsaver service does: enabled is missing; state is missing; "),
    ],
)
def test_an_answer_that_cannot_be_read_concerns_one_engine(
    sites: Sites, handler: type[NoEngine], kind: str, why: str
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            other = Member("x", f"http://127.0.0.1:{server.server_port}")
            with Fleet(StaticMembership([sites["a"].member, other]), silence_s=SILENCE_S) as fleet:
                assert [engine.alive for engine in fleet.status().engines] == [True, False]
                (told,) = fleet.reconcile()
                assert (told.name, told.kind) == ("x", kind)
                assert why in told.error
                assert "\n" not in told.error
                assert fleet.release(Selector(names=("a",))).success
        finally:
            server.shutdown()
            thread.join()


def test_nothing_is_moved_in_silence(
    sites: Sites, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a coordinator does to keep an engine as it is wanted is an operation, and says whose wish that was."""
    audit = tmp_path / "audit.log"
    b = sites["b"]
    with (
        caplog.at_level(logging.WARNING, "memsaver"),
        served([site.member for site in sites.values()], audit_file=str(audit)) as http,
    ):
        released = http.post("/release_memory_occupation", json={"tags": ["kv_cache"]}).json()["operation_id"]
        wait_until(lambda: b.http.get("/memory_occupation").json()["coordinator"])
        holder = b.http.get("/memory_occupation").json()["coordinator"]
        assert holder.startswith("memsaver-coordinator ")
        direct = b.http.post("/resume_memory_occupation").json()
        assert (direct["coordinator"], f"{holder} holds this memory" in direct["message"]) == (holder, True)
        wait_until(lambda: b.engine.resident() == {"weights"})
        cause = f"wanted released since operation {released} of 127.0.0.1 python-httpx"
        wait_until(lambda: http.get("/operations").json()["operations"][0]["status"] == "succeeded")
        done = http.get("/operations").json()["operations"][0]
        assert (done["origin"], done["client"], done["engines"]) == ("reconciler", holder, {"b": "done"})
        assert done["cause"].startswith(cause)
        (last, *_) = b.http.get("/operations").json()["operations"]
        assert last["client"] == f"127.0.0.1 {holder}"
        reconciled = 'memsaver_fleet_reconciliations_total{operation="release",outcome="success"} 1.0'
        assert reconciled in http.get("/metrics").text
        wait_until(lambda: any(f"release of kv_cache, {cause}" in message for message in caplog.messages))
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(line["origin"], line["event"], line["outcome"]) for line in lines] == [
        ("caller", "release", "success"),
        ("reconciler", "release", "success"),
    ]
    assert [set(line["engines"]) for line in lines] == [{"a", "b", "c"}, {"b"}]
    assert lines[1]["cause"] == done["cause"]


def test_another_coordinator_is_named(sites: Sites, coordinate: Callable[..., Fleet]) -> None:
    """By what moves the engines without asking it."""
    with served([site.member for site in sites.values()]) as http:
        http.get("/memory_occupation").raise_for_status()
        wait_until(lambda: sites["c"].http.get("/memory_occupation").json()["coordinator"])
        result = coordinate(name="another").release(Selector(names=("c",)))
        assert result.coordinator.startswith("memsaver-coordinator ")
        assert f". {result.coordinator} holds this memory" in result.message


def test_two_coordinators_name_each_other_and_do_not_fight(sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    """Each undid the other's operation every few seconds, and neither answer nor log named the other."""
    members, one, two = [sites["a"].member], "memsaver-coordinator one", "memsaver-coordinator two"
    with (
        caplog.at_level(logging.WARNING, "memsaver"),
        served(members, name="one") as first,
        served(members, name="two") as second,
    ):
        for name in (one, two):
            wait_until(lambda name=name: any(f"a is held by {name}, too" in message for message in caplog.messages))
        assert first.post("/release_memory_occupation").json()["coordinator"] == two
        resumed = second.post("/resume_memory_occupation").json()
        assert (resumed["coordinator"], f"{one} holds this memory" in resumed["message"]) == (one, True)
        later = clock.monotonic() + 12  # two rounds of the reconcilers
        wait_until(lambda: clock.monotonic() > later)
        assert sites["a"].is_serving
        operations = [each for http in (first, second) for each in http.get("/operations").json()["operations"]]
        assert [each["origin"] for each in operations] == ["caller", "caller"]


def test_a_coordinator_takes_over_from_one_that_is_gone(sites: Sites) -> None:
    record, members = MemoryRecord(), [sites["a"].member]
    with served(members, name="gone", record=record) as http:
        assert http.post("/release_memory_occupation").is_success
        wait_until(lambda: sites["a"].http.get("/memory_occupation").json()["coordinator"])
    with served(members, name="next", record=record) as http:
        sites["a"].http.post("/resume_memory_occupation").raise_for_status()
        wait_until(lambda: sites["a"].is_released)
        assert "coordinator" not in http.post("/release_memory_occupation").json()


def test_a_coordinator_that_starts_beside_another_takes_nothing_back(
    sites: Sites, caplog: pytest.LogCaptureFixture
) -> None:
    """Its record is older: the last operation counts."""
    record, members = MemoryRecord(), [sites["a"].member]
    with served(members, name="old", record=record) as http:
        assert http.post("/resume_memory_occupation").is_success
    with served(members, name="now") as http:
        assert http.post("/release_memory_occupation").is_success
        with caplog.at_level(logging.WARNING, "memsaver"), served(members, name="again", record=record) as again:
            rival = "a is held by memsaver-coordinator now, too"
            wait_until(lambda: any(rival in message for message in caplog.messages))
            later = clock.monotonic() + 12  # two rounds of its reconciler
            wait_until(lambda: clock.monotonic() > later)
            assert sites["a"].is_released
            assert again.get("/operations").json()["operations"] == []


def test_attempts_that_fail_are_one_operation(sites: Sites) -> None:
    with served([site.member for site in sites.values()]) as http:
        http.post("/release_memory_occupation").raise_for_status()
        memory = sites["b"].engine.memory
        memory.hold("release")
        sites["b"].http.post("/resume_memory_occupation").raise_for_status()
        memory.fail("release", MemsaverError("no"))
        metric = 'memsaver_fleet_reconciliations_total{operation="release",outcome="error"} '
        memory._holding.pop("release").set()
        wait_until(lambda: f"{metric}1.0" in http.get("/metrics").text)
        wait_until(lambda: sites["b"].is_released)
        assert [each["origin"] for each in http.get("/operations").json()["operations"]] == ["reconciler", "caller"]


def test_what_a_dead_coordinator_had_begun_is_listed_too(sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    asked = FleetRelease().resolved(60)
    engines = {"a": Prepared(url=sites["a"].wire.url)}
    running = Running(stage="preparing", wanted=Wanted.of(asked, "one", "somebody", False), engines=engines)
    record = MemoryRecord()
    asyncio.run(record.save(RecordContent(running={"one": running})))
    with caplog.at_level(logging.WARNING, "memsaver"), served([sites["a"].member], record=record) as http:
        wait_until(lambda: http.get("/operations").json()["operations"])
        wait_until(lambda: http.get("/operations/one").json()["status"] == "failed")
        listed = http.get("/operations/one").json()
        assert (listed["client"], "had begun it is gone" in listed["cause"]) == ("somebody", True)
        wait_until(lambda: any("which another coordinator had begun" in message for message in caplog.messages))


def test_a_record_is_private(coordinate: Callable[..., Fleet], sites: Sites, tmp_path: Path) -> None:
    """It has the keys of what is prepared."""
    path = tmp_path / "record.json"
    path.with_name("record.json.new").touch(0o644)  # which a crash left
    coordinate(record=FileRecord(path)).release()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_record_that_was_removed_is_written_again(
    coordinate: Callable[..., Fleet], sites: Sites, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All that was wanted, and what ids stand for, was forgotten in silence."""
    path = tmp_path / "record.json"
    fleet = coordinate(record=FileRecord(path))
    assert fleet.release(operation_id="one").success
    path.unlink()
    sites["b"].http.post("/resume_memory_occupation").raise_for_status()
    with caplog.at_level(logging.WARNING, "memsaver"):
        assert [each.name for each in fleet.reconcile()] == ["b"]
        wait_until(lambda: any(f"the record {path} was removed" in message for message in caplog.messages))
    assert sites["b"].is_released
    with pytest.raises(IdempotencyKeyError):
        coordinate(record=FileRecord(path)).resume(operation_id="one")


def test_another_verb_is_another_operation(sites: Sites, tmp_path: Path) -> None:
    """What fails is tried again under its id; not so the opposite, nor what fails after the engine had left."""
    path, b = tmp_path / "members.yaml", sites["b"]
    ids: list[str] = []

    def note(operation: FleetOperation) -> AbstractAsyncContextManager[None]:
        if operation.origin == "reconciler":
            ids.append(operation.id)
        return nullcontext()

    async def run() -> None:
        async with AsyncFleet(listed(path, sites, "ab"), silence_s=SILENCE_S) as fleet:
            fleet.around = note
            for wanted, other in (("release", "resume"), ("resume", "release")):
                assert (await getattr(fleet, wanted)(Selector(names=("b",)))).success
                b.http.post(f"/{other}_memory_occupation").raise_for_status()
                for _ in range(2):
                    b.engine.memory.fail(wanted, MemsaverError("no"))
                    assert [each.success for each in await fleet.reconcile()] == [False]
            listed(path, sites, "a")
            await fleet.reconcile()
            listed(path, sites, "ab")
            assert [each.success for each in await fleet.reconcile()] == [True]

    asyncio.run(run())
    assert (ids[0], ids[2]) == (ids[1], ids[3])
    assert len(set(ids)) == 3


def test_nothing_of_a_hibernated_engine_is_on_the_device(
    fleet: Fleet, sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = sites["b"].engine.memory
    status = memory.status
    assert fleet.release().success
    memory.resume(Tagged(tags=("weights",)))
    monkeypatch.setattr(memory, "status", lambda: status().model_copy(update={"hibernated": True}))
    assert fleet.reconcile() == []
    assert [(each.name, each.kind) for each in fleet.resume().failed] == [("b", "changed")]  # as it is asleep still
    assert [each.name for each in fleet.reconcile()] == ["b"]  # which is to be resident


def test_the_end_of_a_coordinator_is_the_error_of_its_operation(sites: Sites) -> None:
    async def run() -> FleetOperation:
        async with AsyncFleet(StaticMembership([sites["a"].member]), silence_s=SILENCE_S) as fleet:
            sites["a"].wire.on('"prepare":true', "delay", times=1)
            operation = fleet.start(FleetOperation.of(FleetRelease().resolved(1.0)))
            while operation.phase != "preparing":
                await asyncio.sleep(0)
            assert operation.task is not None
            operation.task.cancel()
            await asyncio.wait({operation.task})
            return operation

    error = asyncio.run(run()).error
    assert isinstance(error, ServerEndsError)
    assert "in phase 'aborting'" in str(error)
