"""The clock of limits of time in this process, which tests hold."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from memsaver_server import clock
from tests import forks

#: How long nothing may have happened before the clock moves, and by how much it does then, seconds.
QUIET_S, STEP_S = 0.004, 0.04
#: How often those look at it that wait by it, seconds; and event loops, which are woken.
LOOK_S, LONG_S = 0.05, 1.0
#: Its pace while something else moves, as a share of the system's.
CREEP = 0.01

Activity = dict[str, str]


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
        before: Activity = {}
        while not ended.wait(QUIET_S):
            assert self._moved is not None
            try:
                now = activity()
                if now == before and all(map(is_asleep, now)):
                    self._moved += STEP_S
                before = now
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


def activity() -> Activity:
    """How long each other thread ran and waited for a processor so far, and how often; by its folder in /proc."""
    own = threading.get_native_id()
    found = {}
    for process in (os.getpid(), *forks.running()):
        with suppress(FileNotFoundError, ProcessLookupError):
            for thread in os.listdir(f"/proc/{process}/task"):
                if int(thread) != own:
                    folder = f"/proc/{process}/task/{thread}"
                    found[folder] = read(f"{folder}/schedstat")
    return found


def is_asleep(folder: str) -> bool:
    """Whether a thread waits for something else than a processor, is stopped, or has ended."""
    return read(f"{folder}/stat").rpartition(")")[2].split()[:1] not in (["R"], ["D"])


def read(path: str) -> str:
    with suppress(FileNotFoundError, ProcessLookupError), open(path) as file:
        return file.read()
    return ""


CLOCK = HeldClock()
