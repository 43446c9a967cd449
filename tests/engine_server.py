"""A server of somebody else's engine in processes of its own, with memsaver inside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any, ClassVar, TypeVar

import httpx
import pytest

from tests.waiting import wait_until

T = TypeVar("T")
PROMPT = [5, 17, 60, 2]
#: How long a server may take to start on a machine that does other work, seconds.
START_S = 240.0
#: What `/kv_cache` counts, but is no size.
COUNTS = {"recomputed": 0, "reused_bytes": 0}


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def prompts(count: int) -> list[list[int]]:
    return [[*PROMPT, 100 + number] for number in range(count)]


class EngineServer:
    """Its calls: ``own`` the engine's endpoints, ``service`` memsaver's.

    Attributes:
        ready: what its log says once it serves.
        answer_s: how long an answer may take, seconds.
        first_token_s: likewise the first tokens of ``in_background``.
    """

    ready: ClassVar[str]
    answer_s: ClassVar[float]
    first_token_s: ClassVar[float]

    def __init__(self, log: Path) -> None:
        self.log = log
        self.url = f"http://127.0.0.1:{free_port()}"
        self.service_url = f"http://127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[bytes]
        self.http = httpx.Client(timeout=self.answer_s)
        self._threads = ThreadPoolExecutor(32)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def stream(self, length: int, prompt: list[int], begun: Event) -> list[int]:
        """Return the tokens that follow ``prompt``; set ``begun`` at the first one."""
        raise NotImplementedError

    def wait_until_up(self) -> None:
        wait_until(lambda: self.is_dead() or self.ready in self.output(), START_S)
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

    def tags(self) -> dict[str, str]:
        """The state of each tag, by the service."""
        return {each["tag"]: each["state"] for each in self.get("/memory_occupation").json()["tags"]}

    def in_background(self, count: int, length: int) -> list[Future[list[int]]]:
        """Start requests with the prompts of ``prompts``; return once each has its first token."""
        begun = [Event() for _ in range(count)]
        started = [
            self._threads.submit(self.stream, length, prompt, event)
            for prompt, event in zip(prompts(count), begun, strict=True)
        ]
        assert all(event.wait(self.first_token_s) for event in begun)
        return started

    def later(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        return self._threads.submit(call, *arguments)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        self.http.close()


def starter(kind: type[Any], model: Path, folders: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Give a function that starts servers, which end with the fixture that this is."""
    servers: list[EngineServer] = []

    def start(*arguments: str, model: Path = model, wait: bool = True, serve: bool = True, **environment: str) -> Any:
        servers.append(kind(model, folders.mktemp("server") / "log", *arguments, serve=serve, **environment))
        if wait:
            servers[-1].wait_until_up()
        return servers[-1]

    yield start
    for server in servers:
        server.close()
