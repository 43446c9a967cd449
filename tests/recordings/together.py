"""Two engines behind one coordinator: together or not at all, with failures, turns, and what is written down."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from memsaver_core import MemsaverError
from memsaver_core.contract.errors import OutOfDeviceMemoryError
from memsaver_server.fleet import FileRecord, RecordContent, RecordError
from tests.waiting import wait_until

from .fleets import Fleet, both, ended
from .others import description, samples
from .scenario import ABSENT, Scenario, sent_events

RELEASE, RESUME = "POST /release_memory_occupation", "POST /resume_memory_occupation"
FIRST = {"selector": {"names": ["a"]}}
KEY, READ_KEY = "key-of-the-recordings", "read-key-of-the-recordings"


def together(folder: Path) -> Iterator[tuple[str, Any]]:
    """The recordings of a fleet of two."""
    with both(history=8) as fleet:
        yield "fleet_status", {name: each(fleet) for name, each in _STATUS.items()}
        yield "fleet_operations", {_title(each): each(fleet) for each in _OPERATIONS}
        yield "fleet_failures", {_title(each): each(fleet) for each in _FAILURES}
        yield "fleet_every_engine", _every_engine(fleet)
        yield "fleet_errors", {"paths": _paths(fleet), "pages of other sites": _pages(fleet)}
        yield "fleet_proxy", {_title(each): each(fleet) for each in (_passed_on, _turns, _not_passed_on)}
        yield "openapi_fleet", description(fleet.http)
        yield "metrics_fleet", samples(fleet.http.get("/metrics").text)
    with both(unreachable=True) as fleet:
        yield "fleet_with_an_engine_that_does_not_answer", _unreachable(fleet)
    with both(api_key=KEY, read_key=READ_KEY, protect_probes=True) as fleet:
        yield "fleet_keys", _keys(fleet)
    yield "fleet_record", _record(folder)


def _title(make: Any) -> str:
    return str(make.__name__.strip("_").replace("_", " "))


# -- what it is --------------------------------------------------------------------------------------------------------


def _ask(scenario: Scenario, *, whole: bool = False) -> None:
    for line in (
        *("GET /memory_occupation", "GET /memory_status", "GET /is_sleeping", "GET /is_paused", "GET /v1/models"),
        *("GET /livez", "GET /health", "GET /readyz", "GET /health_generate", "HEAD /readyz"),
    ):
        scenario.call(line, whole=whole and line != "GET /health_generate")


def _resident(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    scenario.call("POST /resume_memory_occupation")  # so that something is wanted
    scenario.steps.clear()
    _ask(scenario, whole=True)
    scenario.call("GET /version", whole=True)
    scenario.call("GET /v1/models/model%20of%20a")
    scenario.call("GET /v1/models/no-such-model", whole=True)
    return scenario.steps


def _released(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    scenario.call(RELEASE)
    _ask(scenario)
    return scenario.steps


def _partly(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    scenario.call(RELEASE, {**FIRST, "tags": ["kv_cache"]})
    _ask(scenario)
    return scenario.steps


def _paused(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    scenario.call("POST /pause_generation", FIRST)
    _ask(scenario)
    return scenario.steps


_STATUS = {
    "resident": _resident,
    "released": _released,
    "one engine partly released": _partly,
    "one engine paused": _paused,
}


# -- what it does ------------------------------------------------------------------------------------------------------


def _all_released_and_resumed(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    for line in (RELEASE, RESUME):
        found = scenario.call(line, whole=True).json()["operation_id"]
        scenario.call(f"GET /operations/{found}", whole=True)
        scenario.call(f"GET /operations/{found}/events", whole=True)
        scenario.call(line)
    return scenario.steps


def _best_effort(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    scenario.call(RELEASE, {"fleet_mode": "best_effort"}, whole=True)
    scenario.call(RESUME, {"fleet_mode": "best_effort", "tags": ["weights"]})
    scenario.call(RESUME, {"fleet_mode": "best_effort"})
    return scenario.steps


def _selected(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    for selector in (
        *({"names": ["a"]}, {"models": ["model of b"]}, {"labels": {"role": "a"}}, {"hosts": ["host-b"]}),
        *({"names": ["a", "b"]}, {"names": ["a"], "hosts": ["host-b"]}, {"gpus": ["no-such-gpu"]}, {"names": "a"}),
    ):
        scenario.call(RELEASE, {"selector": selector})
        scenario.call(RESUME, {"selector": selector})
    scenario.call(RELEASE, {"selector": {"names": ["a"]}, "model": "model of b"})
    scenario.call("POST /sleep", {"model": "model of a", "options": {"level": 1}})
    scenario.call("POST /wakeup", {"model": "model of a"})
    scenario.call("POST /release_memory", {"model": "model of b"})
    scenario.call("POST /resume_memory", {"model": "model of b"})
    scenario.call("POST /release_memory_occupation?model=model%20of%20b&tags=kv_cache")
    return scenario.steps


def _what_a_dry_run_says(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    scenario.call(RELEASE, {"dry_run": True, "tags": ["weights"]}, whole=True)
    scenario.call(RESUME, {"dry_run": True}, whole=True)
    scenario.call(RELEASE, {"dry_run": True, "hibernate": True})
    scenario.call(RELEASE, {"dry_run": True, "selector": {"names": ["z"]}})
    scenario.call("POST /sleep", {"dry_run": True, "level": 2})
    scenario.call("POST /sleep", {"dry_run": True, "level": 0})
    scenario.call("POST /wake_up", {"dry_run": True, "wait_for_memory_s": 2})
    scenario.call("POST /release_memory", {"dry_run": True, "tags": ["model"], "trim": False})
    scenario.call("POST /release_kv_cache_memory", {"dry_run": True, "tags": ["weights"]})
    return scenario.steps


def _in_the_background(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    found = scenario.call(RELEASE, {"async": True, "operation_id": "first"}, whole=True).json()["operation_id"]
    ended(fleet.http)
    scenario.call(f"GET /operations/{found}")
    scenario.call("POST /release_memory", {"async": True, "operation_id": "second"})
    ended(fleet.http)
    scenario.call("GET /operations")
    return scenario.steps


def _ids_and_keys(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    key = {"Idempotency-Key": "key 1"}
    scenario.call(RELEASE, {"operation_id": "mine", "tags": ["kv_cache"]})
    scenario.call(RELEASE, {"operation_id": "mine", "tags": ["kv_cache"]})
    scenario.call(RELEASE, {"operation_id": "mine", "tags": ["weights"]}, whole=True)
    scenario.call(RESUME, {"operation_id": "mine"})
    scenario.call(RESUME)
    scenario.call(RELEASE, {"operation_id": "mine", "tags": ["kv_cache"]})
    scenario.call(RELEASE, {"tags": ["kv_cache"]}, key)
    scenario.call(RELEASE, {"tags": ["kv_cache"]}, key)
    scenario.call(RELEASE, {"tags": ["weights"]}, key)
    scenario.call("POST /v1/runtime/models/sleep", {"model_name": "model of a", "operation_id": "mine"})
    scenario.call("POST /v1/runtime/models/sleep", {"model_name": "model of a", "operation_id": "sleep"}, whole=True)
    scenario.call("POST /v1/runtime/models/sleep", {"model_name": "model of a", "operation_id": "sleep"})
    scenario.call("POST /v1/runtime/models/wake", {"model_name": "model of a", "operation_id": "wake"}, whole=True)
    scenario.call("POST /v1/runtime/models/wake", {"model_name": "no such model"})
    return scenario.steps


def _conflicts_and_giving_up(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    with fleet.engines["b"].request("r1"):
        scenario.call(RELEASE, {"async": True, "operation_id": "given-up"})
        wait_until(lambda: _stages(fleet, "given-up") == {"a": "prepared", "b": "preparing"})
        scenario.call("GET /operations/given-up", whole=True)
        scenario.call("GET /memory_occupation")
        scenario.call(RESUME, whole=True)
        scenario.call("POST /wake_up", FIRST)
        scenario.call(RESUME, {"dry_run": True, **FIRST})
        scenario.call("DELETE /operations/given-up", whole=True)
        scenario.call("DELETE /operations/given-up")
        scenario.call("POST /operations/given-up/abort")
        scenario.call("GET /operations/given-up/events", whole=True)
        scenario.call(RELEASE, {"operation_id": "given-up"})
    found = scenario.call(RELEASE).json()["operation_id"]
    scenario.call(f"DELETE /operations/{found}", whole=True)
    scenario.call(f"POST /operations/{found}/commit")
    for line in ("GET /operations/none", "DELETE /operations/none", "POST /operations/none/abort"):
        scenario.call(line)
    scenario.call("GET /operations/none/events", whole=True)
    return scenario.steps


def _stages(fleet: Fleet, operation_id: str) -> Any:
    return fleet.http.get(f"/operations/{operation_id}").json()["engines"]


def _joined(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    request = fleet.engines["b"].request("r1")
    request.__enter__()
    scenario.call(RELEASE, {"async": True, "operation_id": "joined"})
    with scenario.during(RELEASE), scenario.during("POST /release_memory"):
        wait_until(lambda: fleet.http.get("/operations/joined").json()["callers"] == 3)
        request.__exit__(None, None, None)
    return scenario.steps


def _live_events(fleet: Fleet) -> list[Any]:
    """Those that are sent while one engine is held up, and the last one: others are sent only if somebody looks."""
    scenario = fleet.scenario()
    request = fleet.engines["b"].request("r1")
    request.__enter__()
    scenario.call(RELEASE, {"async": True, "operation_id": "live"})
    wait_until(lambda: _stages(fleet, "live") == {"a": "prepared", "b": "preparing"})
    found: list[Any] = []
    with fleet.http.stream("GET", "/operations/live/events") as answer:
        for event in sent_events(answer.iter_lines()):
            if len(found) < 3 or event[0] == "done":
                found.append(event)
            if len(found) == 3:
                request.__exit__(None, None, None)
    scenario.note(events=found)
    return scenario.steps


def _the_feed(fleet: Fleet) -> list[Any]:
    """The names of the dashboard's feed and of their fields."""
    fleet.restore()
    found: dict[str, list[str]] = {}
    with fleet.http.stream("GET", "/dashboard/feed") as answer:
        for name, data in sent_events(answer.iter_lines()):
            found[name] = sorted(data)
            if "occupation" in found:
                return [found]
    raise AssertionError("the feed has ended")


