"""An engine that hangs keeps nobody waiting but those who asked for it, and is named while they wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Literal

import httpx
import pytest
from typer.testing import CliRunner

from memsaver_core.contract.requests import FleetRelease
from memsaver_server.cli.commands import app
from memsaver_server.fleet import (
    AsyncFleet,
    Fleet,
    MemoryRecord,
    RecordContent,
    Running,
    Selector,
    StaticMembership,
    Wanted,
)
from memsaver_server.fleet.record import Prepared
from tests.waiting import wait_until

from .conftest import Sites
from .served_fleet import served

#: Longer than these tests wait for anything.
SILENCE_S = 36000.0


@pytest.fixture
def fleet(sites: Sites) -> Iterator[httpx.Client]:
    """All engines, of which b was seen and hangs since, as after SIGSTOP."""
    with served([site.member for site in sites.values()], silence_s=SILENCE_S) as http:
        assert http.get("/readyz").is_success
        sites["b"].wire.silence()
        yield http
        sites["b"].wire.heal()


def test_others_are_released_resumed_and_looked_at(fleet: httpx.Client, sites: Sites) -> None:
    for _ in range(2):
        for verb in ("release", "resume"):
            answer = fleet.post(f"/{verb}_memory_occupation", json={"selector": {"names": ["a", "c"]}}, timeout=60)
            assert answer.json()["success"] is True
    rows = {row["name"]: row for row in fleet.get("/memory_occupation").json()["engines"]}
    assert [rows[name]["error"] for name in "ac"] == ["", ""]
    wait_until(lambda: fleet.get("/memory_occupation").json()["engines"][1]["error"].startswith("no answer for "), 60)
    for command in ("status", "top"):
        shown = CliRunner().invoke(app, [command, "--url", str(fleet.base_url)])
        assert (shown.exit_code, "b: no answer for " in shown.output) == (3, True)


def test_it_is_named_while_its_operation_waits(fleet: httpx.Client, sites: Sites) -> None:
    fleet.post("/release_memory_occupation", json={"async": True, "operation_id": "all"}).raise_for_status()
    wait_until(lambda: fleet.get("/operations/all").json()["engines"].get("b") == "silent", 60)
    assert fleet.get("/memory_occupation").json()["progress"]["engines"]["b"] == "silent"
    seen: list[str] = []

    def follow() -> None:
        with fleet.stream("GET", "/operations/all/events") as events:
            seen.extend(events.iter_lines())

    following = threading.Thread(target=follow, daemon=True)
    following.start()
    wait_until(lambda: 'data: {"name": "b", "stage": "silent"}' in seen, 60)
    assert fleet.post("/release_memory_occupation", json={"selector": {"names": ["a"]}}, timeout=60).is_success
    sites["b"].wire.drop_waiting()
    sites["b"].wire.heal()
    following.join()
    assert fleet.get("/operations/all").json()["status"] == "succeeded"


def test_others_are_brought_to_what_is_wanted(fleet: httpx.Client, sites: Sites) -> None:
    fleet.post("/release_memory_occupation", json={"selector": {"names": ["c"]}}).raise_for_status()
    for _ in range(2):
        sites["c"].http.post("/resume_memory_occupation").raise_for_status()
        wait_until(lambda: sites["c"].is_released, 60)


def test_a_call_of_every_engine_gives_up_on_it(sites: Sites) -> None:
    """After the patience with silence, and not never."""
    with served([site.member for site in sites.values()], silence_s=1.5) as http:
        sites["b"].wire.silence()
        answer = http.post("/flush_cache", timeout=60)
        assert (answer.status_code, [engine["success"] for engine in answer.json()["engines"]]) == (
            502,
            [True, False, True],
        )
        assert "b: no answer: " in answer.json()["message"]


def test_the_silent_keep_no_other_from_being_asked(sites: Sites) -> None:
    """However many calls wait for them, of which only so many are sent at a time."""

    async def run() -> None:
        sites["b"].wire.silence()
        async with AsyncFleet(StaticMembership([site.member for site in sites.values()]), silence_s=20) as fleet:
            parts = [asyncio.create_task(fleet.roster.asked(sites["b"].member)) for _ in range(200)]
            await asyncio.sleep(0.1)
            part = await fleet.roster.asked(sites["a"].member)
            assert part.before is not None
            assert not any(task.done() for task in parts)
            for task in parts:
                task.cancel()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_others_are_watched(sites: Sites) -> None:
    """Their events had come once the patience with the silent one was at its end."""
    sites["b"].wire.silence()
    with Fleet(StaticMembership([site.member for site in sites.values()]), silence_s=SILENCE_S) as fleet:
        events = fleet.watch(interval_s=0.05)
        first = [next(events) for _ in range(6)]
        assert [(each.engine, each.event) for each in first] == [
            (name, event) for name in "abc" for event in ("joined", "silent" if name == "b" else "state")
        ]
        sites["a"].http.post("/release_memory_occupation").raise_for_status()
        while (event := next(events)).event != "state":
            assert event.engine == "a"
        sites["b"].wire.drop_waiting()
        sites["b"].wire.heal()
        while (event := next(events)).event != "back":
            assert event.engine == "a"
        assert event.engine == "b"
        events.close()


def test_a_recovery_that_hangs_holds_up_no_other(sites: Sites) -> None:
    asked = FleetRelease().resolved(60)

    def left(name: str, stage: Literal["preparing", "committing"]) -> Running:
        engines = {name: Prepared(url=sites[name].wire.url, operation_id="gone")}
        return Running(stage=stage, wanted=Wanted.of(asked, name, "somebody", False), engines=engines)

    async def run() -> None:
        record = MemoryRecord()
        await record.save(RecordContent(running={"one": left("b", "committing"), "two": left("c", "preparing")}))
        sites["b"].wire.silence()
        members = StaticMembership([site.member for site in sites.values()])
        fleet = AsyncFleet(members, record=record, silence_s=SILENCE_S)
        recovering = asyncio.create_task(fleet.recover())
        assert (await fleet.release(Selector(names=("a", "c")))).success
        assert list((await record.load()).running) == ["one"]
        repeat = asyncio.create_task(fleet.release(Selector(names=("b",))))
        await asyncio.sleep(0)
        assert not recovering.done()
        assert not repeat.done()
        sites["b"].wire.drop_waiting()
        sites["b"].wire.heal()
        (result, *_) = await recovering
        assert [engine.kind for engine in result.failed] == ["not_found"]
        assert (await repeat).success
        await fleet.close()

    asyncio.run(asyncio.wait_for(run(), 60))
