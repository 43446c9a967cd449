"""tokenspeed's own requests for memory and weights, carried out by the service's lifecycle.

They come from tokenspeed's HTTP server and its ``Engine``. By tokenspeed alone a release waits without a deadline, a
repeated one fails, a failure ends the process, and a weight update touches memory that is released.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from memsaver_core.options import ReleaseOptions, ResumeOptions, tags_of
from memsaver_server.integrations.sglang.event_loop import LeadingLoop
from memsaver_server.integrations.tokenspeed.port import Port
from memsaver_server.operation import Operation, ReleaseRequest, ResumeRequest
from memsaver_server.settings import Settings
from memsaver_server.tag_selection import released_tags
from memsaver_server.threads import start_thread

if TYPE_CHECKING:
    from memsaver_server.lifecycle import Lifecycle

logger = logging.getLogger("memsaver")

#: Who called, in operations and logs.
CLIENT = "tokenspeed"


class _NotWrittenError(Exception):
    """tokenspeed has answered that it wrote no weights."""


class Controls:
    """Takes the requests out of what the event loop receives, and answers them."""

    def __init__(self, port: Port, loop: LeadingLoop, lifecycle: Lifecycle, settings: Settings) -> None:
        self._port = port
        self._messages = importlib.import_module("tokenspeed.runtime.engine.io_struct")
        self._loop = loop
        self._lifecycle = lifecycle
        self._settings = settings
        self._updates: dict[str, Future[Any]] = {}  # by the name of the answer that is waited for
        port.sent = self._sent

    # In the loop's thread.

    def take(self, received: Sequence[Any]) -> list[Any]:
        """Return those of ``received`` that tokenspeed gets now."""
        return [each for each in received if not self._takes(each)]

    def _takes(self, request: Any) -> bool:
        name = type(request).__name__
        work: Callable[[Any], None]
        if name in ("ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput"):
            work = self._operate
        elif name.startswith("UpdateWeight"):
            work = self._update
        elif name == "IsSleepingReqInput":
            sleeping = bool(released_tags(self._lifecycle.memory.status()))
            self._port.send_pyobj(self._messages.IsSleepingReqOutput(is_sleeping=sleeping))
            return True
        else:
            return False
        start_thread(f"memsaver-{CLIENT}", partial(work, request))
        return True

    def _sent(self, output: Any) -> None:
        if (answered := self._updates.pop(type(output).__name__, None)) is not None:
            answered.set_result(output)

    # In a thread of its own for each request.

    def _answer(self, request: Any, error: BaseException | None) -> None:
        output = getattr(self._messages, _answer_to(request))(success=error is None, message=str(error or ""))
        self._loop.submit(partial(self._port.send_pyobj, output))

    def _operate(self, request: Any) -> None:
        try:
            operation = self._start(request)
            operation.done.result()
            error = operation.error
        except Exception as refused:
            error = refused
        if error is not None:
            logger.error("tokenspeed's own %s failed: %s", type(request).__name__, error)
        self._answer(request, error)

    def _start(self, request: Any) -> Operation:
        tags = tags_of(request.tags)
        if type(request).__name__.startswith("Release"):
            asked = ReleaseRequest(ReleaseOptions(tags), self._settings.drain_timeout_s)
            return self._lifecycle.release(asked, wait=True, client=CLIENT)
        return self._lifecycle.resume(ResumeRequest(ResumeOptions(tags)), wait=True, client=CLIENT)

    def _update(self, request: Any) -> None:
        """Have tokenspeed write weights while no release or resume runs, and note whether it did."""
        try:
            with self._lifecycle.writing():
                answered = self._updates[_answer_to(request)] = Future()
                self._loop.send(request)
                self._loop.wait_for_future(answered)
                if not answered.result().success:
                    raise _NotWrittenError
        except _NotWrittenError:
            pass
        except Exception as error:
            self._answer(request, error)


def _answer_to(request: Any) -> str:
    return type(request).__name__.replace("ReqInput", "ReqOutput")
