"""SGLang's own requests for memory, weights, cache and pauses, carried out by the service's lifecycle.

They come from SGLang's HTTP server and its ``Engine``. By SGLang alone a release ends the process if a request runs, a
resume if nothing is released, and a weight update or a continuation touches memory that is released.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from memsaver_core.options import ReleaseOptions, ResumeOptions, tags_of
from memsaver_server.integrations.sglang.event_loop import LeadingLoop
from memsaver_server.operation import Operation, ReleaseRequest, ResumeRequest
from memsaver_server.settings import Settings
from memsaver_server.tag_selection import released_tags
from memsaver_server.threads import start_thread

if TYPE_CHECKING:
    from memsaver_server.lifecycle import Lifecycle

logger = logging.getLogger("memsaver")

#: Who called, in operations and logs.
CLIENT = "sglang"

#: How long a flush waits for requests that are about to end, or to be set aside by a pause before it, seconds.
SETTLING_S = 1.0


class _NotWrittenError(Exception):
    """SGLang has answered that it wrote no weights."""


class _Engine(Protocol):
    """What the requests need of ``SglangEngine``."""

    @property
    def is_open(self) -> bool: ...
    @property
    def is_idle(self) -> bool: ...
    def flush_cache(self) -> None: ...
    def when_still(self, timeout_s: float, then: Callable[[], None] = ...) -> None: ...


class Controls:
    """Takes the requests out of what the scheduler receives, and answers them."""

    def __init__(
        self, scheduler: Any, messages: ModuleType, loop: LeadingLoop, engine: _Engine, lifecycle: Lifecycle,
        settings: Settings,
    ) -> None:  # fmt: skip
        self._scheduler = scheduler
        self._messages = messages
        self._loop = loop
        self._engine = engine
        self._lifecycle = lifecycle
        self._settings = settings
        self._continuation: Any = None  # of the scheduler's thread alone

    # In the scheduler's thread.

    def take(self, received: Sequence[Any]) -> list[Any]:
        """Return those of ``received`` that the scheduler gets now."""
        return [each for each in received if not self._takes(each)]

    def continue_now(self) -> None:
        """Admission is open: let SGLang continue, if it was asked to."""
        if self._continuation is not None:
            self._loop.send(self._continuation)
            self._continuation = None

    def _takes(self, request: Any) -> bool:
        name = type(request).__name__
        closed = not self._engine.is_open
        work: Callable[[], None] | None = None
        if name in ("ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput"):
            work = partial(self._operate, request)
        elif name == "FlushCacheReqInput" and (closed or not self._engine.is_idle):
            work = partial(self._flush, request)
        elif name.startswith("UpdateWeight") and "From" in name:
            work = partial(self._update, request)
        elif name == "CheckWeightsReqInput" and "weights" in released_tags(self._lifecycle.memory.status()):
            self._refuse(request, "the memory of 'weights' is released; resume it first")
            return True
        elif name == "ContinueGenerationReqInput" and closed:
            self._continuation = request
            return True
        elif name == "PauseGenerationReqInput":
            self._continuation = None
        if work is None:
            return False
        start_thread(f"memsaver-{CLIENT}", work)
        return True

    def _refuse(self, request: Any, message: str) -> None:
        name = type(request).__name__.replace("ReqInput", "ReqOutput")
        self._answer(request, getattr(self._messages, name)(success=False, message=message))

    def _answer(self, request: Any, output: Any) -> None:
        self._scheduler.ipc_channels.send_to_tokenizer.send_output(output, request)

    # In a thread of its own for each request.

    def _operate(self, request: Any) -> None:
        release = type(request) is self._messages.ReleaseMemoryOccupationReqInput
        output = getattr(self._messages, type(request).__name__.replace("ReqInput", "ReqOutput"))()
        try:
            operation = self._start(tags_of(request.tags), release=release)
            operation.done.result()
            error = operation.error
        except Exception as refused:
            error = refused
        if error is not None:
            logger.error("SGLang's own %s failed: %s", "release" if release else "resume", error)
            # SGLang's answer has no field for a failure. ``frontend`` raises what the unused field says.
            output.rid = f"{getattr(error, 'status', 500)} {error}"
        self._loop.submit(partial(self._answer, request, output))

    def _start(self, tags: tuple[str, ...], *, release: bool) -> Operation:
        if release:
            asked = ReleaseRequest(ReleaseOptions(tags), self._settings.drain_timeout_s)
            return self._lifecycle.release(asked, wait=True, client=CLIENT)
        return self._lifecycle.resume(ResumeRequest(ResumeOptions(tags)), wait=True, client=CLIENT)

    def _flush(self, request: Any) -> None:
        """By SGLang alone it fails beside requests that a pause has set aside, and just after the last answer."""
        output = self._messages.FlushCacheReqOutput(success=True)
        try:
            self._engine.when_still(max(SETTLING_S, getattr(request, "timeout_s", None) or 0))
            self._engine.flush_cache()
        except Exception as error:
            output = self._messages.FlushCacheReqOutput(success=False, message=str(error))
        self._loop.submit(partial(self._answer, request, output))

    def _update(self, request: Any) -> None:
        """Have SGLang write weights while no release or resume runs, and note whether it did.

        Each request of an update in several ones counts as all, as nothing marks the last: its clients resume the KV
        cache, or continue generation, after all of them.
        """
        try:
            with self._lifecycle.writing():
                answered: Future[Any] = Future()
                send = partial(self._loop.process, request, answered)
                if getattr(request, "flush_cache", False):
                    # Its flush would end the process if a request ran, as it may just after the last answer.
                    self._engine.when_still(self._settings.drain_timeout_s, send)
                else:
                    send()
                self._loop.wait_for_future(answered)
                if not answered.result().success:
                    raise _NotWrittenError
        except _NotWrittenError:
            pass
        except Exception as error:
            self._loop.submit(partial(self._refuse, request, str(error)))
