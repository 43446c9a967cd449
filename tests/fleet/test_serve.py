"""A fleet behind one address, called as its callers call one engine."""

from __future__ import annotations

import base64
import gc
import http.client
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import memsaver_core as ms
from memsaver_core import MemsaverError
from memsaver_server import Settings, attach
from memsaver_server.client import Client
from memsaver_server.fleet import Member, MemoryRecord, StaticMembership
from tests import forks
from tests.amount import amount
from tests.e2e.serving import memsaver
from tests.waiting import wait_until

from .conftest import Sites
from .light_engine import LightEngine
from .served_fleet import served
from .wire import Loop, Wire

ALL = ("a", "b", "c")
SELECTED = {"selector": {"names": ["a", "b"]}}


class Trained(LightEngine):
    """A light engine with a graph, which takes weights."""

    def __init__(self, name: str) -> None:
        super().__init__(name, model="m")
        with ms.region(f"{name}/cuda_graph", restore="host"):
            self.graph = torch.ones(1000, device=ms.torch_device())
        self.memory.names = (*self.memory.names, "cuda_graph")

    def update_weights_from_disk(self, model_path: str, **_options: bool) -> int:
        raise ValueError(f"{model_path} has no weights")

    def update_weights_from_tensor(self, payloads: list[str], **_options: object) -> int:
        (bucket,) = payloads
        self.weights.fill_(int(base64.b64decode(bucket)))
        return 1


@pytest.fixture
def fleet(sites: Sites) -> Iterator[httpx.Client]:
    with served([site.member for site in sites.values()]) as http:
        yield http
        for site in sites.values():
            site.engine.memory.heal()


def states(sites: Sites) -> list[str]:
    return ["released" if site.is_released else "resident" if site.is_serving else "other" for site in sites.values()]


def names(answer: httpx.Response) -> list[str]:
    return [engine["name"] for engine in answer.json()["engines"]]


def test_requests_for_one_model_wake_one_engine(sites: Sites) -> None:
    """On GPUs of their own, each look at the engines while one was being woken woke a further one."""
    members = [Member(name, site.wire.url, model="m", gpus=(name,)) for name, site in sites.items()]

    def asked(http: httpx.Client) -> httpx.Response:
        return http.post("/v1/completions", json={"model": "m"})

    with served(members) as http, ThreadPoolExecutor(2) as pool:
        http.post("/release_memory_occupation", json={"wake_on_request": True}).raise_for_status()
        for site in sites.values():
            site.engine.memory.hold("resume")
        first = pool.submit(asked, http)
        resuming = 'memsaver_fleet_waiting_requests{model="m"} 1.0'
        wait_until(lambda: resuming in http.get("/metrics").text)
        wait_until(lambda: "resuming" in str(http.get("/memory_occupation").json()["engines"]))
        second = pool.submit(asked, http)
        wait_until(lambda: resuming.replace("1.0", "2.0") in http.get("/metrics").text)
        http.get("/memory_occupation").raise_for_status()  # a look at all of them
        for site in sites.values():
            site.engine.memory.heal()
        served_by = {each.result().headers["x-memsaver-engine"] for each in (first, second)}
        assert len(served_by) == 1
        assert [name for name, site in sites.items() if site.engine.resident()] == list(served_by)
        assert 'memsaver_fleet_wakes_total{model="m"} 1.0' in http.get("/metrics").text


def test_an_engine_that_cannot_be_woken_is_passed_over(sites: Sites) -> None:
    """All requests for its model were refused, although another engine of it slept."""
    members = [Member(name, sites[name].wire.url, model="m", gpus=(name,)) for name in "ab"]
    with served(members) as http:
        for failing in ("a", "b", "ab"):
            http.post("/release_memory_occupation", json={"wake_on_request": True}).raise_for_status()
            for name in failing:
                sites[name].engine.memory.fail("resume", MemsaverError("no"))
            answer = http.post("/v1/completions", json={"model": "m"})
            if failing == "ab":
                assert (answer.status_code, "was not woken" in answer.json()["message"]) == (503, True)
            else:
                assert answer.headers["x-memsaver-engine"] != failing
            for site in sites.values():
                site.engine.memory.heal()


def test_a_repeat_is_told_what_became_of_the_first(sites: Sites, tmp_path: Path) -> None:
    """It "continues in the background". And after a restart it was a second success in the audit log."""
    audit, record = tmp_path / "audit.log", MemoryRecord()
    asked = {"operation_id": "one", "async": True}
    for _ in range(2):
        with served([site.member for site in sites.values()], record=record, audit_file=str(audit)) as http:
            http.post("/release_memory_occupation", json={"operation_id": "one"}).raise_for_status()
            again = http.post("/release_memory_occupation", json=asked).json()
            assert (again["status"], again["message"]) == ("succeeded", "release one has ended: succeeded")
    (line,) = audit.read_text().splitlines()
    assert json.loads(line)["outcome"] == "success"


def test_advice_is_what_helps(fleet: httpx.Client, sites: Sites) -> None:
    """An engine advised to wait, which its coordinator does not."""
    sites["a"].http.post("/release_memory_occupation", json={"prepare": True}).raise_for_status()
    refused = fleet.post("/release_memory_occupation", json={"wait": True})
    assert refused.status_code == 409
    assert "Try again when it is done. All engines are as before" in refused.json()["message"]


