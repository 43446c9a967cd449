"""One process of an engine: answers each message of the rank protocol by memsaver_core's functions."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import memsaver_core as ms
from memsaver_core import communicators, hibernation, process
from memsaver_core.errors import UnsupportedError
from memsaver_core.options import ReleaseOptions, ResumeOptions
from memsaver_core.policies import COMMUNICATORS, WELL_KNOWN_TAGS, policy_for
from memsaver_core.ranks import protocol
from memsaver_core.ranks.plans import plan_release, plan_resume
from memsaver_core.ranks.progress import ProgressRecord
from memsaver_core.ranks.protocol import ANSWERS, REQUESTS, Answer, Failure, Introduction, Plain, Plan
from memsaver_core.reports import CommunicatorStatus, OperationReport, TagReport

#: The result of a request; None if there is nothing to report.
Result = Introduction | Plan | OperationReport | Failure | None

#: The operation and the phase that each step of a hibernation belongs to.
_STEPS = {
    "lock": ("release", "lock"),
    "checkpoint": ("release", "hibernate"),
    "restore": ("resume", "wake"),
    "unlock": ("resume", "unlock"),
}


class Rank:
    """This process as a rank. An engine with more of its own to do derives a class from it.

    Messages come one at a time, from any thread.
    """

    def __init__(self) -> None:
        self._failed_phase = ""

    def enabled(self) -> bool:
        """Return whether memsaver manages the memory of this rank."""
        return ms.enabled()

    def answer(self, message: Plain) -> Plain:
        """Carry out a message. Never raises: an error is part of the answer, as an engine may give up a rank that
        raises."""
        self._failed_phase = ""
        result: Result
        try:
            request = REQUESTS.decode(message)
            if self.enabled():
                with self._progress.answering():
                    result = self.carry_out(request)
            else:
                result = Introduction() if isinstance(request, protocol.Introduce) else None
        except Exception as error:
            result = Failure.of(error, self._failed_phase)
        return ANSWERS.encode(
            Answer(
                status=ms.status() if self.enabled() else None,
                introduction=result if isinstance(result, Introduction) else None,
                plan=result if isinstance(result, Plan) else None,
                report=result if isinstance(result, OperationReport) else None,
                failure=result if isinstance(result, Failure) else None,
            )
        )

    def carry_out(self, request: protocol.Request) -> Result:
        """Do what ``request`` asks for.

        Raises:
            UnsupportedError: this kind of rank does not know such a message.
            Also what the functions of memsaver_core raise.
        """
        match request:
            case protocol.Introduce():
                obstacles = tuple(hibernation.obstacles(suspending=True))
                return Introduction(ms.read_devices(), obstacles, os.getpid(), self._progress.location)
            case protocol.PrepareRelease(options, exact):
                return plan_release(options, exact=exact)
            case protocol.PrepareResume(options):
                return plan_resume(options)
            case protocol.Release(options):
                return self.release_own(options)
            case protocol.Resume(options):
                tags = _here(options.tags)
                return self.resume(ResumeOptions(tags)) if tags or not options.tags else _nothing("resume")
            case protocol.Reserve(options):
                tags = _here(options.tags)
                if tags or not options.tags:
                    ms.reserve_with(ResumeOptions(tags))
                return _nothing("resume")
            case protocol.GiveBackReserved():
                ms.give_back_reserved()
                return _nothing("resume")
            case protocol.SuspendCommunicators(names, timeout_s):
                return self._communicate("release", names, timeout_s)
            case protocol.ResumeCommunicators(names, timeout_s):
                return self._communicate("resume", names, timeout_s)
            case protocol.HibernationStep(step):
                return self._hibernate(step)
        raise UnsupportedError(f"this rank does not answer {type(request).__name__}")

    def release_own(self, options: ReleaseOptions) -> OperationReport:
        """Release those of the tags that this rank has."""
        tags = _here(options.tags)
        if options.tags and not tags:
            return _nothing("release")
        restore = {tag: options.restore[tag] for tag in _here(options.restore)}
        return self.release(replace(options, tags=tags, restore=restore))

    def release(self, options: ReleaseOptions) -> OperationReport:
        """Release; the engine is idle. Must touch no device if this process is hibernated."""
        return self.followed(functools.partial(ms.release_with, options))

    def resume(self, options: ResumeOptions) -> Result:
        """Resume, and do what the engine does at a wake-up."""
        return self.followed(functools.partial(ms.resume_with, options))

    def followed(self, operate: Callable[..., OperationReport]) -> OperationReport:
        """Run ``operate(log=...)``, followed by the progress record."""
        log = ms.PhaseLog()
        try:
            with self._progress.following(log):
                return operate(log=log)
        except Exception:
            self._failed_phase = log.failed
            raise

    @functools.cached_property
    def _progress(self) -> ProgressRecord:
        return ProgressRecord()

    def _communicate(self, operation: str, names: Sequence[str], timeout_s: float) -> OperationReport:
        """Suspend or resume those of ``names`` that this process has."""
        resuming = operation == "resume"
        act = communicators.resume if resuming else communicators.suspend

        def held(counted: Iterable[CommunicatorStatus]) -> dict[str, int]:
            return {each.name: each.suspendable_bytes for each in counted if each.name in names}

        def operate(log: ms.PhaseLog) -> OperationReport:
            with log.phase(f"{'resume' if resuming else 'suspend'}_communicators"):
                before = held(communicators.found())
                act(tuple(before), timeout_s)
                moved = abs(sum(held(communicators.statuses()).values()) - sum(before.values()))  # counted by the call
            tag = TagReport(
                tag=COMMUNICATORS,
                restore=policy_for(COMMUNICATORS, None).value,
                state="resident" if resuming else "released",
                bytes=moved,
                released_bytes=0 if resuming else moved,
                resumed_bytes=moved if resuming else 0,
            )
            return OperationReport(operation, True, log.seconds, (tag,), log.phases, log.devices())

        return self.followed(operate)

    def _hibernate(self, step: str) -> OperationReport:
        operation, phase = _STEPS[step]
        take: Callable[[], dict[str, float]] = getattr(hibernation, step)

        def operate(log: ms.PhaseLog) -> OperationReport:
            with log.phase(phase) as details:
                details.update(take())
            return OperationReport(operation, True, log.seconds, (), log.phases, log.devices())

        return self.followed(operate)


def _here(tags: Iterable[str]) -> tuple[str, ...]:
    """Return those of ``tags`` that this process has; ranks of one engine may have different ones."""
    saver = process.existing_saver()
    known = {*WELL_KNOWN_TAGS, *(saver.known_tags() if saver is not None else ())}
    return tuple(tag for tag in tags if tag in known)


def _nothing(operation: str) -> OperationReport:
    """Return the report of an operation that had nothing to do."""
    return OperationReport(operation, True, 0.0, (), (), ())
