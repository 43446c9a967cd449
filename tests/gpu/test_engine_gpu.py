"""The reference engine on a CUDA device: graphs replay after a release and a resume."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import memsaver_core as ms
from memsaver_server import attach
from memsaver_server.client import Client
from memsaver_server.reference.engine import TransformersEngine
from tests.tensors import storage_bytes, tensors_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or ms.driver_name() != "cuda", reason="needs an NVIDIA GPU and the CUDA driver"
    ),
]

#: MEMSAVER_TEST_SHAPE names another, for tools under which this one would take hours.
QWEN2 = Path(os.environ.get("MEMSAVER_TEST_SHAPE", Path(__file__).parents[1] / "data" / "qwen2-1.5b" / "config.json"))
VOCABULARY = json.loads(QWEN2.read_text())["vocab_size"]
SIZES = (1, 2, 4, 8, 16, 32, 64)
GIB = 1 << 30

Start = Callable[..., TransformersEngine]


@pytest.fixture(scope="module")
def held_by_others() -> set[int]:
    """Addresses of what other tests of this process keep in torch's own pool."""
    gc.collect()
    torch.cuda.empty_cache()
    return set(own_pool())


@pytest.fixture
def start(held_by_others: set[int]) -> Iterator[Start]:
    engines: list[TransformersEngine] = []

    def begin(**options: Any) -> TransformersEngine:
        engines.append(TransformersEngine(**options))
        return engines[-1]

    yield begin
    ms.resume()
    for engine in engines:
        engine.close()
    assert {tag.tag for tag in ms.status().tags if tag.bytes} <= {"workspace"}  # of which cuBLAS keeps 34 MiB


@pytest.fixture
def qwen(start: Start) -> TransformersEngine:
    return start(random_weights=QWEN2, kv_cache_bytes=5 * GIB)


def release(engine: TransformersEngine, tags: list[str] | None = None, mode: str = "wait", **options: Any) -> Any:
    engine.close_admission("memory is released")
    engine.drain(60, mode)  # type: ignore[arg-type]
    return ms.release(tags, **options)


def resume(engine: TransformersEngine, lost: Sequence[str] = ("kv_cache", "workspace")) -> Any:
    report = ms.resume()
    engine.repair([tag.tag for tag in report.tags if tag.resumed_bytes], lost)
    engine.open_admission()
    return report


def request(prompt: int, tokens: int = 48) -> dict[str, Any]:
    """A prompt of its own length and content, so that no two in a batch are alike."""
    ids = [(7919 * (prompt + 1) * (place + 3)) % VOCABULARY for place in range(3 + 11 * prompt % 600)]
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}


def alone(engine: TransformersEngine, prompts: Sequence[int]) -> list[list[int]]:
    return [asyncio.run(engine.generate(request(prompt)))["output_ids"] for prompt in prompts]


def together(engine: TransformersEngine, prompts: int) -> list[list[int]]:
    """The answers of a batch that is always composed the same way, because other batch sizes round differently."""
    engine.flush_cache()
    engine.close_admission("gathering a batch", hold=prompts)
    engine.drain(60)
    futures = [engine.submit(request(prompt)) for prompt in range(prompts)]
    engine.open_admission()
    return [future.result(120).output for future in futures]


def used_bytes() -> int:
    return ms.read_devices()[torch.cuda.current_device()].used_bytes


def own_pool() -> dict[int, int]:
    """Segments of torch's own pool, which a release frees only by emptying its cache: address and bytes."""
    segments = [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) == (0, 0)]
    return {each["address"]: each["total_size"] for each in segments}


def addresses(engine: TransformersEngine) -> list[int]:
    runner = engine.runner
    layers = [tensor for pair in runner._cache._layers for tensor in pair]
    static = [tensor for tensor in vars(runner).values() if isinstance(tensor, torch.Tensor)]
    static += runner._inputs.values()
    return [tensor.data_ptr() for tensor in (*layers, *static, *tensors_of(runner.model).values())]


