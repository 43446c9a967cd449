"""vLLM's own API server with the plugin, and requests to it."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.gpu import engines
from tests.waiting import wait_until

MIB = 1 << 20
CONFIG = Path(__file__).parents[1] / "data" / "qwen2-1.5b" / "config.json"
START_S = 240
#: Graphs of a few sizes, and no compilation: an engine that starts in seconds.
QUICK = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
#: The workers get the methods of ``vllm_worker``, for ``ask_workers``.
EXTENDED = ("--worker-extension-cls", "tests.gpu.vllm_worker.Extension")

ENVIRONMENT = {
    "MEMSAVER_VLLM": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc, by which weights are loaded again
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def missing() -> str:
    """As ``engines.missing``."""
    return engines.missing("vLLM", "vllm", "vllm.general_plugins")


def has_option(option: str) -> bool:
    """Return whether vLLM's server has this option. vLLM is not imported, which takes long."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return f'"{option}"' in Path(found.origin).with_name("engine").joinpath("arg_utils.py").read_text()


def write_model(folder: Path, seed: int = 3) -> None:
    """Write a checkpoint of seeded random weights: four layers of Qwen2-1.5B's shape."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {**json.loads(CONFIG.read_text()), "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(shape))
    torch.manual_seed(seed)
    random = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    state = {name: tensor.contiguous() for name, tensor in random.state_dict().items() if name != "lm_head.weight"}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@contextmanager
def serving(
    model: Path, log: Path, *arguments: str, **environment: str
) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    """Start the server in the usual way."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name"]
    command += ["m", "--skip-tokenizer-init", "--enable-sleep-mode", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--gpu-memory-utilization", "0.15", "--max-model-len", "2048", *arguments]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT, **environment}, stdout=output, stderr=output
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            _wait_until_up(client, process, log)
            yield client, process
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_up(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
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


def complete(client: httpx.Client, number: int, tokens: int = 24, model: str = "m") -> list[int]:
    body = {
        "model": model,
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


def completions(client: httpx.Client, model: str = "m") -> list[list[int]]:
    """One prompt at a time and none from the prefix cache, because only then greedy tokens are reproducible."""
    answers = []
    for number in range(3):
        client.post("/flush_cache").raise_for_status()
        answers.append(complete(client, number, model=model))
    return answers


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def ask_workers(client: httpx.Client, method: str, *arguments: str) -> list[Any]:
    """Call a method of vLLM's workers; return each one's result, as a string unless it is None, a list or an object."""
    results: list[Any] = post(client, "/collective_rpc", method=method, args=arguments)["results"]
    return results


def used() -> int:
    """Return the bytes of the device that are in use, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def held(client: httpx.Client) -> dict[str, dict[str, Any]]:
    """Return what the service reports of each tag."""
    return {tag["tag"]: tag for tag in client.get("/memory_occupation").raise_for_status().json()["tags"]}


def fall_asleep(client: httpx.Client, level: int) -> None:
    """Sleep by memsaver's routes; the device has all the memory back when the answer comes."""
    loaded = used()
    answer = post(client, "/sleep", level=level)
    assert loaded - used() >= answer["released_bytes"] - 64 * MIB
    assert all(tag["resident_bytes"] == 0 for tag in held(client).values())


def metric(client: httpx.Client, name: str) -> float:
    """Return a counter of vLLM's, over all of its labels."""
    lines = client.get("/metrics").raise_for_status().text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
