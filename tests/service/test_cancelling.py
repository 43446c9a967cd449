"""Operations that are cancelled, and drains that a stronger one overtakes."""

from __future__ import annotations

import uuid
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from memsaver_core._native import Saver as Driver
from memsaver_server.client import Client, ConflictError, OperationCancelledError
from tests.waiting import wait_until

from .program import Program, client
from .tensor_engine import MIB, TensorEngine
from .test_operations import (
    drain_held_up,
    events,
    operation,
    post,
    release_in_drain,
    stopped,
    until_done,
    weights_being_written,
)


def cancel(http: httpx.Client, operation_id: str) -> httpx.Response:
    return http.request("DELETE", f"/operations/{operation_id}", headers={"User-Agent": "the operator"})


def check_cancelled(answer: httpx.Response, operation_id: str) -> None:
    """What a caller of a cancelled operation is answered."""
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert error["type"] == "cancelled"
    assert "the operator" in error["cancelled_by"]
    assert "the operator" in answer.json()["message"]
    assert operation_id in answer.json()["message"]


def waiting_call(http: httpx.Client, pool: ThreadPoolExecutor, path: str, **body: object) -> Future[httpx.Response]:
    """A call whose operation is queued when this returns."""
    before = len(http.get("/operations").json()["operations"])
    call = pool.submit(post, http, path, **body)
    wait_until(lambda: len(http.get("/operations").json()["operations"]) > before)
    return call


