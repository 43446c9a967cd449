"""Operations as clients see them: joined, queued, refused, left alone, watched, remembered."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

import memsaver_core as ms
from memsaver_core._native import Saver as Driver
from memsaver_server.schemas import AcceptedAnswer, OperationStatusAnswer

from .tensor_engine import MIB, TensorEngine

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
    """Follow the events of an operation; return its answer."""
    return next(data for name, data in events(http, operation_id) if name == "done")


@contextmanager
def drain_held_up(http: httpx.Client, engine: TensorEngine) -> Iterator[ThreadPoolExecutor]:
    """A request that does not end until the block does: a release inside stays in its drain."""
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


def test_two_clients_wake_at_once(http: httpx.Client, engine: TensorEngine) -> None:
    """R9: a repeat of a call in flight joins it, and both get the one operation's answer."""
    with drain_held_up(http, engine) as pool:
        operation_id = release_in_drain(http, engine, tags=["kv_cache", "weights"])
        repeats = [
            pool.submit(post, http, "/release_memory_occupation", tags=tags)
            for tags in (["weights", "kv_cache"], ["kv_cache", "weights", "weights"])
        ]
        with pytest.raises(TimeoutError):
            repeats[0].result(timeout=0.01)
        engine.unblock()
        answers = [repeat.result().json() for repeat in repeats]
    assert [answer["operation_id"] for answer in answers] == [operation_id] * 2
    assert answers[0] == answers[1]
    with ThreadPoolExecutor(8) as pool:
        woken = [pool.submit(post, http, "/resume_memory_occupation") for _ in range(8)]
        assert {call.result().status_code for call in woken} == {200}
    assert http.get("/memory_occupation").json()["state"] == "resident"


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
        while len(http.get("/operations").json()["operations"]) < 2:
            pass
        engine.unblock()
        assert waiting.result().json()["state"] == "resident"


def test_releases_of_different_tags_follow_each_other(http: httpx.Client, engine: TensorEngine) -> None:
    with drain_held_up(http, engine) as pool:
        release_in_drain(http, engine, tags=["kv_cache"])
        second = pool.submit(post, http, "/release_memory_occupation", tags=["weights"])
        engine.unblock()
        assert second.result().json()["state"] == "released"
    assert http.get("/memory_status").json()["parked_tags"] == ["kv_cache", "weights"]


def test_a_client_that_goes_away_cancels_nothing(http: httpx.Client, engine: TensorEngine) -> None:
    """R10: the operation completes by itself, and the state is true."""
    address = urlsplit(str(http.base_url))
    with drain_held_up(http, engine):
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(b"POST /release_memory_occupation HTTP/1.1\r\nHost: engine\r\nContent-Length: 0\r\n\r\n")
            engine.wait_until(lambda engine: engine.is_closed)
        operation_id = http.get("/memory_occupation").json()["operation_id"]
        engine.unblock()
        assert until_done(http, operation_id)["state"] == "released"
    assert operation(http, operation_id)["status"] == "succeeded"
    assert http.get("/memory_occupation").json()["state"] == "released"


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
    assert http.get(address).json()["answer"]["released_bytes"] >= 24 * MIB


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
    driver.delay("copy_to_host", 0.2)
    operation_id = post(http, "/release_memory_occupation", **{"async": True}).json()["operation_id"]
    progress = [data for name, data in events(http, operation_id) if name == "progress"]
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
    assert post(http, "/release_memory_occupation", at_least_bytes=17 * MIB).json()["released_bytes"] >= 17 * MIB
    assert parked() == ["kv_cache", "workspace"]
    post(http, "/resume_memory_occupation")
    assert post(http, "/release_memory_occupation", at_least_bytes=18 * MIB).json()["released_bytes"] >= 18 * MIB
    assert parked() == ["kv_cache", "weights", "workspace"]
    post(http, "/resume_memory_occupation")
    response = post(http, "/release_memory_occupation", at_least_bytes=1 << 40)
    assert response.status_code == 400
    assert parked() == []
    assert http.get("/readyz").status_code == 200


def test_a_phase_that_makes_no_progress_is_named(
    serve: Serve, engine: TensorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3: callers of an operation that is stuck are told the phase; the operation goes on, and the state is true."""
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
def test_a_driver_call_that_hangs_is_named(serve: Serve, driver: Driver, path: str, call: str, phase: str) -> None:
    """S3: a driver that does not come back is told by the phase it is in; probes answer, and the end is true."""
    http = serve(phase_timeout_s=0.2)
    if path == "resume":
        post(http, "/release_memory_occupation").raise_for_status()
    driver.delay(call, 1.0)
    response = post(http, f"/{path}_memory_occupation", tags=["workspace"])
    assert (response.status_code, response.json()["error"]["type"]) == (504, "phase_timeout")
    assert response.json()["error"]["phase"] == phase
    assert http.get("/livez").status_code == 200
    assert http.get("/metrics").status_code == 200
    driver.heal()
    assert until_done(http, response.json()["error"]["operation_id"])["success"] is True


def test_every_answer_comes_while_an_operation_runs(http: httpx.Client, engine: TensorEngine) -> None:
    with drain_held_up(http, engine):
        release_in_drain(http, engine)
        for path in ("/memory_occupation", "/is_sleeping", "/memory_status", "/livez", "/health", "/metrics"):
            assert http.get(path).status_code == 200
        assert http.get("/readyz").status_code == 503
        assert http.get("/flush_cache").status_code == 200
    assert ms.status().state in ("resident", "releasing", "released")
