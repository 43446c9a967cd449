"""The sync client."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import httpx

from memsaver_server.client.calls import Caller, Calls
from memsaver_server.client.requests import Call, Event, EventParser, parse_json

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _blocking(
    method: Callable[Concatenate[Calls, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[Client, _P], _T]:
    @wraps(method)
    def call(client: Client, /, *arguments: _P.args, **options: _P.kwargs) -> _T:
        coroutine = method(cast(Calls, client), *arguments, **options)
        try:
            coroutine.send(None)  # as _request and _pause block, no coroutine ever waits: it returns at its first step
        except StopIteration as returned:
            return cast(_T, returned.value)
        raise AssertionError(f"{method.__name__} waits")

    return call


class Client(Caller, AbstractContextManager["Client"]):
    """As ``AsyncClient``, blocking. Safe to use from several threads."""

    _client = httpx.Client
    _transport = httpx.HTTPTransport

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
        timeout = httpx.Timeout(self._target.timeout_s, read=None)
        try:
            with self._http.stream("GET", f"/operations/{operation_id}/events", timeout=timeout) as response:
                if not response.is_success:
                    response.read()
                    parse_json(response)
                for line in response.iter_lines():
                    if event := parser.feed(line):
                        yield event
                parser.end()
        except httpx.RequestError as error:
            raise self._target.unreachable(error) from error

    def close(self) -> None:
        self._http.close()

    def __exit__(self, *_error: object) -> None:
        self.close()

    async def _request(self, call: Call) -> httpx.Response:
        return cast(httpx.Response, self._http.request(**self._target.options(call)))

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)
