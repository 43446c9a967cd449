"""A rank's own side of the protocol: the operations on the memory of this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property

import memsaver_core as ms
from memsaver_core.options import ReleaseOptions, ResumeOptions
from memsaver_core.ranks.progress import ProgressRecord
from memsaver_core.ranks.protocol import (
    Answer,
    Failure,
    Introduction,
    Plain,
    Request,
    decode_request,
    encode_answer,
)
from memsaver_core.reports import OperationReport

#: What a request comes to; None if there is nothing to report.
Result = Introduction | OperationReport | Failure | None


class LocalRank:
    """This process as a rank.

    Args:
        in_use: whether the engine's memory in this process is memsaver's.
    """

    def __init__(self, in_use: Callable[[], bool] = ms.enabled) -> None:
        self._in_use = in_use
        self._failed_phase = ""

    @cached_property
    def _progress(self) -> ProgressRecord:
        return ProgressRecord()

    def answer(self, message: Plain, carry_out: Callable[[Request], Result]) -> Plain:
        """Answer ``message`` with the result of ``carry_out``.

        Never raises: an error is part of the answer, as an engine may give up a rank that raises.
        """
        result: Result
        self._failed_phase = ""
        try:
            result = carry_out(decode_request(message))
        except Exception as error:
            result = self.failure_of(error)
        return encode_answer(
            Answer(
                status=ms.status() if self._in_use() else None,
                introduction=result if isinstance(result, Introduction) else None,
                report=result if isinstance(result, OperationReport) else None,
                failure=result if isinstance(result, Failure) else None,
            )
        )

    def failure_of(self, error: Exception) -> Failure:
        """Describe ``error``, with the phase if it ended this rank's last operation."""
        return Failure.of(error, self._failed_phase)

    def introduce(self) -> Introduction:
        if not self._in_use():
            return Introduction()
        obstacles = tuple(ms.hibernation_obstacles())
        return Introduction(ms.read_devices(), obstacles, os.getpid(), self._progress.location)

    def release(self, options: ReleaseOptions) -> OperationReport:
        """As ``memsaver_core.release_with``; the progress record follows."""
        return self._followed(lambda log: ms.release_with(options, log=log))

    def resume(self, options: ResumeOptions) -> OperationReport:
        """As ``memsaver_core.resume_with``; the progress record follows."""
        return self._followed(lambda log: ms.resume_with(options, log=log))

    def _followed(self, operate: Callable[[ms.PhaseLog], OperationReport]) -> OperationReport:
        log = ms.PhaseLog()
        self._failed_phase = ""
        try:
            with self._progress.following(log):
                return operate(log)
        except Exception:
            self._failed_phase = log.failed
            raise
