"""Operations in two phases: prepared under a lease, then committed or undone."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from memsaver_server.two_phases import PreparedAnswer
from tests.waiting import wait_until

from .tensor_engine import ALL_TAGS, TensorEngine
from .test_operations import post

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
    operation_id = prepare(http, lease_s=0.05)["operation_id"]
    wait_until(lambda: operation(http, operation_id)["status"] == "cancelled")
    error = operation(http, operation_id)["answer"]["error"]
    assert (error["type"], error["cancelled_by"]) == ("cancelled", "the end of its lease")
    check_refused(post(http, RELEASE, commit=operation_id), "lease_ended", "the end of its lease")
    assert not engine.is_closed
    assert http.get("/memory_occupation").json()["state"] == "resident"


def test_a_repeat_joins_and_renews(http: httpx.Client) -> None:
    first = prepare(http, lease_s=1)
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


def test_a_commit_names_its_own_kind(http: httpx.Client) -> None:
    operation_id = prepare(http)["operation_id"]
    assert post(http, RESUME, commit=operation_id).status_code == 400
    assert post(http, f"/operations/{operation_id}/commit").json()["state"] == "released"
