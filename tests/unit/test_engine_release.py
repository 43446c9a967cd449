"""The reference engine with released and resumed memory, on the host driver."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("MEMSAVER_DRIVER", "host")

import pytest

import memsaver_core as ms
from memsaver_server.engine import DrainTimeoutError, GeneratingEngine
from memsaver_server.reference.engine import TransformersEngine
from tests.dirty_pages import dirty_pages
from tests.programs import output_of
from tests.tensors import storage_bytes, tensors_of

TAGS = ("weights", "kv_cache", "workspace", "cuda_graph")
REQUEST = {
    "text": "a prompt that is longer than one chunk of tokens, so that it has a prefix to reuse, twice over: " * 2,
    "sampling_params": {"max_new_tokens": 40},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersEngine]:
    engine = TransformersEngine(kv_cache_bytes=32 << 20, max_len=320)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def whole_again(engine: TransformersEngine) -> Iterator[None]:
    yield
    ms.resume()
    engine.repair(TAGS, ("kv_cache", "workspace"))
    engine.open_admission()


def release(engine: TransformersEngine, tags: list[str] | None = None, mode: str = "wait") -> ms.OperationReport:
    engine.close_admission("memory is released")
    engine.drain(60, mode)  # type: ignore[arg-type]
    return ms.release(tags)


def resume(engine: TransformersEngine, tags: list[str] | None = None) -> ms.OperationReport:
    report = ms.resume(tags)
    resumed = [tag.tag for tag in report.tags if tag.resumed_bytes]
    engine.repair(resumed, [tag.tag for tag in report.tags if tag.resumed_bytes and tag.restore in ("zero", "discard")])
    if all(tag.state == "resident" for tag in ms.status().tags):
        engine.open_admission()
    return report


def addresses(engine: TransformersEngine) -> dict[str, int]:
    runner = engine.runner
    found = {name: tensor.data_ptr() for name, tensor in tensors_of(runner.model).items()}
    found.update({name: tensor.data_ptr() for name, tensor in vars(runner).items() if hasattr(tensor, "data_ptr")})
    found.update({f"inputs {shape}": tensor.data_ptr() for shape, tensor in runner._inputs.items()})
    for layer, pair in enumerate(runner._cache._layers):
        found.update({f"kv {layer} {which}": tensor.data_ptr() for which, tensor in enumerate(pair)})
    return found


def live_bytes() -> dict[str, int]:
    return {tag.tag: tag.bytes for tag in ms.status().tags}


def resident_bytes() -> int:
    return sum(tag.resident_bytes for tag in ms.status().tags)


def test_the_engine_fits_the_port(engine: TransformersEngine) -> None:
    assert isinstance(engine, GeneratingEngine)


@pytest.mark.guards("tensors were recorded under the wrong tag")
def test_every_part_lies_in_its_region(engine: TransformersEngine) -> None:
    """Weights including computed buffers, KV cache, scratch, static inputs and outputs."""
    runner, held = engine.runner, live_bytes()
    weights = storage_bytes(tensors_of(runner.model).values())
    assert any("inv_freq" in name for name in tensors_of(runner.model))
    kv = storage_bytes(tensor for pair in runner._cache._layers for tensor in pair)
    scratch = storage_bytes(tensor for pair in runner._cache._scratch for tensor in pair)
    static = storage_bytes([*runner._inputs.values(), runner._offsets, runner.logits, runner._likeliest])
    for tag, needed in [("weights", weights), ("kv_cache", kv), ("workspace", scratch), ("cuda_graph", static)]:
        assert needed <= held[tag] < needed + (4 << 20), tag


def test_tokens_and_addresses_are_the_same_after_everything_went_and_came_back(engine: TransformersEngine) -> None:
    before, where = asyncio.run(engine.generate(REQUEST)), addresses(engine)
    for _ in range(3):
        held = live_bytes()
        report = release(engine)
        assert report.released_bytes >= sum(held.values())
        assert resident_bytes() == 0
        assert resume(engine).resumed_bytes >= sum(held.values())
        assert addresses(engine) == where
        assert asyncio.run(engine.generate(REQUEST))["output_ids"] == before["output_ids"]


@pytest.mark.parametrize("tags", [["weights"], ["kv_cache"], ["workspace"], ["cuda_graph"], ["kv_cache", "cuda_graph"]])
@pytest.mark.guards("resuming everything failed on tags that were never released")
def test_tokens_are_the_same_after_a_part_went_and_came_back(engine: TransformersEngine, tags: list[str]) -> None:
    """What was never released stays as it is; a resume without tags brings the rest back."""
    before = asyncio.run(engine.generate(REQUEST))
    release(engine, tags)
    assert {tag.tag for tag in ms.status().tags if tag.released_bytes} == set(tags)
    resume(engine)
    assert asyncio.run(engine.generate(REQUEST))["output_ids"] == before["output_ids"]


@pytest.mark.guards("replaying a graph failed after its memory was discarded")
def test_static_tensors_that_lost_their_content_have_it_again(engine: TransformersEngine) -> None:
    before = asyncio.run(engine.generate(REQUEST))
    engine.close_admission("memory is released")
    engine.drain(60)
    ms.release(["cuda_graph"], restore={"cuda_graph": "zero"})
    ms.resume()
    engine.repair(["cuda_graph"], ["cuda_graph"])
    engine.open_admission()
    engine.flush_cache()
    assert asyncio.run(engine.generate(REQUEST))["output_ids"] == before["output_ids"]


def test_parts_come_back_one_by_one_with_a_flush_between(engine: TransformersEngine) -> None:
    before = asyncio.run(engine.generate(REQUEST))
    release(engine, ["weights"])
    release(engine, ["kv_cache", "cuda_graph"])
    engine.flush_cache()
    resume(engine, ["weights"])
    engine.flush_cache()
    engine.close_admission("kv_cache is released", hold=1)
    held = engine.submit(REQUEST)
    resume(engine, ["kv_cache", "cuda_graph"])
    assert held.result(600).output == before["output_ids"]


@pytest.mark.guards("the prefix cache pointed to discarded pages")
def test_a_prefix_that_went_with_the_cache_is_computed_again(engine: TransformersEngine) -> None:
    """Cached prefixes are dropped with their KV pages, and stay if the pages stay."""
    first, second = asyncio.run(engine.generate(REQUEST)), asyncio.run(engine.generate(REQUEST))
    assert second["meta_info"]["cached_tokens"] > 0
    release(engine, ["weights"])
    resume(engine)
    assert asyncio.run(engine.generate(REQUEST))["meta_info"]["cached_tokens"] > 0
    release(engine, ["kv_cache"])
    resume(engine)
    again = asyncio.run(engine.generate(REQUEST))
    assert again["meta_info"]["cached_tokens"] == 0
    assert again["output_ids"] == second["output_ids"] == first["output_ids"]


@pytest.mark.guards("undefined KV cache pages produced NaN")
def test_a_cache_that_comes_back_empty_gives_no_undefined_number(engine: TransformersEngine) -> None:
    """The KV cache returns as zeros whatever its new pages held, and the tokens are the same."""
    before = asyncio.run(engine.generate(REQUEST))["output_ids"]
    cache = [tensor for pair in engine.runner._cache._layers for tensor in pair]
    with dirty_pages(cache[0].data_ptr(), 2 * live_bytes()["kv_cache"]):
        release(engine, ["kv_cache"])
        resume(engine)
    assert all(not tensor.any() for tensor in cache)
    assert asyncio.run(engine.generate(REQUEST))["output_ids"] == before


def test_frozen_requests_go_on_after_a_release(engine: TransformersEngine) -> None:
    requests = [{"text": f"request {n}: " * n, "sampling_params": {"max_new_tokens": 50}} for n in range(1, 5)]
    before = [asyncio.run(engine.generate(request))["output_ids"] for request in requests]
    futures = [engine.submit(request) for request in requests]
    everything: list[str] | None = None
    for tags in (everything, ["weights"], ["kv_cache"], everything):
        release(engine, tags, mode="keep")
        resume(engine)
    assert [future.result(600).output for future in futures] == before


def test_aborted_requests_answer_with_what_they_have(engine: TransformersEngine) -> None:
    whole = asyncio.run(engine.generate(REQUEST))["output_ids"]
    future = engine.submit(REQUEST)
    release(engine, mode="abort")
    done = future.result(0)
    assert done.output == whole[: len(done.output)]
    assert done.meta_info()["finish_reason"]["type"] == "abort"


def test_a_drain_that_takes_too_long_changes_nothing(engine: TransformersEngine) -> None:
    before = asyncio.run(engine.generate(REQUEST))["output_ids"]
    future = engine.submit({**REQUEST, "rid": "slow"})
    engine.close_admission("memory is being released")
    with pytest.raises(DrainTimeoutError) as timeout:
        engine.drain(0.0)
    assert timeout.value.pending == ("slow",)
    assert future.result(600).output == before


def test_an_unknown_drain_mode_is_refused(engine: TransformersEngine) -> None:
    with pytest.raises(ValueError, match="choose one of wait, abort, keep"):
        engine.drain(1.0, "hurry")  # type: ignore[arg-type]


@pytest.mark.guards("health probes confused a sleeping engine with a dead one")
def test_the_engine_is_alive_while_its_memory_is_away(engine: TransformersEngine) -> None:
    release(engine)
    assert engine.is_alive()


PROGRAM = """
import asyncio, json, sys
import memsaver_core as ms
from memsaver_server.reference.engine import TransformersEngine
engine = TransformersEngine(kv_cache_bytes=32 << 20, max_len=320, **json.loads(sys.argv[2]))
request = json.loads(sys.argv[1])
tokens = [asyncio.run(engine.generate(request))["output_ids"]]
engine.close_admission("released")
engine.drain(60)
released = ms.release().released_bytes
ms.resume()
engine.repair(["kv_cache"], ["kv_cache"])
engine.open_admission()
tokens.append(asyncio.run(engine.generate(request))["output_ids"])
print(json.dumps({"enabled": ms.enabled(), "released": released, "tokens": tokens}))
if sys.argv[3] == "leave released":
    engine.close_admission("released")
    engine.drain(60)
    ms.release()
