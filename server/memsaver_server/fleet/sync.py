"""The synchronous twin of ``AsyncFleet``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from memsaver_server.fleet.fleet import AsyncFleet
from memsaver_server.fleet.results import FleetError, FleetEvent, FleetProgress, FleetResult

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _blocking(
    method: Callable[Concatenate[AsyncFleet, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[Fleet, _P], _T]:
    @wraps(method)
    def call(fleet: Fleet, /, *arguments: _P.args, **options: _P.kwargs) -> _T:
        return fleet._call(method(fleet._fleet, *arguments, **options))

    return call


def _made(make: Callable[_P, AsyncFleet]) -> Callable[Concatenate[Fleet, _P], None]:
    @wraps(make)
    def __init__(fleet: Fleet, /, *arguments: _P.args, **options: _P.kwargs) -> None:
        fleet._begin(make(*arguments, **options))

    return __init__


_init = _made(AsyncFleet)


async def _in_loop(function: Callable[[], _T]) -> _T:
    return function()


class Fleet(AbstractContextManager["Fleet"]):
    """As ``AsyncFleet``, blocking. Safe to use from several threads: its event loop runs in a separate thread. Once
    ``close`` was called, every call raises FleetError."""

    __init__ = _init

    def _begin(self, fleet: AsyncFleet) -> None:
        self._fleet = fleet
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="memsaver-fleet", daemon=True)
        self._thread.start()
        self._closing = threading.Lock()
        self._closed = False
        self._calls: set[Future[Any]] = set()

    release = _blocking(AsyncFleet.release)
    resume = _blocking(AsyncFleet.resume)
    cancel = _blocking(AsyncFleet.cancel)
    status = _blocking(AsyncFleet.status)
    recover = _blocking(AsyncFleet.recover)
    reconcile = _blocking(AsyncFleet.reconcile)

    @property
    def progress(self) -> FleetProgress | None:
        """See ``AsyncFleet.progress``."""
        return self._call(_in_loop(lambda: self._fleet.progress))

    def operations(self) -> list[FleetProgress | FleetResult]:
        """See ``AsyncFleet.operations``."""
        return self._call(_in_loop(self._fleet.operations))

    def watch(self, interval_s: float = 1.0) -> Iterator[FleetEvent]:
        """See ``AsyncFleet.watch``."""
        watcher = self._call(_in_loop(lambda: self._fleet.hub.watcher(interval_s)))
        try:
            while (event := self._call(watcher.next())) is not None:
                yield event
        except FleetError:
            if not self._closed:  # ``close`` ends what is watched
                raise
        finally:
            with suppress(FleetError):
                self._call(watcher.close())

    def close(self) -> None:
        """Wait for calls in progress, end what is watched, close the connections and end the thread. Engines keep their
        state."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._submit(self._fleet.hub.close()).result()
        wait(set(self._calls))
        self._submit(self._fleet.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _call(self, call: Coroutine[Any, Any, _T]) -> _T:
        with self._closing:
            if self._closed:
                call.close()
                raise FleetError("this Fleet is closed; nothing was done")
            done = self._submit(call)
            self._calls.add(done)
        try:
            return done.result()
        finally:
            self._calls.discard(done)

    def _submit(self, call: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)
