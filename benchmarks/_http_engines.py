"""Engines in separate processes that serve HTTP: how each is started, and asked for tokens and for its memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from _machine import visible_gpu
from _processes import end, free_ports

#: How long an engine may take to start, seconds.
START_S = 400.0
#: How long it may take to end by itself, seconds.
END_S = 60.0
#: The first token in an answer.
_TOKEN = re.compile(rb'"(token|output)_ids": ?\[\d')


@dataclass(frozen=True)
class Kind:
    """How an engine is started, asked for tokens, and released.

    Attributes:
        command: what Python runs; ``{model}`` and ``{port}`` are replaced.
        path, body: the request for tokens.
        release, wake, flush: paths, all for POST without a body.
    """

    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    path: str = "/generate"
    body: dict[str, Any] = field(default_factory=dict)
    release: str = "/release_memory_occupation"
    wake: str = "/resume_memory_occupation"
    flush: str = "/flush_cache"

    def arguments(self, model: str, port: int) -> list[str]:
        return [sys.executable, *(part.replace("{model}", model).replace("{port}", str(port)) for part in self.command)]


def vllm(checkpoint: str, utilization: float, prompt: list[int], tokens: int, *more: str, stock: bool = False) -> Kind:
    """vLLM's own API server; ``stock`` is its own sleep mode."""
    arguments = ["-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, "--served-model-name", "{model}"]
    arguments += ["--skip-tokenizer-init", "--enable-sleep-mode", "--host", "127.0.0.1", "--port", "{port}"]
    arguments += ["--gpu-memory-utilization", str(utilization), "--max-model-len", "2048", *more]
    environment = {"MEMSAVER_VLLM": "0" if stock else "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": visible_gpu()}
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "detokenize": False}
    body |= {"return_token_ids": True, "stream": True}
    paths = ("/sleep?level=1", "/wake_up", "/reset_prefix_cache")
    return Kind(tuple(arguments), environment, "/v1/completions", body, *paths)


@contextmanager
def started(kind: Kind, model: str, folder: Path, end_s: float = END_S) -> Iterator[httpx.Client]:
    """Run an engine while the block runs; yields a client of it once it serves. Its log is ``folder``/``model``.log.

    Args:
        end_s: how long it may take to end by itself.
    """
    [port] = free_ports(1)
    log = folder / f"{model}.log"
    with log.open("w") as output:
        arguments, environment = kind.arguments(model, port), {**os.environ, **kind.environment}
        process = subprocess.Popen(arguments, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            deadline = time.monotonic() + START_S
            while not _answers(client):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the engine of {model} did not start:\n{log.read_text()[-6000:]}")
                time.sleep(0.2)
            yield client
    finally:
        end(process, end_s)


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[float, list[int]]:
    """Send a request for tokens; return when its first token came, by ``time.perf_counter``, and all tokens."""
    content = b""
    with client.stream("POST", path, json=body) as answer:
        parts = answer.iter_raw()
        while not _TOKEN.search(content):
            part = next(parts, None)
            if part is None:
                raise RuntimeError(f"{path}: {answer.status_code} {content[:300]!r}")
            content += part
        first = time.perf_counter()
        content += b"".join(parts)
    return first, _tokens(content)


def _tokens(content: bytes) -> list[int]:
    lines = [line.removeprefix(b"data: ") for line in content.splitlines() if line.strip()]
    events = [json.loads(line) for line in lines if line != b"[DONE]"]
    if failed := [event for event in events if "error" in event]:
        raise RuntimeError(f"an answer ended with {failed[0]}")
    if "choices" in events[0]:  # vLLM sends the new tokens in each event, SGLang all until then
        return [token for event in events for token in event["choices"][0]["token_ids"] or ()]
    found: list[int] = events[-1]["output_ids"]
    return found