@pytest.mark.guards("nobody could cancel an operation that waited")
def test_a_release_is_cancelled_in_its_drain(
    http: httpx.Client, engine: TensorEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """All its callers are told who did so, and the engine serves as before."""
    caplog.set_level("INFO", "memsaver.audit")
    with drain_held_up(http, engine) as pool:
        operation_id = release_in_drain(http, engine)
        caller = pool.submit(post, http, "/release_memory_occupation")
        wait_until(lambda: operation(http, operation_id)["callers"] == 2)
        ended = cancel(http, operation_id)
        assert (ended.status_code, ended.json()["status"]) == (200, "cancelled")
        check_cancelled(caller.result(), operation_id)
        assert http.get("/readyz").status_code == 200
        assert http.get("/memory_occupation").json()["state"] == "resident"
        assert not engine.is_closed
        assert cancel(http, operation_id).json()["status"] == "cancelled"  # idempotent
    assert http.get(f"/operations/{operation_id}").json()["status"] == "cancelled"
    assert [data["error"]["type"] for name, data in events(http, operation_id) if name == "done"] == ["cancelled"]
    assert 'memsaver_operations_total{operation="release",outcome="cancelled"} 1.0' in http.get("/metrics").text
    wait_until(lambda: any('"outcome": "cancelled"' in record.getMessage() for record in caplog.records))
    assert post(http, "/release_memory_occupation").json()["state"] == "released"


@pytest.mark.guards("nobody could cancel an operation that waited")
def test_an_operation_is_cancelled_in_the_queue(http: httpx.Client, engine: TensorEngine) -> None:
    """At once; those before and behind it go on."""
    with drain_held_up(http, engine) as pool:
        first = release_in_drain(http, engine)
        resume = waiting_call(http, pool, "/resume_memory_occupation", wait=True)
        second = http.get("/operations").json()["operations"][0]["operation_id"]
        last = waiting_call(http, pool, "/release_memory_occupation", tags=["workspace"], wait=True)
        ended = cancel(http, second).json()
        assert (ended["status"], ended["started_at"], ended["seconds"]) == ("cancelled", None, 0.0)
        check_cancelled(resume.result(), second)
        assert operation(http, first)["status"] == "running"
        engine.unblock()
        assert last.result().json()["state"] == "released"
    assert until_done(http, first)["state"] == "released"


@pytest.mark.guards("nobody could cancel an operation that waited")
def test_a_resume_is_cancelled_while_it_waits_for_memory() -> None:
    device = {
        "MEMSAVER_DRIVER": "host",
        "MEMSAVER_HOST_DEVICE": f"cancel-{uuid.uuid4().hex[:8]}",
        "MEMSAVER_HOST_CAPACITY": str(64 * MIB),
    }
    with Program(**device) as engine, client(engine) as http:
        post(http, "/release_memory_occupation").raise_for_status()
        with Program("trainer", str(60 * MIB), **device), ThreadPoolExecutor(1) as pool:
            resume = waiting_call(http, pool, "/resume_memory_occupation", wait_for_memory_s=3600)
            operation_id = http.get("/operations").json()["operations"][0]["operation_id"]
            wait_until(lambda: operation(http, operation_id)["phase"] == "wait_for_memory")
            assert cancel(http, operation_id).json()["status"] == "cancelled"
            check_cancelled(resume.result(), operation_id)
            assert http.get("/memory_occupation").json()["state"] == "released"
        assert post(http, "/resume_memory_occupation").json()["state"] == "resident"
        assert http.get("/readyz").status_code == 200


@pytest.mark.parametrize("verb", ["release", "resume"])
@pytest.mark.guards("nobody could cancel an operation that waited")
def test_an_operation_is_cancelled_while_weights_are_written(
    http: httpx.Client, engine: TensorEngine, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    if verb == "resume":
        post(http, "/release_memory_occupation", tags=["kv_cache"]).raise_for_status()
    with weights_being_written(http, engine, monkeypatch) as update:
        operation_id = post(http, f"/{verb}_memory_occupation", **{"async": True}).json()["operation_id"]
        phase = {"release": "drain", "resume": "wait_for_weights"}[verb]
        wait_until(lambda: operation(http, operation_id)["phase"] == phase)
        ended = cancel(http, operation_id).json()
        assert (ended["status"], ended["answer"]["error"]["phase"]) == ("cancelled", phase)
        assert update().status_code == 200
    assert http.get("/memory_occupation").json()["state"] == ("resident" if verb == "release" else "released")
    assert post(http, f"/{verb}_memory_occupation").status_code == 200


@pytest.mark.parametrize(("verb", "call"), [("release", "unmap"), ("resume", "map")])
@pytest.mark.guards("nobody could cancel an operation that waited")
def test_memory_that_is_moved_is_not_interrupted(http: httpx.Client, driver: Driver, verb: str, call: str) -> None:
    """The answer says that the operation will complete; so does that to a caller who is late."""
    if verb == "resume":
        post(http, "/release_memory_occupation").raise_for_status()
    with stopped(driver, call) as wait:
        operation_id = post(http, f"/{verb}_memory_occupation", **{"async": True}).json()["operation_id"]
        wait()
        late = cancel(http, operation_id)
        assert (late.status_code, late.json()["error"]["type"]) == (409, "too_late")
        assert f"{call}ping memory already and will complete" in late.json()["message"]
        assert operation(http, operation_id)["status"] == "running"
    assert until_done(http, operation_id)["success"] is True
    after = cancel(http, operation_id)
    assert (after.status_code, after.json()["error"]["type"]) == (409, "too_late")
    assert "has ended" in after.json()["message"]
    assert cancel(http, "none").status_code == 404


@pytest.mark.guards("nobody could cancel an operation that waited")
def test_a_call_does_not_join_what_was_cancelled(
    http: httpx.Client, engine: TensorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets an operation of its own, although an engine that cannot give up a drain has not noticed yet."""

    def drain(timeout_s: float, mode: str = "wait") -> None:
        TensorEngine.drain(engine, timeout_s, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "drain", drain)
    with drain_held_up(http, engine) as pool:
        first = release_in_drain(http, engine)
        cancelled = pool.submit(cancel, http, first)
        second: dict[str, str] = {}

        def comes_apart() -> bool:
            second.update(post(http, "/release_memory_occupation", **{"async": True}).json())
            return second["operation_id"] != first

        wait_until(comes_apart)
        assert operation(http, first)["status"] == "running"
        engine.unblock()
        assert cancelled.result().json()["status"] == "cancelled"
        assert until_done(http, second["operation_id"])["state"] == "released"


def test_a_cancelled_release_leaves_no_trace(
    http: httpx.Client, engine: TensorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tag that a release of everything took comes back with the last named one, as if it had not been named since."""
    post(http, "/release_memory_occupation").raise_for_status()
    post(http, "/resume_memory_occupation", tags=["weights"]).raise_for_status()
    with weights_being_written(http, engine, monkeypatch):
        operation_id = post(http, "/release_memory_occupation", tags=["workspace"], **{"async": True}).json()[
            "operation_id"
        ]
        wait_until(lambda: operation(http, operation_id)["phase"] == "drain")
        assert cancel(http, operation_id).json()["status"] == "cancelled"
    assert post(http, "/resume_memory_occupation", tags=["kv_cache"]).json()["state"] == "resident"


def test_a_key_stays_with_what_was_cancelled(http: httpx.Client, engine: TensorEngine) -> None:
    """So that a client that repeats its call does not start it again."""
    key = {"Idempotency-Key": "rollout 15"}
    with drain_held_up(http, engine) as pool:
        caller = pool.submit(http.post, "/release_memory_occupation", json={}, headers=key)
        engine.wait_until(lambda engine: engine.is_closed)
        operation_id = http.get("/memory_occupation").json()["operation_id"]
        cancel(http, operation_id)
        check_cancelled(caller.result(), operation_id)
        check_cancelled(http.post("/release_memory_occupation", json={}, headers=key), operation_id)


def test_the_client_cancels(http: httpx.Client, engine: TensorEngine) -> None:
    with Client(str(http.base_url)) as caller, drain_held_up(http, engine) as pool:
        release = pool.submit(caller.release)
        engine.wait_until(lambda engine: engine.is_closed)
        operation_id = http.get("/memory_occupation").json()["operation_id"]
        assert caller.cancel(operation_id).status == "cancelled"
        with pytest.raises(OperationCancelledError, match=operation_id):
            release.result()
        engine.unblock()
        done = caller.release()
        with pytest.raises(ConflictError, match="has ended"):
            caller.cancel(done.operation_id)


# A stronger drain.


@pytest.mark.parametrize("body", [{}, {"restore": {"weights": "discard"}}], ids=["joins", "goes ahead"])
@pytest.mark.guards("an abort waited behind the drain of another release")
def test_a_stronger_drain_overtakes_a_weaker_one(
    http: httpx.Client, engine: TensorEngine, body: dict[str, object]
) -> None:
    """Of the same tags. A call that differs in nothing else joins, and both get the one result."""
    with drain_held_up(http, engine):
        weak = release_in_drain(http, engine, timeout_s=3600)
        strong = post(http, "/release_memory_occupation", mode="abort", **body).json()  # the request is held still
        assert strong["state"] == "released"
        answer = until_done(http, weak)
    assert answer["success"] is True
    assert (strong["operation_id"] == weak) is (body == {})
    assert (strong == answer) is (body == {})


def test_a_repeat_of_the_weaker_call_joins_still(http: httpx.Client, engine: TensorEngine, driver: Driver) -> None:
    with stopped(driver, "unmap") as wait, drain_held_up(http, engine):
        weak = release_in_drain(http, engine)
        strong = post(http, "/release_memory_occupation", mode="abort", **{"async": True}).json()
        wait()
        again = post(http, "/release_memory_occupation", **{"async": True}).json()
        assert strong["operation_id"] == again["operation_id"] == weak
        assert operation(http, weak)["callers"] == 3
    assert until_done(http, weak)["state"] == "released"


def test_a_weaker_drain_and_one_of_other_tags_change_nothing(http: httpx.Client, engine: TensorEngine) -> None:
    with drain_held_up(http, engine) as pool:
        first = release_in_drain(http, engine, tags=["weights"], timeout_s=3600)
        other = waiting_call(http, pool, "/release_memory_occupation", tags=["kv_cache"], mode="abort")
        weaker = waiting_call(http, pool, "/release_memory_occupation", tags=["weights"], timeout_s=1800)
        assert operation(http, first)["phase"] == "drain"
        assert engine.in_flight()
        engine.unblock()
        assert {other.result().status_code, weaker.result().status_code} == {200}


def test_an_abort_behind_a_resume_leaves_the_drain_alone(http: httpx.Client, engine: TensorEngine) -> None:
    """The requests in flight then are not those of now."""
    with drain_held_up(http, engine) as pool:
        release_in_drain(http, engine, timeout_s=3600)
        resume = waiting_call(http, pool, "/resume_memory_occupation", wait=True)
        abort = waiting_call(http, pool, "/release_memory_occupation", mode="abort", wait=True)
        assert engine.in_flight()
        engine.unblock()
        assert resume.result().json()["operation_id"] != abort.result().json()["operation_id"]
    assert http.get("/memory_occupation").json()["state"] == "released"
