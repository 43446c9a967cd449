"""The memory of an engine whose processes are others than this one.

Release: prepare -> tags whose content is kept -> communicators -> the other tags -> lock -> checkpoint.
Resume: prepare -> restore -> unlock -> communicators -> tags.
Each step is taken on all ranks before any rank takes the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar

from memsaver_core import PhaseLog
from memsaver_core.device_memory import read_again
from memsaver_core.errors import MemsaverError, UnknownTagError, UnsupportedError
from memsaver_core.options import ReleaseOptions, ResumeOptions, tags_of
from memsaver_core.policies import COMMUNICATORS, WELL_KNOWN_TAGS, RestorePolicy, keeps_all, keeps_any
from memsaver_core.ranks.protocol import (
    Answer,
    GiveBackReserved,
    HibernationStep,
    Plan,
    PrepareRelease,
    PrepareResume,
    Release,
    Request,
    Reserve,
    Resume,
    ResumeCommunicators,
    SuspendCommunicators,
)
from memsaver_core.reports import DeviceMemory, OperationReport, Status
from memsaver_server.ranks import agreement
from memsaver_server.ranks.group import Channel, Deadlines, Group
from memsaver_server.ranks.host_room import shortage
from memsaver_server.ranks.merging import merged_tags
from memsaver_server.ranks.steps import Steps

_T = TypeVar("_T")


class RankMemory:
    """Implements ``Memory``.

    ``status`` is as of the last operation, since asking the ranks would disturb them; how far they are with the
    operation in progress is read from their shared-memory records.

    Args:
        channel: reaches the ranks.
        processes: ids of other processes that the engine cannot do without, by name; they are watched, too.
    """

    def __init__(
        self, channel: Channel, processes: Mapping[str, int] | None = None, deadlines: Deadlines | None = None
    ) -> None:
        self._group = Group(channel, processes or {}, deadlines or Deadlines())
        self._operation = ""
        self._began = 0.0
        #: The policies that a release of these tags had instead of their own.
        self._overrides: dict[str, RestorePolicy] = {}
        self._lost: set[str] = set()

    @property
    def failure(self) -> str:
        """Why no operation is possible any more, or an empty string."""
        return self._group.failure

    def close(self) -> None:
        """Call before the engine ends its processes, which is then no failure."""
        self._group.close()

    def fail(self, cause: str) -> None:
        """Call if the engine's ranks have failed: refuses all operations from now on."""
        self._group.fail(cause)

    def on_failure(self, call: Callable[[], None]) -> None:
        self._group.on_failure(call)

    def take_lost(self) -> set[str]:
        lost, self._lost = self._lost, set()
        return lost

    def enabled(self) -> bool:
        return any(rank.pid is not None for rank in self._group.ranks)

    def check_tags(self, tags: Sequence[str] | None) -> list[str]:
        names = list(tags_of(tags))
        known = {*WELL_KNOWN_TAGS, *(tag.tag for tag in self.status().tags)}
        unknown = [name for name in names if name not in known]
        if unknown and self.enabled():
            raise UnknownTagError(unknown, sorted(known))
        return names

    def status(self) -> Status:
        status = self._group.devices.merged_status(self._group.statuses)
        if self.failure:
            status = replace(status, state="failed", failure=self.failure)
        if self._operation:
            seconds = time.monotonic() - self._began
            status = replace(status, progress=self._group.progress.progress(self._operation, seconds))
        return replace(status, enabled=self.enabled(), ranks=self._group.rank_statuses())

    def read_devices(self) -> tuple[DeviceMemory, ...]:
        pids = frozenset(rank.pid for rank in self._group.ranks if rank.pid is not None)
        return tuple(read_again(device, pids) for device in self._group.devices.readings)

    def hibernation_obstacles(self) -> list[str]:
        """Return what the ranks reported at the start; each rank checks again before anything is released."""
        return self._of_ranks([rank.obstacles for rank in self._group.ranks])

    def prepare_backup(self) -> None:
        """Do nothing: each rank prepares its own once it is loaded."""

    def release(self, options: ReleaseOptions, *, log: PhaseLog | None = None) -> OperationReport:
        """As ``memsaver_core.release_with``, on every rank or on none.

        Raises:
            GroupFailedError: a rank has ended, hangs, or could not undo what it did. All later calls are refused.
            Also as ``memsaver_core.release_with``, the message naming the rank. All ranks are as before.
        """
        log = log or PhaseLog(read=self.read_devices)
        self.check_tags(options.tags)
        self.check_tags(list(options.restore))
        if not self.enabled():
            return self._merged_report("release", (), log)
        with self._operating("release", log) as steps:
            plans = self._plans(steps, options)
            if self._hibernated:
                steps.take("release", "pause", partial(self.ask, Release(_awake(options, options.tags))), list)
            else:
                self._release(steps, options, self._to_suspend(options, plans))
        self._overrides |= {tag: options.restore[tag] for tag in _released(steps.reports) if tag in options.restore}
        return self._merged_report("release", steps.reports, log)

    def resume(self, options: ResumeOptions, *, log: PhaseLog | None = None) -> OperationReport:
        """As ``memsaver_core.resume_with``, on every rank or on none.

        Raises:
            As ``release``.
        """
        log = log or PhaseLog(read=self.read_devices)
        self.check_tags(options.tags)
        if not self.enabled():
            return self._merged_report("resume", (), log)
        with self._operating("resume", log) as steps:
            plans = steps.prepare(PrepareResume(options))
            if self._hibernated:
                self._take_hibernation(steps, "restore", "wake", "checkpoint")
                self._take_hibernation(steps, "unlock", "unlock", "lock")
            if names := agreement.suspended(plans):
                self._take_communicators(steps, ResumeCommunicators, SuspendCommunicators, names)
            before = self._group.statuses
            steps.take("resume", "restore", partial(self.ask, Resume(options)), lambda: self._release_again(before))
        for tag in merged_tags(tag for report in steps.reports for tag in report.tags):
            if tag.resumed_bytes:
                self._overrides.pop(tag.tag, None)
        return self._merged_report("resume", steps.reports, log)

    def check_release(self, options: ReleaseOptions) -> None:
        """Raise what ``release`` would raise now because it is impossible; changes nothing."""
        with self._operating("release", PhaseLog(read=self.read_devices)) as steps:
            self._to_suspend(options, self._plans(steps, options))

    def reserve(self, options: ResumeOptions) -> None:
        """Take the device memory that a resume needs, on every rank or on none.

        Raises:
            As ``resume``.
        """
        with self._operating("resume", PhaseLog(read=self.read_devices)) as steps:
            steps.prepare(PrepareResume(options))
            if not self._hibernated:
                undo = partial(self.ask, GiveBackReserved())
                steps.take("reservation", "reserve", partial(self.ask, Reserve(options)), undo)

    def give_back_reserved(self) -> None:
        self._group.check(self.ask(GiveBackReserved()))

    @property
    def _hibernated(self) -> bool:
        return any(status is not None and status.hibernated for status in self._group.statuses)

    def ask(self, request: Request) -> list[Answer]:
        """Have every rank release or resume.

        Raises:
            GroupFailedError: the ranks have failed.
        """
        return self._group.ask(request)

    def wait(self, call: Future[_T]) -> _T:
        """Return the result of ``call``, a call of the engine in which all of its ranks release memory.

        Raises:
            GroupFailedError: the ranks have failed.
        """
        return self._group.wait(call)

    def release_awake(self, options: ReleaseOptions) -> list[Answer]:
        """Release on every rank while none is hibernated. An engine with a sleep of its own overrides this.

        Raises:
            MemsaverError: the engine refused.
        """
        return self.ask(Release(options))

    def _release(self, steps: Steps, options: ReleaseOptions, communicators: tuple[str, ...]) -> None:
        """Kept content goes first: until something else is gone, all can be undone without loss."""
        tags = [tag for tag in self.status().tags if tag.tag != COMMUNICATORS]
        tags = [tag for tag in tags if not options.tags or tag.tag in options.tags]
        kept = tuple(tag.tag for tag in tags if keeps_any(options.restore.get(tag.tag, tag.restore)))
        asked = options.tags or [tag.tag for tag in tags] or WELL_KNOWN_TAGS
        rest = tuple(tag for tag in asked if tag not in kept and tag != COMMUNICATORS)
        if not self._group.several and not communicators:
            kept, rest = (), kept + rest
        trim = options.hibernate if options.trim is None else options.trim
        if kept:
            self._take_release(steps, "kept content", _awake(options, kept, trim and not rest))
        if communicators:
            self._take_communicators(steps, SuspendCommunicators, ResumeCommunicators, communicators)
        if rest:
            self._take_release(steps, "discarded content", _awake(options, rest, trim))
        if options.hibernate:
            self._take_hibernation(steps, "lock", "lock", "unlock")
            self._take_hibernation(steps, "checkpoint", "hibernate", "restore")

    def _take_release(self, steps: Steps, what: str, options: ReleaseOptions) -> None:
        before = self._group.statuses
        undo = partial(self._resume_again, before, options)
        steps.take(f"release of {what}", "pause", partial(self.release_awake, options), undo)

    def _take_communicators(
        self,
        steps: Steps,
        act: type[SuspendCommunicators | ResumeCommunicators],
        undo: type[SuspendCommunicators | ResumeCommunicators],
        names: tuple[str, ...],
    ) -> None:
        """NCCL's own deadline comes first: the ranks then tell which of them did not come. To undo it, all come again:
        those inside return only when the last one has entered."""
        limit = self._group.deadlines.communicators_s

        def each(request: type[SuspendCommunicators | ResumeCommunicators]) -> Callable[[], list[Answer]]:
            return lambda: self._group.ask(request(names, limit), 1.5 * limit)

        verb = "suspend" if act is SuspendCommunicators else "resume"
        steps.take(
            f"{verb} of communicators",
            f"{verb}_communicators",
            each(act),
            lambda: each(act)() and each(undo)(),
        )

    def _take_hibernation(self, steps: Steps, step: _Step, phase: str, undo: _Step) -> None:
        limit = self._group.hibernation_limit_s()

        ask = self._group.ask
        steps.take(step, phase, lambda: ask(HibernationStep(step), limit), lambda: ask(HibernationStep(undo), limit))

    def _plans(self, steps: Steps, options: ReleaseOptions) -> list[Plan]:
        """Return what a release would do; raise OutOfHostMemoryError if the host lacks memory for all ranks."""
        here = self._group.progress.seen
        plans = steps.prepare(PrepareRelease(options))
        if shortage(plans, self._group.statuses, here) is not None:
            plans = steps.prepare(PrepareRelease(options, exact=True))
            if (error := shortage(plans, self._group.statuses, here)) is not None:
                raise error
        return plans

    def _to_suspend(self, options: ReleaseOptions, plans: Sequence[Plan]) -> tuple[str, ...]:
        """Return the communicators that a release suspends.

        Raises:
            UnsupportedError: it is to hibernate, and something stands in the way.
        """
        names, reasons = agreement.suspendable(plans)
        if options.hibernate:
            found = self._of_ranks([plan.obstacles for plan in plans])
            if found or reasons:
                obstacles = "; ".join(dict.fromkeys([*found, *reasons]))
                raise UnsupportedError(f"the engine cannot be hibernated: {obstacles}; nothing was released")
        asked = options.hibernate or not options.tags or COMMUNICATORS in options.tags
        return names if asked else ()

    def _of_ranks(self, told: Sequence[Sequence[str]]) -> list[str]:
        """Return what each rank told, with its number if there are several."""
        several = self._group.several
        return [f"rank {rank}: {each}" if several else each for rank, all_ in enumerate(told) for each in all_]

    def _resume_again(self, before: Sequence[Status | None], options: ReleaseOptions) -> list[Answer]:
        """Resume what was released since ``before``, and nothing else."""
        tags = _changed(before, self._group.statuses)
        policies = {**{tag.tag: tag.restore for tag in self.status().tags}, **options.restore}
        self._lost.update(tag for tag in tags if not keeps_all(policies[tag]))
        return self.ask(Resume(ResumeOptions(tags))) if tags else []

    def _release_again(self, before: Sequence[Status | None]) -> list[Answer]:
        """Release what was resumed since ``before``; with its content, of which the engine may have restored parts."""
        tags = _changed(self._group.statuses, before)
        restore = {tag: self._overrides[tag] for tag in tags if tag in self._overrides}
        return self.ask(Release(ReleaseOptions(tags, restore))) if tags else []

    @contextmanager
    def _operating(self, operation: str, log: PhaseLog) -> Iterator[Steps]:
        """The steps of ``operation`` are taken inside."""
        self._group.raise_if_failed()
        self._group.progress.begin()
        self._operation, self._began = operation, time.monotonic()
        steps = Steps(self._group, log)
        try:
            with log.running(lambda: self._group.progress.phase or steps.phase):
                yield steps
        except MemsaverError:
            if steps.failed_phase:
                log.add_failure(steps.failed_phase)
            raise
        finally:
            self._operation = self._group.step = ""

    def _merged_report(self, operation: str, reports: Sequence[OperationReport], log: PhaseLog) -> OperationReport:
        tags = merged_tags(tag for report in reports for tag in report.tags)
        return OperationReport(operation, self.enabled(), log.seconds, tags, log.phases, log.devices())


_Step = Literal["lock", "checkpoint", "restore", "unlock"]


def _awake(options: ReleaseOptions, tags: tuple[str, ...], trim: bool = False) -> ReleaseOptions:
    """Return ``options`` for a step that releases ``tags`` and no more."""
    restore = {tag: policy for tag, policy in options.restore.items() if tag in tags}
    return replace(options, tags=tags, restore=restore, trim=trim, hibernate=False)


def _released(reports: Sequence[OperationReport]) -> set[str]:
    return {tag.tag for report in reports for tag in report.tags if tag.released_bytes}


def _changed(before: Sequence[Status | None], after: Sequence[Status | None]) -> tuple[str, ...]:
    """Return the tags of memory of which some rank has more released in ``after`` than in ``before``."""
    changed: set[str] = set()
    for one, other in zip(before, after, strict=True):
        earlier = {tag.tag: tag.released_bytes for tag in one.tags} if one is not None else {}
        changed |= {tag.tag for tag in (other.tags if other else ()) if tag.released_bytes > earlier.get(tag.tag, 0)}
    return tuple(sorted(changed - {COMMUNICATORS}))
