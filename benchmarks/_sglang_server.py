"""A real SGLang server in separate processes, and its calls."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import httpx
from _processes import end, free_ports

from memsaver_core import compat

#: With the memory of graphs under a tag SGLang starts only without its prefill graphs.
ENVIRONMENT = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
ARGUMENTS = (
    "--skip-tokenizer-init", "--grammar-backend", "none", "--sampling-backend", "pytorch", "--enable-memory-saver",
    "--enable-weights-cpu-backup", "--cuda-graph-backend-prefill", "disabled", "--host", "127.0.0.1",
)  # fmt: skip
#: How long a server may take to start, seconds.
START_S = 300.0
#: How long it may take to answer, seconds.
ANSWER_S = 60.0


class Answer(NamedTuple):
    ms: float
    body: Any


@dataclass(eq=False)
class Running:
    """A request that is being answered.

    Attributes:
        tokens: those that it has until now.
        begun: set at its first one.
        whole: all of them, once they are there.
    """

    tokens: list[int]
    begun: Event
    whole: Future[list[int]]


class Server:
    """Its endpoints; ``own`` calls SGLang's, ``service`` memsaver's. Both raise AssertionError for another status.

    Attributes:
        own_url, service_url: where these are.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path, ports: list[int]) -> None:
        self._process, self._log = process, log
        self.own_url, self.service_url = (f"http://127.0.0.1:{port}" for port in ports)
        # No connection is kept: the server ends those that rest, perhaps just as a request is on its way.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.Client(timeout=ANSWER_S, limits=limits)
        self._threads = ThreadPoolExecutor(256)

    def own(self, path: str, body: dict[str, Any] | None = None, status: int = 200) -> Answer:
        return self._call(self.own_url + path, body, status)

    def service(self, path: str, body: dict[str, Any] | None = None, status: int = 200) -> Answer:
        return self._call(self.service_url + path, body, status)

    def flush(self) -> None:
        """As RL frameworks do: just after an answer SGLang alone may refuse it."""
        deadline = time.monotonic() + ANSWER_S
        while self._http.post(self.own_url + "/flush_cache").status_code != 200:
            assert time.monotonic() < deadline, "the cache was not flushed"
            time.sleep(0.05)

    def probe_ms(self, path: str) -> float:
        begun = time.perf_counter()
        self._http.get(self.service_url + path).raise_for_status()
        return (time.perf_counter() - begun) * 1e3

    def generate(self, prompt: list[int], count: int) -> list[int]:
        body = {"input_ids": prompt, "sampling_params": _greedy(count)}
        return list(self.own("/generate", body).body["output_ids"])

    def count_tokens(self, prompts: list[list[int]], count: int) -> int:
        """Ask for ``count`` tokens for all prompts at once, each in one piece; return how many came."""
        return sum(len(each) for each in self._threads.map(lambda prompt: self.generate(prompt, count), prompts))

    def start(self, prompts: list[list[int]], count: int) -> list[Running]:
        """Start requests for ``count`` tokens each, and return once each has its first."""
        running = [Running([], Event(), Future()) for _ in prompts]
        for each, prompt in zip(running, prompts, strict=True):
            each.whole = self._threads.submit(self._stream, each, prompt, count)
            each.whole.add_done_callback(lambda _, each=each: each.begun.set())  # it may have failed before
        for each in running:
            assert each.begun.wait(ANSWER_S), "a request has no token yet"
            if each.whole.done():
                each.whole.result()
        return running

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + START_S
        while "fired up and ready" not in (output := self.output()):
            failed = self._process.poll() is not None or "Scheduler hit an exception" in output
            if failed or time.monotonic() > deadline:
                raise RuntimeError(f"SGLang did not start: {output[-3000:]}")
            time.sleep(0.1)

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def is_up(self) -> bool:
        try:
            return self._process.poll() is None and self._http.get(self.own_url + "/health").status_code == 200
        except httpx.HTTPError:
            return False

    def _call(self, url: str, body: dict[str, Any] | None, status: int) -> Answer:
        begun = time.perf_counter()
        answer = self._http.post(url, json=body or {})
        ms = (time.perf_counter() - begun) * 1e3
        assert answer.status_code == status, f"{url}: {answer.status_code} {answer.text[:300]}"
        is_json = "json" in answer.headers.get("content-type", "")
        return Answer(ms, answer.json() if is_json else None)

    def _stream(self, running: Running, prompt: list[int], count: int) -> list[int]:
        body = {"input_ids": prompt, "sampling_params": _greedy(count), "stream": True}
        with self._http.stream("POST", self.own_url + "/generate", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    running.tokens = json.loads(line.removeprefix("data: ")).get("output_ids", running.tokens)
                    running.begun.set()
        return running.tokens


def _greedy(count: int) -> dict[str, Any]:
    return {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}


def prompts(*lengths: int) -> list[list[int]]:
    """Seeded prompts of so many tokens."""
    return [random.Random(place).choices(range(10, 1000), k=n) for place, n in enumerate(lengths)]


@contextmanager
def started(
    mode: str, model: Path, stock: Path | None, arguments: list[str], port: int | None = None
) -> Iterator[Server]:
    """Start SGLang, and end it.

    Args:
        mode: ``stock`` (torch_memory_saver), ``drop-in`` (memsaver in its place) or ``service`` (its service, too).
        stock: the folder with torch_memory_saver, if another one comes first on the path.
        port: SGLang's, and the next one is the service's; free ones unless it is given.
    """
    ports = [port, port + 1] if port else free_ports(2)
    environment = {**os.environ, **ENVIRONMENT}
    first = stock if mode == "stock" else compat.PATH
    path = [str(first)] if first else []
    environment["PYTHONPATH"] = os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])
    if mode == "service":
        environment["MEMSAVER_SGLANG"] = f"127.0.0.1:{ports[1]}"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(ports[0])]
    with tempfile.NamedTemporaryFile("w", prefix=f"sglang-{mode}-", suffix=".log", delete=False) as log:
        process = subprocess.Popen(
            [*command, *ARGUMENTS, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            text=True,
        )
    try:
        yield Server(process, Path(log.name), ports)
    finally:
        end(process)
