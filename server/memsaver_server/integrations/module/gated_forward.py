"""A module's ``forward`` behind a gate. Nested blocks belong together: a call inside a call is one request."""

from __future__ import annotations

import functools
import operator
import threading
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import nn

from memsaver_server.gate import InFlightRequest

_Method = TypeVar("_Method", bound=Callable[..., Any])
_not_compiled: Callable[[_Method], _Method] = torch.compiler.disable


class SharedRequest:
    """A request, and the blocks that belong to it; it ends with the last of them."""

    def __init__(self, request: AbstractContextManager[InFlightRequest]) -> None:
        self.in_flight = request.__enter__()
        self._request = request
        self._blocks = 1
        self._lock = threading.Lock()

    def join(self) -> bool:
        """Begin one more block; return False if the request has ended already."""
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
    """The current request of each thread or asyncio task.

    Args:
        open_request: enters the gate.
    """

    def __init__(self, open_request: Callable[[str | None], AbstractContextManager[InFlightRequest]]) -> None:
        self._open_request = open_request
        self._current: ContextVar[SharedRequest | None] = ContextVar("memsaver_request", default=None)

    @_not_compiled
    def begin(self, name: str | None) -> tuple[SharedRequest, SharedRequest | None]:
        """Begin a block; give what this returns to ``end``."""
        request = self._join_or_open(name)
        outer = self._current.get()
        self._current.set(request)
        return request, outer

    @_not_compiled
    def end(self, request: SharedRequest, outer: SharedRequest | None) -> None:
        self._current.set(outer)
        request.leave()

    def iterate(self, name: str, steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Run ``steps`` as one request from first to last; what their consumer does in between is outside it."""
        request = self._join_or_open(name)
        try:
            step: Callable[[Any], Any] = steps.send
            value: Any = None
            while True:
                outer = self._current.get()
                self._current.set(request)
                try:
                    item = step(value)
                except StopIteration as end:
                    return end.value
                finally:
                    self._current.set(outer)
                try:
                    step, value = steps.send, (yield item)
                except BaseException as error:
                    step, value = steps.throw, error
        finally:
            request.leave()

    def _join_or_open(self, name: str | None) -> SharedRequest:
        outer = self._current.get()
        return outer if outer is not None and outer.join() else SharedRequest(self._open_request(name))


class GatedForward:
    """Replaces a module's ``forward``. Copies and pickles of the module have the original.

    Not a pair of hooks: those end nothing at a KeyboardInterrupt, and code that was compiled before does not run them.
    """

    def __init__(self, requests: NestedRequests, module: nn.Module) -> None:
        self._requests = requests
        self._module = module
        self._own = "forward" in vars(module)
        self._forward = module.forward
        self._active = True
        functools.update_wrapper(self, self._forward)
        module.forward = self

    # A compiled caller's graph ends before it, and what it calls is compiled by itself.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator,misc,unused-ignore]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        requests, name = self._requests, type(self._module).__name__
        if not self._active:
            return self._forward(*args, **kwargs)
        request, outer = requests.begin(name)
        try:
            result = self._forward(*args, **kwargs)
        finally:
            requests.end(request, outer)
        return requests.iterate(name, result) if isinstance(result, types.GeneratorType) else result

    def __reduce__(self) -> tuple[Any, ...]:
        # By builtins alone, so that a pickle can be read without memsaver.
        if self._own:
            return operator.getitem, ((self._forward,), 0)
        return getattr, (self._module, "forward")

    def remove(self) -> None:
        """Put the original back, unless other code has wrapped this one; then only pass calls on."""
        self._active = False
        if vars(self._module).get("forward") is not self:
            return
        if self._own:
            self._module.forward = self._forward
        else:
            del self._module.forward
