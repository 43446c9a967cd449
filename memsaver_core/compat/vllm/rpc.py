"""What a vLLM worker answers to ``collective_rpc("memsaver", args=(message,))``: the rank protocol.

vLLM's own sleep and wake-up run around a release and a resume, so that vLLM's state stays in step with the memory.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import memsaver_core as ms
from memsaver_core.compat.vllm.allocator import vllm_allocator
from memsaver_core.compat.vllm.config import worker_config
from memsaver_core.errors import UnsupportedError
from memsaver_core.options import ReleaseOptions, ResumeOptions
from memsaver_core.ranks import protocol
from memsaver_core.ranks.progress import ProgressRecord
from memsaver_core.ranks.protocol import ANSWERS, REQUESTS, Answer, Failure, Introduction, Plain
from memsaver_core.reports import OperationReport

logger = logging.getLogger(__name__)

#: The result of a request; None if there is nothing to report.
Result = Introduction | OperationReport | Failure | None


class _WorkerRank:
    """The worker of this process as a rank."""

    def __init__(self) -> None:
        self._failed_phase = ""
        #: What became of the expected release; None until the worker was put to sleep.
        self._outcome: OperationReport | Failure | None = None

    @functools.cached_property
    def _progress(self) -> ProgressRecord:
        return ProgressRecord()

    def answer(self, worker: Any, message: Plain) -> Plain:
        """Never raises: an error is part of the answer, as an engine may give up a rank that raises."""
        self._failed_phase = ""
        try:
            result = self._carry_out(worker, REQUESTS.decode(message))
        except Exception as error:
            result = Failure.of(error, self._failed_phase)
        return ANSWERS.encode(
            Answer(
                status=ms.status() if worker_config.enabled else None,
                introduction=result if isinstance(result, Introduction) else None,
                report=result if isinstance(result, OperationReport) else None,
                failure=result if isinstance(result, Failure) else None,
            )
        )

    def _carry_out(self, worker: Any, request: protocol.Request) -> Result:
        if isinstance(request, protocol.Introduce):
            if not worker_config.enabled:
                return Introduction()
            obstacles = tuple(ms.hibernation_obstacles())
            return Introduction(ms.read_devices(), obstacles, os.getpid(), self._progress.location)
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
            return self._followed(ms.release_with, request.options)
        if isinstance(request, protocol.Resume):
            return self._resume(worker, request.options)
        raise UnsupportedError(f"a vLLM worker does not answer {type(request).__name__}")

    def _release(self, options: ReleaseOptions) -> None:
        """Release inside the worker's sleep, which must not see the error: the service undoes the release."""
        try:
            self._outcome = self._followed(ms.release_with, options)
        except Exception as error:
            self._outcome = Failure.of(error, self._failed_phase)

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
        allocator.override = lambda: reports.append(self._followed(ms.resume_with, options))
        try:
            # vLLM has to know when nothing stays asleep.
            tags = options.tags
            part = tags and any(each.released_bytes and each.tag not in tags for each in ms.status().tags)
            worker.wake_up(list(tags) if part else None)
        finally:
            allocator.override = None
        return reports[0] if reports else None

    def _followed(self, operate: Callable[..., OperationReport], options: Any) -> OperationReport:
        """Release or resume, followed by the progress record."""
        log = ms.PhaseLog()
        try:
            with self._progress.following(log):
                return operate(options, log=log)
        except Exception:
            self._failed_phase = log.failed
            raise


_rank = _WorkerRank()


def answer(worker: Any, message: Plain) -> Plain:
    """``Worker.memsaver``: answer one message of the rank protocol. Never raises."""
    return _rank.answer(worker, message)
