"""A rank's side of the protocol: operations on the memory of this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

import memsaver_core as ms
from memsaver_core.options import ReleaseOptions, ResumeOptions
from memsaver_core.ranks.progress import ProgressRecord
from memsaver_core.ranks.protocol import ANSWERS, REQUESTS, Answer, Failure, Introduction, Plain, Request
from memsaver_core.reports import OperationReport

#: The result of a request; None if there is nothing to report.
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
        self._failed_phase = ""
        try:
            result = carry_out(REQUESTS.decode(message))
        except Exception as error:
            result = self.failure_of(error)
        return ANSWERS.encode(
            Answer(
                status=ms.status() if self._in_use() else None,
                introduction=result if isinstance(result, Introduction) else None,
                report=result if isinstance(result, OperationReport) else None,
                failure=result if isinstance(result, Failure) else None,
            )
        )

    def failure_of(self, error: Exception) -> Failure:
        """Describe ``error``, with the phase if an operation of this rank failed in one."""
        return Failure.of(error, self._failed_phase)

    def introduce(self) -> Introduction:
        if not self._in_use():
            return Introduction()
        obstacles = tuple(ms.hibernation_obstacles())
        return Introduction(ms.read_devices(), obstacles, os.getpid(), self._progress.location)

    def release(self, options: ReleaseOptions) -> OperationReport:
        """As ``memsaver_core.release_with``, followed by the progress record."""
        return self._followed(ms.release_with, options)

    def resume(self, options: ResumeOptions) -> OperationReport:
        """As ``memsaver_core.resume_with``, followed by the progress record."""
        return self._followed(ms.resume_with, options)

    def _followed(self, operate: Callable[..., OperationReport], options: Any) -> OperationReport:
        log = ms.PhaseLog()
        try:
            with self._progress.following(log):
                return operate(options, log=log)
        except Exception:
            self._failed_phase = log.failed
            raise
