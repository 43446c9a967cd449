"""The reference engine's arithmetic, compared with transformers' generation for models of several families."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("MEMSAVER_DRIVER", "host")

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from memsaver_server.reference import weights
from memsaver_server.reference.engine import TransformersEngine

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "mistral, sliding": MistralConfig(**SHAPE, sliding_window=40),
    "qwen2, some layers sliding": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=40, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "phi3": Phi3Config(**SHAPE),
    "gemma2, capped scores": Gemma2Config(**SHAPE, head_dim=16, sliding_window=40, query_pre_attn_scalar=16),
}

Start = Callable[..., TransformersEngine]


@pytest.fixture
def start() -> Iterator[Start]:
    engines: list[TransformersEngine] = []

    def begin(*args: Any, **options: Any) -> TransformersEngine:
        engines.append(TransformersEngine(*args, **options))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def save_checkpoint(config: Any, folder: Path, seed: int = 3) -> Any:
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights.fill_random(model, seed)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(family: str, tmp_path: Path, start: Start) -> None:
    config = FAMILIES[family]
    model = save_checkpoint(config, tmp_path)
    engine = start(tmp_path, max_len=256)
    prompts = [[3], [7, 8, 9], list(range(20, 120)), list(range(1, 129))]  # below, at and over a chunk; over a window
    futures = [engine.submit({"input_ids": ids, "sampling_params": {"max_new_tokens": 24}}) for ids in prompts]
    for ids, future in zip(prompts, futures, strict=True):
        whole = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, use_cache=True)
        assert future.result(600).output == whole[0, len(ids) :].tolist()


def test_a_model_without_the_attention_interface_is_refused(tmp_path: Path, start: Start) -> None:
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4)
    save_checkpoint(config, tmp_path)
    with pytest.raises(ValueError, match="MambaForCausalLM cannot be served"):
        start(tmp_path)


def test_gpt2_with_its_own_position_table(tmp_path: Path, start: Start) -> None:
    config = GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2)
    model = save_checkpoint(config, tmp_path)
    engine = start(tmp_path)
    assert engine.describe()["max_len"] == 256
    answer = asyncio.run(engine.generate({"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8}}))
    whole = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)[0, 3:].tolist()
    assert answer["output_ids"] == whole[: len(answer["output_ids"])]


def test_the_checkpoint_says_where_an_answer_ends(tmp_path: Path, start: Start) -> None:
    model = save_checkpoint(LlamaConfig(**SHAPE), tmp_path)
    free = model.generate(torch.tensor([[4, 5]]), max_new_tokens=9, do_sample=False)[0, 2:].tolist()
    config = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [299, free[4]]}))
    engine = start(tmp_path)
    answer = asyncio.run(engine.generate({"input_ids": [4, 5], "sampling_params": {"max_new_tokens": 9}}))
    assert answer["output_ids"] == free[: free.index(free[4]) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": free[4]}
    ignoring = {"max_new_tokens": 9, "ignore_eos": True}
    assert asyncio.run(engine.generate({"input_ids": [4, 5], "sampling_params": ignoring}))["output_ids"] == free


def test_a_shape_is_served_without_a_checkpoint(tmp_path: Path, start: Start) -> None:
    file = tmp_path / "shape.json"
    file.write_text(json.dumps({**Qwen2Config(**SHAPE).to_dict(), "dtype": "bfloat16"}))
    request = {"text": "hello", "sampling_params": {"max_new_tokens": 30}}
    first = asyncio.run(start(random_weights=file).generate(request))
    assert first["meta_info"]["prompt_tokens"] == 5
    assert len(set(first["output_ids"])) > 5
    assert asyncio.run(start(random_weights=file).generate(request))["output_ids"] == first["output_ids"]
    assert asyncio.run(start(random_weights=file, seed=1).generate(request))["output_ids"] != first["output_ids"]


def test_random_weights_differ_from_a_checkpoint_of_the_same_shape_in_their_values_alone(
    tmp_path: Path, start: Start
) -> None:
    config = Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)
    model = save_checkpoint(config, tmp_path, seed=11)
    engine = start(random_weights=tmp_path / "config.json", seed=11, dtype=torch.float32)
    answer = asyncio.run(engine.generate({"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 12}}))
    whole = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False)
    assert answer["output_ids"] == whole[0, 3:].tolist()


def test_the_configuration_that_ships_is_qwen2_1_5b() -> None:
    config = AutoConfig.from_pretrained(Path(__file__).parents[1] / "data" / "qwen2-1.5b" / "config.json")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_543_714_304
    assert config.dtype == torch.bfloat16


def test_text_needs_a_tokenizer(tmp_path: Path, start: Start) -> None:
    save_checkpoint(LlamaConfig(**SHAPE), tmp_path)
    engine = start(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer: send input_ids"):
        engine.submit({"text": "hello"})
    assert asyncio.run(engine.generate({"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}))["text"] == ""


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ({"text": ["a", "b"]}, "one request for each prompt"),
        ({"text": ""}, "one or more ids"),
        ({"input_ids": []}, "one or more ids"),
        ({"input_ids": [[1]]}, "one or more ids"),
        ({"input_ids": [True]}, "one or more ids"),
        ({"input_ids": [256]}, "from 0 to 255"),
        ({"input_ids": [-1]}, "from 0 to 255"),
        ({"input_ids": [1] * 512}, "must fit 512"),
    ],
)
def test_requests_that_cannot_be_served_say_why(small: TransformersEngine, request_: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small.submit(request_)


@pytest.fixture(scope="module")
def small() -> Iterator[TransformersEngine]:
    engine = TransformersEngine()
    yield engine
    engine.close()


def test_text_goes_in_and_comes_out(small: TransformersEngine) -> None:
    answer = asyncio.run(
        small.generate({"text": "h\u00e9llo", "rid": "mine", "sampling_params": {"max_new_tokens": 6}})
    )
    assert answer["text"] == bytes(answer["output_ids"]).decode()
    info = answer["meta_info"]
    assert (info["id"], info["prompt_tokens"], info["completion_tokens"]) == ("mine", 6, 6)
    assert info["finish_reason"] == {"type": "length", "length": 6}


def test_draws_repeat_with_their_seed(small: TransformersEngine) -> None:
    request = {"text": "hello", "sampling_params": {"max_new_tokens": 16, "temperature": 1.0, "seed": 5}}
    assert asyncio.run(small.generate(request))["output_ids"] == asyncio.run(small.generate(request))["output_ids"]


def test_a_batch_answers_as_its_requests_alone(small: TransformersEngine) -> None:
    requests = [{"text": "many at once " * n, "sampling_params": {"max_new_tokens": 8 + n}} for n in range(1, 16)]
    alone = [asyncio.run(small.generate(request))["output_ids"] for request in requests]
    small.flush_cache()
    futures = [small.submit(request) for request in requests]
    assert [future.result(600).output for future in futures] == alone


def test_nothing_of_torch_is_left_changed(tmp_path: Path, start: Start) -> None:
    def settings() -> list[Any]:
        return [
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.benchmark,
            torch.get_rng_state().tolist(),
        ]

    before = settings()
    Qwen2Config(**SHAPE).save_pretrained(tmp_path)
    for options in ({}, {"random_weights": tmp_path / "config.json"}):
        engine = start(**options)
        asyncio.run(engine.generate({"text": "a", "sampling_params": {"max_new_tokens": 3, "temperature": 1.0}}))
        engine.close()
    assert settings() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "/nowhere"}, "/nowhere is not a checkpoint folder"),
        ({"random_weights": "/nowhere.json"}, "/nowhere.json does not exist"),
        ({"model": ".", "random_weights": "config.json"}, "not both"),
        ({"batch_sizes": ()}, "batch_sizes must name positive numbers"),
        ({"tensor_parallel": 0}, "0 ranks cannot share .*; tensor_parallel can be 1, 2"),
        ({"kv_cache_bytes": 1}, "kv_cache_bytes = 1 is too small: .*; give .* bytes, or a smaller max_len"),
        ({"max_len": 10}, "max_len must be at least 64"),
    ],
)
def test_options_that_cannot_be_used_say_what_can(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformersEngine(**options)


def test_slots_follow_from_the_bytes_of_the_cache(start: Start) -> None:
    per_slot = 2 * 2 * 2 * 64 * 4 * 128  # layers, keys and values, heads, dim, float32, tokens
    engine = start(kv_cache_bytes=5 * per_slot, max_len=128)
    assert engine.describe()["slots"] == 4  # one is for rows that fill a batch up
    assert engine.describe()["max_len"] == 128
