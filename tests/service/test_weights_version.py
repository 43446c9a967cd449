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


def test_the_caller_of_an_update_that_the_service_does_not_see_names_it(
    http: httpx.Client, engine: TensorEngine, checkpoint: Path
) -> None:
    """Also while the weights are released, if their content is kept."""
    update(http, checkpoint, weight_version="step-12")
    engine.weights += 1
    answer = http.post("/content_written", json={"weights_version": "step-13"}).json()
    assert (answer["message"], answer["weights_version"]) == ("Content counts as written.", "step-13")
    http.post("/release_memory_occupation").raise_for_status()
    assert http.post("/content_written", json={"tags": ["weights"]}).status_code == 409
    body = {"tags": ["weights", "kv_cache"], "weights_version": "step-14"}
    answer = http.post("/content_written", json=body)
    assert (answer.status_code, "kv_cache" in answer.json()["message"]) == (409, True)
    assert version(http) == "step-13"
    for named in ({"tags": ["weights"], "weights_version": "step-14"}, {"weights_version": "step-15"}):
        assert http.post("/content_written", json=named).json()["weights_version"] == named["weights_version"]
    assert http.post("/resume_memory_occupation", json={"weights_version": "step-14"}).status_code == 409
    http.post("/resume_memory_occupation", json={"weights_version": "step-15"}).raise_for_status()
    http.post("/content_written", json={"tags": ["kv_cache"]}).raise_for_status()
    assert version(http) == "step-15"


def test_weights_that_are_given_up_are_named_once_they_are_back(http: httpx.Client, engine: TensorEngine) -> None:
    http.post("/release_memory_occupation", json={"restore": {"weights": "discard"}}).raise_for_status()
    answer = http.post("/content_written", json={"weights_version": "step-12"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "not_resident")
    http.post("/resume_memory_occupation").raise_for_status()
    http.post("/content_written", json={"weights_version": "step-12"}).raise_for_status()
    assert (version(http), engine.is_closed) == ("step-12", False)


def test_weights_that_the_engine_makes_again_have_none(
    http: httpx.Client, engine: TensorEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be those that it began with."""
    update(http, checkpoint, weight_version="step-12")
    monkeypatch.setattr(engine, "repair", lambda tags, lost: lost)
    http.post("/release_memory_occupation", json={"restore": {"weights": "discard"}}).raise_for_status()
    http.post("/resume_memory_occupation").raise_for_status()
    assert (version(http), engine.is_closed) == (None, False)


def test_answers_have_it(http: httpx.Client, checkpoint: Path) -> None:
    """That of an operation has the one of its time."""
    body = {"model_path": str(checkpoint), "weight_version": "step-12"}
    assert http.post("/update_weights_from_disk", json=body).json()["weights_version"] == "step-12"
    answers = [http.post(path).json() for path in ("/release_memory_occupation", "/resume_memory_occupation")]
    assert [answer["weights_version"] for answer in answers] == ["step-12"] * 2
    prompt = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    assert http.post("/generate", json=prompt).json()["meta_info"]["weight_version"] == "step-12"
    discarded = http.post("/release_memory_occupation", json={"restore": {"weights": "discard"}}).json()
    assert discarded["weights_version"] is None
    http.post("/resume_memory_occupation").raise_for_status()
    update(http, checkpoint, weight_version="step-13")
    assert http.post("/generate", json=prompt).json()["meta_info"]["weight_version"] == "step-13"
    for answer in answers:
        assert http.get(f"/operations/{answer['operation_id']}").json()["answer"]["weights_version"] == "step-12"


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
