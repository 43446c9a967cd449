"""What one door accepts, the door behind acts on or refuses by name: each field of each request, at each door."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from memsaver_core.contract.reports import OperationReport
from memsaver_core.contract.requests import FleetRelease, FleetResume, Release, ResizeKvCache, Resume, acts_of
from memsaver_server import Settings
from memsaver_server.controller import Answer, Models
from memsaver_server.fleet.controller import FleetController
from memsaver_server.http.app import application
from memsaver_server.metrics import CallerFigures
from memsaver_server.routes import routers_of

#: A value of each field that is not its default.
VALUES: dict[str, Any] = {
    "tags": ["t"],
    "restore": {"t": "host"},
    "trim": False,
    "hibernate": True,
    "verify": "token",
    "prepare": True,
    "lease_s": 7.5,
    "dry_run": True,
    "wait": True,
    "async": True,
    "timeout_s": 0.0,
    "mode": "keep",
    "at_least_bytes": 5,
    "dp_ranks": [0, 2],
    "wait_for_memory_s": 2.5,
    "weights_version": "step-12",
    "kv_cache": "shrink",
    "communicators": "keep",
    "selector": {"names": ["a"]},
    "model": "m",
    "fleet_mode": "best_effort",
    "operation_id": "mine",
    "wake_on_request": True,
}
#: Likewise, of those that only a resize has.
SIZES: dict[str, Any] = {"bytes": 5, "fraction": 0.5, "tokens": 7}
#: What has to be sent with a field.
WITH = {"lease_s": {"prepare": True}}
#: Clients that do not know one engine from a fleet send these to either.
PASSED_OVER = {"model", "operation_id"}
RELEASES = ("/release_memory_occupation", "/release_memory", "/release_kv_cache_memory", "/sleep")
RESUMES = ("/resume_memory_occupation", "/resume_memory", "/wake_up")
RESIZE = "/kv_cache"
#: A door that names its tags itself.
KV_CACHE = "/release_kv_cache_memory"


@dataclass
class Seen:
    """An operation that ended at once."""

    request: Any
    id: str = "seen"
    status: str = "succeeded"
    phase: str = ""
    has_ended: bool = True


@dataclass
class Spy:
    """A controller that only notes what it is asked for."""

    models: Models
    capabilities: frozenset[str]
    name: str = "spy"
    closing: threading.Event = field(default_factory=threading.Event)
    callers: CallerFigures = field(default_factory=CallerFigures)
    asked: list[Any] = field(default_factory=list)

    async def submit(self, asked: Any, *, client: str, key: str | None) -> Seen:
        self.asked.append(asked)
        return Seen(asked)

    async def plan(self, asked: Any) -> Answer:
        self.asked.append(asked)
        return Answer({"dry_run": True})

    async def attend(self, operation: Seen, *, prepared: bool) -> None:
        assert prepared == operation.request.prepare

    def answer(self, operation: Seen) -> Answer:
        return Answer.of(OperationReport(operation=operation.request.operation))

    async def rows(self, selected: Any) -> list[Any]:
        return []

    async def continue_(self, selected: Any, **_: Any) -> Answer:
        return Answer.message("")


@cache
def served(*, several: bool) -> tuple[Spy, FastAPI]:
    kind = (FleetController.models, FleetController.capabilities) if several else (Models(), frozenset({"update"}))
    spy = Spy(*kind)
    return spy, application(spy, Settings(), routers_of(*kind), "spy", "")


def post(app: FastAPI, path: str, body: dict[str, Any]) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.post(path, json=body)

    return asyncio.run(send())


def cases() -> Iterator[Any]:
    for kind, models, release, resume in (
        ("engine", Models(), Release, Resume),
        ("fleet", FleetController.models, FleetRelease, FleetResume),
    ):
        for paths, model in ((RELEASES, release), (RESUMES, resume)):
            for path in paths:
                for name in VALUES:
                    yield pytest.param(models, model, path, name, id=f"{kind}{path}-{name}")


def test_there_is_a_value_of_every_field() -> None:
    assert VALUES.keys() | SIZES.keys() >= set(acts_of(ResizeKvCache)) - {"run_async"}
    fields = {each.alias or name for model in (FleetRelease, FleetResume) for name, each in model.model_fields.items()}
    assert fields == VALUES.keys()
    assert set(acts_of(FleetRelease)) == set(FleetRelease.model_fields)
    assert set(acts_of(FleetResume)) == set(FleetResume.model_fields)


@pytest.mark.parametrize(("models", "model", "path", "name"), list(cases()))
def test_a_field_acts_or_is_refused(models: Models, model: Any, path: str, name: str) -> None:
    spy, app = served(several=models.several)
    spy.asked.clear()
    answer = post(app, path, {**WITH.get(name, {}), name: VALUES[name]})
    own = next((own for own, each in model.model_fields.items() if name in (own, each.alias)), None)
    if own is None and name in PASSED_OVER:
        assert answer.status_code == 200
        assert answer.json()["ignored"] == [name]
        return
    refused = own is None or (models.several and acts_of(model)[own].fleet not in ("each", "own"))
    if refused or (path == KV_CACHE and name == "tags"):
        assert answer.status_code == 400, answer.text
        assert name in answer.text or "prepare" in answer.text
        assert spy.asked == []
        return
    assert answer.status_code in (200, 202), answer.text
    [asked] = spy.asked
    assert type(asked) is model
    given = asked.model_dump(mode="json", by_alias=True)[name]
    if isinstance(given, dict):
        assert given == {**given, **VALUES[name]}
    else:
        assert given == VALUES[name]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", [*VALUES, *SIZES])
def test_a_field_of_a_resize_acts_or_is_refused(several: bool, name: str) -> None:
    spy, app = served(several=several)
    spy.asked.clear()
    values = {**VALUES, **SIZES, "mode": "preempt"}
    size = {} if name in SIZES else {"bytes": 5}
    answer = post(app, RESIZE, {**WITH.get(name, {}), **size, name: values[name]})
    if name in PASSED_OVER and not several:
        assert answer.json()["ignored"] == [name]
    elif several or not any(name in (own, each.alias) for own, each in ResizeKvCache.model_fields.items()):
        assert answer.status_code == 400, answer.text
        assert spy.asked == []
    else:
        assert answer.status_code in (200, 202), answer.text
        [asked] = spy.asked
        assert asked.model_dump(mode="json", by_alias=True)[name] == values[name]


@pytest.mark.parametrize("model", [FleetRelease, FleetResume])
def test_a_fleet_sends_what_its_caller_set_and_no_more(model: Any) -> None:
    given = {name: VALUES[each.alias or name] for name, each in model.model_fields.items()}
    each = {name for name, acts in acts_of(model).items() if acts.fleet == "each"}
    for name in sorted(each):
        assert model(**{name: given[name]}).sent() == {model.model_fields[name].alias or name: given[name]}
    assert model().sent() == {}
    assert {name for name in each if acts_of(model)[name].lasting} >= {"tags"}


@pytest.mark.parametrize("name", ["at_least_bytes", "timeout_s", "lease_s", "wait_for_memory_s"])
def test_a_truth_value_is_no_number(name: str) -> None:
    spy, app = served(several=False)
    spy.asked.clear()
    path = "/resume_memory_occupation" if name == "wait_for_memory_s" else "/release_memory_occupation"
    answer = post(app, path, {**WITH.get(name, {}), name: True})
    assert (answer.status_code, spy.asked) == (400, [])
    assert name in answer.json()["message"]
