"""The scheduler processes of an engine: one for each tensor-parallel rank of each pipeline stage, on one host.

Rank 0 receives requests, and the service runs there. Each process, rank 0 included, answers the messages of the rank
protocol in a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core.options import ReleaseOptions, ResumeOptions
from memsaver_core.ranks.connection import Listener, SocketChannel, serve
from memsaver_core.ranks.protocol import Introduce, Plain, Request
from memsaver_core.ranks.rank import Rank, Result
from memsaver_core.reports import OperationReport
from memsaver_server.integrations.sglang import names
from memsaver_server.integrations.sglang.event_loop import EventLoop, LeadingLoop
from memsaver_server.ranks import RankMemory

#: How long all ranks may take from the first one's start of its event loop to the last one's, seconds.
CONNECT_S = 300.0


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
            with self._loop.standstill() as number, self._channel.after_command(number):
                return operate()


def is_first(scheduler: Any) -> bool:
    """Return whether ``scheduler`` is rank 0, which receives the engine's requests."""
    parallel = names.parallel(scheduler)
    return bool(parallel.tp_rank == parallel.pp_rank == 0)


def are_several(scheduler: Any) -> bool:
    """Return whether ``scheduler`` is one of several ranks."""
    parallel = names.parallel(scheduler)
    return bool(parallel.tp_size * parallel.pp_size > 1)


def gather(scheduler: Any, loop: LeadingLoop) -> SchedulerMemory:
    """Return the memory of all ranks, of which ``scheduler`` is the first; each of the others calls ``join``.

    Raises:
        MemsaverError: a rank did not join.
    """
    listener = Listener(scheduler.world_group.world_size, first=0)
    _tell(scheduler, listener.path)
    _answer(scheduler, loop, listener.path)
    return SchedulerMemory(loop, SocketChannel(None, listener.accept(CONNECT_S)))


def join(scheduler: Any, loop: EventLoop) -> None:
    """Have this rank answer the first one, which calls ``gather``, until that closes the connection."""
    _answer(scheduler, loop, _tell(scheduler, ""))


def _tell(scheduler: Any, path: str) -> str:
    """Return what rank 0 tells all others; every rank must call it."""
    told = [path]
    world = scheduler.world_group
    torch.distributed.broadcast_object_list(told, src=world.ranks[0], group=world.cpu_group)
    return told[0]


def _answer(scheduler: Any, loop: EventLoop, path: str) -> None:
    """Answer in a thread of its own: this process may be hibernated, with its scheduler's thread in a device call."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    rank = SchedulerRank(loop)

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        serve(path, scheduler.world_group.rank_in_group, rank.answer)

    threading.Thread(target=run, name="memsaver-rank", daemon=True).start()
    if ms.core_settings().prepare_backup:
        ms.prepare_backup()
