"""The event loop of a scheduler. Several ranks iterate in step: each iteration begins with a broadcast of what rank 0
received, which every rank then processes.

What all ranks must do in the same iteration is therefore sent as one more item of that broadcast: requests of the
engine's own, and commands. Calls of a scheduler's methods on rank 0 alone would make the ranks compute different
batches, and hang in the first collective.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import memsaver_core as ms
from memsaver_core.errors import MemsaverError
from memsaver_server.engine import DRAIN_POLL_S, never
from memsaver_server.integrations.scheduler_loop.idle import IdleRest
from memsaver_server.integrations.scheduler_loop.work import Work

#: How long a rank may take to come to the iteration that another rank has come to, seconds.
ARRIVAL_S = 30.0
#: How long rank 0 may take to carry out a command: less than it waits in a collective for a rank that hangs.
COMMAND_S = 120.0

T = TypeVar("T")


class LateError(MemsaverError):
    """Rank 0 has not come to a command in time: its scheduler hangs, or waits for another rank."""


@dataclasses.dataclass(frozen=True)
class Command:
    """Work for every rank.

    Attributes:
        number: counts from 1; 0 if nobody waits for the end.
        name: a method of ``Work``; if it is empty, the ranks only tell that they have come there.
    """

    number: int
    name: str
    arguments: tuple[Any, ...] = ()


class EventLoop:
    """The loop of a rank. The scheduler's own calls ``begin`` and ``process`` in each iteration."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._done = 0  # the number of the last command
        self._arrived = 0  # the same, once the iteration that it was done in is over
        #: What commands have raised, by their numbers: others may be done before a rank is asked.
        self._errors: deque[tuple[int, Exception]] = deque(maxlen=32)
        self._changed = threading.Condition()

    def wait_for(self, number: int) -> None:
        """Return once command ``number`` is done and its iteration over: this rank then waits for the next broadcast.

        Raises:
            MemsaverError: it did not come to that.
            Exception: what that command raised.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._arrived >= number, ARRIVAL_S):
                raise MemsaverError(f"the scheduler did not come to the next iteration in {ARRIVAL_S:g} s")
            error = self._error_of(number)
        if error is not None:
            raise error

    # In the scheduler's thread.

    def begin(self) -> None:
        """An iteration begins; this rank is about to wait for the broadcast."""
        with self._changed:
            self._arrived = self._done
            self._changed.notify_all()

    def process(self, received: Sequence[Any], process: Callable[[list[Any]], T]) -> T:
        """Carry out the commands in what was broadcast; return what the scheduler's ``process`` makes of the rest."""
        for each in received:
            if isinstance(each, Command):
                self._carry_out(each)
        return process([each for each in received if not isinstance(each, Command)])

    def _carry_out(self, command: Command) -> None:
        if not command.number:
            getattr(self._work, command.name)(*command.arguments)
            return
        try:
            if command.name:
                getattr(self._work, command.name)(*command.arguments)
        except Exception as error:
            with self._changed:
                self._errors.append((command.number, error))
        self._done = command.number

    def _error_of(self, number: int) -> Exception | None:
        return next((error for failed, error in self._errors if failed == number), None)


class LeadingLoop(EventLoop):
    """The loop of rank 0, which receives, and admits, for all. Its methods may be called from any thread.

    Attributes:
        after: called in the scheduler's thread at the end of each iteration's processing.
        take: called in the scheduler's thread with what was received; returns what of it is admitted.
        failure: returns why the ranks have failed, or an empty string.
    """

    def __init__(self, work: Work, idle: IdleRest, is_ending: Callable[[], bool]) -> None:
        super().__init__(work)
        self._idle = idle
        self._is_ending = is_ending
        self._thread: threading.Thread | None = None
        self._pending: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._outgoing: deque[Any] = deque()
        self._commands: dict[int, Future[None]] = {}
        self._last = 0
        self._numbering = threading.Lock()
        self._rests: dict[int, threading.Event] = {}
        self.after: Callable[[], None] = lambda: None
        self.take: Callable[[Sequence[Any]], Sequence[Any]] = lambda received: received
        self.failure: Callable[[], str] = str

    def is_alive(self) -> bool:
        """Return whether the event loop runs, or has not begun yet, and the device's context works."""
        running = self._thread is None or self._thread.is_alive()
        return running and not self._is_ending() and not self.failure() and ms.status().state != "failed"

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have ``work`` run in this rank's scheduler thread, before the next broadcast."""
        future: Future[T] = Future()
        self._pending.append((future, work))
        self._idle.wake()
        return future

    def send(self, request: Any) -> None:
        """Have every rank process ``request``, one of the engine's own."""
        self._outgoing.append(request)
        self._idle.wake()

    def tell(self, name: str, *arguments: Any) -> None:
        """Have every rank carry out a command that cannot fail, without waiting for it."""
        self.send(Command(0, name, arguments))

    def run(self, name: str, *arguments: Any, over: threading.Event | None = None) -> int:
        """Have every rank carry out a command, and return its number once this one has.

        Args:
            over: this rank does not begin its next iteration before that.

        Raises:
            LateError: it did not in ``COMMAND_S``.
            MemsaverError: the event loop ended first, or the ranks have failed.
            Exception: what this rank raised.
        """
        done: Future[None] = Future()
        with self._numbering:
            self._last += 1
            number = self._last
            self._commands[number] = done
            if over is not None:
                self._rests[number] = over
            self._outgoing.append(Command(number, name, arguments))
        self._idle.wake()
        self.wait_for_future(done, COMMAND_S)
        if not done.done():
            raise LateError(f"the scheduler of rank 0 did not come to its next iteration in {COMMAND_S:g} s")
        done.result()
        return number

    @contextmanager
    def standstill(self) -> Iterator[int]:
        """Keep every rank between two iterations inside; gives the number that each has come there with.

        This rank rests before its next broadcast, so all others wait in theirs.
        """
        over = threading.Event()
        try:
            yield self.run("", over=over)
        finally:
            over.set()

    def wait_for_future(
        self, future: Future[Any], timeout_s: float = float("inf"), given_up: Callable[[], bool] = never
    ) -> None:
        """Return once ``future`` is done or ``given_up()``, or after ``timeout_s`` seconds; raise MemsaverError as
        ``run``."""
        deadline = time.monotonic() + timeout_s
        while not wait([future], max(0.0, min(DRAIN_POLL_S, deadline - time.monotonic()))).done:
            if not self.is_alive():
                raise MemsaverError(self.failure() or "the engine's scheduler has stopped; restart the engine")
            if given_up() or time.monotonic() >= deadline:
                return

    # In the scheduler's thread.

    def handle(self, received: Sequence[Any]) -> list[Any]:
        """Return what is broadcast in place of ``received``. Called once in each iteration.

        Requests are held and refused here, before the other ranks learn of them.
        """
        while self._pending:
            future, work = self._pending.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        outgoing = [self._outgoing.popleft() for _ in range(len(self._outgoing))]
        return [*outgoing, *self.take(received)]

    def begin(self) -> None:
        super().begin()
        if (over := self._rests.pop(self._done, None)) is not None:
            over.wait()
        self._idle.rest()

    def process(self, received: Sequence[Any], process: Callable[[list[Any]], T]) -> T:
        self._thread = threading.current_thread()
        result = super().process(received, process)
        self.after()
        return result

    def _carry_out(self, command: Command) -> None:
        super()._carry_out(command)
        if command.number:
            done = self._commands.pop(command.number)
            if (error := self._error_of(command.number)) is not None:
                done.set_exception(error)
            else:
                done.set_result(None)
