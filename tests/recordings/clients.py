"""What the clients and the coordinator send, and what they make of the answers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from pydantic import BaseModel

from memsaver_server import Settings, create_app
from memsaver_server.attachment import serve_app
from memsaver_server.client import AsyncClient, Client
from memsaver_server.engine import Engine
from memsaver_server.fleet import AsyncFleet, Fleet, Member, Selector, StaticMembership

from . import engines
from .engines import Site, VerifiedEngine, memory
from .fleets import SILENCE_S
from .fleets import Engine as LightEngine
from .layout import text_of
from .normal import Names, brief
from .tap import Tap

KEY = "key-of-the-recordings"
#: A call: the method, its arguments and keyword arguments. ``ID`` is the operation of the last answer that named one.
Call = tuple[str, tuple[Any, ...], Mapping[str, Any]]
#: Calls that begin with everything resident, and those that go on from there.
CLIENT: tuple[tuple[Call, ...], ...] = (
    (("release", (), {}), ("resume", (), {})),
    (("release", (["kv_cache"],), {}), ("resume", (["kv_cache"],), {})),
    (("release", ("kv_cache",), {}), ("resume", ("kv_cache",), {})),
    (("release", ([],), {}), ("resume", ([],), {})),
    (("release", (), {"timeout_s": 5}),),
    (("release", (), {"mode": "keep"}),),
    (("release", (), {"restore": {"weights": "discard"}}),),
    (("release", (), {"restore": {}}),),
    (("release", (), {"at_least_bytes": 1}),),
    (("release", (), {"trim": True}),),
    (("release", (), {"trim": False}),),
    (("release", (), {"hibernate": True}),),
    (("release", (), {"hibernate": False}),),
    (("release", (), {"verify": "token"}), ("resume", (), {"verify": "token"})),
    (("release", (), {"wait": True}), ("resume", (), {"wait": True, "wait_for_memory_s": 2})),
    (("release", (), {"wait": False, "timeout_s": None, "mode": None, "trim": None}),),
    (("release", (), {"prepare": True}), ("commit", ("ID",), {}), ("commit", ("ID",), {}), ("abort", ("ID",), {})),
    (("release", (["kv_cache"],), {"prepare": True, "lease_s": 60}), ("abort", ("ID",), {}), ("commit", ("ID",), {})),
    (("release", (), {"lease_s": 60}),),
    (("release", (), {"colour": "red"}),),
    (("release", (["no_such_tag"],), {}),),
    (("release", (), {"at_least_bytes": 1 << 40}),),
    (("release", (), {}), ("resume", (), {"prepare": True, "lease_s": 60}), ("commit", ("ID",), {})),
    (("resume", (), {"lease_s": 60}),),
    (("resume", (), {"verify": "everything"}),),
    (("start_release", (["kv_cache"],), {"mode": "abort", "trim": True}),),
    (("start_resume", (["kv_cache"],), {"wait_for_memory_s": 1.5, "wait": True, "verify": None}),),
    (("start_release", (), {"dry_run": True}),),
    (("occupation", (), {}), ("operations", (), {}), ("ready", (), {}), ("alive", (), {})),
    (("release", (["kv_cache"],), {}), ("operation", ("ID",), {}), ("events", ("ID",), {}), ("cancel", ("ID",), {})),
    (("operation", ("none",), {}), ("events", ("none",), {}), ("cancel", ("none",), {})),
    (("generate", (), {"input_ids": [3, 5], "max_new_tokens": 2}), ("generate", ("text",), {"temperature": 0})),
    (("release", (), {}), ("generate", (), {"input_ids": [3]}), ("update_weights_from_disk", ("/none",), {})),
    (("update_weights_from_disk", ("/none",), {}), ("update_weights_from_tensor", (b"1", b"2"), {})),
    (("flush_cache", (), {}),),
    (("pause_generation", (), {}), ("ready", (), {}), ("continue_generation", (), {})),
    (("pause_generation", ("wait",), {"timeout_s": 5}), ("pause_generation", ("sideways",), {})),
)
#: One engine: of two that refuse the same, any may be the first.
ALONE = Selector(names=("a",))
FLEET: tuple[tuple[Call, ...], ...] = (
    (("release", (), {}), ("resume", (), {})),
    (("release", (), {"tags": ["kv_cache"]}), ("resume", (), {"tags": ["kv_cache"], "timeout_s": 7})),
    (("release", (ALONE,), {"drain": "abort"}), ("status", (ALONE,), {})),
    (("release", (), {"mode": "best_effort", "timeout_s": 5}), ("resume", (), {"mode": "best_effort"})),
    (("release", (), {"restore": {"weights": "discard"}}),),
    (("release", (), {"trim": True}),),
    (("release", (), {"trim": False}),),
    (("release", (ALONE,), {"hibernate": True}),),
    (("release", (ALONE,), {"hibernate": True, "trim": False}),),
    (("release", (), {"verify": "token", "operation_id": "mine"}), ("resume", (), {"verify": "token"})),
    (("release", (), {"operation_id": "mine"}), ("release", (), {"operation_id": "mine"})),
    (("release", (), {}), ("resume", (), {"wait_for_memory_s": 2.5, "tags": "weights"})),
    (("release", (), {}), ("resume", (), {"wait_for_memory_s": 0.0})),
    (("release", (), {"wait": True}),),
    (("release", (), {"colour": "red"}),),
    (("release", (), {"mode": "some"}),),
    (("release", (Selector(names=("z",)),), {}),),
    (("release", (ALONE,), {"tags": ["no_such_tag"]}),),
    (("resume", (), {"trim": True}),),
    (("status", (), {}), ("cancel", ("none",), {}), ("recover", (), {}), ("reconcile", (), {})),
)


def clients(_folder: Path) -> Iterator[tuple[str, Any]]:
    """The recordings of the clients and of the coordinator's calls."""
    seen: list[Any] = []
    engine = VerifiedEngine(memory())
    with (
        tapped(engine, seen, api_key=KEY) as url,
        httpx.Client(base_url=url, timeout=600, verify=False, headers=_key()) as http,
    ):
        site = Site(engine, http)
        with Client(url, api_key=KEY) as client:
            found = [_called(site, seen, client, calls) for calls in CLIENT]
        yield "client_requests", found
        asyncio.run(_check_async(site, seen, url, found))
    engine.close()
    yield "fleet_requests", _fleet_requests()


