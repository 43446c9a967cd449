"""Weights that are written while they are released: the resume brings them in, all of an update or nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

import memsaver_core as ms
from memsaver_core import lending
from memsaver_core.contract.errors import NotResidentError
from memsaver_core.updates import written_asleep
from tests.waiting import wait_until

from .tensor_engine import VOCABULARY, TensorEngine

PROMPT = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8}}


@pytest.fixture(autouse=True)
def _writes_asleep(engine: TensorEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "updates_asleep", True, raising=False)


@pytest.fixture
def checkpoint(engine: TensorEngine, tmp_path: Path) -> Iterator[Path]:
    """Other weights; the engine has its own again afterwards."""
    before = engine.weights.clone()
    file = tmp_path / "weights"
    safetensors.torch.save_file({"weights": (before * 3 + 1) % VOCABULARY}, file)
    yield file
    ms.resume()
    engine.weights.copy_(before)


def tokens(http: httpx.Client) -> list[int]:
    answer = http.post("/generate", json=PROMPT)
    answer.raise_for_status()
    output: list[int] = answer.json()["output_ids"]
    return output


def update(http: httpx.Client, path: object, version: str = "new") -> httpx.Response:
    return http.post("/update_weights_from_disk", json={"model_path": str(path), "weight_version": version})


def release(http: httpx.Client, **body: object) -> None:
    answer = http.post("/release_memory_occupation", json=body)
    assert answer.is_success, answer.text


def resume(http: httpx.Client, **body: object) -> dict[str, Any]:
    answer = http.post("/resume_memory_occupation", json=body)
    answer.raise_for_status()
    report: dict[str, Any] = answer.json()
    return report


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["type"]


def test_a_resume_brings_in_what_was_written_asleep(http: httpx.Client, engine: TensorEngine, checkpoint: Path) -> None:
    old, address = tokens(http), engine.weights.data_ptr()
    update(http, checkpoint).raise_for_status()
    expected = tokens(http)
    engine.weights.copy_(safetensors.torch.load_file(checkpoint)["weights"] * 0 + 1)
    assert expected != old
    release(http)
    assert update(http, checkpoint, "step-2").json()["message"] == "1 tensors written."
    assert http.get("/memory_occupation").json()["state"] == "released"
    resume(http, weights_version="step-2")
    assert tokens(http) == expected
    assert engine.weights.data_ptr() == address
    unchanged = http.post("/release_memory_occupation").json()
    (weights,) = [tag for tag in unchanged["tags"] if tag["tag"] == "weights"]
    assert weights["unchanged_bytes"] == engine.weights.nbytes
    resume(http)


def test_an_update_that_fails_leaves_the_version_before(
    http: httpx.Client, engine: TensorEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update(http, checkpoint, "step-1").raise_for_status()
    expected = tokens(http)

    def write_half(*_: object, **__: object) -> int:
        engine.weights[: len(engine.weights) // 2] += 1
        raise RuntimeError("a file is cut off")

    def replace(*_: object, **__: object) -> int:
        engine.weights.data = torch.zeros_like(engine.weights)
        return 1

    def resume_meanwhile(*_: object, **__: object) -> int:
        engine.weights.zero_()
        ms.resume(["weights"])
        return 1

    release(http)
    failures = [
        (write_half, 500, "internal_error"),
        (replace, 409, "unsupported"),
        (resume_meanwhile, 400, "bad_request"),
    ]
    for write, status, kind in failures:
        monkeypatch.setattr(engine, "update_weights_from_disk", write)
        answer = update(http, checkpoint, "step-2")
        assert refusal(answer) == (status, kind)
        assert http.get("/memory_occupation").json()["weights_version"] == "step-1"
    resume(http, weights_version="step-1")
    assert tokens(http) == expected


@pytest.mark.parametrize(
    "body", [{"hibernate": True}, {"restore": {"weights": "discard"}}, {"restore": {"weights": "file"}}]
)
def test_content_that_is_not_in_host_memory_is_not_written(
    http: httpx.Client, checkpoint: Path, body: dict[str, object]
) -> None:
    release(http, **body)
    answer = update(http, checkpoint)
    assert refusal(answer) == (409, "not_resident")
    assert "resume it first" in answer.json()["message"]
    resume(http)
    update(http, checkpoint).raise_for_status()


def test_a_shortage_of_host_memory_is_known_before(
    http: httpx.Client, engine: TensorEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(http)
    release(http)
    monkeypatch.setattr(lending, "available_host_bytes", lambda: engine.weights.nbytes - 1)
    answer = update(http, checkpoint)
    assert refusal(answer) == (507, "out_of_host_memory")
    assert f"takes {engine.weights.nbytes} bytes of host memory" in answer.json()["message"]
    resume(http)
    assert tokens(http) == expected


@pytest.mark.parametrize("demanded", [{}, {"weights_version": "new"}])
def test_a_resume_waits_for_the_update(
    http: httpx.Client,
    engine: TensorEngine,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    demanded: dict[str, str],
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    write = engine.update_weights_from_disk

    def write_slowly(*given: Any, **more: Any) -> int:
        begun.set()
        assert go_on.wait(600)
        return write(*given, **more)

    monkeypatch.setattr(engine, "update_weights_from_disk", write_slowly)
    release(http)
    with ThreadPoolExecutor(2) as pool:
        updating = pool.submit(update, http, checkpoint)
        assert begun.wait(600)
        seen = http.get("/memory_occupation").json()
        resuming = pool.submit(resume, http, **demanded)
        wait_until(lambda: resuming.done() or "wait_for_weights" in http.get("/operations").text)
        go_on.set()
        assert seen["updating"] is True
        updating.result().raise_for_status()
        resuming.result()
    assert torch.equal(engine.weights, safetensors.torch.load_file(checkpoint)["weights"])


def test_tensors_that_share_memory_still_do(memory: object) -> None:
    """Views, also those that the loader makes; only a resident part is refused."""
    with ms.region("weights"):
        whole = torch.arange(100_000.0)
    tied = torch.nn.Parameter(whole, requires_grad=False)
    part = whole[7:70]
    addresses = [each.data_ptr() for each in (whole, tied, part)]
    ms.release(["weights"])
    with written_asleep("weights"):
        tied.mul_(2)
        later = tied[9:11]
        assert part[0] == 14
        assert not {each.data_ptr() for each in (whole, tied, part)} & set(addresses)
    assert [each.data_ptr() for each in (whole, tied, part)] == addresses
    ms.resume(["weights"])
    assert part[0] == 14
    assert later.data_ptr() == whole[9:].data_ptr()
    with pytest.raises(NotResidentError, match="is resident"), written_asleep("weights"):
        pass