@pytest.mark.guards("replaying a graph failed after its memory was discarded")
def test_graphs_replay_with_the_same_tokens_after_release_and_resume(qwen: TransformersEngine) -> None:
    """The pool comes back with its content; nothing is captured again, and no address changes."""
    assert qwen.describe()["graph_batch_sizes"] == list(SIZES)
    before, where, graphs = alone(qwen, range(4)), addresses(qwen), dict(qwen.runner.graphs)
    assert all(len(set(answer)) > 10 for answer in before)
    for _ in range(3):
        release(qwen)
        resume(qwen)
        assert qwen.runner.graphs == graphs
        assert addresses(qwen) == where
        assert alone(qwen, range(4)) == before


@pytest.mark.guards("replaying a graph failed after its memory was discarded")
def test_every_batch_size_answers_the_same_after_release_and_resume(qwen: TransformersEngine) -> None:
    """For each captured graph, padded rows included."""
    sizes = (2, 3, 8, 13, 32, 64)
    before = [together(qwen, size) for size in sizes]
    assert [together(qwen, size) for size in sizes] == before
    release(qwen)
    resume(qwen)
    assert [together(qwen, size) for size in sizes] == before


@pytest.mark.guards("releasing a graph freed nothing", "memory was reported free before it was free")
def test_every_byte_goes_and_the_device_sees_it(qwen: TransformersEngine, held_by_others: set[int]) -> None:
    """Including the graphs' pool; when the release returns, the device's count matches the report."""
    alone(qwen, [0])
    held = {tag.tag: tag.bytes for tag in ms.status().tags}
    assert held["cuda_graph"] > storage_bytes([qwen.runner.logits])
    before = used_bytes()
    report = release(qwen)
    assert report.released_bytes >= sum(held.values())
    assert all(tag.resident_bytes == 0 and tag.retained_bytes == 0 for tag in ms.status().tags)
    assert before - used_bytes() >= report.released_bytes
    assert own_pool().keys() <= held_by_others
    resume(qwen)


@pytest.mark.guards("releasing a graph freed nothing")
def test_the_graph_pool_alone_goes(qwen: TransformersEngine) -> None:
    """Its bytes are freed, as measured, and nothing else is."""
    answers = alone(qwen, [1])
    held = next(tag.bytes for tag in ms.status().tags if tag.tag == "cuda_graph")
    before = used_bytes()
    release(qwen, ["cuda_graph"])
    assert before - used_bytes() >= held
    resume(qwen, lost=())
    assert alone(qwen, [1]) == answers


@pytest.mark.guards("replaying a graph failed after its memory was discarded")
def test_graphs_whose_pool_was_given_up_are_captured_anew(qwen: TransformersEngine) -> None:
    """No graph that relied on discarded content is replayed."""
    answers, graphs = alone(qwen, range(3)), list(qwen.runner.graphs.values())
    release(qwen, ["cuda_graph"], restore={"cuda_graph": "discard"})
    resume(qwen, lost=["cuda_graph"])
    assert qwen.describe()["graph_batch_sizes"] == list(SIZES)
    assert not any(new is old for new in qwen.runner.graphs.values() for old in graphs)
    assert alone(qwen, range(3)) == answers


def test_requests_frozen_over_a_released_cache_are_computed_again(qwen: TransformersEngine) -> None:
    futures = [qwen.submit(request(prompt, tokens=400)) for prompt in range(6)]
    for tags in (["weights"], ["kv_cache"], None):
        release(qwen, tags, mode="keep")
        resume(qwen, lost=["kv_cache"] if tags != ["weights"] else [])
    assert all(len(future.result(120).output) == 400 for future in futures)


@pytest.mark.guards("tensors were recorded under the wrong tag")
def test_weights_loaded_from_a_checkpoint_lie_in_their_region(start: Start, held_by_others: set[int]) -> None:
    """transformers loads in threads of its own, to which the region does not apply; nothing may stay outside."""
    engine = start()
    needed = storage_bytes(tensors_of(engine.runner.model).values())
    assert all(tensor.is_cuda for tensor in tensors_of(engine.runner.model).values())
    assert next(tag.bytes for tag in ms.status().tags if tag.tag == "weights") >= needed
    torch.cuda.empty_cache()
    assert own_pool().keys() <= held_by_others


