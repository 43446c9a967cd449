"""Operations as clients see them: joined, queued, refused, abandoned, watched, remembered."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection

import httpx
import pytest

import memsaver_core as ms
from memsaver_core._native import Saver as Driver
from memsaver_core.contract.reports import AcceptedAnswer, OperationStatusAnswer
from memsaver_core.contract.status import Status
from memsaver_server import attach
from tests.waiting import wait_until

from .tensor_engine import KV_BYTES, MIB, WEIGHTS_BYTES, TensorEngine

PROMPT = {"input_ids": [3, 5, 8], "sampling_params": {"max_new_tokens": 6, "temperature": 0}}
Serve = Callable[..., httpx.Client]


def post(http: httpx.Client, path: str, **body: object) -> httpx.Response:
    return http.post(path, json=body)


def operation(http: httpx.Client, operation_id: str) -> dict[str, object]:
    answer = http.get(f"/operations/{operation_id}").json()
    OperationStatusAnswer.model_validate(answer, extra="forbid")
    return answer


def events(http: httpx.Client, operation_id: str) -> Iterator[tuple[str, dict[str, object]]]:
    with http.stream("GET", f"/operations/{operation_id}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in stream.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))


def until_done(http: httpx.Client, operation_id: str) -> dict[str, object]:
    """Follow the events of an operation, and return its answer."""
    return next(data for name, data in events(http, operation_id) if name == "done")


def asked(http: httpx.Client, path: str) -> HTTPConnection:
    """A connection on which a request was sent and whose answer is not read yet."""
    connection = HTTPConnection(http.base_url.host, http.base_url.port, timeout=600)
    connection.request("POST", path)
    return connection


@contextmanager
def stopped(driver: Driver, call: str) -> Iterator[Callable[[], None]]:
    """Hold the driver's ``call`` while the block runs; the yielded function waits until a call is held."""
    before = driver.counts().get(call, 0)

    def wait() -> None:
        wait_until(lambda: driver.counts().get(call, 0) != before)

    driver.delay(call, 3600)
    try:
        yield wait
    finally:
        driver.heal()


@contextmanager
def drain_held_up(http: httpx.Client, engine: TensorEngine) -> Iterator[ThreadPoolExecutor]:
    """A request that lasts as long as the block, so that a release inside stays in its drain."""
    engine.block()
    with ThreadPoolExecutor(8) as pool:
        pool.submit(post, http, "/generate", **PROMPT)
        engine.wait_until(lambda engine: engine.in_flight())
        try:
            yield pool
        finally:
            engine.unblock()


def release_in_drain(http: httpx.Client, engine: TensorEngine, **body: object) -> str:
    operation_id = post(http, "/release_memory_occupation", **{"async": True}, **body).json()["operation_id"]
    engine.wait_until(lambda engine: engine.is_closed)
    return operation_id


@pytest.mark.guards("one of two concurrent callers was told that the operation failed")
def test_two_clients_release_at_once(http: httpx.Client, engine: TensorEngine) -> None:
    """The second call joins the first, and both get the operation's answer."""
    with drain_held_up(http, engine) as pool:
        operation_id = release_in_drain(http, engine, tags=["kv_cache", "weights"])
        repeats = [
            pool.submit(post, http, "/release_memory_occupation", tags=tags)
            for tags in (["weights", "kv_cache"], ["kv_cache", "weights", "weights"])
        ]
        wait_until(lambda: operation(http, operation_id)["callers"] == 3)
        assert not any(repeat.done() for repeat in repeats)
        engine.unblock()
        answers = [repeat.result().json() for repeat in repeats]
    assert [answer["operation_id"] for answer in answers] == [operation_id] * 2
    assert answers[0] == answers[1]


