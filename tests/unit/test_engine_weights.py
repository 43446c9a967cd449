"""Weight updates of a serving engine."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("MEMSAVER_DRIVER", "host")

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import memsaver_core as ms
from memsaver_server import attach
from memsaver_server.client import Client, InvalidRequestError
from memsaver_server.reference import weights
from memsaver_server.reference.builtin_model import small_checkpoint
from memsaver_server.reference.engine import TransformersEngine
from tests.tensors import tensors_of

REQUEST = {
    "text": "a prompt that is longer than one chunk, so that a prefix of it is kept; ",
    "sampling_params": {"max_new_tokens": 24},
}
Trained = tuple[Path, dict[str, torch.Tensor], list[int]]


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersEngine]:
    engine = TransformersEngine(kv_cache_bytes=32 << 20, max_len=320)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def original() -> Path:
    return small_checkpoint()


@pytest.fixture(scope="module")
def trained(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Another checkpoint of the same shape: its folder, its tensors, and its answer to REQUEST."""
    folder = tmp_path_factory.mktemp("trained")
    model: Any = AutoModelForCausalLM.from_pretrained(original)
    weights.fill_random(model, 99)
    model.save_pretrained(folder)
    prompt = torch.tensor([list(str(REQUEST["text"]).encode())])
    answer = model.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :].tolist()
    return folder, {name: tensor.clone() for name, tensor in model.state_dict().items()}, answer


@pytest.fixture(autouse=True)
def as_it_was(engine: TransformersEngine, original: Path) -> Iterator[None]:
    yield
    ms.resume()
    engine.open_admission()
    engine.update_weights_from_disk(original)


