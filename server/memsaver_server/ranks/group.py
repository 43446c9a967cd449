"""The processes of an engine: asks all of them at once; waits for all answers, a deadline or the end of a process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from memsaver_core.contract.errors import GroupFailedError, OutOfDeviceMemoryError
from memsaver_core.contract.status import RankStatus, Status
from memsaver_core.ranks.progress import GroupProgress
from memsaver_core.ranks.protocol import ANSWERS, REQUESTS, Answer, Failure, Introduce, Introduction, Plain, Request
from memsaver_server.ranks.merging import RankDevices
from memsaver_server.ranks.watch import ProcessWatch, is_stopped

logger = logging.getLogger("memsaver")

_T = TypeVar("_T")

#: Longest interval at which a wait looks at the ranks' progress, seconds.
PROGRESS_INTERVAL_S = 1.0
#: Bytes per second of resident memory; a slower checkpoint or restore counts as hung. The driver's rate is 2.4e9.
SLOWEST_COPY = 5e8
#: How long a call that failed may wait for the end of the process that explains it, seconds.
EXPLAIN_S = 2.0


class Channel(Protocol):
    """How an engine reaches its ranks."""

    def start(self, message: Plain) -> Future[list[Plain]]:
        """Send a message of the rank protocol to every rank, without blocking; the result is all answers, in order."""


@dataclass(frozen=True)
class Deadlines:
    """After how many seconds a step counts as hung.

    Attributes:
        idle_s: of a release or a resume: without progress on any rank.
        prepare_s, communicators_s, hibernation_s: of such a step as a whole; for the last, with nothing resident.
    """

    idle_s: float = 120.0
    prepare_s: float = 60.0
    communicators_s: float = 30.0
    hibernation_s: float = 120.0


class Group:
    """The ranks behind ``channel``, in order, and other ``processes`` that the engine needs, by name; all are watched.
    ``failure`` is why no operation is possible any more, ``step`` what the ranks do now; both may be empty. If
    ``dp_ranks`` names several data-parallel engines, each has the same number of ranks, and only the ranks of the
    engines in ``part`` are asked; of all, if that is empty."""

    def __init__(
        self, channel: Channel, processes: Mapping[str, int], deadlines: Deadlines, dp_ranks: Sequence[int] = ()
    ) -> None:
        self.channel = channel
        self.dp_ranks = tuple(dp_ranks)
        self.part: tuple[int, ...] = ()
        self.deadlines = deadlines
        self.failure = ""
        self._failing = threading.Lock()
        self._failed: Future[None] = Future()
        self.step = "start"
        self.progress = GroupProgress([])
        answers = _decoded(self.wait(channel.start(REQUESTS.encode(Introduce())), deadlines.prepare_s))
        self.step = ""
        self._statuses = [answer.status for answer in answers]
        self.check(answers)
        self.ranks = [answer.introduction or Introduction() for answer in answers]
        self.devices = RankDevices(self.ranks)
        self.progress = GroupProgress([rank.progress for rank in self.ranks])
        self._ended: set[int | None] = set()
        self._closed = False
        self._names = {pid: f"{name} (process {pid})" for name, pid in processes.items()}
        self._names |= {self.ranks[rank].pid or 0: self.name(rank) for rank in self.progress.seen}
        self._watch = ProcessWatch(self._names, self._note_end)

    def name(self, rank: int) -> str:
        return f"rank {rank} (process {self.ranks[rank].pid})"

    @property
    def several(self) -> bool:
        return len(self.ranks) > 1

    @property
    def asked(self) -> Sequence[int]:
        """The ranks that a message is sent to now."""
        return self.ranks_of(self.part)

    def ranks_of(self, dp_ranks: Sequence[int]) -> Sequence[int]:
        """Return the ranks of these data-parallel engines; of all, if none is given."""
        return [rank for rank in range(len(self._statuses)) if not dp_ranks or self.dp_rank(rank) in dp_ranks]

    def dp_rank(self, rank: int) -> int | None:
        """Return the data-parallel engine that ``rank`` is of; None if there are not several."""
        return self.dp_ranks[rank * len(self.dp_ranks) // len(self._statuses)] if self.dp_ranks else None

    @contextmanager
    def only(self, dp_ranks: Sequence[int]) -> Iterator[None]:
        """In the block, ask only the ranks of these data-parallel engines; of all, if none is given."""
        before, self.part = self.part, tuple(dp_ranks)
        try:
            yield
        finally:
            self.part = before

    @property
    def statuses(self) -> list[Status | None]:
        """What each rank held when it last answered; None if it does not use memsaver, or has ended."""
        pairs = zip(self.ranks, self._statuses, strict=True)
        return [None if rank.pid in self._ended else status for rank, status in pairs]

    def hibernation_limit_s(self) -> float:
        """Return after how many seconds a checkpoint or a restore of what is resident now counts as hung."""
        resident = (sum(tag.resident_bytes for tag in status.tags) for status in self.statuses if status is not None)
        return self.deadlines.hibernation_s + max(resident, default=0) / SLOWEST_COPY

    def rank_statuses(self) -> tuple[RankStatus, ...]:
        """Return each rank with the state that it last reported."""
        pairs = enumerate(zip(self.ranks, self.statuses, strict=True))
        alive: dict[int | None, bool] = {**dict.fromkeys(self._watch.pids, True), **dict.fromkeys(self._ended, False)}
        return tuple(
            RankStatus(
                rank=rank,
                pid=process.pid,
                alive=alive.get(process.pid),
                state=status.state if status else "failed" if process.pid else "resident",
                dp_rank=self.dp_rank(rank),
            )
            for rank, (process, status) in pairs
        )

    def close(self) -> None:
        """From now on the end of a process is no failure: the engine ends them."""
        self._closed = True

    def on_failure(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once the group has failed, at once if it has."""
        self._failed.add_done_callback(lambda _: call())

    def raise_if_failed(self) -> None:
        if self.failure:
            raise GroupFailedError(self.failure)

    def fail(self, cause: str) -> GroupFailedError:
        """Refuse all operations from now on, those that are waited for included. The first cause is reported."""
        with self._failing:
            first = not self.failure
            self.failure = self.failure or f"{cause}; restart the engine"
        if first:
            logger.error("the engine's ranks have failed: %s", self.failure)
            self._failed.set_result(None)
        return GroupFailedError(self.failure)

    def start(self, message: Plain) -> Future[list[Plain]]:
        """Send ``message`` to the ranks ``asked``. Overridden for engines that have data-parallel ones."""
        return self.channel.start(message)

    def ask(self, request: Request, limit_s: float | None = None) -> list[Answer]:
        """Send ``request`` to the ranks ``asked``, and take over the status that each answers. ``limit_s`` is a
        deadline; None is ``Deadlines.idle_s`` without progress. Raises GroupFailedError if the ranks have failed."""
        self.raise_if_failed()
        self.progress.asking()
        try:
            answers = _decoded(self.wait(self.start(REQUESTS.encode(request)), limit_s))
        except GroupFailedError:
            raise
        except Exception as error:
            raise self.fail(f"the engine's ranks cannot be reached for the {self.step}: {error}") from error
        for rank, answer in zip(self.asked, answers, strict=True):
            self._statuses[rank] = answer.status
            if answer.report is not None:
                self.devices.note(rank, answer.report.devices)
        return answers

    def wait(self, call: Future[_T], limit_s: float | None = None) -> _T:
        """Return the result of ``call``, in which all ranks do something; ``limit_s`` and errors: as ``ask``."""
        limit = self.deadlines.idle_s if limit_s is None else limit_s
        since, figures = time.monotonic(), self.progress.figures()
        waited: set[Future[Any]] = {call, self._failed}
        while not wait_for(waited, min(PROGRESS_INTERVAL_S, limit / 4), FIRST_COMPLETED).done:
            if limit_s is None and figures != (now := self.progress.figures()):
                since, figures = time.monotonic(), now
            if time.monotonic() - since > limit:
                raise self.fail(f"the {self.step} did not end: no answer in {limit:g} s{self._late()}")
        if call.done() and call.exception() is not None:
            wait_for({self._failed}, EXPLAIN_S)
        self.raise_if_failed()
        return call.result()

    def check(self, answers: Sequence[Answer]) -> None:
        """Raise the error of a rank, with its type; the message also has what other ranks report."""
        pairs = zip(self.asked, answers, strict=False)  # an undo may have nothing to ask
        failures = {rank: answer.failure for rank, answer in pairs if answer.failure is not None}
        if not failures:
            return
        # A rank that only waited for another one reports a plain MemsaverError: report that of the other one.
        first = min(failures, key=lambda rank: failures[rank].error == "MemsaverError")
        name = f"rank {first}: " if len(self._statuses) > 1 else ""
        error = failures[first].to_error(name, self._others(first, failures))
        if isinstance(error, OutOfDeviceMemoryError):
            error.device = self.devices.number(first, error.device)
        raise error

    def _others(self, first: int, failures: Mapping[int, Failure]) -> str:
        """Return the messages of other ranks that differ from that of ``first``."""
        said = {failures[first].message: first}
        for rank, failure in failures.items():
            said.setdefault(failure.message, rank)
        return "".join(f"; rank {rank}: {message}" for message, rank in said.items() if rank != first)

    def _late(self) -> str:
        late = ""
        for rank, what in self.progress.late().items():
            if rank in self.asked:
                why = ", because a signal or a debugger has stopped it" if is_stopped(self.ranks[rank].pid or 0) else ""
                late += f"; {self.name(rank)} {what}{why}"
        return late

    def _note_end(self, pid: int) -> None:
        """A process has ended; called by the watch."""
        if self._closed:
            return
        self._ended.add(pid)
        during = f" during the {self.step}" if self.step else ""
        self.fail(f"{self._names[pid]} has ended{during}")


def _decoded(answers: list[Plain]) -> list[Answer]:
    return [ANSWERS.decode(each) for each in answers]