def _key() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}"}


@contextmanager
def tapped(engine: Engine, seen: list[Any], **settings: Any) -> Iterator[str]:
    """Serve an engine while the block runs; yields its address. Requests are appended to ``seen``."""

    def make() -> FastAPI:
        made = create_app(engine, ours)
        made.add_middleware(Tap, seen=seen)
        return made

    ours = Settings(history=8, **settings)
    with serve_app(make, ours) as attachment:
        yield attachment.url


def _called(site: Site, seen: list[Any], client: Client, calls: tuple[Call, ...]) -> list[Any]:
    site.scenario()
    names, found, last = _Names(), [], ""
    for method, arguments, keywords in calls:
        seen.clear()
        arguments = tuple(last if each == "ID" else each for each in arguments)
        try:
            result = getattr(client, method)(*arguments, **keywords)
            result = list(result) if inspect.isgenerator(result) else result
        except Exception as error:
            result = error
        last = getattr(result, "operation_id", last)
        found.append(names.step(method, arguments, keywords, result, list(seen)))
        site.state()
    return found


class _Names(Names):
    """The names of some calls of a client."""

    def step(self, method: str, arguments: Any, keywords: Any, result: Any, requests: list[Any]) -> Any:
        sent = [*map(_plain, arguments), *([{"keywords": dict(keywords)}] if keywords else [])]
        returned = self.normal(brief(_plain(result)))
        return {"call": self.texts([method, *sent]), "requests": self.texts(requests), "returned": returned}


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Exception):
        about = {key: each for key, each in vars(value).items() if key != "body"}
        return {"raised": type(value).__name__, "message": str(value), **about}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode()
    return {"event": value.name, "data": value.data} if hasattr(value, "data") else value