@pytest.mark.parametrize("mode", ["all", "best_effort"])
def test_every_operation_names_what_has_to_be_written(fleet: httpx.Client, sites: Sites, mode: str) -> None:
    """Only those did that had failed."""
    asked = {"fleet_mode": mode, "restore": {"weights": "discard"}}
    lost = "Content to be written again: weights of a; weights of b"
    for path, body, done in (
        ("/release_memory_occupation", {**SELECTED, **asked}, "released on 2 engines"),
        ("/resume_memory_occupation", {"fleet_mode": mode}, "resumed on 3 engines"),
    ):
        answer = fleet.post(path, json=body).json()
        assert (answer["success"], answer["message"]) == (True, f"{done}. {lost}")
        assert [each["lost"] for each in answer["engines"]][:2] == [["weights"]] * 2
    assert answer["engines"][2]["lost"] == []
    for name in "ab":
        sites[name].write()
    again = fleet.post("/resume_memory_occupation", json={"fleet_mode": mode}).json()
    assert again["message"] == "resumed on 3 engines"


def test_a_query_names_one_model(fleet: httpx.Client) -> None:
    for path in ("/flush_cache", "/v1/completions"):
        refused = fleet.post(f"{path}?model=a&model=b", json={})
        assert (refused.status_code, "it has 'model' more than once" in refused.json()["message"]) == (400, True)


# -- clients of the contract ------------------------------------------------------------------------------------------


def post(fleet: httpx.Client, path: str, body: object = None) -> dict[str, object]:
    """As slime: JSON, an error for any status but 2xx, a JSON answer; and every engine is in it."""
    answer = fleet.post(path, json={} if body is None else body)
    answer.raise_for_status()
    assert sorted(names(answer)) == sorted(
        engine["name"] for engine in fleet.get("/memory_occupation").json()["engines"]
    )
    return answer.json()


def test_slime_miles_and_nemo_rl() -> None:
    engines = [Trained(name) for name in ("slime-1", "slime-2")]
    attachments = [attach(engine, settings=Settings()) for engine in engines]
    with served([Member(engine.name, each.url) for engine, each in zip(engines, attachments, strict=True)]) as fleet:
        assert fleet.get("/flush_cache").status_code == 200
        post(fleet, "/release_memory_occupation")
        assert not any(engine.resident() for engine in engines)
        post(fleet, "/resume_memory_occupation", {"tags": ["weights"]})
        assert [engine.resident() for engine in engines] == [{"weights"}] * 2
        post(fleet, "/pause_generation")
        bucket = base64.b64encode(b"42").decode()
        post(fleet, "/update_weights_from_tensor", {"serialized_named_tensors": [bucket], "flush_cache": False})
        assert all(bool((engine.weights == 42).all()) for engine in engines)
        post(fleet, "/continue_generation")
        post(fleet, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
        assert all(each["alive"] for each in fleet.get("/memory_occupation").json()["engines"])
        post(fleet, "/release_memory_occupation", {"tags": None})  # miles
        post(fleet, "/resume_memory_occupation", {"tags": ["weights", "kv_cache", "cuda_graph"]})
        post(fleet, "/pause_generation", {"mode": "retract"})
        post(fleet, "/continue_generation")
        for tags in (["weights"], ["kv_cache", "cuda_graph"]):  # NeMo-RL
            post(fleet, "/release_memory_occupation", {"tags": tags})
        assert not any(engine.resident() for engine in engines)
        for tags in (["weights"], ["kv_cache", "cuda_graph"]):
            post(fleet, "/resume_memory_occupation", {"tags": tags})
        assert all(bool((engine.weights == 42).all()) for engine in engines)
    for attachment in attachments:
        attachment.close()


def test_the_version_of_weights_is_named_at_every_engine() -> None:
    engines = [Trained(name) for name in ("vllm-1", "vllm-2")]
    attachments = [attach(engine, settings=Settings()) for engine in engines]
    with served([Member(engine.name, each.url) for engine, each in zip(engines, attachments, strict=True)]) as fleet:
        post(fleet, "/release_memory_occupation")
        post(fleet, "/content_written", {"weights_version": "step-1"})
        assert fleet.post("/resume_memory_occupation", json={"weights_version": "step-2"}).status_code == 409
        post(fleet, "/resume_memory_occupation", {"weights_version": "step-1"})
        assert all(any(engine.resident()) for engine in engines)
    for attachment in attachments:
        attachment.close()


def test_weights_in_a_body_go_to_the_engines_that_it_selects() -> None:
    engines = {name: Trained(name) for name in ("tensors-1", "tensors-2", "tensors-3")}
    with ExitStack() as stack:
        urls = {name: stack.enter_context(attach(engine, settings=Settings())).url for name, engine in engines.items()}
        members = [Member(name, url, model=f"model of {name}") for name, url in urls.items()]
        fleet = stack.enter_context(served(members))
        for number, (path, body) in enumerate(
            (
                ("?model=model%20of%20tensors-1", {}),
                ("", {"model": "model of tensors-1"}),
                ("", {"selector": {"names": ["tensors-1"]}}),
            ),
            2,
        ):
            payload = base64.b64encode(b"%d" % number).decode()
            answer = fleet.post(
                f"/update_weights_from_tensor{path}", json={"serialized_named_tensors": [payload], **body}
            )
            answer.raise_for_status()
            assert names(answer) == ["tensors-1"]
            assert [bool((engine.weights == number).all()) for engine in engines.values()] == [True, False, False]


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ({"names": ["a"]}, "selector.names"),
        ({"name": "a"}, "selector.names"),
        ({"label": {"x": "y"}}, "selector.labels"),
        ({"model_name": "m"}, "model"),
    ],
)
def test_what_selects_engines_elsewhere_is_refused(
    fleet: httpx.Client, sites: Sites, field: dict[str, object], meant: str
) -> None:
    """It was passed over, and every engine was released."""
    answer = fleet.post("/release_memory_occupation", json=field)
    assert (answer.status_code, f"did you mean {meant!r}" in answer.json()["message"]) == (400, True)
    assert states(sites) == ["resident"] * 3


