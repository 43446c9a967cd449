"""Admission of what SGLang's scheduler receives."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from types import ModuleType
from typing import Any

#: How many requests may wait until the first one was admitted.
HELD_BEFORE_WARM_UP = 1024


class Intake:
    """Filters what the scheduler receives. ``close`` and ``open`` may be called from any thread."""

    def __init__(self, scheduler: Any, messages: ModuleType) -> None:
        """``messages`` is ``sglang.srt.managers.io_struct``."""
        self._scheduler = scheduler
        self._messages = messages
        self._closed: tuple[str, int] | None = None  # the reason, and how many requests may be held
        # Of the scheduler's thread alone.
        self._held: list[Any] = []
        # The first request is the warm-up of SGLang's server, which ends if that is refused.
        self._warm = getattr(scheduler.server_args, "skip_server_warmup", True)

    @property
    def is_open(self) -> bool:
        return self._closed is None

    def close(self, reason: str, hold: int) -> None:
        self._closed = (reason, hold)

    def open(self) -> None:
        self._closed = None

    def admit(self, received: Sequence[Any]) -> list[Any]:
        """Return what of ``received``, and of what was held, the scheduler gets. In the scheduler's thread."""
        messages = self._messages
        batches = (messages.BatchTokenizedGenerateReqInput, messages.BatchTokenizedEmbeddingReqInput)
        work = (*batches, messages.TokenizedGenerateReqInput, messages.TokenizedEmbeddingReqInput)
        closed = self._closed
        admitted: list[Any] = []
        if closed is None:
            admitted, self._held = self._held, []
        for request in received:
            if isinstance(request, messages.AbortReq):
                self._abort_held(request)
            if closed is None or not isinstance(request, work):
                admitted.append(request)
                continue
            reason, hold = closed
            for each in list(request) if isinstance(request, batches) else [request]:
                self._hold_or_refuse(each, reason, hold if self._warm else HELD_BEFORE_WARM_UP)
        self._warm = self._warm or any(isinstance(each, work) for each in admitted)
        return admitted

    def _hold_or_refuse(self, request: Any, reason: str, hold: int) -> None:
        if request.rid.startswith("HEALTH_CHECK"):
            # As SGLang answers it while busy: the process is healthy, with or without its memory.
            self._scheduler.return_health_check_ipcs.append(getattr(request, "http_worker_ipc", None))
            self._scheduler.maybe_send_health_check_signal()
        elif len(self._held) < hold:
            self._held.append(request)
        else:
            self._answer_aborted(request, reason)

    def _abort_held(self, abort: Any) -> None:
        leaving = [each for each in self._held if abort.abort_all or each.rid.startswith(abort.rid)]
        self._held = [each for each in self._held if each not in leaving]
        for each in leaving:
            self._answer_aborted(each)

    def _answer_aborted(self, request: Any, reason: str = "") -> None:
        finished = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": reason}
        answer = self._messages.AbortReq(rid=request.rid, finished_reason=finished if reason else None)
        self._scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)