async def _check_async(site: Site, seen: list[Any], url: str, found: list[Any]) -> None:
    """The async client sends and returns the same."""
    async with AsyncClient(url, api_key=KEY) as client:
        for calls, expected in zip(CLIENT, found, strict=True):
            site.scenario()
            names, last = _Names(), ""
            for (method, arguments, keywords), step in zip(calls, expected, strict=True):
                seen.clear()
                arguments = tuple(last if each == "ID" else each for each in arguments)
                try:
                    call = getattr(client, method)(*arguments, **keywords)
                    result = await call if inspect.isawaitable(call) else [each async for each in call]
                except Exception as error:
                    result = error
                last = getattr(result, "operation_id", last)
                now = names.step(method, arguments, keywords, result, list(seen))
                assert now == step, f"{text_of(step)} was the sync client's, {text_of(now)} the async one's"
                site.state()


def _fleet_requests() -> list[Any]:
    """What each engine of a fleet is sent, and what the coordinator returns."""
    with ExitStack() as until_end:
        made, seen, members = {}, {}, []
        for name in "ab":
            made[name], seen[name] = LightEngine(name), []
            url = until_end.enter_context(tapped(made[name], seen[name], api_key=KEY))
            members.append(Member(name, url))
        https = [
            until_end.enter_context(httpx.Client(base_url=each.url, timeout=600, verify=False, headers=_key()))
            for each in members
        ]
        found = []
        for calls in FLEET:
            _restore_all(https)
            with Fleet(StaticMembership(members), api_key=KEY, silence_s=SILENCE_S) as fleet:
                found.append(_coordinated(fleet, calls, members, seen))
        _restore_all(https)
        found.append(_reconciled(members, seen, https[0]))
        _restore_all(https)
        asyncio.run(_async_fleet(members))
        return found


def _restore_all(https: list[httpx.Client]) -> None:
    for http in https:
        engines.restore(http)


def _reconciled(members: list[Member], seen: dict[str, list[Any]], first: httpx.Client) -> list[Any]:
    """What brings an engine back that is not what is wanted."""
    with Fleet(StaticMembership(members), api_key=KEY, silence_s=SILENCE_S) as fleet:
        fleet.release(tags=["kv_cache"], drain="abort")
        first.post("/resume_memory_occupation").raise_for_status()
        return _coordinated(fleet, (("reconcile", (), {}),), members, seen)


def _coordinated(fleet: Fleet, calls: tuple[Call, ...], members: list[Member], seen: dict[str, list[Any]]) -> list[Any]:
    names = _Names({member.url: f"http://{member.name}" for member in members})
    found = []
    for method, arguments, keywords in calls:
        for each in seen.values():
            each.clear()
        try:
            result: Any = getattr(fleet, method)(*arguments, **keywords)
        except Exception as error:
            result = error
        step = names.step(method, arguments, keywords, result, [])
        step["requests"] = {name: names.texts(_no_renewals(each)) for name, each in seen.items()}
        found.append(step)
    return found


def _no_renewals(requests: list[Any]) -> list[Any]:
    """The requests without those that repeat one only to renew a lease."""
    known: list[Any] = []
    for line, headers, *body in requests:
        if "prepare" not in str(body) or not any(line == each[0] and body == each[2:] for each in known):
            known.append([line, headers, *body])
    return known


async def _async_fleet(members: list[Member]) -> None:
    """The async coordinator does the same; the sync one is its face."""
    async with AsyncFleet(StaticMembership(members), api_key=KEY, silence_s=SILENCE_S) as fleet:
        released = await fleet.release()
        assert (await fleet.resume()).success is released.success is True
