"""Real vLLM in other modes than its defaults: by its flag, with both model runners, weights that are quantized while
they load, speculative decoding, updates by a trainer's extension, two servers on one GPU; in few starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.gpu.vllm_server import (
    EXTENDED,
    MIB,
    QUICK,
    ask_workers,
    complete,
    completions,
    fall_asleep,
    has_option,
    held,
    metric,
    missing,
    post,
    serving,
    used,
    write_model,
)

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "-")]

GRAPHS = ("--compilation-config", json.dumps(QUICK))
BACKEND = ("--sleep-mode-backend", "memsaver")
OFFLOAD = "--sleep-mode-offload-cudagraph"


def check_levels(client: httpx.Client, tokens: int = 24) -> None:
    """Sleep at level 1, and at level 2 with the weights loaded again: tokens stay the same, also those of an answer
    of ``tokens`` tokens, and the device has the memory meanwhile."""
    before, long = completions(client), complete(client, 1, tokens)
    for level in (1, 2, 1):
        fall_asleep(client, level)
        post(client, "/wake_up", tags=["weights"])
        if level == 2:
            ask_workers(client, "reload_weights")
        post(client, "/wake_up")
        assert completions(client) == before, level
        assert complete(client, 1, tokens) == long, level


@pytest.fixture(scope="module")
def quantized(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """By the flag alone if vLLM has it, with the second model runner, and weights that become FP8 while they load."""
    by_flag = has_option(BACKEND[0])
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    arguments = (*GRAPHS, *EXTENDED, "--quantization", "fp8_per_tensor", *(BACKEND if by_flag else ()))
    environment = {
        "MEMSAVER_VLLM": "" if by_flag else "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_DISABLED_KERNELS": "CutlassFP8ScaledMMLinearKernel",  # torch's own run with every build of vLLM
    }
    with serving(model, log, *arguments, **environment) as (client, _):
        yield client


def test_the_flag_alone_turns_it_on(quantized: httpx.Client) -> None:
    """All that is held for long is under a tag, and the service's routes are served."""
    if not has_option(BACKEND[0]):
        pytest.skip(f"this version of vLLM has no {BACKEND[0]}")
    tags = held(quantized)
    assert {"weights", "kv_cache", "cuda_graph", "runtime", "workspace"} <= set(tags)
    assert all(tag["bytes"] > 0 for tag in tags.values())


@pytest.mark.guards("calibrated FP8 scales or adapters were wrong after a wake-up")
def test_weights_quantized_while_they_load_are_the_same_after_a_wake_up(quantized: httpx.Client) -> None:
    """With the second model runner."""
    assert ask_workers(quantized, "name_runner") == ["vllm.v1.worker.gpu.model_runner"]
    check_levels(quantized)


def test_quantized_weights_that_sleep_are_not_written(quantized: httpx.Client, model: Path) -> None:
    """Only the device can make their format. They are as before when they wake up, and can be written then."""
    before = completions(quantized)
    post(quantized, "/sleep")
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
    # vLLM closes a connection after an error, perhaps when the next request is already on its way.
    assert quantized.post("/collective_rpc", json=body, headers={"Connection": "close"}).status_code >= 400
    post(quantized, "/wake_up")
    assert completions(quantized) == before
    ask_workers(quantized, "reload_weights")
    assert completions(quantized) == before


