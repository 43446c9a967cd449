"""SGLang's own requests for memory, weights, cache and pauses, carried out by the service's lifecycle.

By SGLang alone a release ends the process if a request runs, a resume if nothing is released, and a weight update or a
continuation touches memory that is released.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from memsaver_server.integrations.scheduler_loop import controls
from memsaver_server.integrations.scheduler_loop.engine import LoopEngine
from memsaver_server.integrations.sglang import frontend
from memsaver_server.integrations.sglang.intake import Intake
from memsaver_server.lifecycle import NotResidentError
from memsaver_server.settings import Settings
from memsaver_server.tag_selection import released_tags

if TYPE_CHECKING:
    from memsaver_server.lifecycle import Lifecycle

#: How long a flush waits for requests that are about to end, or to be set aside by a pause before it, seconds.
SETTLING_S = 1.0
#: What reads weights; so do the methods of ``RpcReqInput`` that save the model.
READS = ("CheckWeightsReqInput", "GetWeightsByNameReqInput", "SendWeightsToRemoteInstanceReqInput")
#: What comes before and after the requests of an update, from 0.5.21 on.
BEGIN, END = "BeginWeightUpdateReqInput", "EndWeightUpdateReqInput"


class Controls(controls.Controls):
    client = "sglang"

    def __init__(
        self,
        engine: LoopEngine,
        scheduler: Any,
        intake: Intake,
        lifecycle: Lifecycle,
        settings: Settings,
        paused: Callable[[], None],
    ) -> None:
        """``paused`` is called in the scheduler's thread when a caller pauses generation."""
        super().__init__(engine, lifecycle, settings)
        self._messages = importlib.import_module("sglang.srt.managers.io_struct")
        self._scheduler = scheduler
        self._intake = intake
        self._paused = paused
        # Of the scheduler's thread alone.
        self._continuation: Any = None
        self._updates: dict[str, Future[Any]] = {}  # by the kind of request; they come one at a time
        self._dispatcher = scheduler._request_dispatcher
        scheduler._request_dispatcher = self._dispatch

    # In the scheduler's thread.

    def continue_now(self) -> None:
        """Admission is open: let SGLang continue, if it was asked to."""
        if self._continuation is not None:
            self._loop.send(self._continuation)
            self._continuation = None

    def _takes(self, request: Any) -> bool:
        name = type(request).__name__
        closed = not self._intake.is_open
        if name == "GetInternalStateReq" and request.rid == frontend.QUESTION:
            state = {"closed": closed, "still": self._engine.is_still()}
            self._send(self._messages.GetInternalStateReqOutput(internal_state=state), request)
            return True
        if name == "FlushCacheReqInput" and (closed or not self._scheduler.is_fully_idle()):
            return self._in_thread(self._flush, request)
        if name in READS or (name == "RpcReqInput" and request.method.startswith("save_")):
            status = self._lifecycle.memory.status()
            if status.hibernated or "weights" in released_tags(status):
                self._answer(request, NotResidentError("weights"))
                return True
        if name in (BEGIN, END):
            return self._in_thread(self._update, request)
        if name == "ContinueGenerationReqInput" and closed:
            self._continuation = request
            return True
        if name == "PauseGenerationReqInput":
            self._continuation = None
            self._paused()
        return super()._takes(request)

    def _dispatch(self, request: Any) -> Any:
        """Stands in for the scheduler's ``_request_dispatcher``, which returns the answer to ``request`` or None."""
        name = type(request).__name__
        answered = self._updates.pop(name, None)
        try:
            output = self._dispatcher(request)
        except BaseException as error:
            if answered is not None:
                answered.set_exception(error)
            raise
        if answered is not None:
            if name in (BEGIN, END) and output.success:
                self._engine.unwritten_weights = ("all of an update that has not ended",) if name == BEGIN else ()
            answered.set_result(output)
        return output

    # In a thread of its own for each request.

    def _answer(self, request: Any, error: BaseException | None) -> None:
        name = controls.answer_to(request)
        kind = getattr(self._messages, name)
        if "MemoryOccupation" in name:
            output = kind()
            if error is not None:
                # This answer has no field for a failure. ``frontend`` raises what the unused field says.
                output.rid = f"{getattr(error, 'status', 500)} {error}"
        elif name == "GetWeightsByNameReqOutput":
            output = kind(parameter=None)  # it has no field for a failure either; SGLang answers None as one
        else:
            output = kind(success=error is None, message=str(error or ""))
        self._send(output, request)

    def _send(self, output: Any, request: Any) -> None:
        channels = self._scheduler.ipc_channels
        if type(request).__name__ == "RpcReqInput":
            self._loop.submit(partial(self._messages.sock_send, channels.recv_from_rpc, output))
        else:
            self._loop.submit(partial(channels.send_to_tokenizer.send_output, output, request))

    def _flush(self, request: Any) -> None:
        """By SGLang alone it fails beside requests that a pause has set aside, and just after the last answer."""
        failed: Exception | None = None
        try:
            self._engine.when_still(max(SETTLING_S, getattr(request, "timeout_s", None) or 0))
            self._engine.flush_cache()
        except Exception as error:
            failed = error
        self._answer(request, failed)

    def _write(self, request: Any, answered: Future[Any]) -> None:
        def send() -> None:
            self._updates[type(request).__name__] = answered
            self._loop.send(request)

        if getattr(request, "flush_cache", False):
            # Its flush would end the process if a request ran, as it may just after the last answer.
            self._engine.when_still(self._settings.drain_timeout_s, send)
        else:
            send()
