"""The memory of an engine whose ranks are processes of their own: one ``Memory`` over all of them, all or none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar

from memsaver_core import PhaseLog, errors
from memsaver_core.compat.vllm.board import Boards
from memsaver_core.device_memory import read_again
from memsaver_core.errors import MemsaverError, UnknownTagError
from memsaver_core.policies import WELL_KNOWN_TAGS, keeps_any
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

Report = TypeVar("Report", TagReport, TagStatus)

Answer = dict[str, Any]

#: The worst comes first: the group is in the state of its worst rank.
_STATES = ("failed", "releasing", "resuming", "released", "resident")


class Ranks(Protocol):
    """How the ranks are reached. Each call blocks until every rank has answered."""

    def ask(self, command: str, *arguments: Any) -> list[Answer]:
        """Have every rank do ``command``; see ``memsaver_core.compat.vllm.worker.answer``. One answer of each."""

    def sleep(self, level: int) -> None:
        """Put the engine to sleep in its own way: 1 keeps its weights, 2 gives them up."""


class RankMemory:
    """Implements ``Memory``. What ``status`` says is as of the last operation: asking the ranks would disturb them. How
    far they are with the one in work is read off their boards.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        introductions = ranks.ask("hello")
        _raise_first(introductions)
        #: By rank: the group's number of each of its devices. Ranks may call different devices by one index.
        self._numbers: list[dict[int, int]] = []
        self._devices: list[DeviceMemory] = []
        self._meet(introductions)
        self._pids = frozenset(answer["pid"] for answer in introductions if "pid" in answer)
        self._blockers = [blocker for answer in introductions for blocker in answer["blockers"]]
        self._boards = Boards([answer["board"] for answer in introductions if "board" in answer])
        self._operation = ""
        self._began = 0.0
        self._status = self._merged_status(introductions)

    def enabled(self) -> bool:
        return self._status.enabled

    def check_tags(self, tags: Sequence[str] | None) -> list[str]:
        names = list(dict.fromkeys(tags or ()))
        known = {*WELL_KNOWN_TAGS, *(tag.tag for tag in self._status.tags)}
        unknown = [name for name in names if name not in known]
        if unknown and self.enabled():
            raise UnknownTagError(unknown, sorted(known))
        return names

    def status(self) -> Status:
        if not self._operation:
            return self._status
        seconds = time.monotonic() - self._began
        return replace(self._status, progress=self._boards.progress(self._operation, seconds))

    def read_devices(self) -> tuple[DeviceMemory, ...]:
        return tuple(read_again(device, self._pids) for device in self._devices)

    def hibernation_obstacles(self) -> list[str]:
        """As of the start: what stands in the way of a rank is there from then on. Each rank looks again by itself."""
        return list(self._blockers)

    def prepare_backup(self) -> None:
        """Each rank does that by itself, once it is loaded."""

    def release(
        self,
        tags: Sequence[str] | None = None,
        *,
        restore: Mapping[str, str] | None = None,
        trim: bool | None = None,
        hibernate: bool = False,
        log: PhaseLog | None = None,
    ) -> OperationReport:
        """As ``memsaver_core.release``, on every rank. Where one of several fails, the others are resumed."""
        log = log or PhaseLog(read=self.read_devices)
        names = self.check_tags(tags)
        self.check_tags(list(restore or ()))
        reports: list[list[Answer]] = []
        if self.enabled():
            with self._at_work("release", "pause", log):
                stages = self._stages(names, restore or {})
                for stage in stages:
                    plan = {"tags": stage, "restore": dict(restore or {}), "trim": trim}
                    answers = self._release(plan, hibernate and stage is stages[-1])
                    if any("error" in answer for answer in answers) and len(answers) > 1:
                        self._undo_release(names)
                    _raise_first(answers)
                    reports.append([answer["report"] for answer in answers])
                    log.add(self._merged_phases([answer["report"] for answer in answers]))
                    if "hibernated" in answers[0]:
                        log.add(self._merged_phases([answer["hibernated"] for answer in answers]))
        return self._merged_report("release", reports, log)

    def resume(self, tags: Sequence[str] | None = None, *, log: PhaseLog | None = None) -> OperationReport:
        """As ``memsaver_core.resume``, on every rank. Where one of several fails, the others are released again."""
        log = log or PhaseLog(read=self.read_devices)
        names = self.check_tags(tags)
        reports: list[list[Answer]] = []
        if self.enabled():
            with self._at_work("resume", "restore", log):
                answers = self._ask("resume", names or None)
                if any("error" in answer for answer in answers) and len(answers) > 1:
                    self._undo_resume(answers)
                _raise_first(answers)
                reports.append([answer["report"] for answer in answers])
                log.add(self._merged_phases(reports[0]))
        return self._merged_report("resume", reports, log)

    # -- the ranks -------------------------------------------------------------------------------------------------

    @contextmanager
    def _at_work(self, operation: str, phase: str, log: PhaseLog) -> Iterator[None]:
        """The ranks do ``operation`` inside; ``phase`` is where they are while none of them shows more."""
        self._boards.begin()
        self._operation, self._began = operation, time.monotonic()
        try:
            with log.elsewhere(lambda: self._boards.phase or phase):
                yield
        except MemsaverError as error:
            if phase_of_rank := vars(error).pop("phase", ""):
                log.add_failure(phase_of_rank)
            raise
        finally:
            self._operation = ""

    def _ask(self, command: str, *arguments: Any) -> list[Answer]:
        try:
            answers = self._ranks.ask(command, *arguments)
        except Exception as error:
            raise MemsaverError(f"the engine's ranks cannot be reached: {error}; restart the engine") from error
        self._status = self._merged_status(answers)
        return answers

    def _stages(self, names: list[str], restore: Mapping[str, str]) -> list[list[str]]:
        """What is released one after the other: with several ranks what is kept comes first, as it can be undone."""
        if self._status.hibernated or len(self._numbers) == 1:
            return [names]
        tags = [tag for tag in self._status.tags if not names or tag.tag in names]
        kept = [tag.tag for tag in tags if keeps_any(restore.get(tag.tag, tag.restore))]
        lost = [tag.tag for tag in tags if tag.tag not in kept]
        return [stage for stage in (kept, lost) if stage] or [names]

    def _release(self, plan: dict[str, Any], hibernate: bool) -> list[Answer]:
        if self._status.hibernated:  # the engine's own sleep would wait for the device
            return self._ask("release", plan)
        _raise_first(self._ask("expect_release", plan))
        gives_up = plan["restore"].get("weights") == "discard" and (not plan["tags"] or "weights" in plan["tags"])
        level = 2 if gives_up else 1
        try:
            self._ranks.sleep(level)
        except Exception as error:
            self._ask("outcome")  # nobody expects it any more
            raise MemsaverError(f"the engine cannot go to sleep: {error}; repeat the call, or resume") from error
        answers = self._ask("outcome")
        if all("report" not in answer and "error" not in answer for answer in answers):
            # The engine takes itself to be asleep, and has not asked its ranks: part of its memory was released before.
            answers = self._ask("sleep", plan, level)
        if hibernate and not any("error" in answer for answer in answers):
            for answer, hibernated in zip(answers, self._ask("hibernate", plan["tags"]), strict=True):
                answer.update({name: hibernated[name] for name in ("hibernated", "error") if name in hibernated})
        return answers

    def _undo_release(self, names: list[str]) -> None:
        answers = self._ask("resume", names or None)
        for error in (answer["error"] for answer in answers if "error" in answer):
            logger.error("a rank failed to release, and to resume then: %s", error["message"])

    def _undo_resume(self, answers: list[Answer]) -> None:
        """Release what some ranks have resumed; with their content, of which vLLM has restored parts by itself."""
        resumed = {
            tag["tag"] for answer in answers for tag in answer.get("report", {}).get("tags", ()) if tag["resumed_bytes"]
        }
        if not resumed:
            return
        for error in (answer["error"] for answer in self._release_again(sorted(resumed)) if "error" in answer):
            logger.error("a rank failed to resume, and another to release again then: %s", error["message"])

    def _release_again(self, tags: list[str]) -> list[Answer]:
        return self._ask("release", {"tags": tags, "restore": {}, "trim": False})

    # -- many into one ---------------------------------------------------------------------------------------------

    def _meet(self, introductions: Iterable[Answer]) -> None:
        by_uuid: dict[str, int] = {}
        for answer in introductions:
            numbers = {}
            for given in answer["devices"]:
                number = by_uuid.setdefault(given["uuid"], len(by_uuid))
                if number == len(self._devices):
                    self._devices.append(DeviceMemory(**{**given, "index": number}))
                numbers[given["index"]] = number
            self._numbers.append(numbers)

    def _merged_status(self, answers: Sequence[Answer]) -> Status:
        told = [(rank, answer["status"]) for rank, answer in enumerate(answers) if answer.get("status") is not None]
        if not told:
            return Status(False, "none", "resident", "", (), HostBackupStatus(0, 0, 0), Progress("", 0, 0, 0, 0.0))
        tags: dict[str, TagStatus] = {}
        for rank, status in told:
            for given in status["tags"]:
                mapped = {self._numbers[rank].get(int(at), 0): size for at, size in given["mapped_by_device"].items()}
                tag = TagStatus(**{**given, "mapped_by_device": mapped})
                tags[tag.tag] = _added(tags[tag.tag], tag) if tag.tag in tags else tag
        backups = [status["host_backup"] for _, status in told]
        return Status(
            enabled=True,
            driver=told[0][1]["driver"],
            state=_worst(status["state"] for _, status in told),
            failure="; ".join(f"rank {rank}: {status['failure']}" for rank, status in told if status["failure"]),
            tags=tuple(tags.values()),
            host_backup=HostBackupStatus(
                **{
                    each.name: all(backup[each.name] for backup in backups)
                    if each.name == "prepared"
                    else sum(backup[each.name] for backup in backups)
                    for each in fields(HostBackupStatus)
                }
            ),
            progress=Progress("", 0, 0, 0, 0.0),
            hibernated=any(status["hibernated"] for _, status in told),
        )

    def _merged_phases(self, reports: Sequence[Answer]) -> list[PhaseReport]:
        """The phases of ranks that did the same at the same time: each takes as long as its slowest rank."""
        merged = []
        for phases in zip(*(report["phases"] for report in reports), strict=False):
            devices: dict[int, DeviceDelta] = {}
            for rank, phase in enumerate(phases):
                for given in phase["devices"]:
                    number = self._numbers[rank].get(given["index"], given["index"])
                    devices[number] = DeviceDelta(**{**given, "index": number})
            details: dict[str, float] = {}
            for phase in phases:
                for name, value in phase["details"].items():
                    joined: Callable[..., float] = max if "second" in name else lambda one, other: one + other
                    details[name] = joined(details[name], value) if name in details else value
            seconds = max(phase["seconds"] for phase in phases)
            merged.append(PhaseReport(phases[0]["name"], seconds, tuple(devices.values()), details))
        return merged

    def _merged_report(self, operation: str, reports: Sequence[Sequence[Answer]], log: PhaseLog) -> OperationReport:
        tags: dict[str, TagReport] = {}
        for stage in reports:
            for report in stage:
                for given in report["tags"]:
                    tag = TagReport(**given)
                    tags[tag.tag] = _added(tags[tag.tag], tag) if tag.tag in tags else tag
        return OperationReport(operation, self.enabled(), log.seconds, tuple(tags.values()), log.phases, log.devices())


def _added(one: Report, other: Report) -> Report:
    """Two ranks' accounts of one tag as one."""
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


def _raise_first(answers: Sequence[Answer]) -> None:
    """Raise the first rank's error, as the type that it was.

    Raises:
        MemsaverError: a rank failed.
    """
    for rank, answer in enumerate(answers):
        if "error" not in answer:
            continue
        given = answer["error"]
        where = f"rank {rank}: " if len(answers) > 1 else ""
        kind = getattr(errors, given["type"], MemsaverError)
        error: MemsaverError = kind.__new__(kind)
        RuntimeError.__init__(error, f"{where}{given['message']}")
        for name, value in given["attributes"].items():
            setattr(error, name, value)
        raise error