def payload(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [base64.b64encode(safetensors.torch.save(tensors)).decode()]


def answer_of(engine: TransformersEngine) -> list[int]:
    tokens: list[int] = asyncio.run(engine.generate(REQUEST))["output_ids"]
    return tokens


@pytest.mark.guards("the prefix cache pointed to discarded pages")
def test_from_disk(engine: TransformersEngine, trained: Trained, original: Path) -> None:
    """Prefixes cached with the old weights are dropped."""
    before = answer_of(engine)
    assert engine.update_weights_from_disk(trained[0]) == len(trained[1])
    assert answer_of(engine) == trained[2] != before
    engine.update_weights_from_disk(original)
    assert answer_of(engine) == before


def test_from_tensors_in_buckets(engine: TransformersEngine, trained: Trained) -> None:
    tensors = list(trained[1].items())
    for start in range(0, len(tensors), 20):
        bucket = dict(tensors[start : start + 20])
        assert engine.update_weights_from_tensor(payload(bucket), flush_cache=False) == len(bucket)
    engine.flush_cache()
    assert answer_of(engine) == trained[2]


def test_weights_given_up_are_whole_after_an_update(engine: TransformersEngine, trained: Trained) -> None:
    """Values computed at load (rotary frequencies) are in no update; the repair restores them. An update in parts is
    complete with its last part."""
    engine.close_admission("released")
    engine.drain(60)
    with torch.no_grad():
        for tensor in tensors_of(engine.runner.model).values():
            tensor.fill_(float("nan"))  # as undefined pages may hold
    assert engine.repair(["weights", "cuda_graph"], ["weights", "cuda_graph"]) == ["cuda_graph"]
    tensors = dict(trained[1])
    last = dict([tensors.popitem()])
    engine.update_weights_from_tensor(payload(tensors))
    assert engine.unwritten_weights == frozenset(last)
    engine.update_weights_from_tensor(payload(last))
    assert not engine.unwritten_weights
    engine.open_admission()
    assert answer_of(engine) == trained[2]


@pytest.mark.guards("undefined KV cache pages produced NaN")
def test_broken_weights_leave_no_trace_in_the_cache(engine: TransformersEngine, original: Path) -> None:
    """NaN computed once does not reach later requests through reused slots."""
    before = answer_of(engine)
    broken = {name: torch.full_like(t, float("nan")) for name, t in engine.runner.model.named_parameters()}
    engine.update_weights_from_tensor(payload(broken))
    for _ in range(engine.describe()["slots"] + 1):
        asyncio.run(engine.generate({"text": "x" * 200, "sampling_params": {"max_new_tokens": 4}}))
    engine.update_weights_from_disk(original)
    assert answer_of(engine) == before


def test_requests_in_flight_go_on_with_the_new_weights(engine: TransformersEngine, trained: Trained) -> None:
    future = engine.submit({"text": "go on", "sampling_params": {"max_new_tokens": 200}})
    engine.update_weights_from_disk(trained[0])
    assert len(future.result(600).output) == 200


def test_requests_in_flight_can_be_ended_by_an_update(engine: TransformersEngine, trained: Trained) -> None:
    future = engine.submit({"text": "go on", "sampling_params": {"max_new_tokens": 200}})
    engine.update_weights_from_tensor(payload(trained[1]), abort_all_requests=True)
    assert future.result(600).meta_info()["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("payloads", "load_format", "message"),
    [
        ([], None, "a list of one payload"),
        (["a", "b"], None, "a list of one payload"),
        ("abc", None, "a list of one payload"),
        (["not base64!"], None, "not base64"),
        ([base64.b64encode(b"nonsense").decode()], None, "not a safetensors image"),
        ([base64.b64encode(pickle.dumps([("a", 1)])).decode()], None, "is a pickle"),
        (["YQ=="], "flattened_bucket", "load_format 'flattened_bucket' is not supported"),
        (payload({"lm_head.nothing": torch.zeros(2)}), None, "the model has no lm_head.nothing; nothing was written"),
        (payload({"lm_head.weight": torch.zeros(256, 256, dtype=torch.int8)}), None, "came as int8; send float16"),
        (payload({"lm_head.weight": torch.zeros(2, 3)}), None, r"has shape \[256, 256\], not \[2, 3\]; nothing was"),
    ],
)
def test_an_update_that_does_not_fit_writes_nothing(
    engine: TransformersEngine, payloads: Any, load_format: str | None, message: str
) -> None:
    before = answer_of(engine)
    with pytest.raises(ValueError, match=message):
        engine.update_weights_from_tensor(payloads, load_format=load_format)
    assert answer_of(engine) == before


def test_half_of_a_bad_update_is_not_written_either(engine: TransformersEngine, trained: Trained) -> None:
    before = answer_of(engine)
    with pytest.raises(ValueError, match="nothing was written"):
        engine.update_weights_from_tensor(payload({**trained[1], "zzz": torch.zeros(1)}))
    assert answer_of(engine) == before


def test_a_folder_of_another_model_is_refused(engine: TransformersEngine, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a checkpoint folder"):
        engine.update_weights_from_disk(tmp_path)


def test_a_damaged_folder_is_refused(engine: TransformersEngine, trained: Trained, tmp_path: Path) -> None:
    before = answer_of(engine)
    shutil.copytree(trained[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="is damaged"):
        engine.update_weights_from_disk(tmp_path)
    assert answer_of(engine) == before


def test_a_folder_of_another_shape_is_refused(engine: TransformersEngine, tmp_path: Path) -> None:
    before = answer_of(engine)
    config = AutoConfig.from_pretrained(small_checkpoint())
    config.vocab_size = 300
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="nothing was written"):
        engine.update_weights_from_disk(tmp_path)
    assert answer_of(engine) == before


@pytest.mark.guards("a request during sleep hung or used released memory")
def test_released_weights_are_not_written(engine: TransformersEngine, trained: Trained) -> None:
    """The update is refused and changes nothing."""
    engine.close_admission("released")
    engine.drain(60)
    ms.release(["weights"])
    with pytest.raises(RuntimeError, match="the weights are released; resume them"):
        engine.update_weights_from_tensor(payload(trained[1]))
    ms.resume(["weights"])
    engine.update_weights_from_tensor(payload(trained[1]))
    engine.open_admission()
    assert answer_of(engine) == trained[2]


def test_a_service_writes_released_weights(engine: TransformersEngine, trained: Trained, tmp_path: Path) -> None:
    """What cannot be loaded leaves the version before."""
    with attach(engine) as server, Client(server.url) as client:
        client.release()
        client.update_weights_from_disk(trained[0], version="step-1")
        with pytest.raises(InvalidRequestError, match="not a checkpoint folder"):
            client.update_weights_from_disk(tmp_path, version="step-2")
        client.resume(weights_version="step-1")
        assert answer_of(engine) == trained[2]


def test_new_weights_survive_the_next_release(engine: TransformersEngine, trained: Trained) -> None:
    engine.close_admission("released")
    engine.drain(60)
    ms.release()
    ms.resume()
    engine.repair(["kv_cache"], ["kv_cache"])
    engine.update_weights_from_tensor(payload(trained[1]))
    ms.release()
    ms.resume()
    engine.repair(["kv_cache"], ["kv_cache"])
    engine.open_admission()
    assert answer_of(engine) == trained[2]
