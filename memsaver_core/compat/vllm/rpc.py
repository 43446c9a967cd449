"""What a vLLM worker answers to ``collective_rpc("memsaver", args=(message,))``: the rank protocol.

vLLM's own sleep and wake-up run around a release and a resume, so that vLLM's state stays in step with the memory.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import memsaver_core as ms
from memsaver_core.compat.vllm.allocator import vllm_allocator
from memsaver_core.compat.vllm.config import worker_config
from memsaver_core.options import ReleaseOptions, ResumeOptions
from memsaver_core.ranks import protocol
from memsaver_core.ranks.local_rank import LocalRank, Result
from memsaver_core.ranks.protocol import Failure, Plain
from memsaver_core.reports import OperationReport

logger = logging.getLogger(__name__)


class _WorkerRank:
    """The worker of this process as a rank."""

    def __init__(self) -> None:
        self._rank = LocalRank(in_use=lambda: worker_config.enabled)
        #: What became of the expected release; None until the worker was put to sleep.
        self._outcome: OperationReport | Failure | None = None

    def answer(self, worker: Any, message: Plain) -> Plain:
        return self._rank.answer(message, functools.partial(self._carry_out, worker))

    def _carry_out(self, worker: Any, request: protocol.Request) -> Result:
        if isinstance(request, protocol.Introduce):
            return self._rank.introduce()
        if isinstance(request, protocol.ExpectRelease):
            self._outcome = None
            vllm_allocator().override = functools.partial(self._release, request.options)
            return None
        if isinstance(request, protocol.TakeOutcome):
            return self._take_outcome()
        if isinstance(request, protocol.SleepNow):
            return self._sleep(worker, request.options, request.level)
        if isinstance(request, protocol.Release):
            # Not in the worker's sleep, which calls CUDA, and so would block in a process that is hibernated.
            return self._rank.release(request.options)
        return self._resume(worker, request.options)

    def _release(self, options: ReleaseOptions) -> None:
        """Release inside the worker's sleep, which must not see the error: the service undoes the release."""
        try:
            self._outcome = self._rank.release(options)
        except Exception as error:
            self._outcome = self._rank.failure_of(error)

    def _take_outcome(self) -> Result:
        vllm_allocator().override = None
        outcome, self._outcome = self._outcome, None
        return outcome

    def _sleep(self, worker: Any, options: ReleaseOptions, level: int) -> Result:
        vllm_allocator().override = functools.partial(self._release, options)
        try:
            worker.sleep(level)
        except Exception:
            if self._outcome is None:
                raise
            logger.exception("the memory was released, but vLLM's worker failed after that")
        return self._take_outcome()

    def _resume(self, worker: Any, options: ResumeOptions) -> Result:
        """Resume inside the worker's wake-up, which must see the error, so as not to restore what it saved."""
        reports: list[OperationReport] = []
        allocator = vllm_allocator()
        allocator.override = lambda: reports.append(self._rank.resume(options))
        try:
            # vLLM has to know when nothing stays asleep.
            worker.wake_up(list(options.tags) if options.tags and _stays_released(options.tags) else None)
        finally:
            allocator.override = None
        return reports[0] if reports else None


def _stays_released(tags: Sequence[str]) -> bool:
    return any(each.released_bytes and each.tag not in tags for each in ms.status().tags)


_rank = _WorkerRank()


def answer(worker: Any, message: Plain) -> Plain:
    """``Worker.memsaver``: answer one message of the rank protocol. Never raises."""
    return _rank.answer(worker, message)
