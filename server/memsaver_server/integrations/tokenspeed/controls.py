"""tokenspeed's own requests for memory and weights, carried out by the service's lifecycle.

By tokenspeed alone a release waits without a deadline, a
repeated one fails, a failure ends the process, and a weight update touches memory that is released.
"""

from __future__ import annotations

import importlib
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from memsaver_server.integrations.scheduler_loop import controls
from memsaver_server.integrations.scheduler_loop.engine import LoopEngine
from memsaver_server.settings import Settings
from memsaver_server.tag_selection import released_tags

if TYPE_CHECKING:
    from memsaver_server.lifecycle import Lifecycle


class Controls(controls.Controls):
    """Stands in for the socket of ``handler`` to tokenspeed's server, to see the answers to updates."""

    client = "tokenspeed"

    def __init__(self, engine: LoopEngine, handler: Any, lifecycle: Lifecycle, settings: Settings) -> None:
        super().__init__(engine, lifecycle, settings)
        self._messages = importlib.import_module("tokenspeed.runtime.engine.io_struct")
        self._updates: dict[str, Future[Any]] = {}  # by the name of the answer that is waited for
        self._socket = handler.send_func
        handler.send_func = self

    # In the loop's thread.

    def send_pyobj(self, output: Any) -> None:
        if (answered := self._updates.pop(type(output).__name__, None)) is not None:
            answered.set_result(output)
        self._socket.send_pyobj(output)

    def _takes(self, request: Any) -> bool:
        if type(request).__name__ == "IsSleepingReqInput":
            sleeping = bool(released_tags(self._lifecycle.memory.status()))
            self._socket.send_pyobj(self._messages.IsSleepingReqOutput(is_sleeping=sleeping))
            return True
        return super()._takes(request)

    # In a thread of its own for each request.

    def _answer(self, request: Any, error: BaseException | None) -> None:
        kind = getattr(self._messages, controls.answer_to(request))
        output = kind(success=error is None, message=str(error or ""))
        self._loop.submit(partial(self._socket.send_pyobj, output))

    def _write(self, request: Any, answered: Future[Any]) -> None:
        self._updates[controls.answer_to(request)] = answered
        self._loop.send(request)
