"""The scheduler processes of an engine: one for each rank, all on one host.

Rank 0 receives requests, and the service runs there. Each process, rank 0 included, answers the messages of the rank
protocol in a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core.options import ReleaseOptions, ResumeOptions
from memsaver_core.ranks.connection import Listener, SocketChannel, serve
from memsaver_core.ranks.protocol import Introduce, Plain, Request
from memsaver_core.ranks.rank import Rank, Result
from memsaver_core.reports import OperationReport
from memsaver_server.integrations.scheduler_loop.event_loop import EventLoop, LateError, LeadingLoop
from memsaver_server.ranks import RankMemory
from memsaver_server.ranks.watch import stopped_ranks

#: How long all ranks may take from the first one's start of its event loop to the last one's, seconds.
CONNECT_S = 300.0


@dataclass(frozen=True)
class Group:
    """The processes of an engine, as this one of them sees it.

    Attributes:
        ranks: their ranks in torch's default process group; the first one receives the engine's requests.
        rank_in_group: this process's place among them.
        cpu_group: torch's process group of all, for tensors on the host.
    """

    world_size: int
    ranks: Sequence[int]
    rank_in_group: int
    cpu_group: Any


class SchedulerRank(Rank):
    """Answers messages of the rank protocol, each with the number of the command that this rank must have come to."""

    def __init__(self, loop: EventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._after = 0

    def answer(self, message: Plain) -> Plain:
        self._after = message["after"]
        return super().answer(message["message"])

    def carry_out(self, request: Request) -> Result:
        self._loop.wait_for(self._after)
        return super().carry_out(request)


class _OrderedChannel:
    """A channel to each ``SchedulerRank``."""

    def __init__(self, channel: SocketChannel) -> None:
        self._channel = channel
        self._after = 0

    @contextmanager
    def after_command(self, number: int) -> Iterator[None]:
        """Messages that are sent inside are carried out once a rank has come to that command."""
        self._after = number
        try:
            yield
        finally:
            self._after = 0

    def start(self, message: Plain) -> Future[list[Plain]]:
        return self._channel.start({"after": self._after, "message": message})


class SchedulerMemory(RankMemory):
    """The memory of all ranks. It is released and resumed while none of them iterates."""

    def __init__(self, loop: LeadingLoop, channel: SocketChannel) -> None:
        self._loop = loop
        self._channel = _OrderedChannel(channel)
        self._asking = threading.Lock()
        super().__init__(self._channel)
        loop.failure = lambda: self.failure

    def release(self, options: ReleaseOptions, *, log: ms.PhaseLog | None = None) -> OperationReport:
        return self._at_rest(partial(super().release, options, log=log))

    def resume(self, options: ResumeOptions, *, log: ms.PhaseLog | None = None) -> OperationReport:
        return self._at_rest(partial(super().resume, options, log=log))

    def check_release(self, options: ReleaseOptions) -> None:
        with self._asking:
            super().check_release(options)

    def reserve(self, options: ResumeOptions) -> None:
        with self._asking:
            super().reserve(options)

    def give_back_reserved(self) -> None:
        with self._asking:
            super().give_back_reserved()

    def run(self, name: str, *arguments: Any) -> None:
        """Have every rank carry out a command.

        Raises:
            GroupFailedError: the ranks have failed.
            MemsaverError: it failed on some rank, or the event loop has ended.
        """
        self._group.raise_if_failed()
        with self._failing_if_late():
            number = self._loop.run(name, *arguments)
        with self._asking, self._channel.after_command(number):
            self._group.step = f"command {name}"
            try:
                self._group.check(self._group.ask(Introduce(), self._group.deadlines.prepare_s))
            finally:
                self._group.step = ""

    def _at_rest(self, operate: Callable[[], OperationReport]) -> OperationReport:
        self._group.raise_if_failed()
        with self._asking:
            if any(status is not None and status.hibernated for status in self._group.statuses):
                # Device calls are blocked. A loop that is in one cannot come to rest: it goes on after the wake-up,
                # and has no request to compute.
                return operate()
            with self._failing_if_late(), self._loop.standstill() as number, self._channel.after_command(number):
                return operate()

    @contextmanager
    def _failing_if_late(self) -> Iterator[None]:
        try:
            yield
        except LateError as error:
            stopped = stopped_ranks(self._group.rank_statuses())
            raise self._group.fail(f"{error}{stopped and f'; {stopped}'}") from error


def gather(group: Group, loop: LeadingLoop) -> SchedulerMemory:
    """Return the memory of all ranks, of which this is the first; each of the others calls ``join``.

    Raises:
        MemsaverError: a rank did not join.
    """
    listener = Listener(group.world_size, first=0)
    _tell(group, listener.path)
    _answer(group, loop, listener.path)
    return SchedulerMemory(loop, SocketChannel(None, listener.accept(CONNECT_S)))


def join(group: Group, loop: EventLoop) -> None:
    """Have this rank answer the first one, which calls ``gather``, until that closes the connection."""
    _answer(group, loop, _tell(group, ""))


def _tell(group: Group, path: str) -> str:
    """Return what rank 0 tells all others; every rank must call it."""
    told = [path]
    torch.distributed.broadcast_object_list(told, src=group.ranks[0], group=group.cpu_group)
    return told[0]


def _answer(group: Group, loop: EventLoop, path: str) -> None:
    """Answer in a thread of its own: this process may be hibernated, with its scheduler's thread in a device call."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    rank = SchedulerRank(loop)

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        serve(path, group.rank_in_group, rank.answer)

    threading.Thread(target=run, name="memsaver-rank", daemon=True).start()
    if ms.core_settings().prepare_backup:
        ms.prepare_backup()
