"""Which requests are admitted by a rank of SGLang that receives requests."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from types import ModuleType
from typing import Any

#: How many requests may wait before the first one, which is the warm-up, was admitted.
HELD_BEFORE_WARM_UP = 1024


class RankAdmission:
    """Admits, holds or refuses requests: a refused one is aborted with status 503, which SGLang's server returns to the
    client. Used in the scheduler's thread alone, except for ``closed``: None while requests are admitted, held ones
    first; else the reason, and how many new requests may wait before others are refused."""

    def __init__(self, own: Any, messages: ModuleType) -> None:
        self._own = own
        self._messages = messages
        self._batches = (messages.BatchTokenizedGenerateReqInput, messages.BatchTokenizedEmbeddingReqInput)
        self._work = (*self._batches, messages.TokenizedGenerateReqInput, messages.TokenizedEmbeddingReqInput)
        self.closed: tuple[str, int] | None = None
        self._held: list[Any] = []
        # The first request is the warm-up of SGLang's server, which ends the server if it is refused.
        self._warm = getattr(own.server_args, "skip_server_warmup", True)

    @property
    def has_admissible(self) -> bool:
        """Whether requests are held that the next ``admit`` admits, as admission is open again."""
        return self.closed is None and bool(self._held)

    def is_work(self, request: Any) -> bool:
        """Return whether ``request`` is one of a client for a generation or an embedding."""
        return isinstance(request, self._work)

    def admit(self, received: Sequence[Any]) -> list[Any]:
        """Return the requests that are admitted now, of those ``received`` and of those held before."""
        closed = self.closed
        admitted: list[Any] = []
        if closed is None:
            admitted, self._held = self._held, []
        for request in received:
            if closed is None or not self.is_work(request):
                admitted.append(request)
                continue
            reason, hold = closed
            for each in list(request) if isinstance(request, self._batches) else [request]:
                self._hold_or_refuse(each, reason, hold if self._warm else HELD_BEFORE_WARM_UP)
        self._warm = self._warm or any(map(self.is_work, admitted))
        return admitted

    def abort_held(self, abort: Any) -> None:
        leaving = [each for each in self._held if abort.abort_all or each.rid.startswith(abort.rid)]
        self._held = [each for each in self._held if each not in leaving]
        for each in leaving:
            self._answer_aborted(each)

    def _hold_or_refuse(self, request: Any, reason: str, hold: int) -> None:
        if request.rid.startswith("HEALTH_CHECK"):
            # The answer that SGLang gives while it is busy: the process is healthy, with or without its memory.
            self._own.return_health_check_ipcs.append(getattr(request, "http_worker_ipc", None))
            self._own.maybe_send_health_check_signal()
        elif len(self._held) < hold:
            self._held.append(request)
        else:
            self._answer_aborted(request, reason)

    def _answer_aborted(self, request: Any, reason: str = "") -> None:
        finished = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": reason}
        answer = self._messages.AbortReq(rid=request.rid, finished_reason=finished if reason else None)
        self._own.ipc_channels.send_to_tokenizer.send_output(answer, request)
