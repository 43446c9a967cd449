"""The memory of an engine that runs in other processes than this one.

Release: prepare -> tags whose content is kept -> the other tags -> lock -> checkpoint; communicators beside the tags.
Resume: prepare -> restore -> unlock -> tags, and communicators beside them.
Each step is taken on all ranks before any rank takes the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

from memsaver_core import PhaseLog, process
from memsaver_core.contract import errors
from memsaver_core.contract.phases import Phase
from memsaver_core.contract.policies import COMMUNICATORS, WELL_KNOWN_TAGS, RestorePolicy, keeps_all, keeps_any
from memsaver_core.contract.reports import OperationReport
from memsaver_core.contract.requests import MemoryRequest, OnTags, Tagged, Verb
from memsaver_core.contract.status import DeviceMemory, Status
from memsaver_core.device_memory import read_again
from memsaver_core.manifests import WeightsKey
from memsaver_core.ranks import protocol
from memsaver_core.release_resume import available_host_bytes, tags_left_resident, total_host_bytes
from memsaver_core.updates import Step, in_steps
from memsaver_server.ranks.group import SLOWEST_COPY, Channel, Deadlines, Group
from memsaver_server.ranks.merging import merged_tags

#: A call that every rank runs; returns their answers.
Act = Callable[[], list[protocol.Answer]]


class Steps:
    """Takes steps on every rank of ``group``, and adds their phases to ``log``. ``reports`` are those of the ranks,
    ``failed_phase`` is where the first rank failed, ``phase`` the one to show while the ranks report none."""

    def __init__(self, group: Group, log: PhaseLog) -> None:
        self._group = group
        self._log = log
        self._undo: list[tuple[str, Act]] = []
        self.reports: list[OperationReport] = []
        self.failed_phase = ""
        self.phase = Phase.PREPARE.value

    def prepare(self, request: protocol.Request) -> dict[int, protocol.Plan]:
        """Have every rank check the operation; raise MemsaverError if it is impossible. Nothing is changed."""
        self._group.step = "preparation"
        answers = self._group.ask(request, self._group.deadlines.prepare_s)
        self._check(answers)
        return {rank: answer.plan or protocol.Plan() for rank, answer in zip(self._group.asked, answers, strict=True)}

    def take(self, name: str, phase: Phase, act: Act, undo: Act) -> None:
        """Have every rank do ``act``; ``name`` stands for this step in messages. If it fails on a rank, ``undo`` takes
        it back on the ranks that did anything, and so do the undos of earlier steps. Raises MemsaverError: all is as
        before the operation. Raises GroupFailedError if the ranks have failed, or cannot undo it."""
        self.phase, self._group.step = phase.value, name
        self._undo.append((name, undo))
        try:
            answers = act()
            self._check(answers)
            reports = [answer.report for answer in answers if answer.report is not None]
            if len(reports) < len(answers):
                why = "the engine's own call did not reach its memory"
                raise errors.MemsaverError(f"a rank sent no report: {why}; repeat the call")
        except errors.GroupFailedError:
            raise
        except errors.MemsaverError as error:
            self._undo_all(error)
            raise
        self.reports += reports
        self._log.add(self._group.devices.merged_phases(self._group.asked, reports))

    def _check(self, answers: Sequence[protocol.Answer]) -> None:
        self.failed_phase = next((each.failure.phase for each in answers if each.failure is not None), "")
        self._group.check(answers)

    def _undo_all(self, error: errors.MemsaverError) -> None:
        for name, undo in reversed(self._undo):
            self._group.step = f"undoing of the {name}"
            try:
                self._group.check(undo())
            except errors.GroupFailedError:
                raise
            except errors.MemsaverError as left:
                raise self._group.fail(f"{error}; and the {name} cannot be undone: {left}") from error


class RankMemory(Group):
    """Implements ``WatchedMemory``.

    ``status`` is that after the last operation, since asking the ranks would disturb them; how far they are with the
    operation in progress is read from their shared-memory records.
    """

    def __init__(
        self,
        channel: Channel,
        processes: Mapping[str, int] | None = None,
        deadlines: Deadlines | None = None,
        dp_ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(channel, processes or {}, deadlines or Deadlines(), dp_ranks)
        self._operation = ""
        self._began = 0.0
        #: By tag, the policy that its release named in place of the usual one.
        self._overrides: dict[str, RestorePolicy] = {}
        self._lost: set[str] = set()
        self._host_bytes = total_host_bytes()

    def take_lost(self) -> set[str]:
        lost, self._lost = self._lost, set()
        return lost

    def enabled(self) -> bool:
        return any(rank.pid is not None for rank in self.ranks)

    def check_tags(self, tags: Sequence[str] | None) -> list[str]:
        names = list(dict.fromkeys(tags or ()))
        if self.enabled():
            errors.UnknownTagError.check(names, (*WELL_KNOWN_TAGS, *(tag.tag for tag in self.status().tags)))
        return names

    def status_of(self, dp_ranks: Sequence[int]) -> Status:
        """Return what the ranks of these data-parallel engines hold."""
        ranks = self.ranks_of(dp_ranks)
        statuses = [status if rank in ranks else None for rank, status in enumerate(self.statuses)]
        return self._merged(statuses)

    def status(self) -> Status:
        status = self._merged(self.statuses)
        if self.failure:
            status = status.model_copy(update={"state": "failed", "failure": self.failure})
        if self._operation:
            progress = self.progress.progress(self._operation, time.monotonic() - self._began)
            status = status.model_copy(update={"progress": progress})
        return status.model_copy(update={"enabled": self.enabled(), "ranks": self.rank_statuses()})

    def _merged(self, statuses: Sequence[Status | None]) -> Status:
        """Merge what the ranks hold. Each may use most of its host; those of this host together have no more."""
        status = self.devices.merged_status(statuses)
        limits = (each.host_backup.limit_bytes for rank in self.progress.seen if (each := statuses[rank]))
        limit = status.host_backup.limit_bytes - max(0, sum(limits) - self._host_bytes)
        return status.model_copy(update={"host_backup": status.host_backup.model_copy(update={"limit_bytes": limit})})

    def read_devices(self) -> tuple[DeviceMemory, ...]:
        pids = frozenset(rank.pid for rank in self.ranks if rank.pid is not None)
        return tuple(read_again(device, pids) for device in self.devices.readings)

    def hibernation_obstacles(self) -> list[str]:
        """Return what the ranks reported at the start; each rank checks again before anything is released."""
        return self._of_ranks({rank: each.obstacles for rank, each in enumerate(self.ranks)})

    def prepare_backup(self) -> None:
        """Do nothing: each rank prepares its own once it is loaded."""

    @contextmanager
    def written_asleep(self, tag: str, source: WeightsKey | None = None) -> Iterator[None]:
        """As ``memsaver_core.updates.written_asleep``, on every rank or on none."""
        self.raise_if_failed()
        nbytes = max((each.bytes for each in self.status().tags if each.tag == tag), default=0)
        limit_s = self.deadlines.idle_s + nbytes / SLOWEST_COPY

        def take(step: Step) -> list[str]:
            if step == "drop" and self.failure:
                return []
            self.step = f"update ({step})"
            try:
                answers = self.ask(protocol.WriteAsleep(step, tag, len(self.progress.seen) or 1, source), limit_s)
                self.check(answers)
            except errors.MemsaverError as error:
                if step != "commit":
                    raise
                raise self.fail(f"ranks may have different weights: {error}") from error
            finally:
                self.step = ""
            return [each.taken for each in answers]

        with in_steps(take, shared=source is not None):
            yield

    def release(self, request: MemoryRequest, *, log: PhaseLog | None = None) -> OperationReport:
        """As ``memsaver_core.release_with``, on every rank or on none; if a ``Release`` names data-parallel engines, on
        theirs alone. Errors name the rank. GroupFailedError: a rank has ended, hangs, or could not undo what it
        did; all later calls are refused."""
        log = log or PhaseLog(read=self.read_devices)
        self.check_tags(request.tags)
        self.check_tags(list(request.restore))
        if not self.enabled():
            return self._merged_report("release", (), log)
        with self._operating("release", log, request) as steps:
            plans = self._plans(steps, request)
            if self.hibernated:
                again = protocol.Move("release", _awake(request, request.tags))
                steps.take("release", Phase.PAUSE, partial(self.ask, again), list)
            else:
                self._release(steps, request, self._to_suspend(request, plans))
        released = {tag.tag for report in steps.reports for tag in report.tags if tag.released_bytes}
        self._overrides |= {tag: policy for tag, policy in request.restore.items() if tag in released}
        return self._merged_report("release", steps.reports, log)

    def resume(self, request: Tagged, *, log: PhaseLog | None = None) -> OperationReport:
        """As ``memsaver_core.resume_with``, on the ranks that ``release`` would take; raises likewise."""
        log = log or PhaseLog(read=self.read_devices)
        self.check_tags(request.tags)
        if not self.enabled():
            return self._merged_report("resume", (), log)
        memory = MemoryRequest(tags=request.tags)
        with self._operating("resume", log, request) as steps:
            plans = steps.prepare(protocol.Prepare("resume", memory))
            if self.hibernated:
                self._take_hibernation(steps, "restore", Phase.WAKE, "checkpoint")
                self._take_hibernation(steps, "unlock", Phase.UNLOCK, "lock")
            suspended = {each.name for plan in plans.values() for each in plan.communicators if each.suspended}
            with self._moving_communicators(steps, "resume", tuple(sorted(suspended))):
                before = self.statuses
                act = partial(self.ask, protocol.Move("resume", memory))
                steps.take("resume", Phase.RESTORE, act, lambda: self._release_again(before))
        for tag in merged_tags(tag for report in steps.reports for tag in report.tags):
            if tag.resumed_bytes:
                self._overrides.pop(tag.tag, None)
        return self._merged_report("resume", steps.reports, log)

    def check_release(self, request: MemoryRequest) -> None:
        """Raise the error with which ``release`` would certainly fail now; hold the disk space that it needs."""
        with self._operating("release", PhaseLog(read=self.read_devices), request) as steps:
            self._to_suspend(request, self._plans(steps, request))
            self._take_reservation(steps, Phase.CHECK, protocol.Reserve("release", request))

    def reserve(self, request: Tagged) -> None:
        """Take the device memory that a resume needs, on every rank or on none; raises as ``resume``."""
        with self._operating("resume", PhaseLog(read=self.read_devices), request) as steps:
            memory = MemoryRequest(tags=request.tags)
            steps.prepare(protocol.Prepare("resume", memory))
            self._take_reservation(steps, Phase.RESERVE, protocol.Reserve("resume", memory))

    def _take_reservation(self, steps: Steps, phase: Phase, request: protocol.Reserve) -> None:
        if not self.hibernated:
            steps.take("reservation", phase, partial(self.ask, request), partial(self.ask, protocol.GiveBackReserved()))

    def resize(self, pages: int, before: int) -> None:
        """Back only the first ``pages`` pages of the KV cache with memory, on every rank, or only the first ``before``
        as now. Raises as ``memsaver_core.resize`` and ``release``."""
        with self._operating("resume", PhaseLog(read=self.read_devices), Tagged()) as steps:
            undo = partial(self.ask, protocol.Resize(before))
            steps.take("resize of the KV cache", Phase.RESERVE, partial(self.ask, protocol.Resize(pages)), undo)

    def give_back_reserved(self) -> None:
        self.check(self.ask(protocol.GiveBackReserved()))

    @property
    def hibernated(self) -> bool:
        return any(status is not None and status.hibernated for status in self.statuses)

    def release_awake(self, request: MemoryRequest, again: bool) -> list[protocol.Answer]:
        """Release on every rank while none is hibernated; ``again``: as an earlier step of this operation did.
        Overridden for vLLM, whose own sleep does it, or refuses."""
        return self.ask(protocol.Move("release", request))

    def _release(self, steps: Steps, request: MemoryRequest, communicators: tuple[str, ...]) -> None:
        """Release kept content first: until other content is discarded, all can be undone without loss."""
        tags = [tag for tag in self.status().tags if tag.tag != COMMUNICATORS and request.concerns(tag.tag)]
        left = tags_left_resident(tags, request)
        tags = [tag for tag in tags if tag.tag not in left]
        kept = tuple(tag.tag for tag in tags if keeps_any(request.restore.get(tag.tag, tag.restore)))
        asked = request.tags or [tag.tag for tag in tags] or WELL_KNOWN_TAGS
        rest = tuple(tag for tag in asked if tag not in kept and tag != COMMUNICATORS)
        if not self.several and not communicators:
            kept, rest = (), kept + rest
        with self._moving_communicators(steps, "release", communicators):
            if kept:
                self._take_release(steps, "kept content", _awake(request, kept, request.trims and not rest))
            if rest:
                self._take_release(steps, "discarded content", _awake(request, rest, request.trims), again=bool(kept))
        if request.hibernate:
            self._take_hibernation(steps, "lock", Phase.LOCK, "unlock")
            self._take_hibernation(steps, "checkpoint", Phase.HIBERNATE, "restore")

    def _take_release(self, steps: Steps, what: str, request: MemoryRequest, again: bool = False) -> None:
        before = self.statuses
        undo = partial(self._resume_again, before, request)
        steps.take(f"release of {what}", Phase.PAUSE, partial(self.release_awake, request, again), undo)

    @contextmanager
    def _moving_communicators(self, steps: Steps, operation: Verb, names: tuple[str, ...]) -> Iterator[None]:
        """Suspend or resume ``names`` while the steps in the block are taken. The ranks' own time limit ends before
        that of the step, so that they can report which rank is missing. An undo first repeats the call on all ranks:
        those that are inside NCCL return only when the last one has entered."""
        limit = self.deadlines.communicators_s
        releasing = operation == "release"
        name = f"{'suspend' if releasing else 'resume'} of communicators"
        phase = Phase.SUSPEND_COMMUNICATORS if releasing else Phase.RESUME_COMMUNICATORS

        def move(verb: Verb, begin: bool = False) -> list[protocol.Answer]:
            return self.ask(protocol.MoveCommunicators(verb, names, limit, begin), 1.5 * limit)

        if names:
            undo = partial(move, "resume" if releasing else "release")
            steps.take(name, phase, lambda: move(operation, begin=True), lambda: move(operation) and undo())
        yield
        if names:
            steps.take(name, phase, lambda: move(operation), list)

    def _take_hibernation(self, steps: Steps, step: _Step, phase: Phase, undo: _Step) -> None:
        def act(step: _Step) -> Act:
            return partial(self.ask, protocol.HibernationStep(step), limit)

        limit = self.hibernation_limit_s()
        steps.take(step, phase, act(step), act(undo))

    def _plans(self, steps: Steps, request: MemoryRequest) -> dict[int, protocol.Plan]:
        """Return what a release would do; raise OutOfHostMemoryError if the host lacks memory for all ranks."""
        plans = steps.prepare(protocol.Prepare("release", request))
        if self._shortage(plans) is not None:
            plans = steps.prepare(protocol.Prepare("release", request, exact=True))
            if (error := self._shortage(plans)) is not None:
                raise error
        return plans

    def _shortage(self, plans: Mapping[int, protocol.Plan]) -> errors.OutOfHostMemoryError | None:
        """Return the error of a release by these plans; None if this host has enough memory for its ranks together.

        What is in a shared store is not counted: what the store lacks shows only while content is saved.
        """
        needed = 0
        for rank in self.progress.seen & plans.keys():
            status = self.statuses[rank]
            if status is not None and (backup := status.host_backup).shared_store is None:
                growing = max(0, backup.target_bytes - backup.capacity_bytes)
                needed += max(0, plans[rank].host_bytes_needed - backup.unused_bytes - growing)
        if needed == 0 or needed <= (free := available_host_bytes()):
            return None
        return errors.OutOfHostMemoryError(
            f"the backups of all ranks need {needed} more bytes of host memory together, and {free} are free; nothing "
            "was released: release fewer tags, discard some, or free host memory",
            needed,
            free,
        )

    def _to_suspend(self, request: MemoryRequest, plans: Mapping[int, protocol.Plan]) -> tuple[str, ...]:
        """Return the communicators that a release suspends; raise UnsupportedError if it cannot hibernate as asked."""
        names, reasons = _suspendable(plans)
        if request.hibernate:
            found = self._of_ranks({rank: plan.obstacles for rank, plan in plans.items()})
            if found or reasons:
                obstacles = "; ".join(dict.fromkeys([*found, *reasons]))
                raise errors.UnsupportedError(f"the engine cannot be hibernated: {obstacles}; nothing was released")
        keeps = (request.communicators or process.core_settings().communicators) == "keep"
        by_name = request.hibernate or request.communicators == "suspend" or COMMUNICATORS in request.tags
        return names if by_name or not (request.tags or keeps) else ()

    def _of_ranks(self, said: Mapping[int, Sequence[str]]) -> list[str]:
        """Return what each rank said, with its number if there are several."""
        return [f"rank {rank}: {each}" if self.several else each for rank, all_ in said.items() for each in all_]

    def _resume_again(self, before: Sequence[Status | None], request: MemoryRequest) -> list[protocol.Answer]:
        """Undo a release: resume what was released since ``before``, and nothing else."""
        tags = _changed(before, self.statuses)
        policies = {**{tag.tag: tag.restore for tag in self.status().tags}, **request.restore}
        self._lost.update(tag for tag in tags if not keeps_all(policies[tag]))
        return self.ask(protocol.Move("resume", MemoryRequest(tags=tags))) if tags else []

    def _release_again(self, before: Sequence[Status | None]) -> list[protocol.Answer]:
        """Undo a resume: release what was resumed since ``before``, under the policies of the release before it."""
        tags = _changed(self.statuses, before)
        restore = {tag: self._overrides[tag] for tag in tags if tag in self._overrides}
        return self.ask(protocol.Move("release", MemoryRequest(tags=tags, restore=restore))) if tags else []

    @contextmanager
    def _operating(self, operation: Verb, log: PhaseLog, request: Tagged) -> Iterator[Steps]:
        """In the block, take steps on the ranks that ``request`` is about."""
        self.raise_if_failed()
        self.progress.begin()
        self._operation, self._began = operation, time.monotonic()
        steps = Steps(self, log)
        try:
            dp_ranks = request.dp_ranks if isinstance(request, OnTags) else ()
            with log.running(lambda: self.progress.phase or steps.phase), self.only(dp_ranks):
                yield steps
        except errors.MemsaverError:
            if steps.failed_phase:
                log.failed = steps.failed_phase
            raise
        finally:
            self._operation = self.step = ""

    def _merged_report(self, operation: Verb, reports: Sequence[OperationReport], log: PhaseLog) -> OperationReport:
        tags = merged_tags(tag for report in reports for tag in report.tags)
        return log.report(operation, tags, enabled=self.enabled())


_Step = Literal["lock", "checkpoint", "restore", "unlock"]


def _awake(request: MemoryRequest, tags: tuple[str, ...], trim: bool = False) -> MemoryRequest:
    """Return ``request`` for a step that releases ``tags`` and no more."""
    restore = {tag: policy for tag, policy in request.restore.items() if tag in tags}
    step = {"tags": tags, "restore": restore, "trim": trim, "hibernate": False, "communicators": None}
    return request.model_copy(update=step)


def _changed(before: Sequence[Status | None], after: Sequence[Status | None]) -> tuple[str, ...]:
    """Return the tags of which some rank has more memory released in ``after`` than in ``before``."""
    changed: set[str] = set()
    for one, other in zip(before, after, strict=True):
        earlier = {tag.tag: tag.released_bytes for tag in one.tags} if one is not None else {}
        changed |= {tag.tag for tag in (other.tags if other else ()) if tag.released_bytes > earlier.get(tag.tag, 0)}
    return tuple(sorted(changed - {COMMUNICATORS}))


def _suspendable(plans: Mapping[int, protocol.Plan]) -> tuple[tuple[str, ...], list[str]]:
    """Return the communicators that all of their ranks can suspend, sorted, and why each of the others stays.

    NCCL waits inside for every rank of a communicator, so all of them must agree before any of them begins.
    """
    found = sorted({each.name for plan in plans.values() for each in plan.communicators})
    names, reasons = [], []
    for name in found:
        members = {rank: each for rank, plan in plans.items() for each in plan.communicators if each.name == name}
        ranks = max(each.ranks for each in members.values())
        stays = [f"rank {rank}: {each.obstacle}" for rank, each in members.items() if each.obstacle]
        if len(members) < ranks:
            stays.append(f"{len(members)} of the {ranks} ranks of communicator {name!r} are this engine's")
        if stays:
            reasons += stays
        elif not all(each.suspended for each in members.values()):
            names.append(name)
    return tuple(names), reasons
