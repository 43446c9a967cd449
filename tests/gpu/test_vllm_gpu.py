"""Real vLLM with the plugin: its API server with memsaver's routes, and an ``LLM`` with the service beside it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import memsaver_core as ms
from memsaver_core.ranks.protocol import ANSWERS, REQUESTS, Introduce
from tests.waiting import wait_until

MIB = 1 << 20
CONFIG = Path(__file__).parents[1] / "data" / "qwen2-1.5b" / "config.json"
START_S = 240
#: Graphs of a few sizes, and no compilation: an engine that starts in seconds.
QUICK = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}


def _missing() -> str:
    if not torch.cuda.is_available() or ms.driver_name() != "cuda":
        return "needs an NVIDIA GPU and the CUDA driver"
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    names = [entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")]
    return "" if "memsaver" in names else "memsaver is not installed, so that vLLM does not find its plugin"


pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(bool(_missing()), reason=_missing() or "-")]

ENVIRONMENT = {
    "MEMSAVER_VLLM": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc, by which weights are loaded again
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of seeded random weights: four layers of Qwen2-1.5B's shape."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("model")
    shape = {**json.loads(CONFIG.read_text()), "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(shape))
    torch.manual_seed(3)
    random = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    state = {name: tensor.contiguous() for name, tensor in random.state_dict().items() if name != "lm_head.weight"}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """vLLM's own API server, started in the usual way."""
    port = free_port()
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name"]
    command += ["m", "--skip-tokenizer-init", "--enable-sleep-mode", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--gpu-memory-utilization", "0.15", "--max-model-len", "2048"]
    command += ["--compilation-config", json.dumps(QUICK)]
    with log.open("w") as output:
        process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=output, stderr=output)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            wait_until_up(client, process, log)
            yield client
    finally:
        process.terminate()
        process.wait(60)


def wait_until_up(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    def is_up() -> bool:
        assert process.poll() is None, log.read_text()[-6000:]
        try:
            return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(is_up, START_S, interval_s=0.2)
    except AssertionError:
        raise AssertionError(log.read_text()[-6000:]) from None


def prompt(number: int) -> list[int]:
    return [(7919 * (place + 3) * (number + 1)) % 150_000 + 10 for place in range(30 + 50 * number)]


def complete(client: httpx.Client, number: int, tokens: int = 24) -> list[int]:
    body = {
        "model": "m",
        "prompt": prompt(number),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
    }
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def completions(client: httpx.Client) -> list[list[int]]:
    """One prompt at a time and none from the prefix cache, because only then greedy tokens are reproducible."""
    answers = []
    for number in range(3):
        client.post("/flush_cache").raise_for_status()
        answers.append(complete(client, number))
    return answers


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def held(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {tag["tag"]: tag for tag in client.get("/memory_occupation").raise_for_status().json()["tags"]}


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
        loaded = used()
        answer = post(served, "/sleep", level=1)
        assert loaded - used() >= answer["released_bytes"] - 64 * MIB
        assert all(tag["resident_bytes"] == 0 for tag in held(served).values())
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
        served.post("/collective_rpc", json={"method": "reload_weights"}).raise_for_status()
    post(served, "/wake_up", tags=[second])
    if first == "kv_cache":
        served.post("/collective_rpc", json={"method": "reload_weights"}).raise_for_status()
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
def llm(model: Path) -> Iterator[Any]:
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
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


@pytest.mark.guards("a second release or resume failed")
def test_vllms_own_calls_sleep_by_memsaver(llm: Any) -> None:
    """``LLM.sleep`` and ``LLM.wake_up``, for single tags and all, each of them twice."""
    before, loaded = generated(llm), used()
    [answer] = llm.collective_rpc("memsaver", args=(REQUESTS.encode(Introduce()),))
    status = ANSWERS.decode(answer).status
    assert status is not None
    size = sum(tag.bytes for tag in status.tags)
    for tags in (None, ["weights", "kv_cache"]):
        llm.sleep(level=1)
        llm.sleep(level=1)
        assert loaded - used() >= size - 64 * MIB
        for tag in tags or [None]:
            llm.wake_up(tag and [tag])
        llm.wake_up()
        llm.reset_prefix_cache()
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
