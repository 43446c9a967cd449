"""What the weights hold has a name, which a resume may demand."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
import safetensors.torch

from tests.waiting import wait_until

from .tensor_engine import KV_BYTES, TensorEngine, tenant

WRONG = "wrong_weights_version"


@pytest.fixture
def checkpoint(engine: TensorEngine, tmp_path: Path) -> Path:
    file = tmp_path / "weights"
    safetensors.torch.save_file({"weights": engine.weights + 1}, file)
    return file


def update(http: httpx.Client, checkpoint: Path, **more: object) -> None:
    http.post("/update_weights_from_disk", json={"model_path": str(checkpoint), **more}).raise_for_status()


def version(http: httpx.Client) -> str | None:
    held: str | None = http.get("/memory_occupation").json()["weights_version"]
    return held


def test_an_update_names_what_the_weights_hold(http: httpx.Client, checkpoint: Path) -> None:
    assert version(http) is None
    update(http, checkpoint, weight_version="step-12")
    assert version(http) == "step-12"
    http.post("/update_weights_from_disk", json={"model_path": "/nowhere", "weight_version": "step-13"})
    assert version(http) == "step-12"
    update(http, checkpoint)
    assert version(http) is None


def test_a_resume_may_demand_it(http: httpx.Client, checkpoint: Path) -> None:
    update(http, checkpoint, weight_version="step-12")
    http.post("/release_memory_occupation").raise_for_status()
    answer = http.post("/resume_memory_occupation", json={"weights_version": "step-13"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, WRONG)
    assert "'step-13'" in answer.json()["message"]
    assert "'step-12'" in answer.json()["message"]
    assert http.get("/memory_occupation").json()["state"] == "released"
    for demanded in ("step-13", "step-12"):
        plan = http.post("/resume_memory_occupation", json={"weights_version": demanded, "dry_run": True}).json()
        assert [demanded in each for each in plan["blockers"]] == [True] * (demanded == "step-13")
    http.post("/resume_memory_occupation", json={"weights_version": "step-12"}).raise_for_status()
    assert version(http) == "step-12"


def test_weights_that_are_given_up_have_none(http: httpx.Client, checkpoint: Path) -> None:
    update(http, checkpoint, weight_version="step-12")
    http.post("/release_memory_occupation", json={"restore": {"weights": "discard"}}).raise_for_status()
    answer = http.post("/resume_memory_occupation", json={"weights_version": "step-12"})
    assert answer.status_code == 409
    assert "have no version" in answer.json()["message"]
    http.post("/resume_memory_occupation").raise_for_status()
    assert version(http) is None
    http.post("/content_written").raise_for_status()
    assert version(http) is None
    update(http, checkpoint, weight_version="step-13")
    assert version(http) == "step-13"


def test_weights_that_were_written_in_part_have_none(
    http: httpx.Client, engine: TensorEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update(http, checkpoint, weight_version="step-12")

    def write_half(*_: object, **__: object) -> int:
        engine.weights[: len(engine.weights) // 2] += 1
        raise RuntimeError("a file is cut off")

    monkeypatch.setattr(engine, "update_weights_from_disk", write_half)
    answer = http.post("/update_weights_from_disk", json={"model_path": "any", "weight_version": "step-13"})
    assert answer.status_code == 500
    assert version(http) is None
    http.post("/release_memory_occupation").raise_for_status()
    answer = http.post("/resume_memory_occupation", json={"weights_version": "step-12"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, WRONG)


def test_a_resume_looks_again_after_it_has_waited(http: httpx.Client, checkpoint: Path) -> None:
    """An update came while it waited for memory."""
    update(http, checkpoint, weight_version="step-12")
    http.post("/release_memory_occupation", json={"tags": ["kv_cache"]}).raise_for_status()
    body = {"weights_version": "step-12", "wait_for_memory_s": 3600}
    with ThreadPoolExecutor(1) as pool:
        with tenant(left=KV_BYTES // 2):
            resuming = pool.submit(http.post, "/resume_memory_occupation", json=body)
            wait_until(lambda: phases(http) == ["wait_for_memory"])
            update(http, checkpoint, weight_version="step-13")
        assert (resuming.result().status_code, resuming.result().json()["error"]["type"]) == (409, WRONG)
    assert http.get("/memory_occupation").json()["state"] == "released"
    http.post("/resume_memory_occupation", json={"weights_version": "step-13"}).raise_for_status()


def phases(http: httpx.Client) -> list[str]:
    return [each["phase"] for each in http.get("/operations").json()["operations"] if each["status"] == "running"]


def test_nobody_vouches_for_weights_that_are_being_written(
    http: httpx.Client, engine: TensorEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def write_slowly(*_: object, **__: object) -> int:
        begun.set()
        assert go_on.wait(600)
        return 1

    monkeypatch.setattr(engine, "update_weights_from_disk", write_slowly)
    update_later = partial(update, http, checkpoint, weight_version="step-12")
    http.post("/release_memory_occupation", json={"restore": {"weights": "discard"}}).raise_for_status()
    http.post("/resume_memory_occupation").raise_for_status()
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(update_later)
        assert begun.wait(600)
        answer, closed = http.post("/content_written"), engine.is_closed
        go_on.set()
        updating.result()
    assert (answer.status_code, answer.json()["error"]["type"], closed) == (504, "memory_busy", True)
    assert not engine.is_closed
    assert version(http) == "step-12"