"""


def run_apart(options: dict[str, Any], end: str = "", **environment: str) -> dict[str, Any]:
    said = output_of(PROGRAM, json.dumps(REQUEST), json.dumps(options), end, **environment)
    answer: dict[str, Any] = json.loads(said.splitlines()[-1])
    return answer


def test_tokens_are_the_same_with_the_saver_disabled(engine: TransformersEngine) -> None:
    apart = run_apart({}, MEMSAVER_ENABLED="0")
    assert (apart["enabled"], apart["released"]) == (False, 0)
    assert apart["tokens"] == [asyncio.run(engine.generate(REQUEST))["output_ids"]] * 2


@pytest.mark.parametrize("end", ["", "leave released"])
@pytest.mark.guards("the process aborted at exit")
def test_tokens_are_the_same_without_graphs_and_the_process_ends_cleanly(engine: TransformersEngine, end: str) -> None:
    """An engine that was never closed does not keep the interpreter from exiting."""
    apart = run_apart({"enforce_eager": True}, end, TESTS_END_WHOLE="1")
    assert apart["tokens"] == [asyncio.run(engine.generate(REQUEST))["output_ids"]] * 2


def test_a_closed_engine_gives_its_memory_up(engine: TransformersEngine) -> None:
    held = live_bytes()
    other = TransformersEngine(kv_cache_bytes=32 << 20, max_len=320)
    assert live_bytes()["kv_cache"] > held["kv_cache"]
    other.close()
    assert not other.is_alive()
    assert live_bytes() == held
    with pytest.raises(Exception, match="shutting down"):
        asyncio.run(other.generate(REQUEST))
