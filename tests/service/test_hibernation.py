"""Hibernation over HTTP on the host driver: nothing remains on the device, any resume wakes it, refusals give
reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import memsaver_core as ms
from memsaver_core.contract.status import CommunicatorStatus
from tests.native import injection
from tests.obstacles import put_in

from .tensor_engine import KV_BYTES, WEIGHTS_BYTES

PROMPT = {"input_ids": [3, 5, 8], "sampling_params": {"max_new_tokens": 6, "temperature": 0}}
FULLY = [("/release_memory_occupation", {"hibernate": True}), ("/sleep", {"level": 3})]


@pytest.fixture(autouse=True)
def awake() -> Iterator[None]:
    yield
    ms.resume()


def tokens(http: httpx.Client) -> list[int]:
    return http.post("/generate", json=PROMPT).raise_for_status().json()["output_ids"]


@pytest.mark.parametrize(("path", "body"), FULLY)
def test_it_sleeps_and_wakes(http: httpx.Client, path: str, body: dict[str, object]) -> None:
    before = tokens(http)
    http.post(path, json=body).raise_for_status()
    asleep = http.get("/memory_occupation").json()
    assert (asleep["state"], asleep["hibernated"], asleep["devices"][0]["used_bytes"]) == ("released", True, 0)
    assert asleep["admission"] == {"open": False, "reason": "the process is hibernated"}
    assert http.get("/livez").status_code == 200
    assert http.get("/readyz").json()["reason"] == "the process is hibernated"
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.post("/generate", json=PROMPT).status_code == 503
    answer = http.post("/resume_memory_occupation").raise_for_status().json()
    assert [phase["name"] for phase in answer["phases"]][:2] == ["wake", "restore"]
    assert http.get("/memory_occupation").json()["hibernated"] is False
    assert tokens(http) == before


def test_tags_that_stay_come_back_with_it(http: httpx.Client) -> None:
    before = tokens(http)
    http.post("/release_memory_occupation", json={"tags": ["kv_cache"], "hibernate": True}).raise_for_status()
    device = http.get("/memory_occupation").json()["devices"][0]
    assert device["used_bytes"] == sum(source["bytes"] for source in device["sources"]) == 0
    plan = http.post("/release_memory_occupation", json={"dry_run": True}).json()
    assert plan["message"] == "dry run: nothing to release"  # as the release itself says
    http.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}).raise_for_status()
    assert http.get("/memory_occupation").json()["devices"][0]["used_bytes"] >= KV_BYTES + WEIGHTS_BYTES
    assert tokens(http) == before


@pytest.mark.parametrize(("path", "body"), FULLY)
@pytest.mark.parametrize(
    ("put", "reason"),
    [
        ({"can_checkpoint": False}, "570 or later is needed"),
        ({"mps": "/tmp/nvidia-mps/control"}, "CUDA MPS"),
        ({"communicators": (CommunicatorStatus(name="tp", ranks=2, rank=0),)}, "communicator tp is alive"),
        ({"ipc_tensors": 1}, "CUDA IPC"),
        ({"peers": ((0, 1),)}, "reach each other's memory"),
        ({"managed_bytes": 1}, "managed memory"),
        ({"has_helper": False}, "helper program"),
    ],
)
def test_what_stands_in_the_way_is_told_and_nothing_is_done(
    http: httpx.Client, path: str, body: dict[str, object], put: dict[str, Any], reason: str
) -> None:
    """The reasons are patched in, because this machine has none; everything else is real."""
    before = tokens(http)
    with put_in(**put):
        response = http.post(path, json=body)
    assert response.status_code == 409
    assert response.json()["error"]["type"] == "unsupported"
    assert reason in response.json()["message"]
    assert response.json()["message"].endswith("nothing was released")
    now = http.get("/memory_occupation").json()
    assert (now["state"], now["hibernated"], now["admission"]["open"]) == ("resident", False, True)
    assert tokens(http) == before


def test_the_rest_of_a_release_needs_no_checkpoint(http: httpx.Client) -> None:
    with put_in(can_checkpoint=False):
        http.post("/release_memory_occupation", json={"trim": True}).raise_for_status()
        http.post("/resume_memory_occupation").raise_for_status()


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
def test_a_failed_hibernation_is_undone_and_told(http: httpx.Client, step: str) -> None:
    before = tokens(http)
    injection.fail_step(step)
    response = http.post("/release_memory_occupation", json={"hibernate": True})
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["type"], error["call"], error["code"]) == ("driver_error", step, "INJECTED")
    assert "the process runs on as before" in error["message"]
    assert response.json()["phases"][-1]["name"] == "hibernate"
    assert http.get("/memory_occupation").json()["hibernated"] is False
    http.post("/resume_memory_occupation").raise_for_status()
    assert tokens(http) == before


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_a_failed_wake_is_told_and_the_repeat_works(http: httpx.Client) -> None:
    """It stays hibernated, and nothing is lost."""
    before = tokens(http)
    http.post("/release_memory_occupation", json={"hibernate": True}).raise_for_status()
    injection.fail_step("restore")
    response = http.post("/resume_memory_occupation")
    assert response.status_code == 500
    assert response.json()["error"]["call"] == "restore"
    assert http.get("/livez").status_code == 200
    assert http.get("/memory_occupation").json()["hibernated"] is True
    assert http.post("/generate", json=PROMPT).status_code == 503
    http.post("/resume_memory_occupation").raise_for_status()
    assert tokens(http) == before


def test_the_steps_of_a_trim_are_phases(http: httpx.Client) -> None:
    answer = http.post("/release_memory_occupation", json={"trim": True}).json()
    phases = [phase["name"] for phase in answer["phases"]]
    at = phases.index("pause")
    assert phases[at + 1 : at + 5] == ["trim_workspaces", "empty_cache", "trim_graphs", "trim_pinned"]
    http.post("/resume_memory_occupation").raise_for_status()
