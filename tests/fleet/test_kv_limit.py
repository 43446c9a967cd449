"""AIBrix's ``kv-limit`` at a coordinator: an operation of the fleet, with an id that is its request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from memsaver_server import attach
from memsaver_server.fleet import AsyncFleet, Member, MemoryRecord, RecordContent, StaticMembership
from tests.waiting import wait_until

from .conftest import Sites
from .light_engine import MIB, ElasticEngine
from .served_fleet import served
from .wire import Loop, Wire

LIMIT = "/v1/runtime/models/kv-limit"


class Elastic:
    """Two engines of one model, each behind a wire, and a third of another."""

    def __init__(self, ending: ExitStack) -> None:
        loop = Loop()
        ending.callback(loop.close)
        self.engines = {name: ElasticEngine(name, model="n" if name == "z" else "m") for name in "xyz"}
        self.wires: dict[str, Wire] = {}
        for name, engine in self.engines.items():
            ending.callback(engine.close)
            attachment = ending.enter_context(attach(engine))
            self.wires[name] = Wire(attachment.url, loop.loop)
            ending.callback(self.wires[name].close)

    @property
    def members(self) -> list[Member]:
        return [Member(name, wire.url, model=self.engines[name].model_name) for name, wire in self.wires.items()]

    @property
    def pages(self) -> list[int]:
        return [engine.kept for engine in self.engines.values()]


@pytest.fixture
def elastic() -> Iterator[Elastic]:
    with ExitStack() as ending:
        yield Elastic(ending)


def limit(http: httpx.Client, pages: int, operation_id: str = "", model: str = "m", **options: Any) -> httpx.Response:
    named = {"operation_id": operation_id} if operation_id else {}
    return http.post(LIMIT, json={"model_name": model, "limit_bytes": pages * MIB, **named}, **options)


def kind(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["type"]


class Held(MemoryRecord):
    """Is read only while ``free``."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.free.set()

    async def load(self) -> RecordContent:
        await asyncio.to_thread(self.free.wait)
        return await super().load()