def test_verl_sends_again_after_a_timeout(fleet: httpx.Client, sites: Sites) -> None:
    memory = sites["b"].engine.memory
    before = memory.reached.get("release", 0)
    memory.hold("release")
    body = {"tags": ["kv_cache", "weights"], "reset_connector": True}
    with closing(http.client.HTTPConnection(fleet.base_url.host, fleet.base_url.port)) as impatient:
        impatient.request("POST", "/release_memory_occupation", json.dumps(body))
        wait_until(lambda: memory.reached.get("release", 0) > before)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(fleet.post, "/release_memory_occupation", json=body)
        wait_until(lambda: fleet.get("/operations").json()["operations"][0]["callers"] == 2)
        memory.heal()
        assert again.result().status_code == 200
    assert states(sites) == ["released"] * 3
    assert fleet.get("/flush_cache?reset_connector=true").status_code == 200
    assert fleet.post("/resume_memory_occupation", json={"tags": ["kv_cache", "weights"]}).status_code == 200
    assert states(sites) == ["resident"] * 3


def test_areal_skyrl_and_vllm(fleet: httpx.Client, sites: Sites) -> None:
    assert fleet.get("/health").status_code == 200
    for path in ("/pause_generation", "/continue_generation"):
        assert fleet.post(path).is_success  # AReaL sends no body
    for sleep, wake in (
        (("/sleep", {}, {}), ("/wake_up", {}, {})),
        (
            ("/sleep", {}, {"level": 1, "tags": ["weights", "kv_cache"]}),
            ("/wake_up", {}, {"tags": ["weights", "kv_cache"]}),
        ),
        (
            ("/sleep", {"level": 1, "tags": ["weights", "kv_cache"]}, None),
            ("/wake_up", {"tags": ["weights", "kv_cache"]}, None),
        ),
    ):
        answer = fleet.post(sleep[0], params=sleep[1], json=sleep[2])
        assert answer.is_success, answer.text
        assert fleet.get("/is_sleeping").json()["is_sleeping"] is True
        assert states(sites) == ["released"] * 3
        assert fleet.post(wake[0], params=wake[1], json=wake[2]).is_success
        assert fleet.get("/is_sleeping").json()["is_sleeping"] is False
        assert states(sites) == ["resident"] * 3
    assert fleet.post("/sleep", params={"level": 0}).is_success
    assert fleet.get("/is_sleeping").json()["is_sleeping"] is True
    assert all(site.engine.whole() for site in sites.values())
    assert fleet.post("/wake_up", params={"tags": "scheduling"}).is_success
    assert states(sites) == ["resident"] * 3
    assert fleet.post("/release_kv_cache_memory").is_success
    assert [site.engine.resident() for site in sites.values()] == [{"weights"}] * 3
    assert fleet.post("/wake_up", params={"tags": "kv_cache"}).is_success


def test_tensorrt_llm_tooling(fleet: httpx.Client, sites: Sites) -> None:
    for body in (None, {}, {"tags": ["model"]}):
        answer = fleet.post("/release_memory", json=body)
        assert answer.json()["status"] == "success"
        assert names(answer) == list(ALL)
        status = fleet.get("/memory_status").json()
        parked = ["weights"] if body else ["kv_cache", "weights"]
        assert (status["state"], status["parked_tags"]) == ("parked", parked)
        assert [engine["parked_tags"] for engine in status["engines"]] == [parked] * 3
        assert fleet.post("/resume_memory", json=body).json()["status"] == "success"
    assert fleet.get("/memory_status").json()["state"] == "running"
    assert fleet.post("/release_memory", json={"tags": ["no-such"]}).status_code == 400


def test_operators_with_curl(fleet: httpx.Client, sites: Sites) -> None:
    """No body, no content type; also GET."""
    address = urlsplit(str(fleet.base_url))
    for method in ("POST", "GET"):
        for path, state in (("/release_memory_occupation", "released"), ("/resume_memory_occupation", "resident")):
            connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=600)
            connection.request(method, path)
            answer = connection.getresponse()
            body = json.loads(answer.read())
            assert (answer.status, body["success"], body["state"]) == (200, True, state)
            assert states(sites) == [state] * 3
            connection.close()


def test_ray_serve_llm(fleet: httpx.Client, sites: Sites) -> None:
    model = "model of b"
    assert fleet.post("/sleep", json={"model": model, "options": {"level": 1}}).is_success
    assert states(sites) == ["resident", "released", "resident"]
    for asked in (
        fleet.get("/is_sleeping", params={"model": model}),
        fleet.post("/is_sleeping", json={"model": model}),
    ):
        assert asked.json()["is_sleeping"] is True
        assert [engine["name"] for engine in asked.json()["engines"]] == ["b"]
    assert fleet.get("/is_sleeping", params={"model": "model of a"}).json()["is_sleeping"] is False
    assert fleet.post("/wakeup", json={"model": model, "options": {"tags": ["weights", "kv_cache"]}}).is_success
    assert states(sites) == ["resident"] * 3
    assert fleet.post("/reset_prefix_cache", json={"model": model}).is_success
    assert fleet.post("/pause", json={"model": model, "options": {"mode": "wait", "clear_cache": True}}).is_success
    assert fleet.get("/is_paused", params={"model": model}).json()["is_paused"] is True
    assert fleet.get("/is_paused", params={"model": "model of a"}).json()["is_paused"] is False
    assert fleet.post("/resume", json={"model": model}).is_success
    assert fleet.post("/is_paused", json={"model": model}).json()["is_paused"] is False
    assert fleet.post("/sleep", json={"model": model, "options": {"level": 9}}).status_code == 400
    assert fleet.post("/sleep", json={"model": "no such", "options": {}}).status_code == 404
    assert states(sites) == ["resident"] * 3


