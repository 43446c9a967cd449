"""Real vLLM with the plugin: its API server with memsaver's routes, and an ``LLM`` with the service beside it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from memsaver_core.ranks.protocol import ANSWERS, REQUESTS, Introduce
from tests.gpu.vllm_server import (
    ENVIRONMENT,
    MIB,
    QUICK,
    ask_workers,
    complete,
    completions,
    fall_asleep,
    held,
    metric,
    missing,
    post,
    prompt,
    serving,
    used,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "-")]


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with serving(model, log, "--compilation-config", json.dumps(QUICK)) as (client, _):
        yield client


@pytest.mark.guards("releasing a graph freed nothing", "tensors were recorded under the wrong tag")
def test_all_that_vllm_holds_for_long_is_under_a_tag(served: httpx.Client) -> None:
    """Graphs, buffers and scratch too; the cache's tag holds only the cache."""
    tags = held(served)
    assert {"weights", "kv_cache", "cuda_graph", "runtime", "workspace"} <= set(tags)
    assert all(tag["bytes"] > 0 for tag in tags.values())
    assert {name: tags[name]["restore"] for name in ("weights", "cuda_graph", "runtime")} == {
        "weights": "host",
        "cuda_graph": "host",
        "runtime": "host",
    }
    assert tags["kv_cache"]["allocations"] == 4  # one per layer, and no others


@pytest.mark.guards(
    "memory was reported free before it was free",
    "undefined KV cache pages produced NaN",
    "replaying a graph failed after its memory was discarded",
)
def test_tokens_are_equal_after_sleep_and_wake_up(served: httpx.Client) -> None:
    """The answer comes when the device has the memory back, and later tokens are the same."""
    before = completions(served)
    assert all(len(set(answer)) > 5 for answer in before)
    for _ in range(3):
        fall_asleep(served, level=1)
        assert served.get("/is_sleeping").json() == {"is_sleeping": True}
        post(served, "/wake_up")
        assert served.get("/is_sleeping").json() == {"is_sleeping": False}
        assert completions(served) == before


@pytest.mark.guards("a request during sleep hung or used released memory")
def test_a_sleeping_engine_refuses_work(served: httpx.Client) -> None:
    """The request is refused with the reason, and never reaches the device."""
    post(served, "/release_memory_occupation")
    body = {"model": "m", "prompt": prompt(0), "max_tokens": 4}
    refused = served.post("/v1/completions", json=body)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert served.get("/health").status_code == 200
    assert served.get("/readyz").status_code == 503
    post(served, "/resume_memory_occupation")
    assert served.post("/v1/completions", json=body).status_code == 200


@pytest.mark.guards(
    "a second release or resume failed",
    "releasing everything failed after one tag had been released",
    "resuming everything failed on tags that were never released",
)
def test_tags_go_and_come_in_any_order(served: httpx.Client) -> None:
    """Each call may be repeated; admission opens with the last of them."""
    before = completions(served)
    post(served, "/release_memory_occupation", tags=["kv_cache"])
    assert held(served)["weights"]["released_bytes"] == 0
    post(served, "/release_memory_occupation", tags=["kv_cache"])
    post(served, "/release_memory_occupation")
    post(served, "/resume_memory_occupation", tags=["kv_cache"])
    assert held(served)["weights"]["resident_bytes"] == 0
    assert served.post("/v1/completions", json={"model": "m", "prompt": prompt(0)}).status_code == 503
    post(served, "/resume_memory_occupation", tags=["weights"])
    post(served, "/resume_memory_occupation")
    assert completions(served) == before


@pytest.mark.parametrize("first", ["weights", "kv_cache"])
@pytest.mark.guards("the prefix cache pointed to discarded pages")
def test_weights_that_were_given_up_can_be_loaded_again(served: httpx.Client, first: str) -> None:
    """Level 2, in either order of resuming; buffers that are in no checkpoint return with the weights."""
    before = completions(served)
    post(served, "/sleep", level=2)
    second = "kv_cache" if first == "weights" else "weights"
    post(served, "/wake_up", tags=[first])
    if first == "weights":
        ask_workers(served, "reload_weights")
    post(served, "/wake_up", tags=[second])
    if first == "kv_cache":
        ask_workers(served, "reload_weights")
    assert completions(served) == before


def test_the_worker_hibernates(served: httpx.Client) -> None:
    """A process group of one shares no memory, so its process can be checkpointed."""
    before = completions(served)
    loaded = used()
    released = post(served, "/sleep", level=1)["released_bytes"]
    asleep = used()
    answer = post(served, "/sleep", level=3)
    assert answer["phases"][-1]["name"] == "hibernate"
    assert asleep - used() > 300 * MIB, (loaded, released, asleep, used())  # the context
    assert served.get("/readyz").status_code == 503
    assert served.get("/livez").status_code == 200
    post(served, "/sleep", level=1)
    post(served, "/wake_up")
    assert completions(served) == before