@pytest.mark.parametrize("first", ["resize", "release"])
def test_who_comes_first_takes_the_id(elastic: Elastic, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """Both were carried out, and the record had the one that ended last."""
    checked: list[str] = []
    check = AsyncFleet.check

    async def noted(fleet: AsyncFleet, digest: str, operation_id: str, *about: str) -> Any:
        checked.append(operation_id)
        return await check(fleet, digest, operation_id, *about)

    monkeypatch.setattr(AsyncFleet, "check", noted)
    record = Held()
    with served(elastic.members, record=record) as http, ThreadPoolExecutor(2) as pool:
        calls = {
            "resize": lambda: limit(http, 2, "one"),
            "release": lambda: http.post("/release_memory_occupation", json={"model": "n", "operation_id": "one"}),
        }
        record.free.clear()
        answers = []
        for verb in sorted(calls, key=lambda verb: verb != first):
            answers.append(pool.submit(calls[verb]))
            wait_until(lambda: len(checked) == len(answers))
        record.free.set()
        done, refused = (each.result() for each in answers)
        assert done.status_code == 200, done.text
        assert kind(refused) == (422, "idempotency_key_reused")
        assert f"belongs to {first} one" in refused.json()["message"]
        assert asyncio.run(record.load()).ids["one"].verb == first
        assert elastic.pages == ([2, 2, 4] if first == "resize" else [4, 4, 4])
        assert elastic.engines["z"].resident() == (set() if first == "release" else {"kv_cache", "weights"})


def test_a_repeat_is_answered_as_the_first_although_an_engine_has_died(elastic: Elastic) -> None:
    """It was a 502."""
    record = MemoryRecord()
    for restarted in (False, True):
        with served(elastic.members, record=record) as http:
            for applied in () if restarted else (True, False):
                assert limit(http, 2, "one").json()["applied"] is applied
            elastic.wires["y"].cut()
            again = limit(http, 2, "one")
            assert (again.status_code, again.json()["applied"]) == (200, False), again.text
            assert [engine["name"] for engine in again.json()["engines"]] == ["x", "y"]
    assert [engine.limits for engine in elastic.engines.values()] == [[2], [2], []]


def test_a_repeat_of_what_has_failed_is_carried_out_unless_a_later_one_was(elastic: Elastic) -> None:
    """An old limit took the place of a newer one."""
    with served(elastic.members) as http:
        elastic.engines["y"].refuses = True
        for pages, named in ((3, "one"), (2, "two")):
            assert limit(http, pages, named).status_code == 500
        elastic.engines["y"].refuses = False
        assert limit(http, 1, "other", model="n").status_code == 200
        assert limit(http, 2, "two").json()["applied"]
        assert limit(http, 3, "three").json()["applied"]
        for pages, named in ((3, "one"), (3, "one")):
            assert kind(limit(http, pages, named)) == (409, "changed")
        assert limit(http, 2, "two").json()["applied"] is False
        assert elastic.pages == [3, 3, 1]


def test_what_a_dead_coordinator_had_begun_does_not_take_the_place_of_a_later_one(elastic: Elastic) -> None:
    class Begun(MemoryRecord):
        async def save(self, content: RecordContent) -> None:
            if all(known.outcome == "begun" for known in content.ids.values()):
                await super().save(content)

    dead, record = Begun(), MemoryRecord()
    with served(elastic.members, record=dead) as http:
        assert limit(http, 2, "one").status_code == 200
    asyncio.run(record.save(asyncio.run(dead.load())))
    with served(elastic.members, record=record) as http:
        assert limit(http, 3, "two").json()["applied"]
        assert kind(limit(http, 2, "one")) == (409, "changed")
    assert elastic.pages == [3, 3, 4]
    asyncio.run(record.save(asyncio.run(dead.load())))
    with served(elastic.members, record=record) as http:
        assert limit(http, 2, "one").json()["applied"], "nobody asked for another since"
    assert elastic.pages == [2, 2, 4]


@pytest.mark.parametrize("change", ["removed", "key"])
def test_a_member_that_leaves_is_resized_to_the_end(elastic: Elastic, tmp_path: Path, change: str) -> None:
    """Its connection was closed meanwhile, and the call failed, although the engine did it."""

    def listed(*names: str, **more: str) -> list[dict[str, str]]:
        return [{"name": name, "url": elastic.wires[name].url, "model": "m", **more} for name in names]

    path, y = tmp_path / "members.yaml", elastic.engines["y"]
    path.write_text(yaml.safe_dump(listed("x", "y")))
    with served(StaticMembership(path)) as http, ThreadPoolExecutor(1) as pool:
        y.needed = 4
        resized = pool.submit(limit, http, 2, "one")
        wait_until(lambda: y.limits == [2])
        after = listed("x") if change == "removed" else [*listed("x"), *listed("y", api_key="another")]
        path.write_text(yaml.safe_dump(after))
        assert http.get("/memory_occupation").is_success  # reads the list
        y.needed = 1
        assert resized.result().json()["applied"], resized.result().text
        assert elastic.pages == [2, 2, 4]


def test_two_at_one_time_follow_each_other_and_a_release_waits_for_neither(elastic: Elastic) -> None:
    x = elastic.engines["x"]
    with served(elastic.members) as http, ThreadPoolExecutor(2) as pool:
        x.needed = 4
        one = pool.submit(limit, http, 2, "one")
        wait_until(lambda: x.limits == [2])
        two = pool.submit(limit, http, 1, "two")
        wait_until(lambda: http.get("/operations/two").is_success)
        assert http.get("/memory_occupation").json()["operation_id"] is None, "it serves"
        wait_until(lambda: elastic.engines["y"].kept == 2)
        assert x.limits == [2]
        x.needed = 1
        assert [each.result().status_code for each in (one, two)] == [200, 200]
        assert (x.limits, elastic.pages) == ([2, 1], [1, 1, 4])
        assert limit(http, 4).status_code == 200
        x.needed = 4
        late = pool.submit(limit, http, 3, "late")
        wait_until(lambda: x.limits[-1] == 3)
        x.memory.hold("release")
        body = {"model": "m", "async": True}
        released = [http.post("/release_memory_occupation", json=body).json()["operation_id"]]
        assert kind(late.result()) == (409, "cancelled")
        asleep = pool.submit(limit, http, 2, "asleep")
        wait_until(lambda: http.get("/operations/asleep").is_success)
        released.append(http.post("/release_memory_occupation", json=body).json()["operation_id"])
        assert released[0] == released[1], "the release runs already"
        x.memory.heal()
        assert asleep.result().status_code == 409


def test_it_is_an_operation_with_an_id_or_a_key(elastic: Elastic) -> None:
    """The key was ignored, and the id named no operation."""
    key = {"Idempotency-Key": "key 1"}
    with served(elastic.members) as http:
        assert limit(http, 2, "one").status_code == 200
        operation = http.get("/operations/one").json()
        assert (operation["operation"], operation["status"], operation["tags"]) == ("resize", "succeeded", ["kv_cache"])
        assert operation["answer"]["released_bytes"] == 4 * MIB
        assert operation["engines"] == {"x": "done", "y": "done"}
        assert [limit(http, 3, headers=key).json()["applied"] for _ in range(2)] == [True, False]
        assert kind(limit(http, 2, headers=key)) == (422, "idempotency_key_reused")
        assert kind(http.post("/release_memory_occupation", headers=key)) == (422, "idempotency_key_reused")
        assert elastic.pages == [3, 3, 4]


def test_engines_whose_cache_cannot_be_resized_are_named(sites: Sites) -> None:
    with served([sites["a"].member]) as http:
        refused = limit(http, 2, model="model of a")
        assert kind(refused) == (409, "unsupported")
        named = "a failed while committing: this engine cannot change the size of its KV cache"
        assert named in refused.json()["message"]
