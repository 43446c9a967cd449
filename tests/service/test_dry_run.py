"""A dry run says what would happen and what it would take, and changes nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from memsaver_core import process
from memsaver_core._native import Saver as Driver
from memsaver_core.contract.reports import PlanAnswer
from tests.waiting import wait_until

from .surface import seen
from .tensor_engine import ALL_TAGS, KV_BYTES, MIB, TensorEngine


def ask(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json={"dry_run": True, **body})
    assert response.status_code == 200, response.text
    PlanAnswer.model_validate(response.json(), extra="forbid")
    answer: dict[str, Any] = response.json()
    return answer


def tags_of(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {tag["tag"]: tag for tag in answer["tags"]}


def test_a_release_is_told_before_it_happens(http: httpx.Client) -> None:
    http.post("/release_memory_occupation")  # forgets backups of the KV cache
    http.post("/resume_memory_occupation")
    restore = {"kv_cache": "host"}
    plan = ask(http, "/release_memory_occupation", restore=restore)
    assert plan["blockers"] == []
    assert set(ALL_TAGS) <= tags_of(plan).keys()
    done = http.post("/release_memory_occupation", json={"restore": restore}).json()
    for tag, row in tags_of(done).items():
        assert (tags_of(plan)[tag]["bytes"], tags_of(plan)[tag]["restore"]) == (row["released_bytes"], row["restore"])
    assert tags_of(plan)["kv_cache"]["backup_bytes"] >= KV_BYTES
    assert tags_of(plan)["workspace"]["backup_bytes"] == 0
    assert KV_BYTES <= plan["host"]["needed_bytes"] < plan["host"]["free_bytes"]
    assert not any(row["loses_content"] for row in plan["tags"])
    again = ask(http, "/release_memory_occupation")
    assert (again["host"]["needed_bytes"], sum(row["bytes"] for row in again["tags"])) == (0, 0)
    assert again["message"] == "dry run: nothing to release"


def test_on_a_device_without_memory(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be kept in host memory stays; by its name its release is refused."""
    monkeypatch.setattr(process.backend(), "has_host_memory", lambda _index: True, raising=False)
    plan = ask(http, "/release_memory_occupation")
    assert plan["blockers"] == []
    assert {tag["tag"] for tag in plan["tags"] if tag["bytes"]} == {"kv_cache", "workspace"}
    (blocker,) = ask(http, "/release_memory_occupation", tags=["weights"])["blockers"]
    assert "a backup of 'weights' in host memory would free nothing" in blocker
    done = http.post("/release_memory_occupation").json()
    assert {tag["tag"] for tag in done["tags"] if tag["released_bytes"]} == {"kv_cache", "workspace"}


def test_what_is_prepared_prevents_other_operations(http: httpx.Client) -> None:
    http.post("/release_memory_occupation", json={"prepare": True, "lease_s": 600}).raise_for_status()
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        (blocker,) = ask(http, path, tags=["kv_cache"])["blockers"]
        assert "of all tags is prepared by " in blocker


def test_a_resume_is_told_before_it_happens(http: httpx.Client) -> None:
    http.post("/release_memory_occupation")
    plan = ask(http, "/resume_memory_occupation", tags=["kv_cache"])
    assert sorted(tags_of(plan)) == ["kv_cache"]
    [device] = plan["devices"]
    assert KV_BYTES <= device["needed_bytes"] <= device["free_bytes"]
    assert http.get("/memory_occupation").json()["state"] == "released"
    plan = ask(http, "/resume_memory_occupation")
    done = http.post("/resume_memory_occupation").json()
    assert plan["devices"][0]["needed_bytes"] == done["resumed_bytes"]


@pytest.mark.parametrize(
    "path",
    [
        *("/release_memory_occupation", "/release_memory", "/release_kv_cache_memory", "/sleep", "/sleep?level=2"),
        *("/sleep?level=0", "/release_memory_occupation?async=true"),
        *("/resume_memory_occupation", "/resume_memory", "/wake_up", "/wake_up?tags=scheduling"),
    ],
)
def test_nothing_is_drained_closed_or_moved(http: httpx.Client, engine: TensorEngine, path: str) -> None:
    """In every dialect, with a request in flight, and while memory is released."""
    engine.block()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(http.post, "/generate", json={"input_ids": [3]})
        engine.wait_until(lambda engine: engine.in_flight())
        before = seen(engine)
        assert http.post(path, json={"dry_run": True}).status_code == 200
        assert seen(engine) == before
        engine.unblock()
        assert running.result().status_code == 200
    http.post("/release_memory_occupation")
    before, operations = seen(engine), http.get("/operations").json()
    assert http.post(path, json={"dry_run": True}).status_code == 200
    assert seen(engine) == before
    assert http.get("/operations").json() == operations


def test_content_that_would_be_lost_is_named(http: httpx.Client) -> None:
    plan = ask(http, "/release_memory_occupation", restore={"weights": "discard", "kv_cache": "discard"})
    assert [row["tag"] for row in plan["tags"] if row["loses_content"]] == ["weights"]
    assert tags_of(plan)["weights"]["backup_bytes"] == 0
    assert [row["tag"] for row in ask(http, "/sleep", level=2)["tags"] if row["loses_content"]] == ["weights"]


def test_what_a_file_takes_is_counted_on_the_disk(http: httpx.Client) -> None:
    plan = ask(http, "/release_memory_occupation", restore={"kv_cache": "file"}, tags=["kv_cache"])
    assert plan["host"]["needed_bytes"] == 0
    assert KV_BYTES <= plan["file"]["needed_bytes"] <= plan["file"]["free_bytes"]


def blockers(http: httpx.Client, **body: object) -> list[str]:
    """What stands in the way of a resume."""
    reasons: list[str] = ask(http, "/resume_memory_occupation", **body)["blockers"]
    return reasons


def test_what_would_fail_is_told_as_blockers(http: httpx.Client, driver: Driver) -> None:
    http.post("/release_memory_occupation")
    free = http.get("/memory_occupation").json()["devices"][0]["free_bytes"]
    tenant = driver.allocate(0, "tenant", "discard", (free - KV_BYTES // 2) // (2 * MIB) * 2 * MIB)
    try:
        wait_until(lambda: blockers(http, tags=["kv_cache"]))  # a reading may be of a moment ago
        [reason] = blockers(http, tags=["kv_cache"])
        assert reason.startswith("device 0: ")
    finally:
        driver.free(tenant)
    wait_until(lambda: blockers(http) == [])


def test_the_opposite_operation_in_progress_is_a_blocker(http: httpx.Client, engine: TensorEngine) -> None:
    engine.block()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(http.post, "/generate", json={"input_ids": [3]})
        engine.wait_until(lambda engine: engine.in_flight())
        releasing = pool.submit(http.post, "/release_memory_occupation")
        engine.wait_until(lambda engine: engine.is_closed)
        [reason] = ask(http, "/resume_memory_occupation")["blockers"]
        assert "is in progress" in reason
        engine.unblock()
        assert running.result().status_code == releasing.result().status_code == 200


def test_a_request_that_could_not_be_is_refused_as_ever(http: httpx.Client) -> None:
    for wrong in ({"tags": ["wieghts"]}, {"restore": {"wieghts": "zero"}}, {"at_least_bytes": 1 << 50}):
        assert http.post("/release_memory_occupation", json={"dry_run": True, **wrong}).status_code == 400