def test_aibrix(fleet: httpx.Client, sites: Sites) -> None:
    sleep = {"model_name": "model of a", "level": 1, "operation_id": "sleep-1"}
    expected = {"status": "success", "model_name": "model of a", "operation_id": "sleep-1", "phase": "sleeping"}
    for applied in (True, False):
        answer = fleet.post("/v1/runtime/models/sleep", json=sleep).json()
        assert [engine["name"] for engine in answer.pop("engines")] == ["a"]
        assert answer == {**expected, "applied": applied}
    assert states(sites) == ["released", "resident", "resident"]
    wake = {"model_name": "model of a", "operation_id": "wake-1"}
    assert fleet.post("/v1/runtime/models/wake", json=wake).json()["phase"] == "active"
    assert states(sites) == ["resident"] * 3
    sites["b"].engine.memory.fail("check_release", MemsaverError("no room for b"))
    again = {"model_name": "model of b", "operation_id": "sleep-2"}
    assert not fleet.post("/v1/runtime/models/sleep", json=again).is_success
    assert fleet.post("/v1/runtime/models/sleep", json=again).json()["applied"], "the repeat of what has failed did it"
    reused = fleet.post("/v1/runtime/models/wake", json={"model_name": "model of b", "operation_id": "sleep-1"})
    assert reused.status_code == 422


def test_our_own_client(fleet: httpx.Client) -> None:
    with Client(str(fleet.base_url)) as client:
        released = client.release(["weights"])
        assert (released.released_bytes, released.state) == (3 << 20, "released")
        now = client.occupation()
        assert {tag.tag: tag.released_bytes for tag in now.tags} == {"kv_cache": 0, "weights": 3 << 20}
        assert client.operation(released.operation_id).status == "succeeded"
        client.resume()
        assert client.occupation().state == "resident"
        started = client.start_release()
        assert [event.name for event in client.events(started.operation_id)][-1] == "done"
        client.resume(wait=True)
        client.flush_cache()


def test_our_own_command_fails_if_the_operation_does(fleet: httpx.Client, sites: Sites) -> None:
    sites["b"].engine.memory.fail("check_release", MemsaverError("no room for b"))
    failed = memsaver("release", "--url", str(fleet.base_url))
    assert failed.returncode == 1
    assert "b failed while preparing: no room for b" in failed.stderr
    assert memsaver("release", "--url", str(fleet.base_url)).returncode == 0
    assert states(sites) == ["released"] * 3


# -- all or none, and what the answers say -----------------------------------------------------------------------------


def test_one_that_fails_leaves_all_as_before_and_is_named(fleet: httpx.Client, sites: Sites) -> None:
    sites["b"].engine.memory.fail("check_release", MemsaverError("no room for b"))
    answer = fleet.post("/release_memory_occupation")
    assert answer.status_code == 500
    body = answer.json()
    assert (body["success"], body["error"]["failed"][0]["name"]) == (False, "b")
    assert "no room for b" in body["message"]
    assert [engine["success"] for engine in body["engines"]] == [False] * 3
    assert states(sites) == ["resident"] * 3
    sites["c"].wire.cut()
    answer = fleet.post("/release_memory_occupation")
    assert answer.status_code == 502
    assert names(answer) == list(ALL)
    assert [sites["a"].is_serving, sites["b"].is_serving] == [True, True]
    partly = fleet.post("/release_memory_occupation", json={"fleet_mode": "best_effort", **SELECTED})
    assert partly.status_code == 200
    assert names(partly) == ["a", "b"]
    for path in ("/flush_cache", "/pause_generation", "/continue_generation"):
        answer = fleet.post(path)
        assert (answer.status_code, answer.json()["status"]) == (502, "failed")
        assert [engine["success"] for engine in answer.json()["engines"]] == [True, True, False]
    rows = fleet.get("/memory_occupation").json()["engines"]
    assert [(row["name"], row["alive"]) for row in rows] == [("a", True), ("b", True), ("c", False)]
    assert rows[2]["error"]


@pytest.mark.parametrize("mode", ["all", "best_effort"])
def test_one_that_was_moved_by_others_meanwhile_is_named(fleet: httpx.Client, sites: Sites, mode: str) -> None:
    """It was counted among the engines that were released, and held all its memory."""
    sites["b"].engine.memory.hold("release")
    with ThreadPoolExecutor(1) as pool:
        releasing = pool.submit(fleet.post, "/release_memory_occupation", json={"fleet_mode": mode})
        wait_until(lambda: sites["a"].is_released)
        sites["a"].http.post("/resume_memory_occupation").raise_for_status()
        sites["b"].engine.memory.heal()
        answer = releasing.result()
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "changed")
    assert answer.json()["message"].startswith("released on 2 of 3 engines; a failed while committing: ")
    assert [engine["state"] for engine in answer.json()["engines"]] == ["resident", "released", "released"]
    wait_until(lambda: sites["a"].is_released)  # the wish stands


def test_selected_engines(fleet: httpx.Client, sites: Sites) -> None:
    fleet.post("/release_memory_occupation", json=SELECTED).raise_for_status()
    assert states(sites) == ["released", "released", "resident"]
    now = fleet.get("/memory_occupation").json()
    assert (now["state"], now["engine"]) == ("mixed", "fleet of 3")
    assert [row["wanted"] for row in now["engines"]] == ["released", "released", ""]
    assert [device["uuid"] for device in now["devices"]] == sorted({row["gpus"][0] for row in now["engines"]})
    assert fleet.post("/release_memory_occupation", json={"selector": {"nams": ["a"]}}).status_code == 400
    assert fleet.post("/release_memory_occupation", json={"selector": {"names": ["z"]}}).status_code == 404
    for refused in ({"prepare": True}, {"commit": "x"}, {"at_least_bytes": 5}):
        answer = fleet.post("/resume_memory_occupation", json=refused)
        assert answer.status_code == 400, refused
    assert states(sites) == ["released", "released", "resident"]


