"""The sync client."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import httpx

from memsaver_server.client.calls import Calls
from memsaver_server.client.requests import Call, Event, EventParser, parse_json

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _BlockingCalls(Calls):
    """Calls that block: no coroutine of theirs ever waits, so each returns at its first step."""

    _client = httpx.Client
    _transport = httpx.HTTPTransport

    async def _request(self, call: Call) -> httpx.Response:
        return cast(httpx.Response, self._http.request(**self._target.options(call)))

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)


def _blocking(
    method: Callable[Concatenate[Calls, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[Client, _P], _T]:
    @wraps(method)
    def call(client: Client, /, *arguments: _P.args, **options: _P.kwargs) -> _T:
        coroutine = method(client._calls, *arguments, **options)
        try:
            coroutine.send(None)
        except StopIteration as returned:
            return cast(_T, returned.value)
        raise AssertionError(f"{method.__name__} waits")

    return call


def _made(make: Callable[_P, _BlockingCalls]) -> Callable[Concatenate[Client, _P], None]:
    @wraps(make)
    def __init__(client: Client, /, *arguments: _P.args, **options: _P.kwargs) -> None:
        client._calls = make(*arguments, **options)

    return __init__


class Client(AbstractContextManager["Client"]):
    """As ``AsyncClient``, blocking. Safe to use from several threads."""

    _calls: _BlockingCalls

    __init__ = _made(_BlockingCalls)

    @property
    def address(self) -> str:
        """The service's address, for messages."""
        return self._calls.address

    def key_of(self, operation_id: str) -> str | None:
        """See ``AsyncClient.key_of``."""
        return self._calls.key_of(operation_id)

    release = _blocking(Calls.release)
    start_release = _blocking(Calls.start_release)
    resume = _blocking(Calls.resume)
    start_resume = _blocking(Calls.start_resume)
    plan = _blocking(Calls.plan)
    commit = _blocking(Calls.commit)
    abort = _blocking(Calls.abort)
    occupation = _blocking(Calls.occupation)
    operations = _blocking(Calls.operations)
    operation = _blocking(Calls.operation)
    cancel = _blocking(Calls.cancel)
    ready = _blocking(Calls.ready)
    alive = _blocking(Calls.alive)
    generate = _blocking(Calls.generate)
    update_weights_from_disk = _blocking(Calls.update_weights_from_disk)
    update_weights_from_tensor = _blocking(Calls.update_weights_from_tensor)
    kv_cache = _blocking(Calls.kv_cache)
    resize_kv_cache = _blocking(Calls.resize_kv_cache)
    start_resize_kv_cache = _blocking(Calls.start_resize_kv_cache)
    flush_cache = _blocking(Calls.flush_cache)
    pause_generation = _blocking(Calls.pause_generation)
    continue_generation = _blocking(Calls.continue_generation)

    def events(self, operation_id: str) -> Iterator[Event]:
        """Yield the events of one operation until it has ended. Raises UnreachableError if they end before it does."""
        parser = EventParser()
        target, http = self._calls._target, self._calls._http
        timeout = httpx.Timeout(target.timeout_s, read=None)
        try:
            with http.stream("GET", f"/operations/{operation_id}/events", timeout=timeout) as response:
                if not response.is_success:
                    response.read()
                    parse_json(response)
                for line in response.iter_lines():
                    if event := parser.feed(line):
                        yield event
                parser.end()
        except httpx.RequestError as error:
            raise target.unreachable(error) from error

    def close(self) -> None:
        self._calls._http.close()

    def __exit__(self, *_error: object) -> None:
        self.close()