def test_graphs_change_no_token(start: Start) -> None:
    requests = [{"text": f"question {n}", "sampling_params": {"max_new_tokens": 40}} for n in range(3)]
    graphs = start()
    replayed = [asyncio.run(graphs.generate(asked))["output_ids"] for asked in requests]
    graphs.close()
    eager = start(enforce_eager=True)
    assert eager.describe()["graph_batch_sizes"] == []
    assert [asyncio.run(eager.generate(asked))["output_ids"] for asked in requests] == replayed


def test_drawn_tokens_leave_nothing_outside_the_regions(start: Start, held_by_others: set[int]) -> None:
    engine = start()
    asked = {"text": "draw", "sampling_params": {"max_new_tokens": 40, "temperature": 1.0, "seed": 3, "top_p": 0.9}}
    drawn = asyncio.run(engine.generate(asked))["output_ids"]
    release(engine)
    assert own_pool().keys() <= held_by_others
    resume(engine)
    assert asyncio.run(engine.generate(asked))["output_ids"] == drawn


def test_new_weights_reach_the_graphs(start: Start, tmp_path: Path) -> None:
    first = start(random_weights=QWEN2, kv_cache_bytes=GIB)
    answers = alone(first, [2])
    first.runner.model.save_pretrained(tmp_path)
    first.close()
    second = start(random_weights=QWEN2, kv_cache_bytes=GIB, seed=5)
    assert alone(second, [2]) != answers
    release(second, ["weights"], restore={"weights": "discard"})
    resume(second, lost=["weights"])
    second.update_weights_from_disk(tmp_path)
    assert alone(second, [2]) == answers


@pytest.mark.parametrize("order", [("cuda_graph", "kv_cache", "weights"), ("weights", "cuda_graph", "kv_cache")])
@pytest.mark.guards("a request during sleep hung or used released memory")
def test_a_partly_resumed_engine_replays_nothing(start: Start, order: tuple[str, ...]) -> None:
    """Requests are refused until everything that graphs use is back; then the same graphs give the same answers."""
    engine = start(random_weights=QWEN2, kv_cache_bytes=GIB, batch_sizes=(1, 4))
    graphs = dict(engine.runner.graphs)
    with attach(engine) as server, httpx.Client(base_url=server.url, timeout=120) as http:

        def generate() -> httpx.Response:
            return http.post("/generate", json=request(1, 24))

        before = generate().raise_for_status().json()["output_ids"]
        assert len(before) == 24
        http.post("/release_memory_occupation").raise_for_status()
        for tag in order:
            refused = generate()
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            http.post("/resume_memory_occupation", json={"tags": [tag]}).raise_for_status()
        assert generate().raise_for_status().json()["output_ids"] == before
        assert engine.runner.graphs == graphs


def test_the_cache_shrinks_and_grows_while_requests_run(start: Start) -> None:
    """Of 64 pages in use 32 go, once their requests have ended: a kernel that uses one that is gone fails."""
    engine = start(random_weights=QWEN2, kv_cache_bytes=5 * GIB, batch_sizes=(64,))
    with attach(engine) as server, Client(server.url) as client, ThreadPoolExecutor(64) as pool:

        def generate(prompt: int) -> list[int]:
            ids = request(prompt)["input_ids"]
            return list(client.generate(input_ids=ids, max_new_tokens=64, ignore_eos=True)["output_ids"])

        whole = client.kv_cache()
        before = list(pool.map(generate, range(64)))
        running = [pool.submit(generate, prompt) for _ in range(6) for prompt in range(64)]
        for _ in range(3):
            small = client.resize_kv_cache(tokens=32 * whole.page_tokens, timeout_s=60)
            assert small.kv_cache.bytes == 32 * whole.page_bytes
            assert client.resize_kv_cache(fraction=1.0).kv_cache.bytes == whole.bytes
        assert [each.result() for each in running] == 6 * before
