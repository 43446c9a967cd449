"""The clock of limits of time in this process, which tests hold."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from memsaver_server import clock
from tests import forks

#: How long nothing may have happened before the clock moves, and by how much it does then, seconds.
QUIET_S, STEP_S = 0.008, 0.08
#: How often those look at it that wait by it, seconds; and event loops, which are woken.
LOOK_S, LONG_S = 0.05, 1.0
#: Its pace while something else moves, as a share of the system's.
CREEP = 0.01
#: What is no sign that a thread ran: this thread's own time is read a moment before that of its process.
SLACK_NS = 10_000


class HeldClock:
    """The system's clock, and inside ``held()`` one that moves only while nothing else does.

    There it stands still while a thread of this process, or of a program that it started as a fork, runs or waits for a
    processor. So a limit of time ends when nothing can happen but its end, on a machine however busy; and early, as the
    clock then runs ten times as fast as others.
    """

    def __init__(self) -> None:
        self._offset = 0.0  # from the system's clock; this one never goes back, either
        self._moved: float | None = None
        self._loops: weakref.WeakSet[asyncio.BaseEventLoop] = weakref.WeakSet()

    def now(self) -> float:
        moved, real = self._moved, time.monotonic()
        # It creeps: a thread that waits for the last microsecond without sleeping would hold it for ever.
        return real + self._offset if moved is None else moved + CREEP * real

    @contextmanager
    def held(self) -> Iterator[None]:
        ended = threading.Event()
        self._moved = self.now() - CREEP * time.monotonic()
        mover = threading.Thread(target=self._move, args=(ended,), name="clock", daemon=True)
        mover.start()
        try:
            yield
        finally:
            ended.set()
            mover.join()
            self._offset = self.now() - time.monotonic()
            self._moved = None
            self._wake(all_of_them=True)

    def install(self) -> None:
        """Let the product, and all event loops that are made from now on, take the time from this clock."""
        clock.source = self.now
        clock.wait = self._wait
        asyncio.BaseEventLoop.time = lambda _: self.now()  # type: ignore[method-assign,assignment]
        made = asyncio.SelectorEventLoop.__init__

        def make(loop: asyncio.SelectorEventLoop, *arguments: Any) -> None:
            made(loop, *arguments)
            selector = loop._selector  # type: ignore[attr-defined]
            select = selector.select
            # While the clock is held, the loop is woken when a timer is due.
            selector.select = lambda timeout=None: select(timeout if self._moved is None or not timeout else LONG_S)
            self._loops.add(loop)

        asyncio.SelectorEventLoop.__init__ = make  # type: ignore[method-assign,assignment]

    def _wait(self, changed: threading.Condition, seconds: float) -> None:
        changed.wait(seconds if self._moved is None else min(seconds, LOOK_S))

    def _move(self, ended: threading.Event) -> None:
        before: dict[int, int] = {}
        while not ended.wait(QUIET_S):
            assert self._moved is not None
            now = ran()
            if differ(before, now):
                before = now
            else:
                try:
                    if all_are_asleep(now) and not differ(before, ran()):
                        self._moved += STEP_S
                except OSError:  # of a test without descriptors: as the system's clock
                    self._moved += QUIET_S
            self._wake()

    def _wake(self, *, all_of_them: bool = False) -> None:
        """Have the event loops look at the time."""
        for loop in list(self._loops):
            timers = loop._scheduled  # type: ignore[attr-defined]
            if all_of_them or (timers and timers[0].when() <= self.now()):
                with suppress(RuntimeError):  # it is closed
                    loop.call_soon_threadsafe(int)


def ran() -> dict[int, int]:
    """How long each process ran so far, without this thread, nanoseconds."""
    own = time.thread_time_ns()
    found = {os.getpid(): time.process_time_ns() - own}
    for process in forks.running():
        with suppress(OSError):  # it has ended
            found[process] = time.clock_gettime_ns(~process << 3 | 2)  # as clock_getcpuclockid() of C
    return found


def differ(before: dict[int, int], now: dict[int, int]) -> bool:
    """Whether a thread of a process ran between two times, or a process is another one."""
    return before.keys() != now.keys() or any(abs(now[each] - before[each]) > SLACK_NS for each in now)


def all_are_asleep(processes: Iterable[int]) -> bool:
    """Whether each other thread waits for something else than a processor, is stopped, or has ended."""
    own = str(threading.get_native_id())
    for process in processes:
        with suppress(FileNotFoundError, ProcessLookupError):
            for thread in os.listdir(f"/proc/{process}/task"):
                if thread != own and state(f"/proc/{process}/task/{thread}/stat") in (b"R", b"D"):
                    return False
    return True


def state(path: str) -> bytes:
    """Of a thread, by its file; empty if it has ended. It is asked often: ``open`` would take twice as long."""
    with suppress(FileNotFoundError, ProcessLookupError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return os.read(descriptor, 128).rpartition(b") ")[2][:1]
        finally:
            os.close(descriptor)
    return b""


CLOCK = HeldClock()
