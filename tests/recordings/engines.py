"""One engine, served: what the recordings of an engine call."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any

import httpx
import safetensors.torch

import memsaver_core as ms
from memsaver_core import process
from memsaver_server import Settings, attach
from tests.native.injection import Faulty
from tests.service.tensor_engine import Memory, TensorEngine
from tests.waiting import wait_until

from .scenario import THREADS, Scenario

KEY, READ_KEY = "key-of-the-recordings", "read-key-of-the-recordings"
PROMPT = {"rid": "r1", "input_ids": [3, 5, 8], "sampling_params": {"max_new_tokens": 4}}


@cache
def memory() -> Memory:
    """The memory of this process's engines."""
    return Memory(weights_bytes=256 << 10, kv_bytes=512 << 10, other_bytes=64 << 10)


class VerifiedEngine(TensorEngine):
    """The tests' engine, which can be verified."""

    def verify_tokens(self) -> list[int]:
        return [int(self.weights[token]) for token in range(1, 5)]


class Site:
    """A served engine, and what calls it. ``last`` is its state as of the last look; empty before the first one."""

    def __init__(self, engine: TensorEngine, http: httpx.Client, engine_http: httpx.Client | None = None) -> None:
        self.engine = engine
        self.http = http
        self.engine_http = engine_http or http
        self.last = ""

    def scenario(self, texts: Mapping[str, str] | None = None, *, keep: bool = False) -> Scenario:
        """Begin a scenario, unless ``keep`` with everything resident and nothing in progress."""
        if not keep:
            self.restore()
        if self.last == "resident":
            freshen()
        return Scenario(self.http, texts, self.state)

    def state(self, _answer: httpx.Response | None = None) -> str:
        """What the engine is, in one line."""
        self.last = state_of(self.http, self.engine)
        return self.last

    def bring(self, state: str) -> None:
        """Have everything resident, or released with tokens to compare a resume with."""
        self.restore()
        freshen()
        if state != "resident":
            release = {"verify": "token", "wait": True}
            self.http.post("/release_memory_occupation", json=release).raise_for_status()
            assert self.state() == state, self.last

    def restore(self) -> None:
        """Undo what calls have left."""
        self.engine.unblock()
        driver().heal()
        if (self.last or self.state()) != "resident":
            self.last = restore(self.http, self.last)
            memory().load()  # what was discarded


def freshen() -> None:
    """Change the content that is kept, so that no backup of an earlier scenario is as good."""
    memory().weights[-2] = memory().graph[-1] = next(_CONTENTS)


_CONTENTS = count(1 << 20)


def driver() -> Faulty:
    """The driver below this process's engines, to inject failures and delays."""
    return process.saver()


@contextmanager
def served(engine: TensorEngine | None = None, **settings: Any) -> Iterator[Site]:
    """Serve an engine while the block runs; it is called with the key, if there is one."""
    ms.resume()
    engine = engine or VerifiedEngine(memory())
    headers = {"Authorization": f"Bearer {settings['api_key']}"} if "api_key" in settings else {}
    try:
        with (
            attach(engine, settings=Settings(**settings)) as attachment,
            httpx.Client(base_url=attachment.url, timeout=600, verify=False, headers=headers) as http,
        ):
            wait_until(lambda: _is_read(http.get("/memory_occupation").json()))
            yield Site(engine, http)
    finally:
        engine.close()


@contextmanager
def generating(site: Site) -> Iterator[Future[httpx.Response]]:
    """Have a request in flight that does not end before the end of the block, unless it is aborted."""
    site.engine.block()
    answer = THREADS.submit(site.engine_http.post, "/generate", json=PROMPT)
    try:
        site.engine.wait_until(lambda engine: engine.in_flight())
        yield answer
    finally:
        site.engine.unblock()
        site.last = ""  # what was held up goes on
    answer.result(600)


def state_of(http: httpx.Client, engine: TensorEngine | None = None) -> str:
    """What an engine is once no operation moves: what is released, lost, prepared, and whether requests enter."""
    while (now := http.get("/memory_occupation").json())["operation_id"] is not None and now["prepared"] is None:
        if _waits(http, engine):
            now = http.get("/memory_occupation").json()
            break
    released = [tag["tag"] for tag in now["tags"] if tag["released_bytes"]]
    lost = [tag["tag"] for tag in now["tags"] if tag["content"] == "lost"]
    said = [f"released {' '.join(released)}" if released else now["state"]]
    said += ["hibernated"] if now["hibernated"] else []
    said += [f"lost {' '.join(lost)}"] if lost else []
    said += [f"{now['prepared']['operation']} prepared"] if now["prepared"] else []
    said += ["closed"] if not (now["admission"]["open"] or released) else []
    return ", ".join(said)


def _is_read(occupation: Any) -> bool:
    """Whether the devices were read once, or there are none."""
    return bool(occupation["devices"]) or not occupation["enabled"]


def _waits(http: httpx.Client, engine: TensorEngine | None) -> bool:
    """Whether the operation in progress waits for something that only a step of the scenario can change."""
    running = [each for each in http.get("/operations").json()["operations"] if each["status"] == "running"]
    if running and running[0]["phase"] == "drain" and engine is not None and not engine.in_flight():
        return False
    return bool(running) and (running[0]["phase"] in ("drain", "wait_for_memory") or running[0]["stalled"] is not None)


def restore(http: httpx.Client, state: str = "unknown") -> str:
    """Undo what calls have left in an engine in ``state``, once nothing holds operations up; return its state then."""
    if "prepared" in state or not state.startswith(("released", "resident")):
        settled(http)
    if state != "resident":
        http.post("/resume_memory_occupation")
        state = state_of(http)
    if state != "resident":
        http.post("/content_written")
        http.post("/continue_generation")
        state = state_of(http)
    assert state == "resident", state
    return state


def settled(http: httpx.Client) -> None:
    """Wait until no operation is in progress; undo what is prepared."""
    while (now := http.get("/memory_occupation").json())["operation_id"] is not None:
        if now["prepared"]:
            key = {"Idempotency-Key": "key 3"}  # with which the one scenario prepares that does so with a key
        http.delete(f"/operations/{now['operation_id']}", headers=key).raise_for_status()


def payload(site: Site, more: int = 1) -> str:
    """What a weight update takes."""
    return base64.b64encode(image(site, more)).decode()


def image(site: Site, more: int = 1) -> bytes:
    """The content of a safetensors file with other weights."""
    return safetensors.torch.save({"weights": site.engine.weights + more})