_OPERATIONS = (
    *(_all_released_and_resumed, _best_effort, _selected, _what_a_dry_run_says, _in_the_background, _ids_and_keys),
    *(_conflicts_and_giving_up, _joined, _live_events, _the_feed),
)


# -- what fails --------------------------------------------------------------------------------------------------------


def _an_engine_cannot_prepare(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    for whole, line, body in (
        (True, RELEASE, ABSENT),
        (False, RELEASE, {"fleet_mode": "best_effort"}),
        (False, "POST /sleep", ABSENT),
        (False, "POST /release_memory", ABSENT),
        (False, "POST /v1/runtime/models/sleep", {"model_name": "model of b"}),
        (False, RELEASE, {"async": True, "operation_id": "fails"}),
    ):
        call = "release" if isinstance(body, dict) and "fleet_mode" in body else "check_release"
        fleet.engines["b"].memory.fail(call, MemsaverError("b has no room"))
        scenario.call(line, body, whole=whole)
        fleet.engines["b"].memory.heal()
        if isinstance(body, dict) and "fleet_mode" in body:
            scenario.call(RESUME)
    ended(fleet.http)
    scenario.call("GET /operations/fails")
    scenario.call(RELEASE, {"operation_id": "fails"})
    return scenario.steps


def _an_engine_fails_to_release(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    fleet.engines["b"].memory.fail("release", MemsaverError("b is broken"))
    found = scenario.call(RELEASE, whole=True).json()["operation_id"]
    scenario.call(f"GET /operations/{found}")
    scenario.call(f"GET /operations/{found}/events")
    return scenario.steps


def _an_engine_fails_to_resume(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    scenario.call(RELEASE)
    fleet.engines["b"].memory.fail("resume", MemsaverError("b is broken"))
    scenario.call(RESUME, whole=True)
    fleet.engines["a"].memory.fail("reserve", OutOfDeviceMemoryError("a has no room", needed_bytes=2, free_bytes=1))
    scenario.call(RESUME, whole=True)
    fleet.engines["a"].memory.fail("reserve", OutOfDeviceMemoryError("a has no room", needed_bytes=2, free_bytes=1))
    scenario.call("POST /wake_up")
    return scenario.steps


def _an_engine_cannot_be_undone(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    fleet.engines["b"].memory.fail("release", MemsaverError("b is broken"))
    fleet.engines["a"].memory.fail("resume", MemsaverError("a is stuck"))
    scenario.call(RELEASE, whole=True)
    return scenario.steps


def _a_drain_takes_too_long(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    with fleet.engines["b"].request("r1"):
        scenario.call(RELEASE, {"timeout_s": 0.01}, whole=True)
        scenario.call("POST /sleep", {"timeout_s": 0.01, "mode": "wait"})
        scenario.call(RELEASE, {"timeout_s": 0.01, "fleet_mode": "best_effort"})
        scenario.call(RESUME)
        scenario.call("POST /pause_generation", {"timeout_s": 0.01, "mode": "wait"})
    return scenario.steps


def _what_only_engines_refuse(fleet: Fleet) -> list[Any]:
    """One engine is asked: of two that refuse the same, any may be the first."""
    scenario = fleet.scenario()
    scenario.call(RELEASE, {**FIRST, "tags": ["no_such_tag"]}, whole=True)
    scenario.call(RELEASE, {**FIRST, "restore": {"no_such_tag": "host"}})
    scenario.call(RELEASE, {**FIRST, "hibernate": True})
    scenario.call("POST /sleep", {**FIRST, "level": 3})
    scenario.call(RESUME, {**FIRST, "verify": "token"})
    scenario.call(RESUME, {"tags": ["no_such_tag"], "fleet_mode": "best_effort"})
    return scenario.steps


_FAILURES = (
    *(_an_engine_cannot_prepare, _an_engine_fails_to_release, _an_engine_fails_to_resume),
    *(_an_engine_cannot_be_undone, _a_drain_takes_too_long, _what_only_engines_refuse),
)


def _unreachable(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    _ask(scenario)
    scenario.call(RELEASE, whole=True)
    scenario.call(RELEASE, {"fleet_mode": "best_effort"}, whole=True)
    scenario.call(RESUME, {"selector": {"names": ["a", "b"]}})
    scenario.call(RELEASE, {"dry_run": True})
    scenario.call("POST /flush_cache")
    scenario.call("POST /pause_generation")
    scenario.call("POST /continue_generation", {"selector": {"names": ["c"]}}, whole=True)
    scenario.call("POST /v1/completions", {"model": "model of c"})
    return scenario.steps


def _every_engine(fleet: Fleet) -> list[Any]:
    payload = base64.b64encode(b"0").decode()
    scenario = fleet.scenario()
    for line, body in (
        ("POST /flush_cache", ABSENT),
        ("POST /pause_generation", {"mode": "keep"}),
        ("POST /continue_generation", ABSENT),
        ("POST /pause", {"model": "model of a", "options": {"mode": "wait"}}),
        ("POST /is_paused", {"model": "model of a"}),
        ("POST /resume", {"model": "model of a"}),
        ("POST /content_written", {"tags": ["weights"]}),
        ("POST /content_written", {"tags": ["no_such_tag"], **FIRST}),
        ("POST /update_weights_from_disk", {"model_path": "/none", "flush_cache": False}),
        ("POST /update_weights_from_tensor", {"serialized_named_tensors": [payload], "flush_cache": False}),
        ("POST /update_weights_from_tensor", {"serialized_named_tensors": [payload], "colour": "red"}),
        ("GET /health_generate", ABSENT),
    ):
        scenario.call(line, body, whole=True)
    scenario.call(RELEASE, {"tags": ["weights"], **FIRST})
    scenario.call("POST /update_weights_from_tensor", {"serialized_named_tensors": [payload]})
    scenario.call("POST /continue_generation")
    scenario.call("GET /health_generate")
    return scenario.steps


# -- who may call, and what there is -----------------------------------------------------------------------------------


def _paths(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    for line in (
        *("GET /no-such-path", "GET /sleep", "PUT /wakeup", "DELETE /operations", "POST /livez", "HEAD /metrics"),
        *("POST /operations/none/commit", "GET /dashboard/none", "POST /memory_occupation", "GET /docs"),
    ):
        scenario.call(line)
    scenario.call(RELEASE, b" " * 70_000)
    scenario.call(RELEASE, b"{")
    return scenario.steps


def _pages(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    # The coordinator may have read the engines last in the middle of an earlier scenario.
    wait_until(lambda: fleet.http.get("/livez").json()["state"] == "resident")
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://site.example"}, {"Host": "site.example"}):
        scenario.call("POST /flush_cache", ABSENT, headers)
        scenario.call("GET /memory_status", ABSENT, headers)
        scenario.call("POST /v1/completions", {"model": "model of a"}, headers)
        scenario.call("GET /livez", ABSENT, headers)
    return scenario.steps


def _keys(fleet: Fleet) -> dict[str, Any]:
    described = fleet.http.get("/openapi.json").json()["paths"]
    lines = [f"{method.upper()} {path}" for path in described for method in described[path]]
    lines += ["POST /v1/completions", "POST /generate", "GET /dashboard/feed", "GET /", "HEAD /livez"]
    given = {
        "no key": None,
        "the key that reads": {"Authorization": f"Bearer {READ_KEY}"},
    }
    found: dict[str, Any] = {}
    with httpx.Client(base_url=fleet.http.base_url, timeout=600, verify=False) as http:
        for line in sorted(lines):
            method, path = line.replace("{operation_id}", "none").replace("{model}", "none").split()
            found[line] = {name: _status(http, method, path, headers) for name, headers in given.items()}
    return found


def _status(http: httpx.Client, method: str, path: str, headers: dict[str, str] | None) -> int:
    with http.stream(method, path, headers=headers) as answer:  # a feed has no end
        return answer.status_code


# -- requests for models -----------------------------------------------------------------------------------------------


def _passed_on(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    path = "/v1/completions"
    headers = {"X-Request-Id": "7", "Authorization": "Bearer of-the-caller", "Cookie": "c=1"}
    scenario.call(f"POST {path}", {"model": "model of a", "prompt": [1, 2]}, headers, whole=True)
    scenario.call(f"POST {path}?model=model%20of%20b", b'{"prompt": "\xc3\xa9"}', whole=True)
    scenario.call(f"GET {path}?model=model%20of%20b&n=1", whole=True)
    scenario.call(f"POST {path}?fail=1", {"model": "model of a"}, whole=True)
    scenario.call(f"POST {path}?stream=1", {"model": "model of a"}, whole=True)
    scenario.call("POST /v1/no-such-path", {"model": "model of a"}, whole=True)
    scenario.call("PUT /v1/completions", {"model": "model of a"})
    scenario.call("POST /generate", {"model": "model of a", "input_ids": [3, 5]}, whole=True)
    scenario.call("POST /generate", {"model": "model of a", "input_ids": [], "stream": True})
    return scenario.steps


def _turns(fleet: Fleet) -> list[Any]:
    """An engine that sleeps until a request wakes it."""
    scenario = fleet.scenario()
    for asleep, body in (
        ("POST /v1/runtime/models/sleep", {"model_name": "model of a", "level": 1}),
        (RELEASE, {**FIRST, "wake_on_request": True}),
    ):
        scenario.call(asleep, body)
        scenario.call("GET /v1/models")
        scenario.call("POST /v1/completions", {"model": "model of a"})
        scenario.call("GET /v1/models/model%20of%20a")
    return scenario.steps


def _not_passed_on(fleet: Fleet) -> list[Any]:
    scenario = fleet.scenario()
    scenario.call("POST /v1/completions", ABSENT, whole=True)
    scenario.call("POST /v1/completions", {"model": 7})
    scenario.call("POST /v1/completions", b"{")
    scenario.call("POST /v1/completions", {"model": "no such model"}, whole=True)
    scenario.call(RELEASE, FIRST)
    scenario.call("POST /v1/completions", {"model": "model of a"}, whole=True)
    scenario.call("GET /v1/models")
    scenario.call(RESUME)
    scenario.call("POST /v1/runtime/models/sleep", {"model_name": "no such model"}, whole=True)
    scenario.call("POST /v1/runtime/models/sleep", {})
    return scenario.steps


# -- what is written down ----------------------------------------------------------------------------------------------


class _Written(FileRecord):
    """A record that keeps what each write has left in its file, and fails if it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path
        self.states: list[Any] = []
        self.broken = False

    async def save(self, content: RecordContent) -> None:
        if self.broken:
            raise RecordError(f"the record {self.path} cannot be written: the disk is full")
        await super().save(content)
        self.states.append(json.loads(self.path.read_text()))


def _record(folder: Path) -> dict[str, Any]:
    """What each write leaves in the file."""
    record = _Written(folder / "record.json")
    written: list[Any] = []
    with both(record) as fleet:
        for line, body in (
            (RELEASE, {"operation_id": "1", "tags": ["weights", "kv_cache"], "restore": {"kv_cache": "host"}}),
            (RESUME, {"operation_id": "2", "wait_for_memory_s": 2, "verify": None}),
            (RELEASE, {"operation_id": "3", **FIRST, "mode": "abort", "timeout_s": 7, "trim": True}),
            (RELEASE, {"operation_id": "4", "trim": False, "verify": "token", "wake_on_request": True}),
            (RESUME, {"operation_id": "5", "fleet_mode": "best_effort"}),
            ("POST /sleep", {"operation_id": "6", "level": 2}),
            ("POST /wakeup", {"operation_id": "7"}),
            ("POST /content_written", {}),
            ("POST /v1/runtime/models/sleep", {"operation_id": "8", "model_name": "model of b"}),
            ("POST /v1/runtime/models/wake", {"operation_id": "9", "model_name": "model of b"}),
            (RELEASE, {"operation_id": "10"}),
        ):
            record.states.clear()
            if body.get("operation_id") == "10":
                fleet.engines["b"].memory.fail("release", MemsaverError("b is broken"))
            scenario = fleet.scenario(keep=True)
            scenario.call(line, body)
            answered = scenario.steps[0]["response"][0]
            written.append(
                {"request": [line, body], "status": answered, "written": scenario.names.normal(record.states)}
            )
        scenario = fleet.scenario({str(folder): "/FOLDER"})
        record.broken = True
        scenario.call(RELEASE, whole=True)
        record.broken = False
    return {"written": written, "it cannot be written": scenario.steps}
