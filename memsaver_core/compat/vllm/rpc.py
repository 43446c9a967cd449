"""What a vLLM worker answers to ``collective_rpc("memsaver", args=(message,))``: the rank protocol.

vLLM's own sleep and wake-up run around a release and a resume, so that vLLM's state stays in step with the memory.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import memsaver_core as ms
from memsaver_core.compat.vllm import saved_buffers
from memsaver_core.compat.vllm.allocator import vllm_allocator
from memsaver_core.compat.vllm.config import worker_config
from memsaver_core.options import ReleaseOptions, ResumeOptions
from memsaver_core.ranks import protocol
from memsaver_core.ranks.protocol import Failure, Plain
from memsaver_core.ranks.rank import Rank, Result
from memsaver_core.reports import OperationReport

logger = logging.getLogger(__name__)


class _WorkerRank(Rank):
    """The worker of this process. A ``Release`` by itself calls no CUDA, as the worker's sleep would: it is for a
    process that is hibernated."""

    worker: Any = None

    def __init__(self) -> None:
        super().__init__()
        #: What became of the expected release; None until the worker was put to sleep.
        self._outcome: OperationReport | Failure | None = None
        #: What the worker used of its notes in the resume that was the last message.
        self._used: dict[str, Any] = {}
        self._sleeping = False

    def enabled(self) -> bool:
        return worker_config.enabled

    def carry_out(self, request: protocol.Request) -> Result:
        used, self._used = self._used, {}
        match request:
            case protocol.Release():
                # Another rank could not resume: what this one discards again comes back from these.
                vars(self.worker).update(used)
            case protocol.ExpectRelease(options):
                self._outcome = None
                vllm_allocator().override = functools.partial(self._release_asleep, options)
                return None
            case protocol.TakeOutcome():
                return self._take_outcome()
            case protocol.SleepNow(options, level):
                return self._sleep(options, level)
        return super().carry_out(request)

    def _release_asleep(self, options: ReleaseOptions) -> None:
        """Release inside the worker's sleep, which must not see the error: the service undoes the release."""
        try:
            self._outcome = self.release_own(options)
        except Exception as error:
            self._outcome = Failure.of(error, self._failed_phase)

    @contextmanager
    def sleeping(self) -> Iterator[None]:
        """The worker is put to sleep inside: the service sees that this rank is at work, as with a message."""
        with nullcontext() if self._sleeping or not self.enabled() else self._progress.answering():
            yield

    def _take_outcome(self) -> Result:
        vllm_allocator().override = None
        outcome, self._outcome = self._outcome, None
        return outcome

    def _sleep(self, options: ReleaseOptions, level: int) -> Result:
        vllm_allocator().override = functools.partial(self._release_asleep, options)
        self._sleeping = True
        try:
            self.worker.sleep(level)
        except Exception:
            if self._outcome is None:
                raise
            logger.exception("the memory was released, but vLLM's worker failed after that")
        finally:
            self._sleeping = False
        return self._take_outcome()

    def resume(self, options: ResumeOptions) -> Result:
        """Resume inside the worker's wake-up, which must see the error, so as not to restore what it saved."""
        self._used = saved_buffers.notes(self.worker)
        reports: list[OperationReport] = []
        allocator = vllm_allocator()
        allocator.override = lambda: reports.append(self.followed(functools.partial(ms.resume_with, options)))
        try:
            # vLLM has to know when nothing stays asleep.
            tags = options.tags
            part = tags and any(each.released_bytes and each.tag not in tags for each in ms.status().tags)
            self.worker.wake_up(list(tags) if part else None)
        finally:
            allocator.override = None
        return reports[0] if reports else None


_rank = _WorkerRank()
sleeping = _rank.sleeping


def answer(worker: Any, message: Plain) -> Plain:
    """``Worker.memsaver``: answer one message of the rank protocol. Never raises."""
    _rank.worker = worker
    return _rank.answer(message)
