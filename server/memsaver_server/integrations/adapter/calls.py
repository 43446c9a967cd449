"""Calls that are requests of a gate, and waits that the caller may give up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from memsaver_server.engine import never, waits
from memsaver_server.engine.gate import InFlightRequest

_Method = TypeVar("_Method", bound=Callable[..., Any])
_not_compiled: Callable[[_Method], _Method] = torch.compiler.disable


def is_done(future: Future[Any], timeout_s: float, given_up: Callable[[], bool] = never) -> bool:
    """Return True once ``future`` is done; False after ``timeout_s`` seconds, or once ``given_up()`` returns True."""
    deadline = time.monotonic() + timeout_s
    return any(wait([future], wait_s).done for wait_s in waits(deadline, given_up, time.monotonic))


class SharedRequest:
    """A request that begins now, and ends with the last of the blocks that belong to it."""

    def __init__(self, request: AbstractContextManager[InFlightRequest]) -> None:
        self.in_flight = request.__enter__()
        self._request = request
        self._blocks = 1
        self._lock = threading.Lock()

    def join(self) -> bool:
        """Begin one more block. Return False if the request has ended already."""
        with self._lock:
            self._blocks += self._blocks > 0
            return self._blocks > 0

    def leave(self) -> None:
        with self._lock:
            self._blocks -= 1
            ended = self._blocks == 0
        if ended:
            self._request.__exit__(None, None, None)


class NestedRequests:
    """The current request of each thread or asyncio task: the outermost block opens one, those inside belong to it."""

    def __init__(self, open_request: Callable[[str | None], AbstractContextManager[InFlightRequest]]) -> None:
        self._open_request = open_request
        self._current: ContextVar[SharedRequest | None] = ContextVar("memsaver_request", default=None)

    @contextmanager
    def request(self, name: str | None) -> Iterator[InFlightRequest]:
        """Run the block as a request, or as a part of the current request."""
        request, outer = self.begin(name)
        try:
            yield request.in_flight
        finally:
            self.end(request, outer)

    @_not_compiled
    def begin(self, name: str | None) -> tuple[SharedRequest, SharedRequest | None]:
        """Begin a block. The caller must pass what this returns to ``end``."""
        request = self._join_or_open(name)
        outer = self._current.get()
        self._current.set(request)
        return request, outer

    @_not_compiled
    def end(self, request: SharedRequest, outer: SharedRequest | None) -> None:
        self._current.set(outer)
        request.leave()

    def iterate(self, name: str, steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Run all of ``steps`` as one request; what their consumer does between two of them is outside it."""
        request = self._join_or_open(name)
        try:
            step: Callable[[Any], Any] = steps.send
            value: Any = None
            while True:
                token = self._current.set(request)
                try:
                    item = step(value)
                except StopIteration as end:
                    return end.value
                finally:
                    self._current.reset(token)
                try:
                    step, value = steps.send, (yield item)
                except BaseException as error:
                    step, value = steps.throw, error
        finally:
            request.leave()

    def _join_or_open(self, name: str | None) -> SharedRequest:
        outer = self._current.get()
        return outer if outer is not None and outer.join() else SharedRequest(self._open_request(name))
