"""Operations in two phases: prepared under a lease, then committed or undone."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import memsaver_core as ms
from memsaver_core._native import Saver as Driver
from memsaver_core.contract.reports import PreparedAnswer
from memsaver_core.contract.status import HostBackupStatus
from memsaver_core.ranks import plans
from memsaver_server import attach
from memsaver_server.client import Client, ConflictError
from tests.waiting import wait_until

from .tensor_engine import ALL_TAGS, MIB, TensorEngine
from .test_operations import PROMPT, drain_held_up, post, stopped

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


def prepare(http: httpx.Client, path: str = RELEASE, **body: object) -> dict[str, Any]:
    response = post(http, path, prepare=True, **body)
    assert response.status_code == 200, response.text
    PreparedAnswer.model_validate(response.json(), extra="forbid")
    answer: dict[str, Any] = response.json()
    return answer


def prepared(http: httpx.Client) -> dict[str, Any] | None:
    state: dict[str, Any] | None = http.get("/memory_occupation").json()["prepared"]
    return state


def operation(http: httpx.Client, operation_id: str) -> dict[str, Any]:
    status: dict[str, Any] = http.get(f"/operations/{operation_id}").json()
    return status


def operations(http: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = http.get("/operations").json()["operations"]
    return found


def check_refused(answer: httpx.Response, kind: str, *texts: str) -> None:
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, kind)
    for text in texts:
        assert text in answer.json()["message"]


def test_a_release_is_prepared_then_committed(http: httpx.Client, engine: TensorEngine) -> None:
    answer = prepare(http, lease_s=60)
    assert {row["tag"] for row in answer["tags"] if row["bytes"]} == set(ALL_TAGS)
    assert 0 < answer["lease_s"] <= 60
    assert engine.is_closed
    held = http.get("/memory_occupation").json()
    assert held["prepared"]["operation_id"] == answer["operation_id"]
    assert all(tag["released_bytes"] == 0 for tag in held["tags"])
    assert operation(http, answer["operation_id"])["status"] == "prepared"
    assert 'memsaver_lease_seconds{operation="release"}' in http.get("/metrics").text
    done = post(http, RELEASE, commit=answer["operation_id"])
    assert done.status_code == 200, done.text
    assert (done.json()["state"], done.json()["operation_id"]) == ("released", answer["operation_id"])
    assert done.json()["released_bytes"] == sum(row["bytes"] for row in answer["tags"])
    assert post(http, RELEASE, commit=answer["operation_id"]).json() == done.json()  # idempotent
    assert prepared(http) is None
    late = post(http, f"/operations/{answer['operation_id']}/abort")
    check_refused(late, "too_late")
    assert post(http, RESUME).json()["state"] == "resident"
    assert prepare(http)["expected_s"] > 0


def test_an_abort_leaves_all_as_before(http: httpx.Client, engine: TensorEngine) -> None:
    before = http.get("/memory_occupation").json()["tags"]
    operation_id = prepare(http)["operation_id"]
    for method, path in (("POST", f"/operations/{operation_id}/abort"), ("DELETE", f"/operations/{operation_id}")):
        answer = http.request(method, path)
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    assert http.get("/memory_occupation").json()["tags"] == before
    assert not engine.is_closed
    check_refused(post(http, RELEASE, commit=operation_id), "lease_ended", operation_id)
    assert post(http, RELEASE).json()["state"] == "released"


def test_the_end_of_the_lease_is_an_abort(http: httpx.Client, engine: TensorEngine) -> None:
    operation_id = prepare(http, lease_s=1)["operation_id"]
    wait_until(lambda: operation(http, operation_id)["status"] == "cancelled")
    error = operation(http, operation_id)["answer"]["error"]
    assert (error["type"], error["cancelled_by"]) == ("cancelled", "the end of its lease")
    check_refused(post(http, RELEASE, commit=operation_id), "lease_ended", "the end of its lease")
    assert not engine.is_closed
    assert http.get("/memory_occupation").json()["state"] == "resident"


def test_a_repeat_joins_and_renews(http: httpx.Client) -> None:
    first = prepare(http, lease_s=60)
    again = prepare(http, lease_s=1000)
    assert again["operation_id"] == first["operation_id"]
    assert again["lease_s"] > 900
    assert prepare(http, lease_s=1)["lease_s"] > 900  # which does not shorten it


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RELEASE, {}),
        (RESUME, {}),
        (RELEASE, {"tags": ["kv_cache"]}),
        (RELEASE, {"prepare": True, "tags": ["kv_cache"]}),
    ],
)
def test_other_calls_are_refused_meanwhile(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    operation_id = prepare(http)["operation_id"]
    check_refused(post(http, path, **body), "conflict", operation_id, "is prepared")
    assert operation(http, operation_id)["status"] == "prepared"


@pytest.mark.parametrize(
    "body",
    [
        {"commit": "x", "tags": []},
        {"commit": "x", "prepare": True},
        {"lease_s": 1},
        {"prepare": True, "lease_s": 0},
    ],
)
def test_fields_that_contradict_each_other(http: httpx.Client, body: dict[str, Any]) -> None:
    assert post(http, RELEASE, **body).status_code == 400
    assert post(http, RELEASE, commit="none").status_code == 404


@pytest.mark.parametrize("more", [{"communicators": "keep"}, {"dp_ranks": [0]}])
def test_what_contradicts_a_level_is_refused(http: httpx.Client, more: dict[str, Any]) -> None:
    """It was a 500: a sleep of level 3 hibernates, which the check of its body did not know."""
    answer = post(http, "/sleep", level=3, **more)
    assert (answer.status_code, "leave out" in answer.text or "leave it out" in answer.text) == (400, True), answer.text


def test_a_commit_names_its_own_kind(http: httpx.Client) -> None:
    operation_id = prepare(http)["operation_id"]
    assert post(http, RESUME, commit=operation_id).status_code == 400
    assert post(http, f"/operations/{operation_id}/commit").json()["state"] == "released"


def test_a_resume_is_prepared_with_its_memory(http: httpx.Client, driver: Driver) -> None:
    """Nobody else can take it until the commit or the abort, so that the commit cannot run out of memory."""
    bytes_released = post(http, RELEASE).json()["released_bytes"]

    def free() -> int:
        size: int = http.get("/memory_occupation").json()["devices"][0]["free_bytes"]
        return size

    before = free()
    answer = prepare(http, RESUME)
    assert sum(row["bytes"] for row in answer["tags"]) == bytes_released
    wait_until(lambda: free() == before - bytes_released)  # a reading may be of a moment ago
    [reserved] = [
        source
        for source in http.get("/memory_occupation").json()["devices"][0]["sources"]
        if source["kind"] == "reserved"
    ]
    assert reserved["bytes"] == bytes_released
    post(http, f"/operations/{answer['operation_id']}/abort").raise_for_status()
    wait_until(lambda: free() == before)
    answer = prepare(http, RESUME)
    tenant = driver.allocate(0, "tenant", "discard", (before - bytes_released) // (2 * MIB) * 2 * MIB)
    try:
        assert post(http, RESUME, commit=answer["operation_id"]).json()["resumed_bytes"] == bytes_released
    finally:
        driver.free(tenant)
    assert http.get("/readyz").status_code == 200


def test_a_resume_without_room_is_not_prepared(http: httpx.Client, driver: Driver) -> None:
    post(http, RELEASE)
    size = http.get("/memory_occupation").json()["devices"][0]["free_bytes"]
    tenant = driver.allocate(0, "tenant", "discard", (size - 4 * MIB) // (2 * MIB) * 2 * MIB)
    try:
        short = post(http, RESUME, prepare=True)
        assert (short.status_code, short.json()["error"]["type"]) == (503, "out_of_device_memory")
        assert http.get("/memory_occupation").json()["state"] == "released"
    finally:
        driver.free(tenant)
    assert post(http, RESUME, commit=prepare(http, RESUME)["operation_id"]).json()["state"] == "resident"


def test_requests_that_arrive_meanwhile(serve: Callable[..., httpx.Client], engine: TensorEngine) -> None:
    """They are queued as during a release, and served after an abort."""
    http = serve(while_released="queue")
    expected = post(http, "/generate", **PROMPT).json()["output_ids"]
    operation_id = prepare(http)["operation_id"]
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(post, http, "/generate", **PROMPT) for _ in range(4)]
        engine.wait_until(lambda engine: engine.held == len(calls))
        post(http, f"/operations/{operation_id}/abort").raise_for_status()
        assert [call.result().json()["output_ids"] for call in calls] == [expected] * len(calls)


def test_requests_that_arrive_meanwhile_are_refused_by_default(http: httpx.Client) -> None:
    operation_id = prepare(http)["operation_id"]
    refused = post(http, "/generate", **PROMPT)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "admission_closed")
    post(http, f"/operations/{operation_id}/abort").raise_for_status()
    assert post(http, "/generate", **PROMPT).status_code == 200


def test_a_caller_that_dies_in_the_drain_leaves_nothing_behind(http: httpx.Client, engine: TensorEngine) -> None:
    with drain_held_up(http, engine), httpx.Client(base_url=http.base_url, timeout=0.1) as dying:
        with pytest.raises(httpx.ReadTimeout):
            post(dying, RELEASE, prepare=True, lease_s=0.05)
        engine.wait_until(lambda engine: engine.is_closed)
    wait_until(lambda: operations(http)[0]["status"] == "cancelled")
    assert operations(http)[0]["answer"]["error"]["cancelled_by"] == "the end of its lease"
    assert not engine.is_closed


def test_what_cannot_be_is_not_prepared(http: httpx.Client, engine: TensorEngine) -> None:
    """The errors are those of the operation itself, and all is as before."""
    with drain_held_up(http, engine):
        late = post(http, RELEASE, prepare=True, timeout_s=0.05)
        assert (late.status_code, late.json()["error"]["type"]) == (504, "drain_timeout")
    assert post(http, RELEASE, prepare=True, tags=["none"]).status_code == 400
    assert post(http, RELEASE, prepare=True, at_least_bytes=1 << 50).status_code == 400
    assert prepared(http) is None
    assert not engine.is_closed


def test_host_memory_that_is_short_is_found_before(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostBackupStatus, "room_bytes", lambda *_: 0)
    short = post(http, RELEASE, prepare=True, restore={"workspace": "host"})
    assert (short.status_code, short.json()["error"]["type"]) == (507, "out_of_host_memory")
    assert http.get("/memory_occupation").json()["state"] == "resident"


def test_a_call_that_waits_runs_afterwards(http: httpx.Client) -> None:
    """However the preparation ends; a hold is no stall."""
    operation_id = prepare(http)["operation_id"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, http, RELEASE, tags=["kv_cache"], wait=True)
        wait_until(lambda: len(operations(http)) == 2)
        assert operation(http, operation_id)["stalled"] is None
        post(http, f"/operations/{operation_id}/abort").raise_for_status()
        assert waiting.result().json()["released_bytes"] > 0
    assert post(http, RESUME).json()["state"] == "resident"


def test_a_plain_call_joins_what_is_committed(http: httpx.Client, driver: Driver) -> None:
    operation_id = prepare(http)["operation_id"]
    with stopped(driver, "unmap") as wait, ThreadPoolExecutor(2) as pool:
        commit = pool.submit(post, http, RELEASE, commit=operation_id)
        wait()
        plain = pool.submit(post, http, RELEASE)
        wait_until(lambda: operation(http, operation_id)["callers"] == 2)
        check_refused(post(http, f"/operations/{operation_id}/abort"), "too_late")
        driver.heal()
        assert commit.result().json() == plain.result().json()


def test_the_end_of_the_service_is_an_abort(engine: TensorEngine) -> None:
    with attach(engine) as attachment, httpx.Client(base_url=attachment.url, timeout=600, verify=False) as http:
        prepare(http, lease_s=3600)
        assert engine.is_closed
    wait_until(lambda: not engine.is_closed)
    assert ms.status().state == "resident"


def test_the_idempotency_key_of_a_prepare(http: httpx.Client) -> None:
    """The same answer while it is prepared; then the operation's own."""
    key = {"Idempotency-Key": "a key"}
    first = http.post(RELEASE, json={"prepare": True}, headers=key).json()
    assert http.post(RELEASE, json={"prepare": True}, headers=key).json()["operation_id"] == first["operation_id"]
    done = http.post(RELEASE, json={"commit": first["operation_id"]}, headers=key).json()
    assert http.post(RELEASE, json={"prepare": True}, headers=key).json() == done


