"""An engine's own requests for memory and weights, carried out by the service's lifecycle.

They come from the engine's HTTP server and its class ``Engine``.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from memsaver_core.options import ReleaseOptions, ResumeOptions, tags_of
from memsaver_server.integrations.scheduler_loop.engine import LoopEngine
from memsaver_server.operation import Operation, ReleaseRequest, ResumeRequest
from memsaver_server.settings import Settings
from memsaver_server.threads import NoThreadError, start_thread

if TYPE_CHECKING:
    from memsaver_server.lifecycle import Lifecycle

logger = logging.getLogger("memsaver")


class _NotWrittenError(Exception):
    """The engine has answered that it wrote no weights."""


class Controls(ABC):
    """Takes the requests out of what the scheduler receives, and answers them.

    Attributes:
        client: who called, in operations and logs.
    """

    client: ClassVar[str]

    def __init__(self, engine: LoopEngine, lifecycle: Lifecycle, settings: Settings) -> None:
        self._engine = engine
        self._loop = engine.loop
        self._lifecycle = lifecycle
        self._settings = settings

    @abstractmethod
    def _answer(self, request: Any, error: BaseException | None) -> None:
        """Answer a request that has failed by ``error``, or succeeded. From any thread."""

    @abstractmethod
    def _write(self, request: Any, answered: Future[Any]) -> None:
        """Have the engine carry out an update of weights; ``answered`` gets its answer."""

    # In the scheduler's thread.

    def take(self, received: Sequence[Any]) -> list[Any]:
        """Return those of ``received`` that the scheduler gets now."""
        return [each for each in received if not self._takes(each)]

    def _takes(self, request: Any) -> bool:
        name = type(request).__name__
        if name in ("ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput"):
            return self._in_thread(self._operate, request)
        if name.startswith("UpdateWeight") and "From" in name:
            return self._in_thread(self._update, request)
        return False

    def _in_thread(self, work: Callable[[Any], None], request: Any) -> bool:
        try:
            start_thread(f"memsaver-{self.client}", partial(work, request))
        except NoThreadError as error:
            self._answer(request, error)
        return True

    # In a thread of its own for each request.

    def _operate(self, request: Any) -> None:
        try:
            operation = self._start(request)
            operation.done.result()
            error = operation.error
        except Exception as refused:
            error = refused
        if error is not None:
            logger.error("%s's own %s failed: %s", self.client, type(request).__name__, error)
        self._answer(request, error)

    def _start(self, request: Any) -> Operation:
        tags = tags_of(request.tags)
        if type(request).__name__.startswith("Release"):
            asked = ReleaseRequest(ReleaseOptions(tags), self._settings.drain_timeout_s)
            return self._lifecycle.release(asked, wait=True, client=self.client)
        return self._lifecycle.resume(ResumeRequest(ResumeOptions(tags)), wait=True, client=self.client)

    def _update(self, request: Any) -> None:
        """Have the engine write weights while no release or resume runs, and note whether it did.

        Each request of an update in several ones counts as all, as nothing marks the last: its clients resume the KV
        cache, or continue generation, after all of them.
        """
        answered: Future[Any] = Future()
        try:
            with self._lifecycle.writing():
                self._write(request, answered)
                self._loop.wait_for_future(answered)
                if not answered.result().success:
                    raise _NotWrittenError
        except _NotWrittenError:
            pass
        except Exception as error:
            self._answer(request, error)


def answer_to(request: Any) -> str:
    """Return the name of the class of the answer."""
    return type(request).__name__.replace("ReqInput", "ReqOutput")
