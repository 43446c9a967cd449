"""Bodies of generation requests to the engine of ``memsaver serve``, and their effect on it and on other requests."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

from memsaver_server.reference.builtin_model import small_checkpoint
from memsaver_server.reference.engine import TransformersEngine

PROMPT = "a prompt; "
LARGE = 10**40


@pytest.fixture(scope="module")
def transformers_engine() -> Iterator[TransformersEngine]:
    engine = TransformersEngine(kv_cache_bytes=32 << 20, max_len=320)
    yield engine
    engine.close()


@pytest.fixture
def engine(transformers_engine: TransformersEngine) -> TransformersEngine:
    return transformers_engine


def generate(http: httpx.Client, **sampling: Any) -> httpx.Response:
    # Not json=, which refuses to write NaN.
    body = json.dumps({"text": PROMPT, "sampling_params": {"max_new_tokens": 8, **sampling}})
    return http.post("/generate", content=body)


def tokens(http: httpx.Client, **sampling: Any) -> list[int]:
    response = generate(http, **sampling)
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["output_ids"]
    return ids


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 1e-6])
def test_a_temperature_too_small_to_matter_is_greedy(http: httpx.Client, temperature: float) -> None:
    assert tokens(http, temperature=temperature) == tokens(http, temperature=0)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1e-5},
        {"temperature": 100},
        {"temperature": 100, "top_p": 1e-6},
        {"temperature": 1, "top_k": LARGE},
        {"temperature": 1, "seed": LARGE},
        {"max_new_tokens": LARGE},
        {"temperature": 1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0},
        {"temperature": 1, "stop_token_ids": [LARGE]},
    ],
)
def test_extremes_that_are_understood(http: httpx.Client, sampling: dict[str, Any]) -> None:
    greedy = tokens(http)
    assert tokens(http, **sampling)
    assert tokens(http) == greedy


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 1e308, -1e308, LARGE, -LARGE])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_numbers_that_are_of_no_use_are_refused_by_name(http: httpx.Client, name: str, number: float) -> None:
    response = generate(http, **{name: number})
    assert response.status_code == 400
    assert f"sampling_params.{name}" in response.json()["message"]


def test_weights_that_are_no_numbers_end_no_engine(http: httpx.Client, engine: TransformersEngine) -> None:
    """Its scores are NaN; with new weights it answers as before."""
    greedy = tokens(http)
    file = next(small_checkpoint().glob("*.safetensors"))
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in safetensors.torch.load_file(file).items()}
    payload = base64.b64encode(safetensors.torch.save(broken)).decode()
    update = http.post("/update_weights_from_tensor", json={"serialized_named_tensors": [payload]})
    assert update.status_code == 200, update.text
    try:
        tokens(http, temperature=1)
        tokens(http, temperature=0)
    finally:
        engine.update_weights_from_disk(small_checkpoint())
    assert tokens(http) == greedy


@pytest.mark.parametrize("field", ["text", "rid", "other", "sampling_params"])
@pytest.mark.parametrize("text", ["\ud800", "before \udfff after", "\ude00\ud83d"])
def test_text_that_no_answer_could_repeat_is_refused(http: httpx.Client, field: str, text: str) -> None:
    """Unpaired surrogates, which JSON allows and UTF-8 does not."""
    value = {text: 1} if field == "sampling_params" else text
    response = http.post("/generate", content=json.dumps({"text": PROMPT, field: value}))
    assert response.status_code == 400
    assert "unpaired surrogate" in response.json()["message"]


def test_any_other_text_is_repeated_as_it_came(http: httpx.Client) -> None:
    for text in ("\U0001f600", "\x00", "\ufffd", "\u2028", "\\ud800"):
        for ascii_only in (True, False):
            fields = {"text": text, "rid": text, "sampling_params": {"max_new_tokens": 1}}
            body = json.dumps(fields, ensure_ascii=ascii_only).encode()
            assert http.post("/generate", content=body).json()["meta_info"]["id"] == text


@pytest.mark.parametrize("stream", [True, 1, "true", {"a": 1}])
def test_an_answer_in_parts_is_refused(http: httpx.Client, stream: object) -> None:
    """A client that reads events would wait for the first one."""
    response = http.post("/generate", json={"text": PROMPT, "stream": stream})
    assert response.status_code == 400
    assert "stream is not supported" in response.json()["message"]
    assert http.post("/generate", json={"text": PROMPT, "stream": False}).status_code == 200