def test_a_dry_run_asks_every_engine_and_moves_nothing(fleet: httpx.Client, sites: Sites) -> None:
    answer = fleet.post("/release_memory_occupation", json={"dry_run": True, "tags": ["weights"]}).json()
    assert (answer["dry_run"], answer["blockers"]) == (True, [])
    assert [engine["body"]["tags"][0]["bytes"] for engine in answer["engines"]] == [1 << 20] * 3
    assert states(sites) == ["resident"] * 3


def test_operations_are_followed_and_given_up(fleet: httpx.Client, sites: Sites) -> None:
    inside = sites["b"].engine.request()
    inside.__enter__()
    accepted = fleet.post("/release_memory_occupation", json={"async": True, "operation_id": "first"})
    assert (accepted.status_code, accepted.headers["Location"]) == (202, "/operations/first")
    wait_until(lambda: fleet.get("/operations/first").json()["phase"] == "preparing")
    conflict = fleet.post("/resume_memory_occupation")
    assert (conflict.status_code, conflict.json()["error"]["type"]) == (409, "conflict")
    given_up = fleet.delete("/operations/first")
    assert given_up.json()["status"] == "cancelled"
    assert fleet.post("/operations/first/abort").json()["status"] == "cancelled"
    assert fleet.post("/release_memory_occupation", json={"operation_id": "first"}).status_code == 409
    inside.__exit__(None, None, None)
    wait_until(lambda: states(sites) == ["resident"] * 3)
    released = fleet.post("/release_memory_occupation", headers={"Idempotency-Key": "key 1"}).json()
    again = fleet.post("/release_memory_occupation", headers={"Idempotency-Key": "key 1"}).json()
    assert again == released
    sites["b"].engine.memory.fail("resume", MemsaverError("no"))
    resumed = [fleet.post("/resume_memory_occupation", headers={"Idempotency-Key": "key 2"}) for _ in range(2)]
    assert [answer.status_code for answer in resumed] == [500, 200]
    assert resumed[0].json()["operation_id"] == resumed[1].json()["operation_id"]
    other = fleet.post("/release_memory_occupation", json={"tags": ["weights"]}, headers={"Idempotency-Key": "key 1"})
    assert other.status_code == 422
    assert fleet.delete(f"/operations/{released['operation_id']}").status_code == 409
    assert fleet.get("/operations/no-such").status_code == 404
    events = fleet.get(f"/operations/{released['operation_id']}/events").text
    assert events.count("event: engine") == 3
    assert events.strip().rpartition("event: ")[2].startswith("done")


def test_a_stronger_drain_begins_once_the_first_is_cancelled(fleet: httpx.Client, sites: Sites) -> None:
    patient = {"timeout_s": 3600, "operation_id": "first"}
    with ThreadPoolExecutor(2) as pool:
        with sites["b"].engine.request() as inside:
            pool.submit(fleet.post, "/release_memory_occupation", json=patient)
            wait_until(lambda: not sites["b"].is_open)
            stronger = pool.submit(fleet.post, "/release_memory_occupation", json={"mode": "abort"})
            wait_until(lambda: len(fleet.get("/operations").json()["operations"]) == 2)
            assert not inside.aborted
            assert fleet.delete("/operations/first").json()["status"] == "cancelled"
            wait_until(lambda: inside.aborted)
        assert stronger.result().is_success, stronger.result().text
    assert states(sites) == ["released"] * 3


def test_an_engine_of_a_release_by_best_effort_is_expedited_by_itself(fleet: httpx.Client, sites: Sites) -> None:
    patient = {"timeout_s": 3600, "fleet_mode": "best_effort"}
    with ThreadPoolExecutor(2) as pool:
        with sites["b"].engine.request() as inside:
            first = pool.submit(fleet.post, "/release_memory_occupation", json=patient)
            wait_until(lambda: not sites["b"].is_open)
            stronger = pool.submit(sites["b"].http.post, "/release_memory_occupation", json={"mode": "abort"})
            wait_until(lambda: inside.aborted)
        assert [each.result().is_success for each in (first, stronger)] == [True, True]
    assert states(sites) == ["released"] * 3