@pytest.fixture(scope="module")
def drafting(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """By the variable, with the first model runner, drafts from the prompt, and vLLM's own offload of graphs if it has
    that."""
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    offload = (OFFLOAD,) if has_option(OFFLOAD) else ()
    arguments = (*GRAPHS, *EXTENDED, *offload, "--speculative-config", json.dumps(drafts))
    with serving(model, log, *arguments, VLLM_USE_V2_MODEL_RUNNER="0") as (client, _):
        yield client


@pytest.mark.guards("replaying a graph failed after its memory was discarded")
def test_speculative_decoding_gives_equal_tokens_after_a_wake_up(drafting: httpx.Client) -> None:
    """With the first model runner, and with vLLM's own offload of graphs turned on: their pool is memsaver's."""
    assert ask_workers(drafting, "name_runner") == ["vllm.v1.worker.gpu_model_runner"]
    assert held(drafting)["cuda_graph"]["bytes"] > 0
    drafted = metric(drafting, "vllm:spec_decode_num_drafts_total")
    check_levels(drafting, tokens=400)  # so long that tokens are repeated, which are what drafts are made from
    assert metric(drafting, "vllm:spec_decode_num_drafts_total") > drafted


@pytest.mark.guards("content was wrong after a restore")
def test_a_trainer_writes_weights_that_are_awake_or_asleep(drafting: httpx.Client, model: Path, tmp_path: Path) -> None:
    """By a worker extension and the model's own ``load_weights``."""
    write_model(tmp_path, seed=4)
    old = completions(drafting)
    ask_workers(drafting, "load_weights_from", str(tmp_path))
    new = completions(drafting)
    ask_workers(drafting, "load_weights_from", str(model))
    assert completions(drafting) == old != new
    for folder, expected in ((tmp_path, new), (model, old)):
        fall_asleep(drafting, 1)
        ask_workers(drafting, "load_weights_from", str(folder))
        post(drafting, "/wake_up")
        assert completions(drafting) == expected


#: MiB that an engine without graphs leaves on the device: a context, modules, what torch caches.
LEFT = 1200


class Replicas(NamedTuple):
    """Two servers on one GPU. The second listens on every address and has no key, so that vLLM's own routes, which call
    its ``AsyncLLM``, control its memory. ``before`` is how many bytes were in use before they started."""

    first: httpx.Client
    second: httpx.Client
    before: int


@pytest.fixture(scope="module")
def replicas(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """No host memory is pinned before the first sleep. torch allocates in expandable segments outside of regions."""
    logs, before = tmp_path_factory.mktemp("log"), used()
    environment = {"MEMSAVER_PREPARE_BACKUP": "0", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    arguments = ("--enforce-eager", "--no-enable-prefix-caching", *EXTENDED)
    with (
        serving(model, logs / "first", *arguments, **environment) as (first, _),
        serving(model, logs / "second", *arguments, "--host", "0.0.0.0", **environment) as (second, _),
    ):
        assert second.get("/memory_occupation").status_code == 404
        yield Replicas(first, second, before)


def answers(client: httpx.Client) -> list[list[int]]:
    return [complete(client, number) for number in range(3)]


def sleep(client: httpx.Client) -> None:
    client.post("/sleep", params={"level": "1"}).raise_for_status()


def wake_up(client: httpx.Client) -> None:
    client.post("/wake_up").raise_for_status()


@pytest.mark.parametrize("by_service", [True, False], ids=["service", "vllms_own_routes"])
@pytest.mark.guards("an engine that could not sleep never generated again")
def test_a_server_without_host_memory_for_a_sleep_serves(replicas: Replicas, by_service: bool) -> None:
    """The system refuses the memory in the middle of the backup. Before any other sleep of these servers, as later ones
    use memory that they have."""
    client = replicas.first if by_service else replicas.second
    before = answers(client)
    ask_workers(client, "leave_host_memory", "256")
    # vLLM closes a connection after an error, perhaps when the next request is already on its way.
    failed = client.post("/sleep", params={"level": "1"}, headers={"Connection": "close"})
    assert failed.status_code >= 500
    assert "memory" in failed.text.lower(), failed.text
    ask_workers(client, "leave_host_memory", "")
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert answers(client) == before
    sleep(client)
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    wake_up(client)
    assert answers(client) == before


@pytest.mark.guards("two engines on one GPU hung")
def test_two_servers_on_one_gpu_take_turns(replicas: Replicas) -> None:
    """One serves while the other is asleep; in between both are."""
    first, second, before = replicas
    expected = answers(first)
    assert answers(second) == expected
    sleep(second)
    for resting, awake in ((first, second), (second, first)) * 2:
        sleep(resting)
        assert used() - before < 2 * LEFT * MIB
        wake_up(awake)
        assert answers(awake) == expected
    wake_up(second)
    assert answers(second) == answers(first) == expected