def test_a_key_does_not_keep_a_prepare_whose_lease_has_ended(http: httpx.Client) -> None:
    key = {"Idempotency-Key": "a key"}
    first = http.post(RELEASE, json={"prepare": True, "lease_s": 0.05}, headers=key).json()
    wait_until(lambda: operation(http, first["operation_id"])["status"] == "cancelled")
    again = http.post(RELEASE, json={"prepare": True, "lease_s": 60}, headers=key)
    assert again.status_code == 200
    assert prepared(http) is not None
    done = http.post(RELEASE, json={"commit": again.json()["operation_id"]}, headers=key)
    assert done.json()["success"] is True


def test_a_prepared_operation_has_an_owner(http: httpx.Client) -> None:
    """Whoever has not its key neither joins it nor ends it, and is told who has it, for how long."""
    mine, other = {"Idempotency-Key": "mine", "User-Agent": "owner"}, {"Idempotency-Key": "another"}
    body = {"prepare": True, "lease_s": 60}
    found = http.post(RELEASE, json=body, headers=mine).json()["operation_id"]
    assert "owner" in (prepared(http) or {})["client"]
    for headers in ({}, other):
        for answer in (
            http.post(RELEASE, json=body, headers=headers),
            http.post(RELEASE, json={"commit": found}, headers=headers),
            http.post(f"/operations/{found}/commit", headers=headers),
            http.post(f"/operations/{found}/abort", headers=headers),
            http.delete(f"/operations/{found}", headers=headers),
        ):
            check_refused(answer, "conflict", found, "owner")
            error = answer.json()["error"]
            assert (error["operation_id"], 50 < error["lease_s"] <= 60) == (found, True)
            assert error["client"] == (prepared(http) or {})["client"]
            assert "mine" not in answer.text
    assert operation(http, found)["status"] == "prepared"
    renewed = http.post(RELEASE, json={**body, "lease_s": 1000}, headers=mine).json()
    assert (renewed["operation_id"], renewed["lease_s"] > 900) == (found, True)
    assert http.post(RELEASE, json={"commit": found}, headers=mine).json()["state"] == "released"
    late = http.delete(f"/operations/{found}")
    check_refused(late, "too_late")