@pytest.mark.guards("one of two concurrent callers was told that the operation failed")
def test_clients_that_wake_at_once(http: httpx.Client, driver: Driver) -> None:
    """All resumes that arrive while one maps memory join it, and get its answer."""
    post(http, "/release_memory_occupation").raise_for_status()
    with stopped(driver, "map") as wait:
        callers = [asked(http, "/resume_memory_occupation")]
        wait()
        callers += [asked(http, "/resume_memory_occupation") for _ in range(7)]
        operation_id = post(http, "/resume_memory_occupation", **{"async": True}).json()["operation_id"]
        wait_until(lambda: operation(http, operation_id)["callers"] == len(callers) + 1)
    responses = [caller.getresponse() for caller in callers]
    answers = [json.load(response) for response in responses]
    assert {response.status for response in responses} == {200}
    assert {answer["operation_id"] for answer in answers} == {operation_id}
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["resumed_bytes"] >= KV_BYTES + WEIGHTS_BYTES
    assert [each["operation"] for each in http.get("/operations").json()["operations"]] == ["resume", "release"]
    assert http.get("/memory_occupation").json()["state"] == "resident"
    for caller in callers:
        caller.close()


def test_a_conflicting_operation_is_refused_and_named(http: httpx.Client, engine: TensorEngine) -> None:
    with drain_held_up(http, engine):
        operation_id = release_in_drain(http, engine)
        response = post(http, "/resume_memory_occupation", tags=["weights"])
        assert response.status_code == 409
        assert response.json()["error"]["operation_id"] == operation_id
        assert operation_id in response.json()["message"]
        engine.unblock()
        assert until_done(http, operation_id)["success"] is True


def test_a_conflicting_operation_waits_its_turn_where_asked(http: httpx.Client, engine: TensorEngine) -> None:
    with drain_held_up(http, engine) as pool:
        release_in_drain(http, engine)
        waiting = pool.submit(post, http, "/resume_memory_occupation", wait=True)
        wait_until(lambda: len(http.get("/operations").json()["operations"]) >= 2)
        engine.unblock()
        assert waiting.result().json()["state"] == "resident"


def test_releases_of_different_tags_follow_each_other(http: httpx.Client, engine: TensorEngine) -> None:
    with drain_held_up(http, engine) as pool:
        release_in_drain(http, engine, tags=["kv_cache"])
        second = pool.submit(post, http, "/release_memory_occupation", tags=["weights"])
        engine.unblock()
        assert second.result().json()["state"] == "released"
    assert http.get("/memory_status").json()["parked_tags"] == ["kv_cache", "weights"]


@pytest.mark.guards("a call was answered by an operation that the next in the queue undid")
def test_a_call_does_not_join_across_its_opposite(http: httpx.Client, engine: TensorEngine) -> None:
    """A release behind a queued resume is an operation of its own, and the state at the end is the one it asked for."""
    with drain_held_up(http, engine):
        first = release_in_drain(http, engine)
        resume = post(http, "/resume_memory_occupation", wait=True, **{"async": True}).json()["operation_id"]
        refused = post(http, "/release_memory_occupation")
        assert (refused.status_code, refused.json()["error"]["operation_id"]) == (409, resume)
        last = post(http, "/release_memory_occupation", wait=True, **{"async": True}).json()["operation_id"]
        assert len({first, resume, last}) == 3
        repeat = post(http, "/release_memory_occupation", wait=True, **{"async": True}).json()["operation_id"]
        assert repeat == last
        engine.unblock()
        assert until_done(http, last)["released_bytes"] >= KV_BYTES + WEIGHTS_BYTES
    assert http.get("/memory_occupation").json()["state"] == "released"


@pytest.mark.guards("a call was answered by an operation that the next in the queue undid")
def test_alternating_calls_end_in_the_state_of_the_last(http: httpx.Client) -> None:
    """300 that nobody waits for; the queue refuses some when it is full."""
    accepted = ""
    for number in range(300):
        verb = "release" if number % 2 else "resume"
        answer = post(http, f"/{verb}_memory_occupation", tags=["workspace"], wait=True, **{"async": True})
        assert answer.status_code in (202, 503), answer.text
        accepted = answer.json()["operation_id"] if answer.status_code == 202 else accepted
    last = until_done(http, accepted)
    assert http.get("/operations").json()["operations"][0]["operation_id"] == accepted
    assert http.get("/memory_occupation").json()["state"] == last["state"]
    assert last["state"] == {"release": "released", "resume": "resident"}[last["operation"]]


