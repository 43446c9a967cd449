"""A fleet, served: one engine behind a coordinator, for its doors; and two, for what they do together."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import httpx
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from memsaver_server import Settings, attach, create_app
from memsaver_server.app import create_fleet_app
from memsaver_server.attachment import serve_app
from memsaver_server.fleet import AsyncFleet, Member, Record, StaticMembership, connection, observer
from memsaver_server.fleet.turns.options import ModelOptions, TurnOptions
from tests.fleet.light_engine import LightEngine
from tests.waiting import wait_until

from . import engines
from .engines import VerifiedEngine, memory, state_of
from .scenario import Scenario

#: As long as no recording takes: no engine counts as silent, and each answer has what the engines are now.
SILENCE_S = 600.0
KIB = 1 << 10


class _Unreconciled(AsyncFleet):
    """A coordinator that leaves engines as they are: what it does every few seconds would come at any moment."""

    async def keep(self, interval_s: float = 0.0) -> None:
        await asyncio.Event().wait()


@contextmanager
def _served(members: Iterable[Member], record: Record | None = None, **settings: Any) -> Iterator[httpx.Client]:
    """Serve a coordinator while the block runs; yields what calls it, with its key."""
    ours = Settings(**settings)
    fleet = _Unreconciled(StaticMembership(members), record=record, silence_s=SILENCE_S)
    app = partial(create_fleet_app, fleet, ours, turns=TurnOptions({"*": ModelOptions(awake_s=0)}))
    headers = {"Authorization": f"Bearer {settings['api_key']}"} if "api_key" in settings else {}
    with (
        patch.object(connection, "QUIET_S", SILENCE_S),
        patch.object(observer, "GLANCE_S", SILENCE_S),
        serve_app(app, ours) as attachment,
        httpx.Client(base_url=attachment.url, timeout=600, verify=False, headers=headers) as http,
    ):
        yield http


class CoordinatedSite(engines.Site):
    """One engine that can do everything, called through its coordinator. ``engine_http`` calls the engine itself."""

    def state(self, answer: httpx.Response | None = None) -> str:
        if answer is not None and answer.status_code == 202:
            ended(self.http)
        self.last = state_of(self.engine_http, self.engine)
        return self.last

    def restore(self) -> None:
        self.engine.unblock()
        engines.driver().heal()
        if (self.last or self.state()) != "resident":
            engines.settled(self.engine_http)
            self.http.post("/resume_memory_occupation", json={"wait": True})  # so that the coordinator wants it
            self.last = engines.restore(self.engine_http, self.state())
            memory().load()


def ended(http: httpx.Client) -> None:
    """Wait until no operation of the fleet is in progress."""
    wait_until(lambda: all(each["status"] != "running" for each in http.get("/operations").json()["operations"]))


@contextmanager
def coordinated(**settings: Any) -> Iterator[CoordinatedSite]:
    """Serve one engine behind a coordinator while the block runs."""
    engine = VerifiedEngine(memory())
    engine.model_name = "model of a"  # type: ignore[attr-defined]
    with (
        attach(engine, settings=Settings(history=1)) as attachment,
        _served([Member("a", attachment.url)], **settings) as http,
        httpx.Client(base_url=attachment.url, timeout=600, verify=False) as engine_http,
    ):
        yield CoordinatedSite(engine, http, engine_http)
    engine.close()


class Engine(LightEngine):
    """A light engine that generates, can be verified and takes weights."""

    def __init__(self, name: str) -> None:
        super().__init__(name, weights_bytes=64 * KIB, kv_bytes=128 * KIB, model=f"model of {name}")

    def verify_tokens(self) -> list[int]:
        return [int(self.weights[number]) for number in range(4)]

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        with self.request():
            return {"text": "", "output_ids": [int(self.weights[each]) for each in request["input_ids"]]}

    def update_weights_from_disk(self, model_path: str, **_options: bool) -> int:
        raise ValueError(f"{model_path} has no weights")

    def update_weights_from_tensor(self, payloads: list[str], **_options: object) -> int:
        (given,) = payloads
        self.weights.copy_(torch.arange(len(self.weights)) + int(base64.b64decode(given)))
        return 1


def with_completions(engine: Engine) -> FastAPI:
    """The application of an engine, with completions of its own: what a coordinator passes on."""
    app = create_app(engine, Settings())

    @app.api_route("/v1/completions", methods=["GET", "POST"])
    async def completions(request: Request) -> Response:
        asked = {"method": request.method, "query": str(request.query_params), "body": (await request.body()).decode()}
        names = ("accept", "x-request-id", "authorization", "cookie", "origin")
        asked["headers"] = {name: value for name, value in request.headers.items() if name in names}
        with engine.request():
            if "fail" in asked["query"]:
                return JSONResponse({"error": {"message": "no such adapter"}}, 422, {"X-Engine": engine.name})
            if "stream" in asked["query"]:
                return StreamingResponse(_events(), media_type="text/event-stream")
            return JSONResponse({"engine": engine.name, "asked": asked}, headers={"X-Engine": engine.name})

    return app


async def _events() -> AsyncIterator[str]:
    for number in range(2):
        yield f"event: token\ndata: {json.dumps({'token': number})}\n\n"


class Fleet:
    """Engines ``a`` and ``b`` behind a coordinator, and perhaps a ``c`` that does not answer.

    Attributes:
        engines, https: the engines by name, and what calls them.
    """

    def __init__(self, http: httpx.Client, both: Mapping[str, Engine], https: Mapping[str, httpx.Client]) -> None:
        self.http = http
        self.engines = both
        self.https = https

    def scenario(self, texts: Mapping[str, str] | None = None, *, keep: bool = False) -> Scenario:
        """Begin a scenario, unless ``keep`` with everything resident and nothing in progress."""
        if not keep:
            self.restore()
        urls = {str(http.base_url).rstrip("/"): f"http://{name}" for name, http in self.https.items()}
        return Scenario(self.http, {**urls, **(texts or {})}, self.state)

    def state(self, answer: httpx.Response | None = None) -> str:
        """What the engines are, in one line; empty if something has only begun."""
        if answer is not None and answer.status_code == 202:
            return ""
        states = {name: state_of(http) for name, http in self.https.items()}
        if len(set(states.values())) == 1:
            return f"all {states['a']}"
        return "; ".join(f"{name} {state}" for name, state in states.items())

    def restore(self) -> None:
        """Undo what calls have left."""
        for engine in self.engines.values():
            engine.memory.heal()
        if self.state() == "all resident":
            return
        self.http.post("/resume_memory_occupation", json={"wait": True, "fleet_mode": "best_effort"})
        for http in self.https.values():
            engines.restore(http)


@contextmanager
def both(record: Record | None = None, *, unreachable: bool = False, **settings: Any) -> Iterator[Fleet]:
    """Serve two engines behind a coordinator while the block runs."""
    served = {name: _engine(name) for name in "ab"}
    urls = {name: url for name, (_, url) in served.items()}
    members = [Member(name, url, labels={"role": name}, host=f"host-{name}") for name, url in urls.items()]
    members += [Member("c", "http://127.0.0.1:9", model="model of c")] if unreachable else []
    with ExitStack() as until_end:
        https = {
            name: until_end.enter_context(httpx.Client(base_url=url, timeout=600, verify=False))
            for name, url in urls.items()
        }
        http = until_end.enter_context(_served(members, record, **settings))
        yield Fleet(http, {name: engine for name, (engine, _) in served.items()}, https)
        for each in https.values():
            engines.restore(each)


@cache
def _engine(name: str) -> tuple[Engine, str]:
    """The engine of this name, and its address. A process has one, which is served to its end."""
    engine = Engine(name)
    return engine, serve_app(partial(with_completions, engine), Settings()).url