def test_keys_are_bounded(http: httpx.Client) -> None:
    """The engine's process kept thousands of 64 KiB."""
    found = http.post(RELEASE, json={"prepare": True}, headers={"Idempotency-Key": "k" * 255}).json()["operation_id"]
    for path in (RELEASE, f"/operations/{found}/commit", f"/operations/{found}/abort"):
        refused = http.post(path, headers={"Idempotency-Key": "k" * 256})
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "bad_request")
        assert "send at most 255" in refused.json()["message"]


def test_its_owner_prepares_anew_after_an_abort(http: httpx.Client) -> None:
    mine = {"Idempotency-Key": "mine"}
    first = http.post(RELEASE, json={"prepare": True}, headers=mine).json()["operation_id"]
    assert http.post(f"/operations/{first}/abort", headers=mine).json()["status"] == "cancelled"
    again = http.post(RELEASE, json={"prepare": True}, headers=mine)
    assert (again.status_code, again.json()["operation_id"] != first) == (200, True)


def test_what_is_prepared_without_a_key_is_not_shared_with_another_client(http: httpx.Client) -> None:
    first = prepare(http, lease_s=60)["operation_id"]
    refused = http.post(RELEASE, json={"prepare": True}, headers={"User-Agent": "another"})
    check_refused(refused, "conflict", first, (prepared(http) or {})["client"])
    assert prepare(http)["operation_id"] == first


