"""The sync client."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx

from memsaver_server.client.calls import Calls
from memsaver_server.client.requests import DEFAULT_URL, Call, Event, EventParser, Target, parse_json

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _BlockingCalls(Calls):
    """Calls that never wait: each coroutine returns at its first step."""

    def __init__(self, target: Target, attempts: int, http: httpx.Client) -> None:
        super().__init__(target, attempts)
        self._http = http

    async def _request(self, call: Call) -> httpx.Response:
        return self._http.request(**self._target.options(call))

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)


def _blocking(
    method: Callable[Concatenate[Calls, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[Client, _P], _T]:
    """Return the method of ``Client`` for one of ``Calls``."""

    @wraps(method)
    def call(client: Client, /, *arguments: _P.args, **options: _P.kwargs) -> _T:
        coroutine = method(client._calls, *arguments, **options)
        try:
            coroutine.send(None)
        except StopIteration as returned:
            result: _T = returned.value
            return result
        raise AssertionError(f"{method.__name__} waits")

    return call


class Client:
    """Client of one service. Safe to use from several threads.

    Args:
        url: the service's address, ``http://host:port``, ``https://host:port`` or ``unix:///path``. Ignored if ``uds``
            is given.
        uds: path of the service's Unix socket.
        api_key: sent as ``Authorization: Bearer``.
        timeout_s: limit of connecting, and of one attempt of a call that answers at once, in seconds.
        operation_timeout_s: limit of one attempt of a release, a resume or a generation. None: no limit.
        attempts: how often a call is sent in total, if repeating it is safe.
        verify: checks the certificate of an ``https`` address; False accepts any. The default trusts the system's
            authorities, or those of the file that SSL_CERT_FILE names.
        transport: another httpx transport, e.g. to reach an ASGI app.

    Every method raises UnreachableError if no answer came, and an AnswerError if the answer is not a success.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        uds: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 10.0,
        operation_timeout_s: float | None = 600.0,
        attempts: int = 3,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._target = target = Target(url, uds, api_key, timeout_s, operation_timeout_s)
        self._http = httpx.Client(
            base_url=target.base_url,
            headers=target.headers,
            transport=transport or httpx.HTTPTransport(uds=target.uds, verify=target.verifies(verify)),
        )
        self._calls = _BlockingCalls(target, attempts, self._http)

    @property
    def address(self) -> str:
        """The service's address, for messages."""
        return self._target.address

    def key_of(self, operation_id: str) -> str | None:
        """See ``AsyncClient.key_of``."""
        return self._calls.key_of(operation_id)

    release = _blocking(Calls.release)
    start_release = _blocking(Calls.start_release)
    resume = _blocking(Calls.resume)
    start_resume = _blocking(Calls.start_resume)
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
    flush_cache = _blocking(Calls.flush_cache)
    pause_generation = _blocking(Calls.pause_generation)
    continue_generation = _blocking(Calls.continue_generation)

    def events(self, operation_id: str) -> Iterator[Event]:
        """Yield the events of one operation until it has ended."""
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
        except httpx.TransportError as error:
            raise self._target.unreachable(error) from error

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
