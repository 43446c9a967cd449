"""The memory of an engine whose ranks are processes: one ``Memory`` over all of them, released all or none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar

from memsaver_core import PhaseLog
from memsaver_core.device_memory import read_again
from memsaver_core.errors import MemsaverError, UnknownTagError
from memsaver_core.options import ReleaseOptions, ResumeOptions, tags_of
from memsaver_core.policies import WELL_KNOWN_TAGS, keeps_any
from memsaver_core.ranks.progress import GroupProgress
from memsaver_core.ranks.protocol import (
    ANSWERS,
    REQUESTS,
    Answer,
    Introduce,
    Introduction,
    Plain,
    Release,
    Request,
    Resume,
)
from memsaver_core.reports import (
    DeviceDelta,
    DeviceMemory,
    HostBackupStatus,
    OperationReport,
    PhaseReport,
    Progress,
    Status,
    TagReport,
    TagStatus,
)

logger = logging.getLogger("memsaver")

_Tag = TypeVar("_Tag", TagReport, TagStatus)

#: The worst first: a group is in the state of its worst rank.
_STATES = ("failed", "releasing", "resuming", "released", "resident")


class Channel(Protocol):
    """How an engine reaches its ranks."""

    def call(self, message: Plain) -> list[Plain]:
        """Send a message of the rank protocol to every rank; return the answer of each once all have answered."""


class RankMemory:
    """Implements ``Memory``.

    ``status`` is as of the last operation, since asking the ranks would disturb them; how far they are with the
    operation in progress is read from their shared-memory records.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        answers = [ANSWERS.decode(each) for each in channel.call(REQUESTS.encode(Introduce()))]
        self._failed_phase = ""
        self._check(answers)
        ranks = [answer.introduction or Introduction() for answer in answers]
        self._several = len(ranks) > 1
        self._devices = RankDevices(ranks)
        self._pids = frozenset(rank.pid for rank in ranks if rank.pid is not None)
        self._obstacles = [obstacle for rank in ranks for obstacle in rank.obstacles]
        self._progress = GroupProgress(rank.progress for rank in ranks if rank.progress is not None)
        self._operation = ""
        self._began = 0.0
        self._status = self._devices.merged_status([answer.status for answer in answers])

    def enabled(self) -> bool:
        return self._status.enabled

    def check_tags(self, tags: Sequence[str] | None) -> list[str]:
        names = list(tags_of(tags))
        known = {*WELL_KNOWN_TAGS, *(tag.tag for tag in self._status.tags)}
        unknown = [name for name in names if name not in known]
        if unknown and self.enabled():
            raise UnknownTagError(unknown, sorted(known))
        return names

    def status(self) -> Status:
        if not self._operation:
            return self._status
        seconds = time.monotonic() - self._began
        return replace(self._status, progress=self._progress.progress(self._operation, seconds))

    def read_devices(self) -> tuple[DeviceMemory, ...]:
        return tuple(read_again(device, self._pids) for device in self._devices.readings)

    def hibernation_obstacles(self) -> list[str]:
        """Return what the ranks reported at the start; each rank checks again before it hibernates."""
        return list(self._obstacles)

    def prepare_backup(self) -> None:
        """Do nothing: each rank prepares its own once it is loaded."""

    def release(self, options: ReleaseOptions, *, log: PhaseLog | None = None) -> OperationReport:
        """As ``memsaver_core.release_with``, on every rank. If one of several fails, the others are resumed."""
        log = log or PhaseLog(read=self.read_devices)
        self.check_tags(options.tags)
        self.check_tags(list(options.restore))
        reports: list[OperationReport] = []
        if self.enabled():
            with self._operating("release", "pause", log):
                for step in self._release_steps(options):
                    rounds = self._release(step)
                    if _failed(rounds[-1]) and self._several:
                        undo = Resume(ResumeOptions(options.tags))
                        self._undo(undo, "a rank failed to release, and then to resume: %s")
                    self._check(rounds[-1])
                    reports += _reports(rounds[0])
                    for answers in rounds:
                        log.add(self._devices.merged_phases(_reports(answers)))
        return self._merged_report("release", reports, log)

    def resume(self, options: ResumeOptions, *, log: PhaseLog | None = None) -> OperationReport:
        """As ``memsaver_core.resume_with``, on every rank. If one of several fails, the others are released again."""
        log = log or PhaseLog(read=self.read_devices)
        self.check_tags(options.tags)
        reports: list[OperationReport] = []
        if self.enabled():
            with self._operating("resume", "restore", log):
                answers = self.ask(Resume(options))
                if _failed(answers) and self._several:
                    self._undo_resume(answers)
                self._check(answers)
                reports = _reports(answers)
                log.add(self._devices.merged_phases(reports))
        return self._merged_report("resume", reports, log)

    def ask(self, request: Request) -> list[Answer]:
        """Send ``request`` to every rank, and take over the status that each answers.

        Raises:
            MemsaverError: the ranks cannot be reached.
        """
        try:
            told = self._channel.call(REQUESTS.encode(request))
        except Exception as error:
            raise MemsaverError(f"the engine's ranks cannot be reached: {error}; restart the engine") from error
        answers = [ANSWERS.decode(each) for each in told]
        self._status = self._devices.merged_status([answer.status for answer in answers])
        return answers

    def release_awake(self, options: ReleaseOptions) -> list[Answer]:
        """Release on every rank while none is hibernated. An engine with a sleep of its own overrides this.

        Raises:
            MemsaverError: the engine refused.
        """
        return self.ask(Release(options))

    # Steps of an operation. What a step did on some ranks is undone on them if it fails on another.

    def _release_steps(self, options: ReleaseOptions) -> list[ReleaseOptions]:
        """With several ranks kept content goes first: that step can be undone without loss."""
        if self._status.hibernated or not self._several:
            return [options]
        tags = [tag for tag in self._status.tags if not options.tags or tag.tag in options.tags]
        kept = tuple(tag.tag for tag in tags if keeps_any(options.restore.get(tag.tag, tag.restore)))
        lost = tuple(tag.tag for tag in tags if tag.tag not in kept)
        names = [step for step in (kept, lost) if step] or [options.tags]
        steps = [replace(options, tags=step, hibernate=False) for step in names]
        return [*steps[:-1], replace(steps[-1], hibernate=options.hibernate)]

    def _release(self, step: ReleaseOptions) -> list[list[Answer]]:
        """Return the answers to the release and, if it succeeded and was asked for, to the hibernation."""
        awake = replace(step, hibernate=False)
        if self._status.hibernated:  # the engine's own sleep would wait for the device
            return [self.ask(Release(awake))]
        answers = self.release_awake(awake)
        if not step.hibernate or _failed(answers):
            return [answers]
        return [answers, self.ask(Release(ReleaseOptions(step.tags, hibernate=True)))]

    def _undo_resume(self, answers: Sequence[Answer]) -> None:
        """Release what some ranks resumed; with its content, of which the engine may have restored parts."""
        reports = [answer.report for answer in answers if answer.report is not None]
        resumed = {tag.tag for report in reports for tag in report.tags if tag.resumed_bytes}
        if resumed:
            again = Release(ReleaseOptions(tuple(sorted(resumed))))
            self._undo(again, "a rank failed to resume, and another to release again: %s")

    def _undo(self, request: Request, failed: str) -> None:
        for answer in self.ask(request):
            if answer.failure is not None:
                logger.error(failed, answer.failure.message)

    @contextmanager
    def _operating(self, operation: str, phase: str, log: PhaseLog) -> Iterator[None]:
        """The ranks do ``operation`` inside; ``phase`` is the current one while no rank reports any."""
        self._progress.begin()
        self._operation, self._began, self._failed_phase = operation, time.monotonic(), ""
        try:
            with log.running(lambda: self._progress.phase or phase):
                yield
        except MemsaverError:
            if self._failed_phase:
                log.add_failure(self._failed_phase)
            raise
        finally:
            self._operation = ""

    def _check(self, answers: Sequence[Answer]) -> None:
        """Raise the first rank's error, as the type that it was."""
        for rank, answer in enumerate(answers):
            if answer.failure is not None:
                self._failed_phase = answer.failure.phase
                raise answer.failure.to_error(f"rank {rank}: " if len(answers) > 1 else "")

    def _merged_report(self, operation: str, reports: Sequence[OperationReport], log: PhaseLog) -> OperationReport:
        tags = merged_tags(tag for report in reports for tag in report.tags)
        return OperationReport(operation, self.enabled(), log.seconds, tags, log.phases, log.devices())


