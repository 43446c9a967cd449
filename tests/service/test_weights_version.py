"""What the weights hold has a name, which a resume may demand."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import safetensors.torch

from .tensor_engine import TensorEngine


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
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "wrong_weights_version")
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
