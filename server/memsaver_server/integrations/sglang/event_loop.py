"""The event loop of a scheduler. Several ranks iterate in step: each iteration begins with a broadcast of what rank 0
received, which every rank then processes.

What all ranks must do in the same iteration is therefore sent as one more item of that broadcast: requests of SGLang's
own, and commands. Calls of a scheduler's methods on rank 0 alone would make the ranks compute different batches, and
hang in the first collective.
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
from memsaver_server.integrations.sglang import names
from memsaver_server.integrations.sglang.idle import IdleRest
from memsaver_server.integrations.sglang.intake import Intake
from memsaver_server.integrations.sglang.work import SchedulerWork

#: How long a rank may take to come to the iteration that another rank has come to, seconds.
ARRIVAL_S = 30.0

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Command:
    """Work for every rank.

    Attributes:
        number: counts from 1.
        name: a method of ``SchedulerWork``; if it is empty, the ranks only tell that they have come there.
    """

    number: int
    name: str
    arguments: tuple[Any, ...] = ()


class EventLoop:
    """The loop of a rank. Takes the place of the scheduler's ``process_input_requests`` and ``request_receiver``."""

    def __init__(self, scheduler: Any, work: SchedulerWork) -> None:
        self._scheduler = scheduler
        self._work = work
        self._done = 0  # the number of the last command
        self._arrived = 0  # the same, once the iteration that it was done in is over
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._process_input_requests = scheduler.process_input_requests
        scheduler.process_input_requests = self._process
        self._receiver = scheduler.request_receiver
        scheduler.request_receiver = self

    def wait_for(self, number: int) -> None:
        """Return once command ``number`` is done and its iteration over: this rank then waits for the next broadcast.

        Raises:
            MemsaverError: it did not come to that.
            Exception: what that command raised.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._arrived >= number, ARRIVAL_S):
                raise MemsaverError(f"SGLang's event loop did not come to the next iteration in {ARRIVAL_S:g} s")
        if self._done == number and self._error is not None:
            raise self._error

    # In the scheduler's thread.

    def recv_requests(self, *arguments: Any, **named: Any) -> Any:
        """Stands in for ``SchedulerRequestReceiver.recv_requests``, with which the event loop begins an iteration."""
        self._arrive()
        return self._receiver.recv_requests(*arguments, **named)

    def _arrive(self) -> None:
        with self._changed:
            self._arrived = self._done
            self._changed.notify_all()

    def _process(self, received: Sequence[Any]) -> None:
        """Stands in for ``Scheduler.process_input_requests``, which the event loop calls in each iteration."""
        for each in received or ():
            if isinstance(each, Command):
                self._carry_out(each)
        self._process_input_requests([each for each in received or () if not isinstance(each, Command)])

    def _carry_out(self, command: Command) -> Any:
        result = self._error = None
        try:
            if command.name:
                result = getattr(self._work, command.name)(*command.arguments)
        except Exception as error:
            self._error = error
        self._done = command.number
        return result


class LeadingLoop(EventLoop):
    """The loop of rank 0, which receives, and admits, for all. Its methods may be called from any thread.

    Attributes:
        after: called in the scheduler's thread at the end of each iteration's processing.
        take: called in the scheduler's thread with what was received; returns what of it is admitted.
        failure: returns why the ranks have failed, or an empty string.
    """

    def __init__(self, scheduler: Any, work: SchedulerWork, intake: Intake) -> None:
        super().__init__(scheduler, work)
        self._intake = intake
        self._thread: threading.Thread | None = None
        self._pending: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._outgoing: deque[Any] = deque()
        self._commands: dict[int, Future[Any]] = {}
        self._last = 0
        self._numbering = threading.Lock()
        self._rests: dict[int, threading.Event] = {}
        self._outputs: dict[int, Future[Any]] = {}  # by the identity of the request that is processed
        self.after: Callable[[], None] = lambda: None
        self.take: Callable[[Sequence[Any]], Sequence[Any]] = lambda received: received
        self.failure: Callable[[], str] = str
        # What SGLang asks between its receipt of requests and their broadcast, on the ranks that receive any.
        self._blocker = self._receiver.input_blocker
        self._idle = IdleRest(self._receiver, work.has_nothing_to_do, names.parallel(scheduler).pp_size)
        self._idle.shorten(getattr(scheduler, "idle_sleeper", None))
        self._receiver = dataclasses.replace(self._receiver, input_blocker=self)
        self._dispatcher = scheduler._request_dispatcher
        scheduler._request_dispatcher = self._dispatch

    def is_alive(self) -> bool:
        """Return whether the event loop runs, or has not begun yet, and the device's context works."""
        running = self._thread is None or self._thread.is_alive()
        return running and not self._scheduler.gracefully_exit and not self.failure() and ms.status().state != "failed"

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have ``work`` run in this rank's scheduler thread, before the next broadcast."""
        future: Future[T] = Future()
        self._pending.append((future, work))
        self._idle.wake()
        return future

    def send(self, request: Any) -> None:
        """Have every rank process ``request``, one of SGLang's own."""
        self._outgoing.append(request)
        self._idle.wake()

    def process(self, request: Any, answered: Future[Any]) -> None:
        """As ``send``; ``answered`` then gets what this rank's scheduler answers."""
        self._outputs[id(request)] = answered
        self.send(request)

    def run(self, name: str, *arguments: Any) -> int:
        """Have every rank carry out a command, and return its number once this one has.

        Raises:
            MemsaverError: the event loop ended first, or the ranks have failed.
            Exception: what this rank raised.
        """
        return self._run(name, arguments, None)

    @contextmanager
    def standstill(self) -> Iterator[int]:
        """Keep every rank between two iterations inside; gives the number that each has come there with.

        This rank rests before its next broadcast, so all others wait in theirs.
        """
        over = threading.Event()
        try:
            yield self._run("", (), over)
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
                raise MemsaverError(self.failure() or "SGLang's scheduler has stopped; restart the engine")
            if given_up() or time.monotonic() >= deadline:
                return

    def _run(self, name: str, arguments: tuple[Any, ...], over: threading.Event | None) -> int:
        done: Future[Any] = Future()
        with self._numbering:
            self._last += 1
            number = self._last
            self._commands[number] = done
            if over is not None:
                self._rests[number] = over
            self._outgoing.append(Command(number, name, arguments))
        self._idle.wake()
        self.wait_for_future(done)
        done.result()
        return number

    # In the scheduler's thread.

    def handle(self, received: Sequence[Any]) -> list[Any]:
        """Stands in for SGLang's input blocker: return what is broadcast in place of ``received``.

        Requests are held and refused here, before the other ranks learn of them.
        """
        if self._blocker is not None:
            received = self._blocker.handle(received)
        while self._pending:
            future, work = self._pending.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        outgoing = [self._outgoing.popleft() for _ in range(len(self._outgoing))]
        return [*outgoing, *self._intake.admit(self.take(received))]

    def _arrive(self) -> None:
        super()._arrive()
        if (over := self._rests.pop(self._done, None)) is not None:
            over.wait()
        self._idle.rest()

    def _process(self, received: Sequence[Any]) -> None:
        self._thread = threading.current_thread()
        super()._process(received)
        self.after()

    def _dispatch(self, request: Any) -> Any:
        """Stands in for the scheduler's ``_request_dispatcher``, which returns the answer to ``request`` or None."""
        answered = self._outputs.pop(id(request), None)
        try:
            output = self._dispatcher(request)
        except BaseException as error:
            if answered is not None:
                answered.set_exception(error)
            raise
        if answered is not None:
            answered.set_result(output)
        return output

    def _carry_out(self, command: Command) -> Any:
        result = super()._carry_out(command)
        done = self._commands.pop(command.number)
        if self._error is not None:
            done.set_exception(self._error)
        else:
            done.set_result(result)
        return result