@pytest.mark.guards("the caller disconnected in the middle of an operation")
def test_a_client_that_goes_away_cancels_nothing(http: httpx.Client, engine: TensorEngine) -> None:
    """The operation completes by itself, and the reported state is true."""
    with drain_held_up(http, engine):
        connection = asked(http, "/release_memory_occupation")
        engine.wait_until(lambda engine: engine.is_closed)
        connection.close()
        operation_id = http.get("/memory_occupation").json()["operation_id"]
        engine.unblock()
        assert until_done(http, operation_id)["state"] == "released"
    assert operation(http, operation_id)["status"] == "succeeded"
    assert http.get("/memory_occupation").json()["state"] == "released"


@pytest.mark.guards("the caller disconnected in the middle of an operation")
def test_a_client_that_goes_away_from_a_resume_cancels_nothing(http: httpx.Client, driver: Driver) -> None:
    """The resume completes by itself, and the reported state is true."""
    before = post(http, "/generate", **PROMPT).json()["output_ids"]
    post(http, "/release_memory_occupation").raise_for_status()
    with stopped(driver, "map") as wait:
        connection = asked(http, "/resume_memory_occupation")
        wait()
        connection.close()
        occupation = http.get("/memory_occupation").json()
        assert occupation["state"] == "resuming"
    assert until_done(http, occupation["operation_id"])["state"] == "resident"
    assert operation(http, occupation["operation_id"])["status"] == "succeeded"
    assert http.get("/memory_occupation").json()["state"] == "resident"
    assert post(http, "/generate", **PROMPT).json()["output_ids"] == before


@pytest.mark.guards("the caller disconnected in the middle of an operation")
def test_a_resume_that_fails_after_its_client_went_away(http: httpx.Client, driver: Driver) -> None:
    """It is undone by itself, the reported state is true, and the next one works."""
    before = post(http, "/generate", **PROMPT).json()["output_ids"]
    post(http, "/release_memory_occupation").raise_for_status()
    maps = driver.counts()["map"]
    driver.delay("map", 0.5)
    driver.fail("copy_to_device")
    connection = asked(http, "/resume_memory_occupation")
    wait_until(lambda: driver.counts()["map"] != maps)
    connection.close()
    operation_id = http.get("/operations").json()["operations"][0]["operation_id"]
    answer = until_done(http, operation_id)
    driver.heal()
    assert (answer["success"], answer["error"]["type"], answer["state"]) == (False, "driver_error", "released")
    assert http.get("/operations").json()["operations"][0]["status"] == "failed"
    assert http.get("/memory_occupation").json()["state"] == "released"
    assert http.get("/readyz").status_code == 503
    assert post(http, "/resume_memory_occupation").json()["state"] == "resident"
    assert post(http, "/generate", **PROMPT).json()["output_ids"] == before


def test_an_operation_that_nobody_waits_for(http: httpx.Client, engine: TensorEngine) -> None:
    with drain_held_up(http, engine):
        response = post(http, "/release_memory_occupation", **{"async": True})
        assert response.status_code == 202
        AcceptedAnswer.model_validate(response.json(), extra="forbid")
        address = response.headers["location"]
        assert address == response.json()["location"]
        engine.wait_until(lambda engine: engine.is_closed)
        now = operation(http, response.json()["operation_id"])
        assert (now["status"], now["phase"], now["answer"]) == ("running", "drain", None)
        assert http.get("/memory_occupation").json()["state"] == "releasing"
    assert until_done(http, response.json()["operation_id"])["state"] == "released"
    assert http.get(address).json()["answer"]["released_bytes"] >= KV_BYTES + WEIGHTS_BYTES


