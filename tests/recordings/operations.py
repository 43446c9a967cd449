"""Operations of one engine: in the background, joined, queued, cancelled, prepared, repeated; and their events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

from .engines import Site, driver, generating, served
from .scenario import Scenario, sent_events

RELEASE, RESUME = "POST /release_memory_occupation", "POST /resume_memory_occupation"


def operations(folder: Path) -> Iterator[tuple[str, Any]]:
    """The recordings of operations, of their events and of the audit log."""
    found: dict[str, Any] = {}
    with served(history=12) as site:
        for make in (
            _in_the_background,
            _joined,
            _overtaken,
            _conflicts,
            _cancelled_in_its_drain,
            _cancelled_in_the_queue,
            _idempotency_keys,
            _prepared_release,
            _prepared_resume,
            _aborted,
            _lease_ended,
            _commits_that_are_refused,
            _prepared_blocks_others,
            _already,
        ):
            found[_title(make)] = make(site)
        live = {_title(make): make(site) for make in (_events_of_a_drain, _events_of_a_cancelled_one, _feed)}
    with served(history=2) as site:
        found["listed"] = _listed(site)
    with served() as site:
        found["the queue is full"] = _full(site)
    with served(phase_timeout_s=1) as site:
        found["stalled"] = _stalled(site)
    yield "engine_operations", found
    yield "engine_events", live
    yield "audit_log", _audit(folder / "audit.log")


def _title(make: Any) -> str:
    return make.__name__.strip("_").replace("_", " ")


def _status(site: Site, operation_id: str) -> str:
    return site.http.get(f"/operations/{operation_id}").json()["status"]


def _until(site: Site, operation_id: str, status: str) -> None:
    wait_until(lambda: _status(site, operation_id) == status)


def _draining(scenario: Scenario, fields: dict[str, Any] | None = None) -> str:
    """Start a release in the background, and return its id once it drains; a request is in flight."""
    accepted = scenario.call(RELEASE, {"async": True, **(fields or {})}).json()
    return str(accepted["operation_id"])


def _in_drain(site: Site, operation_id: str) -> None:
    wait_until(lambda: site.http.get(f"/operations/{operation_id}").json()["phase"] == "drain")


def _in_the_background(site: Site) -> list[Any]:
    scenario = site.scenario()
    for line in (RELEASE, RESUME):
        found = scenario.call(line, {"async": True}, whole=True).json()["operation_id"]
        _until(site, found, "succeeded")
        scenario.call(f"GET /operations/{found}", whole=True)
        scenario.call(f"GET /operations/{found}/events", whole=True)
        scenario.call(f"DELETE /operations/{found}")
    scenario.call("GET /operations/no-such-id", whole=True)
    scenario.call("DELETE /operations/no-such-id")
    scenario.call("POST /operations/no-such-id/commit")
    scenario.call("POST /operations/no-such-id/abort")
    scenario.call("GET /operations/no-such-id/events")
    scenario.call("GET /release_memory_occupation?async=1")
    return scenario.steps


def _listed(site: Site) -> list[Any]:
    scenario = site.scenario()
    scenario.call("GET /operations", whole=True)
    scenario.call(RELEASE, {"tags": ["kv_cache"]})
    scenario.call("GET /operations", whole=True)
    scenario.call(RESUME, {"tags": ["kv_cache"]})
    scenario.call(RELEASE, {"tags": ["weights"]})
    scenario.call("GET /operations")
    return scenario.steps


def _joined(site: Site) -> list[Any]:
    scenario = site.scenario()
    with generating(site):
        found = _draining(scenario)
        with (
            scenario.during(RELEASE),
            scenario.during("POST /sleep?mode=wait"),
            scenario.during("POST /release_memory"),
        ):
            wait_until(lambda: site.http.get(f"/operations/{found}").json()["callers"] == 4)
            _in_drain(site, found)
            scenario.call(f"GET /operations/{found}", whole=True)
            site.engine.unblock()
    return scenario.steps


def _overtaken(site: Site) -> list[Any]:
    scenario = site.scenario()
    with generating(site):
        found = _draining(scenario, {"timeout_s": 60})
        _in_drain(site, found)
        scenario.call(RELEASE, {"timeout_s": 30, "mode": "abort"})
        scenario.call(f"GET /operations/{found}")
    return scenario.steps


def _conflicts(site: Site) -> list[Any]:
    scenario = site.scenario()
    with generating(site):
        found = _draining(scenario, {"tags": ["kv_cache"], "timeout_s": 60})
        _in_drain(site, found)
        scenario.call(RESUME, whole=True)
        scenario.call(RESUME, {"tags": ["kv_cache"]})
        scenario.call("POST /wake_up")
        scenario.call("POST /resume_memory")
        scenario.call(RESUME, {"dry_run": True})
        scenario.call(RESUME, {"tags": ["weights"], "async": True})
        queued = scenario.call(RESUME, {"wait": True, "async": True}).json()["operation_id"]
        scenario.call(f"GET /operations/{queued}")
        scenario.call(f"POST /operations/{queued}/commit")
        site.engine.unblock()
        _until(site, queued, "succeeded")
        scenario.call(f"GET /operations/{queued}")
    return scenario.steps


def _cancelled_in_its_drain(site: Site) -> list[Any]:
    scenario = site.scenario()
    with generating(site):
        found = _draining(scenario, {"timeout_s": 60})
        with scenario.during(RELEASE, {"timeout_s": 60}, whole=True):
            wait_until(lambda: site.http.get(f"/operations/{found}").json()["callers"] == 2)
            _in_drain(site, found)
            scenario.call(f"DELETE /operations/{found}", whole=True)
        scenario.call(f"DELETE /operations/{found}")
        scenario.call(f"POST /operations/{found}/abort")
        scenario.call(f"POST /operations/{found}/commit")
        scenario.call(f"GET /operations/{found}/events", whole=True)
    return scenario.steps


def _cancelled_in_the_queue(site: Site) -> list[Any]:
    scenario = site.scenario()
    with generating(site):
        _draining(scenario, {"timeout_s": 60})
        queued = scenario.call(RESUME, {"wait": True, "async": True}).json()["operation_id"]
        scenario.call(f"POST /operations/{queued}/abort", whole=True)
        scenario.call(f"GET /operations/{queued}/events")
    return scenario.steps


def _idempotency_keys(site: Site) -> list[Any]:
    scenario = site.scenario()
    key = {"Idempotency-Key": "key 1"}
    scenario.call(RELEASE, {"tags": ["kv_cache"]}, key)
    scenario.call(RELEASE, {"tags": ["kv_cache"]}, key)
    scenario.call(RESUME)
    scenario.call(RELEASE, {"tags": ["kv_cache"]}, key)
    scenario.call(RELEASE, {"tags": ["kv_cache"], "async": True}, key)
    scenario.call(RELEASE, {"tags": ["kv_cache"], "wait": True}, key)
    scenario.call(RELEASE, {"tags": ["kv_cache"], "dry_run": True}, key)
    scenario.call("POST /release_memory", {"tags": ["kv_cache"]}, key)
    scenario.call(RELEASE, {"tags": ["kv_cache"], "timeout_s": 25}, key)
    scenario.call(RELEASE, {"tags": ["kv_cache"], "timeout_s": 26}, key, whole=True)
    scenario.call(RELEASE, {"tags": ["weights"]}, key)
    scenario.call(RESUME, {"tags": ["kv_cache"]}, key)
    scenario.call("POST /sleep", None, key)
    failing = {"Idempotency-Key": "key 2"}
    driver().fail("unmap")
    scenario.call(RELEASE, None, failing)
    scenario.call(RELEASE, None, failing)
    return scenario.steps


def _prepared_release(site: Site) -> list[Any]:
    scenario = site.scenario()
    found = scenario.call(RELEASE, {"prepare": True, "lease_s": 600}, whole=True).json()["operation_id"]
    scenario.call(RELEASE, {"prepare": True, "lease_s": 700})
    scenario.call("GET /memory_occupation", whole=True)
    scenario.call(f"GET /operations/{found}")
    scenario.call("GET /readyz")
    scenario.call(RESUME, {"commit": found})
    scenario.call(RELEASE, {"commit": found, "tags": ["kv_cache"]})
    scenario.call(RELEASE, {"commit": found, "dry_run": True})
    scenario.call(RELEASE, {"commit": found}, whole=True)
    scenario.call(RELEASE, {"commit": found})
    scenario.call(f"POST /operations/{found}/commit", {"colour": "red"})
    scenario.call(f"POST /operations/{found}/abort")
    return scenario.steps


def _prepared_resume(site: Site) -> list[Any]:
    scenario = site.scenario()
    scenario.call(RELEASE)
    found = scenario.call(RESUME, {"prepare": True, "tags": ["weights"], "lease_s": 600}, whole=True).json()
    scenario.call("GET /memory_occupation", until=_is_read)
    scenario.call(f"POST /operations/{found['operation_id']}/commit", b"{", whole=True)
    scenario.call(f"POST /operations/{found['operation_id']}/commit", whole=True)
    scenario.call(f"POST /operations/{found['operation_id']}/commit", {})
    scenario.call(f"GET /operations/{found['operation_id']}/events")
    return scenario.steps


def _is_read(occupation: Any) -> bool:
    """Whether the device was read since the reservation that a prepared resume holds, or since it was given back."""
    held = sum(tag["resident_bytes"] for tag in occupation["tags"])
    reserved = 262144 if occupation["prepared"] else 0
    return bool(occupation["devices"][0]["used_bytes"] == held + reserved)


def _aborted(site: Site) -> list[Any]:
    scenario = site.scenario()
    for line in (RELEASE, RESUME):
        found = scenario.call(line, {"prepare": True}).json()["operation_id"]
        scenario.call(f"POST /operations/{found}/abort", {}, whole=True)
        scenario.call(f"POST /operations/{found}/abort")
        scenario.call(f"POST /operations/{found}/commit", whole=True)
        scenario.call(line, {"commit": found})
        scenario.call(RELEASE)
    return scenario.steps


def _lease_ended(site: Site) -> list[Any]:
    scenario = site.scenario()
    key = {"Idempotency-Key": "key 3"}
    found = scenario.call(RELEASE, {"prepare": True, "lease_s": 0.01, "async": True}, key).json()["operation_id"]
    del scenario.steps[-1]["then"]  # it may have ended
    _until(site, found, "cancelled")
    scenario.call(f"GET /operations/{found}", whole=True)
    scenario.call(f"POST /operations/{found}/commit", whole=True)
    scenario.call(f"DELETE /operations/{found}")
    again = scenario.call(RELEASE, {"prepare": True, "lease_s": 600}, key).json()["operation_id"]
    scenario.note(is_another=again != found)
    return scenario.steps


def _commits_that_are_refused(site: Site) -> list[Any]:
    scenario = site.scenario()
    found = scenario.call(RELEASE).json()["operation_id"]
    scenario.call(RELEASE, {"commit": found})
    scenario.call(RESUME, {"commit": found})
    scenario.call(f"POST /operations/{found}/commit")
    scenario.call(f"POST /operations/{found}/commit", [1])
    scenario.call("POST /release_memory_occupation?commit=no-such-id")
    return scenario.steps


def _prepared_blocks_others(site: Site) -> list[Any]:
    scenario = site.scenario()
    found = scenario.call(RELEASE, {"prepare": True, "tags": ["kv_cache"], "lease_s": 600}).json()["operation_id"]
    scenario.call(RELEASE, {"tags": ["kv_cache"]})
    scenario.call(RELEASE, {"tags": ["weights"]})
    scenario.call(RESUME, {"tags": ["weights"]})
    scenario.call(RESUME, {"dry_run": True})
    queued = scenario.call(RELEASE, {"tags": ["weights"], "wait": True, "async": True}).json()["operation_id"]
    scenario.call(f"POST /operations/{found}/abort")
    _until(site, queued, "succeeded")
    scenario.call(f"GET /operations/{queued}")
    return scenario.steps


def _already(site: Site) -> list[Any]:
    scenario = site.scenario()
    scenario.call(RESUME, whole=True)
    scenario.call(RESUME, {"dry_run": True})
    scenario.call(RESUME, {"wait_for_memory_s": 5, "verify": "token"})
    scenario.call(RELEASE, {"tags": ["kv_cache"]})
    scenario.call(RELEASE, {"tags": ["kv_cache"]}, whole=True)
    scenario.call(RELEASE, {"tags": ["kv_cache"], "dry_run": True})
    scenario.call(RELEASE, {"tags": ["kv_cache"], "at_least_bytes": 1})
    scenario.call(RELEASE)
    scenario.call(RELEASE)
    scenario.call(RESUME, {"tags": ["weights"]})
    scenario.call(RESUME, {"tags": ["weights"]})
    scenario.call(RESUME)
    return scenario.steps


def _full(site: Site) -> list[Any]:
    scenario = site.scenario()
    accepted = 0
    with generating(site):
        first = site.http.post("/release_memory_occupation", json={"async": True, "timeout_s": 600}).json()
        while True:
            path = ("/resume_memory_occupation", "/release_memory_occupation")[accepted % 2]
            if not site.http.post(path, json={"async": True, "wait": True}).is_success:
                break
            accepted += 1
        scenario.call(f"POST {path}", {"async": True, "wait": True}, whole=True)
        for each in site.http.get("/operations").json()["operations"]:
            if each["status"] == "queued":
                site.http.delete(f"/operations/{each['operation_id']}").raise_for_status()
        site.http.delete(f"/operations/{first['operation_id']}").raise_for_status()
    scenario.note(queued_before=accepted)
    return scenario.steps


def _stalled(site: Site) -> list[Any]:
    scenario = site.scenario()
    driver().delay("unmap", 3600)
    found = scenario.call(RELEASE, {"tags": ["kv_cache"]}, whole=True).json()["error"]["operation_id"]
    scenario.call(f"GET /operations/{found}", until=lambda status: status["stalled"])
    scenario.call(RELEASE, {"tags": ["kv_cache"]})
    scenario.call(f"DELETE /operations/{found}")
    scenario.call(RESUME, {"wait": True})
    driver().heal()
    wait_until(lambda: {each["status"] for each in _recent(site)} == {"succeeded"})
    scenario.call("GET /operations")
    return scenario.steps


def _recent(site: Site) -> list[Any]:
    return list(site.http.get("/operations").json()["operations"])


# -- events ------------------------------------------------------------------------------------------------------------


def _stream(site: Site, path: str, act: Any) -> list[Any]:
    """Return the events of a stream that is opened before ``act`` is called, after its first event.

    A phase is announced only if somebody looks while it runs: those after the first event are left out, and progress.
    """
    found: list[Any] = []
    with site.http.stream("GET", path) as answer:
        for event in sent_events(answer.iter_lines()):
            if not found:
                act()
            elif event[0] in ("phase", "progress"):
                continue
            found.append(event)
    return found


def _events_of_a_drain(site: Site) -> list[Any]:
    scenario = site.scenario()
    with generating(site):
        found = _draining(scenario)
        _in_drain(site, found)
        events = _stream(site, f"/operations/{found}/events", site.engine.unblock)
    scenario.note(events=events)
    return scenario.steps


def _events_of_a_cancelled_one(site: Site) -> list[Any]:
    scenario = site.scenario()
    with generating(site):
        found = _draining(scenario, {"timeout_s": 60})
        _in_drain(site, found)
        cancel = lambda: site.http.delete(f"/operations/{found}").raise_for_status()  # noqa: E731
        events = _stream(site, f"/operations/{found}/events", cancel)
    scenario.note(events=events)
    return scenario.steps


def _feed(site: Site) -> list[Any]:
    """The names of the dashboard's feed and of their fields; it shows the operations that are remembered."""
    site.restore()
    found: dict[str, list[str]] = {}
    with site.http.stream("GET", "/dashboard/feed") as answer:
        for name, data in sent_events(answer.iter_lines()):
            found[name] = sorted(data)
            if "occupation" in found:
                return [found]
    raise AssertionError("the feed has ended")


def _audit(path: Path) -> list[Any]:
    """The lines of the audit log."""
    with served(audit_file=str(path)) as site:
        scenario = site.scenario()
        scenario.call(RELEASE, {"tags": ["kv_cache", "weights"]}, {"User-Agent": "an orchestrator"})
        scenario.call(RESUME)
        driver().fail("unmap")
        scenario.call(RELEASE)
        found = scenario.call(RELEASE, {"prepare": True}).json()["operation_id"]
        scenario.call(f"DELETE /operations/{found}")
        wait_until(lambda: "cancelled" in path.read_text())
    return [scenario.names.normal(json.loads(line)) for line in path.read_text().splitlines()]