def test_a_request_that_was_frozen_goes_on(served: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, served, 1, 1500)
        wait_until(running.running)
        time.sleep(0.3)  # into the 1,500 tokens; wherever it is, it must complete
        post(served, "/release_memory_occupation", mode="keep")
        assert not running.done()
        post(served, "/resume_memory_occupation")
        assert len(running.result(120)) == 1500


def test_a_drain_that_takes_too_long_changes_nothing(served: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, served, 1, 1500)
        time.sleep(0.3)
        late = served.post("/release_memory_occupation", json={"timeout_s": 0.05})
        assert late.status_code == 504, late.text
        assert all(tag["released_bytes"] == 0 for tag in held(served).values())
        assert len(running.result(120)) == 1500
    assert len(complete(served, 0)) == 24


def test_requests_wait_while_generation_is_paused(served: httpx.Client) -> None:
    post(served, "/pause_generation", mode="keep")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, served, 0)
        time.sleep(0.3)
        assert not waiting.done()
        post(served, "/continue_generation")
        assert len(waiting.result(60)) == 24


@pytest.fixture(scope="module")
def elastic(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server whose cache comes in pieces, and is so small that requests fill it: 32 MiB a layer, 32,768 tokens."""
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    arguments = ("--compilation-config", json.dumps(QUICK), "--kv-cache-memory-bytes", str(128 * MIB))
    with serving(model, log, *arguments, MEMSAVER_KV_CACHE_PIECE="2MiB") as (client, _):
        yield client


def cache(client: httpx.Client) -> dict[str, Any]:
    answer: dict[str, Any] = client.get("/kv_cache").raise_for_status().json()
    return answer


@contextmanager
def running(client: httpx.Client, requests: int, tokens: int) -> Iterator[list[Future[list[int]]]]:
    """So many requests at once, all of which have begun."""
    with ThreadPoolExecutor(requests) as pool:
        begun = [pool.submit(complete, client, number % 3, tokens) for number in range(requests)]
        wait_until(lambda: cache(client)["used_bytes"] >= requests * cache(client)["page_bytes"], 60)
        yield begun


def test_half_of_the_cache_goes_and_comes_back(elastic: httpx.Client) -> None:
    """Tokens are the same at each size; what is written to the new memory is used."""
    before, whole = completions(elastic), cache(elastic)
    assert whole["bytes"] == whole["full_bytes"]
    assert whole["full_bytes"] > 120 * MIB
    assert whole["tokens"] == pytest.approx(32_768, rel=0.1)
    for _ in range(3):
        loaded = used()
        half = post(elastic, "/kv_cache", fraction=0.5)["kv_cache"]
        assert half["bytes"] == pytest.approx(whole["bytes"] / 2, rel=0.01)
        assert loaded - used() >= whole["bytes"] / 2 - 16 * MIB  # by the device's own count
        tag = held(elastic)["kv_cache"]
        assert tag["state"] == "resident"
        assert tag["shrunk_bytes"] >= whole["bytes"] / 2 - 16 * MIB
        assert completions(elastic) == before
        post(elastic, "/kv_cache", fraction=1)
        assert abs(loaded - used()) <= 16 * MIB
        assert completions(elastic) == before


def test_prefixes_that_stay_are_found_and_others_are_computed_again(elastic: httpx.Client) -> None:
    before, same = completions(elastic), 0
    for fraction in (0.5, 0.25, 1.0):
        post(elastic, "/kv_cache", fraction=fraction)
        for number in range(3):
            elastic.post("/flush_cache").raise_for_status()
            assert complete(elastic, number) == before[number]
            same += complete(elastic, number)[0] == before[number][0]  # from the prefix cache
    assert same >= 7  # a prompt of another length in the batch may round otherwise


def test_requests_end_while_the_cache_shrinks(elastic: httpx.Client) -> None:
    """Whatever blocks they have: the resize waits for them, and no request fails."""
    with running(elastic, 24, 400) as requests:
        post(elastic, "/kv_cache", fraction=0.25, timeout_s=120)
        assert all(len(each.result(120)) == 400 for each in requests)
    with running(elastic, 24, 400) as requests:  # in the smaller cache, in which vLLM preempts if they do not fit
        assert cache(elastic)["used_bytes"] <= cache(elastic)["bytes"]
        post(elastic, "/kv_cache", fraction=1)
        assert all(len(each.result(120)) == 400 for each in requests)


def test_requests_are_preempted_by_a_cache_that_shrinks(elastic: httpx.Client) -> None:
    """Again and again while they run; each gets all of its tokens, and later ones the same as before."""
    before = completions(elastic)
    with running(elastic, 24, 600) as requests:
        for fraction in (0.3, 0.9, 0.2, 1.0, 0.25):
            post(elastic, "/kv_cache", fraction=fraction, mode="preempt", timeout_s=30)
            time.sleep(0.2)  # so that they run at this size; wherever they are, they must complete
        assert all(len(each.result(180)) == 600 for each in requests)
    assert completions(elastic) == before
    post(elastic, "/kv_cache", fraction=1)
    assert completions(elastic) == before
    assert cache(elastic)["used_bytes"] == 0


def test_blocks_in_use_are_named_after_the_deadline(elastic: httpx.Client) -> None:
    """And the size is as before."""
    post(elastic, "/kv_cache", fraction=1)
    with running(elastic, 32, 1500) as requests:
        wait_until(lambda: cache(elastic)["smallest_bytes"] > cache(elastic)["full_bytes"] / 2, 60)
        late = elastic.post("/kv_cache", json={"fraction": 0.5, "timeout_s": 0})
        assert late.status_code == 504, late.text
        assert late.json()["error"]["pending"]
        assert cache(elastic)["bytes"] == cache(elastic)["full_bytes"]
        assert all(len(each.result(180)) == 1500 for each in requests)


def test_a_sleep_keeps_the_size_of_the_cache(elastic: httpx.Client) -> None:
    post(elastic, "/kv_cache", fraction=0.5)
    before, size, shrunk = completions(elastic), cache(elastic)["bytes"], held(elastic)["kv_cache"]["shrunk_bytes"]
    for level in (1, 3):
        post(elastic, f"/sleep?level={level}")
        assert elastic.post("/kv_cache", json={"fraction": 1}).status_code == 409
        post(elastic, "/wake_up")
        assert cache(elastic)["bytes"] == size
        assert held(elastic)["kv_cache"]["shrunk_bytes"] == shrunk > 0
        assert completions(elastic) == before
    post(elastic, "/kv_cache", fraction=1)
    assert completions(elastic) == before


def test_a_release_over_frozen_requests_of_a_small_cache(elastic: httpx.Client) -> None:
    """vLLM preempts them, and raises if a block stays in use by its count."""
    post(elastic, "/kv_cache", fraction=0.5)
    with running(elastic, 8, 400) as requests:
        post(elastic, "/release_memory_occupation", mode="keep")
        post(elastic, "/resume_memory_occupation")
        assert all(len(each.result(120)) == 400 for each in requests)
    post(elastic, "/kv_cache", fraction=1)


def test_a_cache_too_small_for_the_longest_request_is_refused(elastic: httpx.Client) -> None:
    refused = elastic.post("/kv_cache", json={"tokens": 512})
    assert refused.status_code == 400
    assert "the longest request needs" in refused.text
    smallest = cache(elastic)["smallest_bytes"]
    assert post(elastic, "/kv_cache", bytes=smallest)["kv_cache"]["bytes"] == smallest
    body = {"model": "m", "prompt": list(range(100, 1100)), "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
    longest = elastic.post("/v1/completions", json={**body, "detokenize": False, "return_token_ids": True})
    assert len(longest.json()["choices"][0]["token_ids"]) == 1000
    post(elastic, "/kv_cache", fraction=1)


def test_a_cache_that_cannot_grow_stays_as_it_is(elastic: httpx.Client) -> None:
    before = completions(elastic)
    post(elastic, "/kv_cache", fraction=0.25)
    size = cache(elastic)["bytes"]
    post(elastic, "/release_memory_occupation")  # torch's caches go, so that they make no room later
    post(elastic, "/resume_memory_occupation")
    free, _ = torch.cuda.mem_get_info()
    tenant = torch.empty(free - 48 * MIB, dtype=torch.uint8, device="cuda")
    try:
        assert cache(elastic)["largest_bytes"] < cache(elastic)["full_bytes"]
        short = elastic.post("/kv_cache", json={"fraction": 1})
        assert short.status_code == 503, short.text
        assert cache(elastic)["bytes"] == size
    finally:
        del tenant
        torch.cuda.empty_cache()
    assert completions(elastic) == before
    post(elastic, "/kv_cache", fraction=1)
    assert completions(elastic) == before


def test_a_cache_in_one_piece_is_not_resized(served: httpx.Client) -> None:
    refused = served.post("/kv_cache", json={"fraction": 0.5})
    assert refused.status_code == 409
    assert "MEMSAVER_KV_CACHE_PIECE=32MiB" in refused.text


def test_what_was_offloaded_is_found_after_a_sleep(model: Path, tmp_path: Path) -> None:
    """A prompt of many blocks is loaded from the connector's tier, and its tokens are the same."""
    hits = "vllm:external_prefix_cache_hits_total"
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
    }
    with serving(model, tmp_path / "log", "--enforce-eager", "--kv-transfer-config", json.dumps(transfer)) as (
        client,
        _,
    ):
        tokens = complete(client, 2)
        post(client, "/sleep", level=1)
        post(client, "/wake_up")
        before = metric(client, hits)
        assert complete(client, 2) == tokens
        assert metric(client, hits) > before


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[Any]:
    # Other tests may have used CUDA in this process, which a fork could not use then. A function crosses by pickle.
    child = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    environment = {**ENVIRONMENT, **child}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    from vllm import LLM

    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enable_sleep_mode=True,
        gpu_memory_utilization=0.15,
        max_model_len=2048,
        compilation_config=QUICK,
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def generated(llm: Any, number: int = 1) -> list[int]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=24)
    [output] = llm.generate([{"prompt_token_ids": prompt(number)}], sampling, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def sizes(llm: Any) -> dict[str, int]:
    """Return the bytes of each tag."""
    [answer] = llm.collective_rpc("memsaver", args=(REQUESTS.encode(Introduce()),))
    status = ANSWERS.decode(answer).status
    assert status is not None
    return {tag.tag: tag.bytes for tag in status.tags}


@pytest.mark.guards("a second release or resume failed")
def test_vllms_own_calls_sleep_by_memsaver(llm: Any) -> None:
    """``LLM.sleep`` and ``LLM.wake_up``, for single tags and all, each of them twice."""
    before, loaded = generated(llm), used()
    size = sum(sizes(llm).values())
    for tags in (None, ["weights", "kv_cache"]):
        llm.sleep(level=1)
        llm.sleep(level=1)
        assert loaded - used() >= size - 64 * MIB
        for tag in tags or [None]:
            llm.wake_up(tag and [tag])
        llm.wake_up()
        llm.reset_prefix_cache()
        assert generated(llm) == before


def test_vllm_itself_releases_the_cache_alone(llm: Any) -> None:
    """``LLM.release_kv_cache_memory``, between a pause and a wake-up."""
    if not hasattr(llm, "release_kv_cache_memory"):
        pytest.skip("this version of vLLM has no release_kv_cache_memory")
    llm.reset_prefix_cache()
    before = generated(llm)
    for tags in (["kv_cache"], None):
        loaded = used()
        llm.sleep(level=0)
        llm.release_kv_cache_memory()
        assert loaded - used() >= sizes(llm)["kv_cache"] - 64 * MIB
        llm.wake_up(tags)
        llm.reset_prefix_cache()
        assert generated(llm) == before


def fail_once(_worker: Any, call: str) -> None:
    """In a worker: the next release or resume of its memory fails."""
    import memsaver_core as ms

    original = getattr(ms, call)

    def fail(*_: Any, **__: Any) -> None:
        setattr(ms, call, original)
        raise ms.OutOfHostMemoryError("this worker has no host memory left")

    setattr(ms, call, fail)


@pytest.mark.guards("an engine that could not sleep never generated again")
def test_an_llm_whose_sleep_fails_generates(llm: Any) -> None:
    """vLLM pauses its scheduler first. The caller gets the reason, and a wake-up that fails can be repeated."""
    before = generated(llm)
    with pytest.raises(Exception, match="no sleep level 4"):
        llm.sleep(level=4)
    assert generated(llm) == before
    for level in (1, 2):
        llm.collective_rpc(fail_once, args=("release",))
        with pytest.raises(Exception, match="this worker has no host memory left"):
            llm.sleep(level=level)
        assert generated(llm) == before
    llm.sleep(level=1)
    llm.collective_rpc(fail_once, args=("resume",))
    with pytest.raises(Exception, match="this worker has no host memory left"):
        llm.wake_up()
    llm.wake_up()
    assert generated(llm) == before


def test_an_llm_hibernates(llm: Any) -> None:
    before = generated(llm)
    llm.sleep(level=1)
    asleep = used()
    llm.wake_up()
    for tags in (None, ["weights"]):
        llm.sleep(level=3)
        assert asleep - used() > 300 * MIB, (asleep, used())  # the context
        llm.wake_up(tags)
        llm.wake_up()
        assert generated(llm) == before


@pytest.mark.guards("a request during sleep hung or used released memory")
def test_the_service_beside_an_llm(llm: Any) -> None:
    """A call of ``generate`` counts as a request: a release waits for it, and it is refused while memory is
    released."""
    from memsaver_server.engine import AdmissionClosedError
    from memsaver_server.integrations.vllm.plugin import attach_to

    before = generated(llm)
    with attach_to(llm) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        released = threading.Event()

        def release() -> None:
            post(client, "/release_memory_occupation")
            released.set()

        threading.Thread(target=release).start()
        assert released.wait(30)
        with pytest.raises(AdmissionClosedError):
            generated(llm)
        post(client, "/resume_memory_occupation")
        assert generated(llm) == before