def _failed(answers: Sequence[Answer]) -> bool:
    return any(answer.failure is not None for answer in answers)


def _reports(answers: Sequence[Answer]) -> list[OperationReport]:
    """Return each rank's report, of which none may be missing."""
    reports = [answer.report for answer in answers if answer.report is not None]
    if len(reports) < len(answers):
        raise MemsaverError("a rank sent no report: the engine's own call did not reach its memory; repeat the call")
    return reports


class RankDevices:
    """The devices of all ranks, numbered for the group: ranks may call different devices by the same index.

    Attributes:
        readings: one for each device, with the group's number as index.
    """

    def __init__(self, introductions: Iterable[Introduction]) -> None:
        self.readings: list[DeviceMemory] = []
        self._numbers: list[dict[int, int]] = []  # by rank: the group's number of each of its indices
        by_uuid: dict[str, int] = {}
        for introduction in introductions:
            numbers = {}
            for device in introduction.devices:
                number = by_uuid.setdefault(device.uuid, len(by_uuid))
                if number == len(self.readings):
                    self.readings.append(replace(device, index=number))
                numbers[device.index] = number
            self._numbers.append(numbers)

    def merged_status(self, statuses: Sequence[Status | None]) -> Status:
        """Merge what each rank holds; None is a rank that does not use memsaver."""
        told = [(rank, status) for rank, status in enumerate(statuses) if status is not None]
        if not told:
            return Status(False, "none", "resident", "", (), HostBackupStatus(0, 0, 0), Progress("", 0, 0, 0, 0.0))
        tags = [self._renumbered(rank, tag) for rank, status in told for tag in status.tags]
        backups = [status.host_backup for _, status in told]
        sums = {each.name: sum(getattr(backup, each.name) for backup in backups) for each in fields(HostBackupStatus)}
        return Status(
            enabled=True,
            driver=told[0][1].driver,
            state=_worst(status.state for _, status in told),
            failure="; ".join(f"rank {rank}: {status.failure}" for rank, status in told if status.failure),
            tags=merged_tags(tags),
            host_backup=HostBackupStatus(**{**sums, "prepared": all(backup.prepared for backup in backups)}),
            progress=Progress("", 0, 0, 0, 0.0),
            hibernated=any(status.hibernated for _, status in told),
        )

    def merged_phases(self, reports: Sequence[OperationReport]) -> list[PhaseReport]:
        """Merge the phases of ranks that did the same at the same time: each takes as long as its slowest rank."""
        merged = []
        for phases in zip(*(report.phases for report in reports), strict=False):
            devices: dict[int, DeviceDelta] = {}
            details: dict[str, float] = {}
            for rank, phase in enumerate(phases):
                for device in phase.devices:
                    number = self._numbers[rank].get(device.index, device.index)
                    devices[number] = replace(device, index=number)
                for name, value in phase.details.items():
                    joined: Callable[..., float] = max if "second" in name else lambda one, other: one + other
                    details[name] = joined(details[name], value) if name in details else value
            seconds = max(phase.seconds for phase in phases)
            merged.append(PhaseReport(phases[0].name, seconds, tuple(devices.values()), details))
        return merged

    def _renumbered(self, rank: int, tag: TagStatus) -> TagStatus:
        def by_number(by_index: Mapping[int, int]) -> dict[int, int]:
            return {self._numbers[rank].get(index, 0): size for index, size in by_index.items()}

        return replace(
            tag, mapped_by_device=by_number(tag.mapped_by_device), bytes_by_device=by_number(tag.bytes_by_device)
        )


def merged_tags(tags: Iterable[_Tag]) -> tuple[_Tag, ...]:
    """Merge what is about the same tag: numbers are added up."""
    merged: dict[str, _Tag] = {}
    for tag in tags:
        merged[tag.tag] = _added(merged[tag.tag], tag) if tag.tag in merged else tag
    return tuple(merged.values())


def _added(one: _Tag, other: _Tag) -> _Tag:
    changes: dict[str, Any] = {}
    for each in fields(one):
        mine, theirs = getattr(one, each.name), getattr(other, each.name)
        if isinstance(mine, bool):
            changes[each.name] = mine and theirs
        elif isinstance(mine, int):
            changes[each.name] = mine + theirs
        elif isinstance(mine, Mapping):
            changes[each.name] = {key: mine.get(key, 0) + theirs.get(key, 0) for key in {**mine, **theirs}}
    changes["state"] = _worst((one.state, other.state))
    changes["restore"] = one.restore if one.restore == other.restore else "mixed"
    return replace(one, **changes)


def _worst(states: Iterable[str]) -> str:
    return min(states, key=_STATES.index)