def test_a_refused_call_leaves_no_error_unread(sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    with served([site.member for site in sites.values()]) as http:
        body = {"selector": {"names": ["nobody"]}}
        assert http.post("/release_memory_occupation", json=body).status_code == 404
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_ids_and_keys_are_their_requests_also_after_a_restart(sites: Sites) -> None:
    members, record = [site.member for site in sites.values()], MemoryRecord()
    key, named = {"Idempotency-Key": "key 1"}, {"operation_id": "one"}
    with served(members, record=record) as http:
        assert http.post("/release_memory_occupation", json={"tags": ["kv_cache"]}, headers=key).is_success
        assert http.post("/sleep", json={"model": "model of a", "options": named}).is_success
        assert http.post("/resume_memory_occupation").is_success
    with served(members, record=record) as http:
        for path, body, headers in (
            ("/release_memory_occupation", {}, key),
            ("/resume_memory_occupation", {"tags": ["kv_cache"]}, key),
            ("/release_memory_occupation", named, {}),
            ("/v1/runtime/models/wake", {"model_name": "model of a", **named}, {}),
            ("/v1/runtime/models/sleep", {"model_name": "model of b", **named}, {}),
        ):
            refused = http.post(path, json=body, headers=headers)
            assert (refused.status_code, refused.json()["error"]["type"]) == (422, "idempotency_key_reused"), path
            assert " belongs to release " in refused.json()["message"]
        assert not http.get("/operations").json()["operations"]
    assert states(sites) == ["resident"] * 3


def test_a_repeat_for_some_tags_after_a_restart_is_about_these(sites: Sites) -> None:
    """It was answered as done although they had been resumed, and as undone although only others were."""
    members, record = [sites["a"].member], MemoryRecord()
    release, resume = ({"operation_id": verb, "tags": ["weights"]} for verb in ("release", "resume"))
    with served(members, record=record) as http:
        assert http.post("/release_memory_occupation", json=release).is_success
        assert http.post("/release_memory_occupation", json={"tags": ["kv_cache"]}).is_success
        assert http.post("/resume_memory_occupation", json=resume).is_success
    with served(members, record=record) as http:
        changed = http.post("/release_memory_occupation", json=release)
        assert (changed.status_code, changed.json()["error"]["type"]) == (409, "changed")
        again = http.post("/resume_memory_occupation", json=resume)
        assert (again.status_code, again.json()["resumed_bytes"]) == (200, 0)
    assert sites["a"].engine.resident() == {"weights"}


def test_a_key_that_is_not_kept_any_more_is_new(
    fleet: httpx.Client, sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume was answered by the release that had the key a day ago."""
    key = {"Idempotency-Key": "key 1"}
    assert fleet.post("/release_memory_occupation", headers=key).is_success
    for module in ("record", "operation"):
        monkeypatch.setattr(f"memsaver_server.fleet.{module}.KEPT_S", 0.0)
    assert fleet.post("/resume_memory_occupation", headers=key).json()["resumed_bytes"]
    assert states(sites) == ["resident"] * 3


# -- who may call, and what can be seen -------------------------------------------------------------------------------


def test_callers_need_the_key_of_the_fleet_and_engines_get_theirs(sites: Sites) -> None:
    engine = LightEngine("keyed", model="m")
    with (
        attach(engine, settings=Settings(api_key="engine key")) as attachment,
        served([Member("keyed", attachment.url)], key="engine key", api_key="fleet key", read_key="look") as http,
    ):
        plain = httpx.Client(base_url=http.base_url, timeout=600, verify=False)
        for path in (
            "/memory_occupation",
            "/operations",
            "/v1/models",
            "/dashboard/feed",
            "/is_sleeping",
            "/memory_status",
        ):
            assert plain.get(path).status_code == 401, path
        for path in (
            "/release_memory_occupation",
            "/sleep",
            "/v1/completions",
            "/flush_cache",
            "/v1/runtime/models/wake",
        ):
            assert plain.post(path).status_code == 401, path
        reader = httpx.Client(
            base_url=http.base_url, timeout=600, verify=False, headers={"Authorization": "Bearer look"}
        )
        assert reader.get("/memory_occupation").status_code == 200
        assert reader.post("/release_memory_occupation").status_code == 403
        assert plain.get("/livez").status_code == 200
        assert http.post("/release_memory_occupation").json()["success"] is True
        assert http.post("/flush_cache").json()["success"] is True
        assert http.post("/resume_memory_occupation").json()["success"] is True
        assert "fleet key" not in http.get("/memory_occupation").text
        assert 'memsaver_refused_requests_total{reason="read_only"} 1.0' in http.get("/metrics").text


def test_two_addresses_of_one_engine_are_one_engine(sites: Sites) -> None:
    a = sites["a"]
    with served([a.member, Member("again", a.attachment.url), sites["b"].member]) as http:
        for _ in range(2):
            answer = http.post("/release_memory_occupation")
            assert (names(answer), answer.json()["released_bytes"]) == (["a", "b"], 4 << 20)
            assert http.post("/resume_memory_occupation").is_success
        assert [row["name"] for row in http.get("/memory_occupation").json()["engines"]] == ["a", "b"]
        one = http.post("/release_memory_occupation", json={"selector": {"names": ["a"]}})
        assert one.json()["released_bytes"] == 2 << 20


def test_a_fleet_without_engines_has_no_state() -> None:
    with served([]) as http:
        assert http.get("/memory_status").json() == {"state": "", "parked_tags": [], "engines": []}
        assert http.get("/memory_occupation").json()["state"] == ""


def test_a_coordinator_is_no_member(fleet: httpx.Client, sites: Sites) -> None:
    with served([sites["a"].member, Member("other", str(fleet.base_url))]) as http:
        answer = http.post("/release_memory_occupation")
        assert (answer.status_code, answer.json()["error"]["type"]) == (409, "is_coordinator")
        assert "is a coordinator of 3 engines: list those engines instead" in answer.json()["message"]
        assert "is a coordinator" in http.get("/memory_occupation").json()["engines"][1]["error"]
    assert states(sites) == ["resident"] * 3


def test_a_wrong_key_of_the_engines_names_the_setting(sites: Sites) -> None:
    engine = LightEngine("locked", model="m")
    with (
        attach(engine, settings=Settings(api_key="right")) as attachment,
        served([Member("locked", attachment.url)], key="wrong") as http,
    ):
        for path in ("/release_memory_occupation", "/flush_cache"):
            answer = http.post(path)
            assert answer.status_code in (401, 502)
            assert "MEMSAVER_ENGINE_API_KEY" in answer.json()["message"], path
        assert "MEMSAVER_ENGINE_API_KEY" in http.get("/memory_occupation").json()["engines"][0]["error"]


class Generating(LightEngine):
    async def generate(self, asked: dict[str, object]) -> dict[str, object]:
        return {"text": str(asked["text"])}


def test_a_key_of_an_engine_that_only_reads_is_not_told_to_be_the_clients() -> None:
    with (
        attach(Generating("shown", model="m"), settings=Settings(api_key="right", read_key="reads")) as attachment,
        served([Member("shown", attachment.url)], key="reads") as http,
    ):
        answer = http.post("/generate", json={"model": "m"})
        assert (answer.status_code, "MEMSAVER_ENGINE_API_KEY" in answer.json()["message"]) == (502, True)


def test_a_key_goes_to_no_address_but_its_own(tmp_path: Path) -> None:
    """``a`` gets another address, which does not answer, and another key: the old one must not be sent that."""
    loop, members = Loop(), tmp_path / "engines.json"
    with attach(Generating("moved", model="m"), settings=Settings(api_key="old")) as attachment:
        wire = Wire(attachment.url, loop.loop)
        wire.silence()
        members.write_text(json.dumps([{"name": "a", "url": attachment.url, "api_key": "old"}]))
        with served(StaticMembership(members)) as fleet:
            assert fleet.get("/readyz").status_code == 200
            members.write_text(json.dumps([{"name": "a", "url": wire.url, "api_key": "new"}]))

            def is_moved() -> bool:
                answer = fleet.post("/generate", json={"model": "m", "text": "one"})
                assert answer.status_code in (200, 404), "502: the key was refused"
                return bool(fleet.get("/memory_occupation").json()["engines"][0]["url"] == wire.url)

            wait_until(is_moved)
        wire.close()
    loop.close()


def test_a_wake_up_that_leaves_an_engine_paused_is_no_success(fleet: httpx.Client, sites: Sites) -> None:
    sites["b"].wire.on("/continue_generation", "reset")
    answer = fleet.post("/wake_up")
    assert (answer.status_code, answer.json()["success"]) == (502, False)
    assert "b: no answer" in answer.json()["message"]
    sites["b"].wire.heal()
    assert fleet.post("/wake_up").status_code == 200


def test_options_inside_of_options_count(fleet: httpx.Client, sites: Sites) -> None:
    assert fleet.post("/sleep", json={"options": {"options": {"level": 9}}}).status_code == 400
    assert fleet.post("/sleep", json={"options": {"options": {"tags": ["kv_cache"]}}}).status_code == 200
    assert [site.engine.resident() for site in sites.values()] == [{"weights"}] * 3


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"dry_run": true, "dry_run": false}', "'dry_run' more than once"),
        ('{"selector": {"names": ["a"], "names": ["b"]}}', "'names' more than once"),
        ('{"dry_run": "yes"}', "dry_run: Input should be true or false"),
        ('{"async": 1}', "async: Input should be true or false"),
        ('{"hibernate": "on"}', "hibernate: Input should be true or false"),
        ('{"selector": {"names": []}}', "names is empty"),
        ('{"selector": {"models": ["model of b"]}, "model": "model of a"}', "model and selector.models differ"),
    ],
)
def test_a_request_that_could_be_read_in_two_ways_is_refused(fleet: httpx.Client, body: str, said: str) -> None:
    answer = fleet.post("/release_memory_occupation", content=body)
    assert (answer.status_code, said in answer.json()["message"]) == (400, True), answer.text


def test_nobody_selected_is_the_same_error_with_and_without_a_dry_run(fleet: httpx.Client) -> None:
    nobody = {"selector": {"names": ["nobody"]}}
    answers = [fleet.post("/release_memory_occupation", json={**nobody, "dry_run": asks}) for asks in (True, False)]
    assert [(each.status_code, each.json()["error"]["type"]) for each in answers] == [(404, "not_found")] * 2


def test_calls_about_one_engine_are_not_passed_on_to_one_of_many(sites: Sites) -> None:
    site = sites["a"]
    with served([site.member]) as http:
        for path in ("/v1/load_lora_adapter", "/v1/runtime/models/activate"):
            answer = http.post(path, json={"model": "model of a"})
            assert (answer.status_code, "call each engine itself" in answer.json()["message"]) == (404, True)
    assert not any("/v1/" in request for request in site.wire.seen)


def test_limits_on_host_memory_are_never_more_than_the_host_has(fleet: httpx.Client, sites: Sites) -> None:
    now = sites["a"].http.get("/memory_occupation").json()
    assert now["host_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    together = fleet.get("/memory_occupation").json()
    assert now["host_backup"]["limit_bytes"] * 3 > now["host_bytes"], "else this shows nothing"
    assert together["host_backup"]["limit_bytes"] == together["host_bytes"] == now["host_bytes"]


def test_no_path_leads_around_the_coordinator(fleet: httpx.Client, sites: Sites) -> None:
    """httpx, as every client, takes dot segments out of a path before it sends it."""
    address = urlsplit(str(fleet.base_url))
    assert address.hostname is not None
    for path in ("/v1/../release_memory_occupation", "/v1/%2e%2e/release_memory_occupation"):
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=600)
        connection.request("POST", f"{path}?model={sites['a'].engine.model_name}".replace(" ", "%20"))
        assert connection.getresponse().status == 400
        connection.close()
    assert states(sites) == ["resident"] * 3


def test_browsers_and_large_bodies_are_refused(fleet: httpx.Client, sites: Sites) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert fleet.post("/release_memory_occupation", headers=headers).status_code == 403, headers
    assert fleet.post("/release_memory_occupation", content=b" " * (65 << 10)).status_code == 413
    assert fleet.post("/release_memory_occupation", content=b"{").status_code == 400
    assert fleet.post("/release_memory_occupation", json={"tgas": ["weights"]}).status_code == 400
    assert states(sites) == ["resident"] * 3


def test_a_bug_ends_nothing_that_runs_for_ever(sites: Sites) -> None:
    """The probe is red as long as the fleet cannot be looked at, and green afterwards."""

    class Buggy(StaticMembership):
        broken = False

        async def members(self) -> list[Member]:
            if self.broken:
                raise TypeError("a bug")
            return await super().members()

    membership = Buggy([sites["a"].member])
    with served(membership) as http:
        assert http.get("/readyz").status_code == 200
        membership.broken = True
        wait_until(lambda: http.get("/readyz").status_code == 503)
        assert "a bug" in http.get("/readyz").json()["reason"]
        membership.broken = False
        wait_until(lambda: http.get("/readyz").status_code == 200)


def test_probes_metrics_and_dashboard(fleet: httpx.Client, sites: Sites) -> None:
    assert fleet.get("/readyz").json() == {"status": "ok", "state": "resident", "reason": ""}
    fleet.post("/release_memory_occupation", json=SELECTED).raise_for_status()
    metrics = fleet.get("/metrics").text
    for line in (
        'memsaver_fleet_engines{state="released"} 2.0',
        'memsaver_fleet_engine_up{engine="a"} 1.0',
        'memsaver_fleet_engine_bytes{engine="a",state="released"} 2.097152e+06',
        'memsaver_fleet_operations_total{operation="release",outcome="success"} 1.0',
    ):
        assert line in metrics
    assert "engines.js" in fleet.get("/dashboard/page.js").text
    assert fleet.get("/").headers["content-security-policy"]
    with fleet.stream("GET", "/dashboard/feed") as feed:
        text = ""
        for part in feed.iter_text():
            text += part
            if "event: occupation" in text and text.endswith("\n\n"):
                break
    events = dict(block.split("\ndata: ") for block in text.removeprefix("event: ").strip().split("\n\nevent: "))
    occupation = json.loads(events["occupation"])
    assert [row["state"] for row in occupation["engines"]] == ["released", "released", "resident"]
    assert [device["name"] for device in occupation["devices"]] == ["1 device"]
    assert json.loads(events["operation"])["answer"]["engines"][0]["name"] == "a"


EXAMPLES = amount(1, long=60)
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_answer_is_as_described(fleet: httpx.Client) -> None:
    described = schemathesis.openapi.from_url(str(fleet.base_url.join("/openapi.json")))
    answers: list[int] = []
    for found in described.get_all_operations():

        @given(case=found.ok().as_strategy())
        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def answers_well(case: schemathesis.Case) -> None:
            response = case.call(timeout=600)
            assert response.status_code != 500, response.text
            answers.append(response.status_code)
            case.validate_response(response, checks=CHECKS)

        answers_well()
    assert answers.count(200) > 10


def test_the_command(sites: Sites, tmp_path: Path) -> None:
    """``memsaver fleet serve`` says where it serves, keeps a record, and ends with exit code 0."""
    members = tmp_path / "members.yaml"
    rows = [{"name": name, "url": site.member.url} for name, site in sites.items()]
    members.write_text(json.dumps({"members": rows, "models": {"*": {"idle_release_s": 3600}}}))
    command = [sys.executable, "-m", "memsaver_server.cli", "fleet", "serve", "--members", str(members), "--port", "0"]
    record = ["--record", str(tmp_path / "record.json")]
    with forks.Popen([*command, *record], stdout=forks.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith(f"serving the fleet of {members} on http://127.0.0.1:")
        answer = httpx.post(f"{said.split()[-1]}/release_memory_occupation", timeout=600)
        assert names(answer) == list(ALL)
        assert states(sites) == ["released"] * 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 0
    assert json.loads((tmp_path / "record.json").read_text())["wanted"][0]["state"] == "released"


def test_too_few_open_files(tmp_path: Path) -> None:
    """A coordinator that may not open a file for each connection says so, and can still be reached."""
    members = tmp_path / "members.yaml"
    members.write_text(json.dumps([f"http://127.0.0.1:{port}" for port in range(1, 21)]))
    command = [sys.executable, "-m", "memsaver_server.cli", "fleet", "serve", "--members", str(members), "--port", "0"]
    with forks.Popen(command, stdout=forks.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        assert (
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            == (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2
        )
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (100, 100))
        answer = httpx.post(f"{url}/release_memory_occupation", timeout=600)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "fleet_unknown")
        assert "20 engines need 144 open files, but this process may have 100" in answer.json()["message"]
        assert httpx.get(f"{url}/livez", timeout=600).status_code == 200
        process.terminate()
        assert process.wait(600) == 0


def test_a_call_does_not_join_what_was_given_up(sites: Sites) -> None:
    members = [site.member for site in sites.values()]
    with served(members, silence_s=36000) as fleet, sites["b"].engine.request(), ThreadPoolExecutor(1) as pool:
        fleet.post("/release_memory_occupation", json={"async": True, "operation_id": "one"}).raise_for_status()
        wait_until(lambda: fleet.get("/operations/one").json()["engines"].get("a") == "prepared")
        sites["b"].wire.on("/abort", "delay", times=1)
        cancelling = pool.submit(fleet.delete, "/operations/one")
        wait_until(lambda: any("/abort" in request for request in sites["b"].wire.seen))
        again = fleet.post("/release_memory_occupation", json={"async": True, "wait": True}).json()
        sites["b"].wire.go_on()
        assert cancelling.result().json()["status"] == "cancelled"
        assert again["operation_id"] != "one"
        fleet.delete(again["location"]).raise_for_status()


def test_the_patience_is_an_option(tmp_path: Path) -> None:
    members = tmp_path / "members.yaml"
    members.write_text("[]")
    ran = memsaver("fleet", "serve", "--members", str(members), "--silence", "4000", "--port", "0")
    assert (ran.returncode, "silence_s is '4000.0'" in ran.stderr) == (1, True)


def test_any_name_of_an_engine_can_be_in_a_header(sites: Sites) -> None:
    with served([Member(" a\n\x07名é", sites["a"].wire.url)]) as http:
        answer = http.post("/v1/completions", json={})
    assert (answer.status_code, answer.headers["x-memsaver-engine"]) == (404, "a???é")


def test_headers_of_one_connection_are_not_passed_on(sites: Sites) -> None:
    """Those that ``Connection`` names, too."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\nX-Kept: 1\r\n\r\n{}"
    sites["a"].wire.answer("POST /v1/completions", [head])
    with served([Member("a", sites["a"].wire.url)]) as http:
        answer = http.post("/v1/completions", json={})
    assert (answer.status_code, "x-hop" in answer.headers, "x-kept" in answer.headers) == (200, False, True)