def test_the_clients(http: httpx.Client) -> None:
    with Client(str(http.base_url)) as client:
        answer = client.release(prepare=True, lease_s=60)
        assert client.abort(answer.operation_id).status == "cancelled"
        with pytest.raises(ConflictError) as refused:
            client.commit(answer.operation_id)
        assert refused.value.kind == "lease_ended"
        done = client.commit(client.release(prepare=True).operation_id)
        assert done.released_bytes > 0
        assert client.commit(client.resume(prepare=True).operation_id).resumed_bytes == done.released_bytes
        with Client(str(http.base_url)) as another:
            mine = client.release(prepare=True, lease_s=60).operation_id
            for call in (another.commit, another.abort, another.cancel, lambda _: another.release(prepare=True)):
                with pytest.raises(ConflictError, match=f"{mine} of all tags is prepared by .*memsaver-client"):
                    call(mine)
            assert another.abort(mine, key=client.key_of(mine)).status == "cancelled"


def test_an_operator_aborts_what_another_has_prepared(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    """Its owner may have died with the key, and the lease may last an hour."""
    caplog.set_level("INFO", "memsaver.audit")
    owner, operator = {"Idempotency-Key": "mine", "User-Agent": "owner"}, {"User-Agent": "operator"}
    found = http.post(RELEASE, json={"prepare": True, "lease_s": 3600}, headers=owner).json()["operation_id"]
    check_refused(http.post(f"/operations/{found}/abort", headers=operator), "conflict", "by force")
    forced = http.post(f"/operations/{found}/abort", json={"force": True}, headers=operator)
    assert (forced.status_code, forced.json()["status"]) == (200, "cancelled")
    check_refused(http.post(RELEASE, json={"commit": found}, headers=owner), "lease_ended", "operator")
    wait_until(lambda: [record for record in caplog.records if found in record.getMessage()])
    (line,) = (json.loads(record.getMessage()) for record in caplog.records if found in record.getMessage())
    assert ("owner" in line["client"], "operator" in line["forced_by"]) == (True, True)


def test_who_may_only_read_forces_nothing(serve: Callable[..., httpx.Client]) -> None:
    http = serve(api_key="key", read_key="reader")
    owner = {"Authorization": "Bearer key", "Idempotency-Key": "mine"}
    found = http.post(RELEASE, json={"prepare": True}, headers=owner).json()["operation_id"]
    reader = {"Authorization": "Bearer reader"}
    assert http.post(f"/operations/{found}/abort", json={"force": True}, headers=reader).status_code == 403
    http.post(f"/operations/{found}/abort", headers=owner).raise_for_status()


def test_a_release_that_is_prepared_is_planned_once(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[object] = []
    rooms = plans.backup_rooms
    monkeypatch.setattr(plans, "backup_rooms", lambda *given: planned.append(given) or rooms(*given))
    prepare(http)
    assert len(planned) == 1
