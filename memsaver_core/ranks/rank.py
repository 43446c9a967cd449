"""One process of an engine: answers each message of the rank protocol by memsaver_core's functions."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import memsaver_core as ms
from memsaver_core import communicators, hibernation, process
from memsaver_core.contract.errors import UnsupportedError
from memsaver_core.contract.phases import Phase
from memsaver_core.contract.policies import COMMUNICATORS, WELL_KNOWN_TAGS, policy_for
from memsaver_core.contract.reports import OperationReport, TagReport
from memsaver_core.contract.requests import MemoryRequest, Tagged, Verb
from memsaver_core.contract.status import CommunicatorStatus
from memsaver_core.device_memory import read_devices
from memsaver_core.ranks import protocol
from memsaver_core.ranks.plans import plan_release, plan_resume
from memsaver_core.ranks.progress import ProgressRecord
from memsaver_core.ranks.protocol import ANSWERS, REQUESTS, Answer, Failure, Introduction, Plain, Plan
from memsaver_core.rendezvous import started
from memsaver_core.updates import Update

_NOTHING_RESUMED = OperationReport(operation="resume")

#: The result of a request; None if there is nothing to report, a text from a step of an update.
Result = Introduction | Plan | OperationReport | Failure | str | None

#: The operation and the phase that each step of a hibernation belongs to.
_STEPS: dict[str, tuple[Verb, Phase]] = {
    "lock": ("release", Phase.LOCK),
    "checkpoint": ("release", Phase.HIBERNATE),
    "restore": ("resume", Phase.WAKE),
    "unlock": ("resume", Phase.UNLOCK),
}


class Rank:
    """This process as a rank; an engine may derive a class from it. Messages come one at a time, from any thread."""

    def __init__(self) -> None:
        self._failed_phase = ""
        self._update: Update | None = None
        self._moving: Future[int] | None = None

    def enabled(self) -> bool:
        """Return whether memsaver manages the memory of this rank."""
        return ms.enabled()

    def answer(self, message: Plain) -> Plain:
        """Carry out a message. Errors are answers, too: an engine may give up a rank that raises."""
        self._failed_phase = ""
        result: Result
        try:
            request = REQUESTS.decode(message)
            if self.enabled():
                with self.progress.answering():
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
                taken=result if isinstance(result, str) else "",
            )
        )

    def carry_out(self, request: protocol.Request) -> Result:
        """Do what ``request`` asks for; raise UnsupportedError if this kind of rank does not know such a message."""
        match request:
            case protocol.Introduce():
                obstacles = tuple(hibernation.obstacles(suspending=True))
                return Introduction(ms.read_devices(), obstacles, os.getpid(), self.progress.location)
            case protocol.Prepare("release", memory, exact):
                return plan_release(memory, exact=exact)
            case protocol.Prepare("resume", memory):
                return plan_resume(memory)
            case protocol.Move("release", memory):
                return self.release_own(memory)
            case protocol.Move("resume", memory):
                own = _own(memory)
                return _NOTHING_RESUMED if own is None else self.resume(own)
            case protocol.Reserve("release", memory):
                plan_release(memory, reserve_disk=True)
                return OperationReport(operation="release")
            case protocol.Reserve("resume", memory):
                if (own := _own(memory)) is not None:
                    ms.reserve_with(own)
                return _NOTHING_RESUMED
            case protocol.GiveBackReserved():
                ms.give_back_reserved()
                return _NOTHING_RESUMED
            case protocol.MoveCommunicators():
                return self._communicate(request)
            case protocol.HibernationStep(step):
                return self._hibernate(step)
            case protocol.WriteAsleep(step, tag, processes, source):
                if self._update is None:
                    self._update = Update(tag, processes, source)
                update = self._update
                if step in ("commit", "drop"):
                    self._update = None
                return update.take(step)
        raise UnsupportedError(f"this rank does not answer {type(request).__name__}")

    def release_own(self, memory: MemoryRequest) -> OperationReport:
        """Release those tags that this process has; the engine is idle. Touches no device while hibernated."""
        if (own := _own(memory)) is None:
            return OperationReport(operation="release")
        return self.followed(functools.partial(ms.release_with, own))

    def resume(self, tagged: Tagged) -> Result:
        """Resume, and do what the engine does at a wake-up."""
        return self.followed(functools.partial(ms.resume_with, tagged))

    def followed(self, operate: Callable[..., OperationReport]) -> OperationReport:
        """Run ``operate(log=...)``; meanwhile the progress record shows its progress."""
        log = ms.PhaseLog(read_devices)
        try:
            with self.progress.following(log):
                return operate(log=log)
        except Exception:
            self._failed_phase = log.failed
            raise

    @functools.cached_property
    def progress(self) -> ProgressRecord:
        return ProgressRecord()

    def _communicate(self, request: protocol.MoveCommunicators) -> OperationReport:
        """Suspend or resume those of the named communicators that this process has."""
        resuming = request.operation == "resume"

        def held(counted: Iterable[CommunicatorStatus]) -> dict[str, int]:
            return {each.name: each.suspendable_bytes for each in counted if each.name in request.names}

        def move() -> int:
            before = held(communicators.found())
            act = communicators.resume if resuming else communicators.suspend
            act(tuple(before), request.timeout_s)
            return abs(sum(held(communicators.statuses()).values()) - sum(before.values()))  # counted by the call

        def operate(log: ms.PhaseLog) -> OperationReport:
            with log.phase(Phase.RESUME_COMMUNICATORS if resuming else Phase.SUSPEND_COMMUNICATORS):
                moved = moving.result()
            tag = TagReport(
                tag=COMMUNICATORS,
                restore=policy_for(COMMUNICATORS, None).value,
                state="resident" if resuming else "released",
                bytes=moved,
                released_bytes=0 if resuming else moved,
                resumed_bytes=moved if resuming else 0,
            )
            return log.report(request.operation, (tag,))

        moving = self._moving or started(move, "memsaver-communicators")
        self._moving = moving if request.begin else None
        return OperationReport(operation=request.operation) if request.begin else self.followed(operate)

    def _hibernate(self, step: str) -> OperationReport:
        operation, phase = _STEPS[step]
        take: Callable[[], dict[str, float]] = getattr(hibernation, step)

        def operate(log: ms.PhaseLog) -> OperationReport:
            with log.phase(phase) as details:
                details.update(take())
            return log.report(operation, ())

        return self.followed(operate)


def _own(memory: MemoryRequest) -> MemoryRequest | None:
    """Return ``memory`` with those of its tags that this process has, as ranks of one engine may have different ones;
    None if it is about others alone."""
    known = {*WELL_KNOWN_TAGS, *process.known_tags()}
    tags = tuple(tag for tag in memory.tags if tag in known)
    restore = {tag: policy for tag, policy in memory.restore.items() if tag in known}
    return memory.model_copy(update={"tags": tags, "restore": restore}) if tags or not memory.tags else None
