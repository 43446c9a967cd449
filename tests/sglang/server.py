"""A real SGLang server in processes of its own; here on its CPU engine, with memsaver's host driver."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any, ClassVar, TypeVar

import httpx
import psutil

from tests.waiting import wait_until

ARGUMENTS = (
    "--skip-tokenizer-init", "--sampling-backend", "pytorch", "--grammar-backend", "none", "--enable-memory-saver",
    "--max-total-tokens", "16384", "--context-length", "4096", "--host", "127.0.0.1",
)  # fmt: skip
CPU = (
    "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--mem-fraction-static", "0.3",
    "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled",
)  # fmt: skip
#: How long a server may take to start, or to answer, on a machine that does other work, seconds.
START_S, ANSWER_S = 240.0, 240.0
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "MEMSAVER_DRAIN_TIMEOUT_S": str(ANSWER_S),
    "MEMSAVER_DRIVER": "host",
    "MEMSAVER_HOST_CAPACITY": str(2 << 30),
    "OMP_NUM_THREADS": "1",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
T = TypeVar("T")
PROMPT = [5, 17, 60, 2]


def source(path: str) -> str:
    """The source of the installed SGLang."""
    found = find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "srt" / path).read_text()


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def prompts(count: int) -> list[list[int]]:
    return [[*PROMPT, 100 + number] for number in range(count)]


class Server:
    """Its calls: ``own`` SGLang's endpoints, ``service`` memsaver's."""

    arguments: ClassVar[tuple[str, ...]] = (*ARGUMENTS, *CPU)
    environment: ClassVar[dict[str, str]] = ENVIRONMENT

    def __init__(self, model: Path, log: Path, *arguments: str, serve: bool = True, **environment: str) -> None:
        self.model = model
        self.log = log
        self.url = f"http://127.0.0.1:{free_port()}"
        self.service_url = f"http://127.0.0.1:{free_port()}"
        named = {"MEMSAVER_SGLANG": self.service_url.removeprefix("http://")} if serve else {}
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *self.arguments]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--port", self.url.rpartition(":")[2], *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment, **named, **environment},
                start_new_session=True,
            )
        self.http = httpx.Client(timeout=ANSWER_S)
        self._threads = ThreadPoolExecutor(32)

    def wait_until_up(self) -> None:
        wait_until(lambda: self.is_dead() or "fired up and ready" in self.output(), START_S)
        assert not self.is_dead(), self.output()[-5000:]

    def is_dead(self) -> bool:
        return self.process.poll() is not None or "Scheduler hit an exception" in self.output()

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def own(self, path: str, body: dict[str, Any] | None = None, *, status: int = 200) -> Any:
        answer = self.http.post(self.url + path, json=body or {})
        assert answer.status_code == status, (answer.status_code, answer.text)
        return answer

    def service(self, path: str, body: dict[str, Any] | None = None, *, status: int = 200) -> Any:
        answer = self.http.post(self.service_url + path, json=body or {})
        assert answer.status_code == status, (answer.status_code, answer.text)
        return answer.json()

    def get(self, path: str) -> httpx.Response:
        return self.http.get(self.service_url + path)

    def request(self, length: int = 16, prompt: list[int] | None = None, **fields: Any) -> httpx.Response:
        parameters = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt or PROMPT, "sampling_params": parameters, **fields}
        return self.http.post(self.url + "/generate", json=body)

    def generate(self, length: int = 16, prompt: list[int] | None = None, **fields: Any) -> list[int]:
        answer = self.request(length, prompt, **fields)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["output_ids"]
        return tokens

    def stream(self, length: int, prompt: list[int], begun: Event) -> list[int]:
        """As ``generate``; sets ``begun`` at the first token."""
        parameters = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": parameters, "stream": True}
        tokens: list[int] = []
        with self.http.stream("POST", self.url + "/generate", json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    tokens = chunk["output_ids"]
                    begun.set()
        return tokens

    def in_background(self, count: int, length: int) -> list[Future[list[int]]]:
        """Start requests with the prompts of ``prompts``; return once each has its first token."""
        begun = [Event() for _ in range(count)]
        started = [
            self._threads.submit(self.stream, length, prompt, event)
            for prompt, event in zip(prompts(count), begun, strict=True)
        ]
        assert all(event.wait(ANSWER_S) for event in begun)
        return started

    def later(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        return self._threads.submit(call, *arguments)

    def tags(self) -> dict[str, str]:
        """The state of each tag, by the service."""
        return {each["tag"]: each["state"] for each in self.get("/memory_occupation").json()["tags"]}

    def check_cycles(self, answers: Callable[[], Any]) -> None:
        """Release and resume everything, by SGLang's own call and by the service; ``answers()`` must stay the same."""
        expected = answers()
        for call in (self.own, self.service):
            for _ in range(3):
                call("/release_memory_occupation")
                assert set(self.tags().values()) == {"released"}
                call("/resume_memory_occupation")
                assert answers() == expected, self.output()[-3000:]

    def schedulers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in children if each.cmdline()[0].startswith("sglang::scheduler")]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        self.http.close()