def test_the_state_beside_no_operation_is_that_after_it(
    engine: TensorEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation that ends while an answer is made is still in it, or its effect is: a caller that waits until no
    operation is in progress reads no state from before."""
    read = ms.status

    def slow() -> Status:
        before = read()
        if threading.current_thread().name != "memsaver-http":  # the operation itself reads, too
            return before
        driver.heal()
        wait_until(lambda: attachment.lifecycle.operations.running is None)
        return before

    with attach(engine) as attachment, httpx.Client(base_url=attachment.url, timeout=600) as http:
        with stopped(driver, "unmap") as wait:
            post(http, "/release_memory_occupation", **{"async": True})
            wait()
            monkeypatch.setattr("memsaver_server.engine._LocalMemory.status", staticmethod(slow))
            now = http.get("/memory_occupation").json()
        assert (now["operation_id"], now["state"]) == (None, "released")
        assert all(tag["resident_bytes"] == 0 for tag in now["tags"])


def test_events_tell_the_phases_as_they_come(http: httpx.Client, engine: TensorEngine) -> None:
    with drain_held_up(http, engine):
        operation_id = release_in_drain(http, engine)
        told = []
        for name, data in events(http, operation_id):
            told.append((name, data.get("name")))
            if (name, data.get("name")) == ("phase", "drain"):
                engine.unblock()
    assert told[0] == ("phase", "drain")
    finished = [phase for name, phase in told if name == "phase_done"]
    assert finished == ["drain", "synchronize", "pause", "empty_cache", "ipc_collect", "settle"]
    assert told[-1][0] == "done"


def test_events_tell_how_far_a_copy_is(http: httpx.Client, driver: Driver) -> None:
    driver.delay("copy_to_host", 3600)  # until some progress was told
    operation_id = post(http, "/release_memory_occupation", **{"async": True}).json()["operation_id"]
    progress = []
    for name, data in events(http, operation_id):
        if name == "progress":
            progress.append(data)
            driver.heal()
    assert progress
    done = [entry["done_bytes"] for entry in progress]
    assert done == sorted(done)
    assert all(entry["done_bytes"] <= entry["total_bytes"] for entry in progress)


def test_an_operation_that_is_not_remembered(http: httpx.Client) -> None:
    assert http.get("/operations/none").status_code == 404
    assert http.get("/operations/none/events").status_code == 404


def test_history_is_bounded(serve: Serve) -> None:
    http = serve(history=3)
    made = [post(http, "/release_memory_occupation", tags=["workspace"]).json()["operation_id"] for _ in range(5)]
    remembered = [entry["operation_id"] for entry in http.get("/operations").json()["operations"]]
    assert remembered == made[:1:-1]


def test_an_idempotency_key_answers_a_repeat_with_the_first_result(http: httpx.Client) -> None:
    key = {"Idempotency-Key": "rollout 12"}
    first = http.post("/release_memory_occupation", json={"at_least_bytes": MIB}, headers=key)
    assert first.json()["released_bytes"] >= MIB
    again = http.post("/release_memory_occupation", json={"at_least_bytes": MIB}, headers=key)
    assert again.json() == first.json()
    assert again.status_code == 200
    assert http.post("/release_memory_occupation", json={}, headers=key).status_code == 422
    assert len(http.get("/operations").json()["operations"]) == 1


def test_the_key_of_a_call_that_joined_is_remembered(http: httpx.Client, engine: TensorEngine) -> None:
    """Replayed after a resume it releases nothing again."""
    key = {"Idempotency-Key": "rollout 14"}
    with drain_held_up(http, engine) as pool:
        operation_id = release_in_drain(http, engine)
        joined = pool.submit(http.post, "/release_memory_occupation", json={}, headers=key)
        wait_until(lambda: operation(http, operation_id)["callers"] == 2)
        engine.unblock()
        first = joined.result()
    assert post(http, "/resume_memory_occupation").json()["state"] == "resident"
    assert http.post("/release_memory_occupation", json={}, headers=key).json() == first.json()
    assert http.get("/memory_occupation").json()["state"] == "resident"
    assert http.post("/release_memory_occupation", json={"timeout_s": 9}, headers=key).status_code == 422


def test_a_key_outlives_its_first_use_that_failed(serve: Serve, engine: TensorEngine) -> None:
    """That operation leaves the history before the one that succeeded."""
    http = serve(history=2)
    key = {"Idempotency-Key": "rollout 15"}
    with drain_held_up(http, engine):
        assert http.post("/release_memory_occupation", json={"timeout_s": 0}, headers=key).status_code == 504
        engine.unblock()
        engine.wait_until(lambda engine: not engine.in_flight())
    first = http.post("/release_memory_occupation", json={"timeout_s": 0}, headers=key).json()
    post(http, "/resume_memory_occupation")
    assert http.post("/release_memory_occupation", json={"timeout_s": 0}, headers=key).json() == first


def test_a_key_is_its_request_also_once_its_operation_is_forgotten(serve: Serve) -> None:
    http = serve(history=1)
    key = {"Idempotency-Key": "rollout 16"}
    first = http.post("/release_memory_occupation", json={"tags": ["kv_cache"]}, headers=key).json()
    post(http, "/resume_memory_occupation")
    assert http.get(f"/operations/{first['operation_id']}").status_code == 404
    for path, body in (
        ("/release_memory_occupation", {}),
        ("/release_memory_occupation", {"tags": ["weights"]}),
        ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
    ):
        refused = http.post(path, json=body, headers=key)
        assert (refused.status_code, refused.json()["error"]["type"]) == (422, "idempotency_key_reused")
        assert f"release {first['operation_id']}" in refused.json()["message"]
    again = http.post("/release_memory_occupation", json={"tags": ["kv_cache"]}, headers=key).json()
    for name in ("success", "operation_id", "state", "released_bytes", "seconds"):
        assert again[name] == first[name]
    assert http.get("/memory_occupation").json()["state"] == "resident"


def test_an_idempotency_key_does_not_keep_a_failure(http: httpx.Client, engine: TensorEngine) -> None:
    key = {"Idempotency-Key": "rollout 13"}
    body = {"timeout_s": 0}
    with drain_held_up(http, engine):
        assert http.post("/release_memory_occupation", json=body, headers=key).status_code == 504
        engine.unblock()
        engine.wait_until(lambda engine: not engine.in_flight())
    assert http.post("/release_memory_occupation", json=body, headers=key).status_code == 200


def test_at_least_so_much_takes_what_is_discarded_first(http: httpx.Client) -> None:
    def parked() -> list[str]:
        return http.get("/memory_status").json()["parked_tags"]

    assert post(http, "/release_memory_occupation", at_least_bytes=1).status_code == 200
    assert parked() == ["kv_cache"]
    post(http, "/resume_memory_occupation")
    assert post(http, "/release_memory_occupation", at_least_bytes=KV_BYTES + 1).json()["released_bytes"] > KV_BYTES
    assert parked() == ["kv_cache", "workspace"]
    post(http, "/resume_memory_occupation")
    most = KV_BYTES + WEIGHTS_BYTES
    assert post(http, "/release_memory_occupation", at_least_bytes=most).json()["released_bytes"] >= most
    assert parked() == ["kv_cache", "weights", "workspace"]
    post(http, "/resume_memory_occupation")
    response = post(http, "/release_memory_occupation", at_least_bytes=1 << 40)
    assert response.status_code == 400
    assert parked() == []
    assert http.get("/readyz").status_code == 200


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_phase_that_makes_no_progress_is_named(
    serve: Serve, engine: TensorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers of a stuck operation are told its phase; it goes on, and the reported state is true."""
    http = serve(phase_timeout_s=0.2)
    drain = engine.drain

    def drain_without_end(_timeout_s: float, mode: str = "wait") -> None:
        drain(3600.0, "wait")

    monkeypatch.setattr(engine, "drain", drain_without_end)
    with drain_held_up(http, engine) as pool:
        response = post(http, "/release_memory_occupation", timeout_s=0)
        assert response.status_code == 504
        assert response.json()["error"]["phase"] == "drain"
        operation_id = response.json()["error"]["operation_id"]
        behind = pool.submit(post, http, "/resume_memory_occupation", wait=True)
        assert behind.result().json()["error"]["operation_id"] == operation_id
        assert http.get("/memory_occupation").json()["state"] == "releasing"
        assert http.get("/livez").status_code == 200
        engine.unblock()
        assert until_done(http, operation_id)["success"] is True


@pytest.mark.parametrize(("path", "call", "phase"), [("release", "unmap", "pause"), ("resume", "map", "restore")])
@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_driver_call_that_hangs_is_named(serve: Serve, driver: Driver, path: str, call: str, phase: str) -> None:
    """By its phase; probes answer meanwhile, and the final state is true."""
    http = serve(phase_timeout_s=0.2)
    if path == "resume":
        ms.release()  # not by the service, whose phases have 0.2 s
    driver.delay(call, 3600)
    response = post(http, f"/{path}_memory_occupation", tags=["workspace"])
    assert (response.status_code, response.json()["error"]["type"]) == (504, "phase_timeout")
    assert response.json()["error"]["phase"] == phase
    assert http.get("/livez").status_code == 200
    assert http.get("/metrics").status_code == 200
    driver.heal()
    assert until_done(http, response.json()["error"]["operation_id"])["success"] is True


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_what_nobody_waits_for_is_told_when_it_is_stuck(
    serve: Serve, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """A stuck operation without a waiting caller reports itself and its phase in its record, its events, the metrics
    and the log. When it continues, the report ends."""
    http = serve(phase_timeout_s=0.2)
    driver.delay("unmap", 3600)
    started = post(http, "/release_memory_occupation", tags=["workspace"], **{"async": True}).json()
    operation_id = started["operation_id"]
    stalled = next(data for name, data in events(http, operation_id) if name == "stalled")
    assert stalled["phase"] == "pause"
    assert stalled["seconds"] > 0.2
    now = operation(http, operation_id)
    assert (now["status"], now["stalled"]["phase"]) == ("running", "pause")
    assert 'memsaver_stalled_seconds{operation="release",phase="pause"}' in http.get("/metrics").text

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if operation_id in record.getMessage()]

    wait_until(told)
    driver.heal()
    assert until_done(http, operation_id)["success"] is True
    assert operation(http, operation_id)["stalled"] is None
    assert "memsaver_stalled_seconds{" not in http.get("/metrics").text
    assert len(told()) == 1
    assert "no progress in phase 'pause'" in told()[0]


@contextmanager
def weights_being_written(
    http: httpx.Client, engine: TensorEngine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], httpx.Response]]:
    """A weight update that lasts until the block ends, or until its answer is asked for."""
    writing, ends = threading.Event(), threading.Event()

    def write(_path: str, **_how: object) -> int:
        writing.set()
        assert ends.wait(600)
        return 1

    monkeypatch.setattr(engine, "update_weights_from_disk", write)
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(post, http, "/update_weights_from_disk", model_path="/trained")
        assert writing.wait(600)

        def answer() -> httpx.Response:
            ends.set()
            return update.result()

        try:
            yield answer
        finally:
            ends.set()


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_release_waits_for_weights_as_for_requests(
    http: httpx.Client, engine: TensorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the drain deadline; the error names what it waited for, and nothing is released."""
    with weights_being_written(http, engine, monkeypatch) as update:
        late = post(http, "/release_memory_occupation", timeout_s=0.05)
        assert (late.status_code, late.json()["error"]["type"]) == (504, "drain_timeout")
        assert late.json()["error"]["phase"] == "drain"
        assert "a weight update" in late.json()["message"]
        assert http.get("/readyz").status_code == 200
        assert update().status_code == 200
    assert post(http, "/release_memory_occupation").json()["state"] == "released"


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_resume_says_that_it_waits_for_weights(
    serve: Serve, engine: TensorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a deadline nothing is resumed, and the error names what it waited for."""
    http = serve(phase_timeout_s=0.2)
    post(http, "/release_memory_occupation", tags=["kv_cache"])
    with weights_being_written(http, engine, monkeypatch) as update:
        operation_id = post(http, "/resume_memory_occupation", **{"async": True}).json()["operation_id"]
        answer = until_done(http, operation_id)
        assert (answer["error"]["type"], answer["error"]["phase"]) == ("memory_busy", "wait_for_weights")
        assert "a weight update has not ended" in answer["message"]
        assert http.get("/memory_occupation").json()["state"] == "released"
        assert update().status_code == 200
    assert post(http, "/resume_memory_occupation").json()["state"] == "resident"


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_weight_update_does_not_wait_without_end(
    serve: Serve, engine: TensorEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind another update or a stuck operation it is refused after a while, and the error names that."""
    http = serve(phase_timeout_s=0.2)
    with weights_being_written(http, engine, monkeypatch):
        second = post(http, "/update_weights_from_disk", model_path="/trained")
        assert (second.status_code, second.json()["error"]["phase"]) == (504, "wait_for_weights")
    driver.delay("unmap", 3600)
    started = post(http, "/release_memory_occupation", tags=["workspace"], **{"async": True}).json()
    operation_id = started["operation_id"]
    wait_until(lambda: operation(http, operation_id)["stalled"] is not None)
    third = post(http, "/update_weights_from_disk", model_path="/trained")
    assert (third.status_code, third.json()["error"]["phase"]) == (504, "pause")
    assert operation_id in third.json()["message"]
    driver.heal()
    assert until_done(http, operation_id)["success"] is True


@pytest.mark.parametrize(
    ("path", "call", "phase"),
    [("release", "synchronize", "synchronize"), ("release", "unmap", "pause"), ("resume", "create", "restore")],
)
@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_the_error_says_in_which_phase(http: httpx.Client, driver: Driver, path: str, call: str, phase: str) -> None:
    """Also if the phase failed instead of hanging."""
    if path == "resume":
        post(http, "/release_memory_occupation").raise_for_status()
    driver.fail(call, kind="invalid_value")
    answer = post(http, f"/{path}_memory_occupation")
    assert answer.status_code == 500
    assert answer.json()["error"]["phase"] == phase


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_an_engine_that_cannot_be_made_whole_says_in_which_phase(
    http: httpx.Client, engine: TensorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for errors of unknown types."""
    post(http, "/release_memory_occupation").raise_for_status()

    def repair(_tags: list[str], _lost: list[str]) -> None:
        raise RuntimeError("no prefix tree")

    with monkeypatch.context() as broken:
        broken.setattr(engine, "repair", repair)
        answer = post(http, "/resume_memory_occupation")
    assert (answer.status_code, answer.json()["error"]["phase"]) == (500, "repair")
    assert post(http, "/resume_memory_occupation").status_code == 200


def test_every_answer_comes_while_an_operation_runs(http: httpx.Client, engine: TensorEngine) -> None:
    with drain_held_up(http, engine):
        release_in_drain(http, engine)
        for path in ("/memory_occupation", "/is_sleeping", "/memory_status", "/livez", "/health", "/metrics"):
            assert http.get(path).status_code == 200
        assert http.get("/readyz").status_code == 503
        assert http.get("/flush_cache").status_code == 200
    assert ms.status().state in ("resident", "releasing", "released")
