"""A scheduler and its event loop, on each rank of an engine; the ``Engine`` over that of the first rank, and the memory
of all ranks as one.

Several ranks iterate in step: each iteration begins with a broadcast of what rank 0 received, which every rank then
processes. What all ranks must do in the same iteration is therefore sent as one more item of that broadcast: requests
of the engine's own, and commands. Calls of a scheduler's methods on rank 0 alone would make the ranks compute different
batches, and hang in the first collective.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

import memsaver_core as ms
from memsaver_core.contract.errors import ConfigurationError, DrainTimeoutError, MemsaverError, NoThreadError
from memsaver_core.contract.reports import OperationReport
from memsaver_core.contract.requests import MemoryRequest, Release, Resume, Tagged
from memsaver_core.ranks.connection import Listener, SocketChannel, serve
from memsaver_core.ranks.protocol import Introduce, Plain, Request
from memsaver_core.ranks.rank import Rank, Result
from memsaver_server.engine import LOCAL_MEMORY, Engine, Memory, never
from memsaver_server.integrations.adapter.calls import is_done
from memsaver_server.ranks import RankMemory
from memsaver_server.ranks.watch import stopped_ranks
from memsaver_server.settings import Settings
from memsaver_server.threads import start_thread

if TYPE_CHECKING:
    from memsaver_server.engine.lifecycle import Lifecycle

logger = logging.getLogger("memsaver")

#: The longest iteration of an idle event loop and some more, seconds.
ITERATION_S = 2.0
#: How long all ranks may take from the first one's start of its event loop to the last one's, seconds.
CONNECT_S = 300.0
#: How long a rank may take to come to the iteration that another rank has come to, seconds.
ARRIVAL_S = 30.0
#: How long rank 0 may take to carry out a command: less than it waits in a collective for a rank that hangs.
COMMAND_S = 120.0
#: How many results of commands a rank remembers.
RESULTS = 32
#: How long a rest lasts without a message: after it the engine does what it does while it is idle, milliseconds.
REST_MS = 1000

T = TypeVar("T")


class LateError(MemsaverError):
    """Rank 0 has not come to a command in time: its scheduler hangs, or waits for another rank."""


@dataclass(frozen=True)
class Group:
    """The processes of an engine: their ``ranks`` in torch's default process group, of which the first receives the
    engine's requests, and this process's place among them; ``cpu_group`` is torch's group of all."""

    world_size: int
    ranks: Sequence[int]
    rank_in_group: int
    cpu_group: Any


@dataclass(frozen=True)
class Command:
    """Work for every rank: the method ``name`` of ``Scheduler``; if that is empty, the ranks only come to the command.

    Commands are numbered from 1; 0 is one that nobody waits for.
    """

    number: int
    name: str
    arguments: tuple[Any, ...] = ()


class Scheduler(ABC):
    """An engine's scheduler, as memsaver needs it: what an engine alone knows is said in a class derived from this.

    The methods that return nothing are names of commands, which are carried out in the scheduler's thread.

    Attributes:
        engine: the engine's name; its page is ``docs/`` and that name in small letters.
        own: the engine's own object.
    """

    engine: ClassVar[str]

    def __init__(self, own: Any) -> None:
        self.own = own
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # each with its copy on the host

    @property
    @abstractmethod
    def group(self) -> Group:
        """All ranks."""

    @abstractmethod
    def missing(self) -> list[str]:
        """Return the names that memsaver needs and that this version of the engine lacks."""

    @abstractmethod
    def obstacles(self, service: bool) -> Iterator[str]:
        """Yield what else stands in the way; ``service`` as for ``check``."""

    def check(self, *, service: bool = False) -> None:
        """Raise ConfigurationError if this scheduler cannot be served; the message says why.

        Args:
            service: whether a service is to release all memory of the engine, and not only the engine's own calls.
        """
        if missing := self.missing():
            raise ConfigurationError(
                f"this version of {self.engine} cannot be served: it has no {', '.join(missing)}; "
                f"docs/{self.engine.lower()}.md lists versions that can"
            )
        for problem in self.obstacles(service):
            raise ConfigurationError(f"{self.engine}'s scheduler cannot be served: {problem}")

    @abstractmethod
    def take_over(self, loop: EventLoop) -> None:
        """Have each iteration receive by ``loop.beginning``, and give ``loop.process`` what it received."""

    @abstractmethod
    def lead(self, loop: LeadingLoop) -> IdleRest:
        """Have rank 0 broadcast what ``loop.handle`` makes of what it received; return the rest of its thread."""

    @abstractmethod
    def is_ending(self) -> bool:
        """Whether the event loop ends; called from any thread."""

    @abstractmethod
    def is_still(self) -> bool:
        """Whether no request computes, and no copy of the cache or of weights is under way."""

    @abstractmethod
    def has_nothing_to_do(self) -> bool:
        """Whether the event loop would do nothing until it receives something."""

    @abstractmethod
    def in_flight(self) -> list[str]:
        """Return the names of the requests in flight; also called from other threads."""

    @abstractmethod
    def models(self) -> Iterable[Any]:
        """Return the models whose weights are released."""

    @abstractmethod
    def flush(self) -> None:
        """Forget every cached prefix; raise MemsaverError if pages are in use."""

    def save_buffers(self) -> None:
        """Copy the models' buffers, which no weight update writes, if their memory is resident."""
        if any(tag.released_bytes for tag in ms.status().tags if tag.tag == "weights"):
            return
        shared = {id(buffer): buffer for model in self.models() for buffer in model.buffers()}
        self._buffers = [(buffer, buffer.detach().to("cpu", copy=True)) for buffer in shared.values()]

    def repair(self, lost: Sequence[str]) -> None:
        """Write back the buffers of ``lost`` weights, and forget the prefixes of a lost cache."""
        if "weights" in lost:
            with torch.inference_mode():
                for buffer, content in self._buffers:
                    buffer[...] = content
        if "kv_cache" in lost:
            self.flush()


def lacking(owner: Any, paths: Iterable[str], prefix: str) -> list[str]:
    """Return those of ``paths`` (attributes, joined by dots) that ``owner`` does not have, each after ``prefix``."""
    found = []
    for path in paths:
        try:
            attrgetter(path)(owner)
        except AttributeError:
            found.append(f"{prefix}.{path}")
    return found


def memory_obstacles(saves_memory: bool, module: str) -> Iterator[str]:
    """Yield why the memory of an engine cannot be released.

    Args:
        saves_memory: whether it puts that into regions of ``torch_memory_saver``, which its ``module`` imports.
    """
    if not ms.enabled():
        return
    if not saves_memory:
        yield "its memory is in no region; start it with --enable-memory-saver"
    saver = getattr(importlib.import_module(module), "torch_memory_saver", None)
    if not getattr(saver, "__name__", "").startswith("memsaver_core."):
        yield (
            "it uses another torch_memory_saver; install memsaver-torch-memory-saver in place of that, or call "
            "memsaver_core.compat.install() before it is imported"
        )


class EventLoop:
    """The loop of a rank. The scheduler's own calls ``begin`` and ``process`` in each iteration."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._done = 0  # the number of the last command
        self._arrived = 0  # the same, once the iteration that it was done in is over
        #: Of the last commands, by their numbers: others may be done before a rank is asked.
        self._results: dict[int, Future[None]] = {}
        self._changed = threading.Condition()
        scheduler.take_over(self)

    def wait_for(self, number: int) -> None:
        """Return once command ``number`` is done and its iteration over: this rank then waits for the next broadcast.
        Raises what that command raised, or MemsaverError: it did not come to that."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._arrived >= number, ARRIVAL_S):
                raise MemsaverError(f"the scheduler did not come to the next iteration in {ARRIVAL_S:g} s")
        if (result := self._results.get(number)) is not None:
            result.result()

    # In the scheduler's thread.

    def begin(self) -> None:
        """An iteration begins; this rank is about to wait for the broadcast."""
        with self._changed:
            self._arrived = self._done
            self._changed.notify_all()

    def beginning(self, receive: Callable[..., T]) -> Callable[..., T]:
        """Return the scheduler's ``receive``, before which an iteration begins."""

        def begin(*arguments: Any, **named: Any) -> T:
            self.begin()
            return receive(*arguments, **named)

        return begin

    def process(self, received: Sequence[Any], process: Callable[[list[Any]], T]) -> T:
        """Carry out the commands in what was broadcast; return what the scheduler's ``process`` makes of the rest."""
        for each in received:
            if isinstance(each, Command):
                self._carry_out(each)
        return process([each for each in received if not isinstance(each, Command)])

    def _carry_out(self, command: Command) -> None:
        if not command.number:
            getattr(self.scheduler, command.name)(*command.arguments)
            return
        self._done = command.number
        result = self._results.setdefault(command.number, Future())
        try:
            if command.name:
                getattr(self.scheduler, command.name)(*command.arguments)
            result.set_result(None)
        except Exception as error:
            result.set_exception(error)
        self._results.pop(command.number - RESULTS, None)


class LeadingLoop(EventLoop):
    """The loop of rank 0, which receives, and admits, for all. Its methods may be called from any thread.

    Attributes:
        failure: returns why the ranks have failed, or an empty string.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._thread: threading.Thread | None = None
        self._pending: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._outgoing: deque[Any] = deque()
        self._last = 0
        self._numbering = threading.Lock()
        self._rests: dict[int, threading.Event] = {}
        self.failure: Callable[[], str] = str
        self._idle = scheduler.lead(self)
        super().__init__(scheduler)

    def is_alive(self) -> bool:
        """Return whether the event loop runs, or has not begun yet, and the device's context works."""
        running = self._thread is None or self._thread.is_alive()
        return running and not self.scheduler.is_ending() and not self.failure() and ms.status().state != "failed"

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
            self._results[number] = done
            if over is not None:
                self._rests[number] = over
            self._outgoing.append(Command(number, name, arguments))
        self._idle.wake()
        if not self.is_done(done, COMMAND_S):
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

    def is_done(
        self, future: Future[Any], timeout_s: float = float("inf"), given_up: Callable[[], bool] = never
    ) -> bool:
        """As ``calls.is_done``; raises MemsaverError as ``run``."""

        def is_hopeless() -> bool:
            if not self.is_alive():
                raise MemsaverError(self.failure() or "the engine's scheduler has stopped; restart the engine")
            return given_up()

        return is_done(future, timeout_s, is_hopeless)

    # In the scheduler's thread.

    def take(self, received: Sequence[Any]) -> Sequence[Any]:
        """Return what the scheduler gets now of what was ``received``, and held before."""
        return received

    def after(self) -> None:
        """The scheduler has processed what it received."""

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


class IdleRest:
    """Rests the thread that receives requests while there is nothing to do, until a message or a call of ``wake``.

    A scheduler's event loop never sleeps. Beside it each step of another thread of the process waits up to 5 ms for the
    interpreter's lock, Python's switch interval.

    Attributes:
        poller: waits for both; None if the scheduler does not receive from sockets of ZeroMQ.
    """

    def __init__(self, sockets: Sequence[Any], nothing_to_do: Callable[[], bool], iterations: int = 1) -> None:
        """
        Args:
            sockets: those that the scheduler receives from; None is left out.
            nothing_to_do: whether an iteration of the event loop would do nothing; called in the scheduler's thread.
            iterations: how many of them the scheduler needs to settle after the last work.
        """
        self._nothing_to_do = nothing_to_do
        self._settling = iterations
        self._idle = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.poller: Any = None
        with suppress(ImportError):
            zmq = importlib.import_module("zmq")
            if isinstance(sockets[0], zmq.Socket):
                self.poller = zmq.Poller()
                for each in (self._wake, *sockets):
                    if each is not None:
                        self.poller.register(each, zmq.POLLIN)

    def wake(self) -> None:
        """End the rest, or keep the next one from beginning. From any thread."""
        os.eventfd_write(self._wake, 1)

    def rest(self) -> None:
        """Return once there may be something to do. In the scheduler's thread, before it receives."""
        self._idle = self._idle + 1 if self._nothing_to_do() else 0
        if self.poller is not None and self._idle > self._settling:
            self.poller.poll(REST_MS)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)


def _nothing() -> None:
    pass


class _NotWrittenError(Exception):
    """The engine has answered that it wrote no weights."""


class LoopEngine(LeadingLoop, Engine):
    """An engine that is the loop of the scheduler which receives its requests; each other rank calls ``join``.

    A scheduler is touched in its own thread alone, once per iteration of its event loop, and there the service's work
    is done on every rank, between two batches. What the engine's own HTTP server, or its class ``Engine``, asks for is
    taken out of what the scheduler receives, and carried out by the service's lifecycle.

    Attributes:
        unwritten_weights: what ``lifecycle`` asks for at the end of an update of weights.
    """

    scheduler_class: ClassVar[type[Scheduler]]
    _takes_calls = False
    _lifecycle: Lifecycle
    _settings: Settings

    def __init__(self, scheduler: Any) -> None:
        """Take over the intake of ``scheduler``, which was checked and whose event loop does not run yet."""
        super().__init__(scheduler)
        several = gather(scheduler.group, self) if scheduler.group.world_size > 1 else None
        self.memory: Memory = several or LOCAL_MEMORY
        #: Has every rank carry out a command; raises what failed on any of them.
        self.run_on_all: Callable[..., object] = (several or self).run
        self._waiting: list[tuple[Future[None], Callable[[], None]]] = []  # of the scheduler's thread alone
        self._flush_at_repair = False
        self.unwritten_weights: tuple[str, ...] = ()
        self._updates: dict[str, Future[Any]] = {}  # of weights, by the name of the answer that is waited for

    def take_calls(self, lifecycle: Lifecycle, settings: Settings) -> None:
        """Have ``lifecycle`` carry out the engine's own calls."""
        self._lifecycle, self._settings, self._takes_calls = lifecycle, settings, True

    # Of the methods of ``Engine``.

    def flush_cache(self) -> None:
        """In a hibernated process the scheduler's own reset would wait for the device: it is done after the wake-up."""
        if self.memory.status().hibernated:
            self._flush_at_repair = True
        else:
            self.run_on_all("flush")

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> None:
        """Write buffers back into weights that came back without content, and forget the prefixes of a lost cache.

        The weights themselves are then written by the engine's own update calls.
        """
        self.run_on_all("repair", tuple(lost))
        if self._flush_at_repair:
            self.run_on_all("flush")
            self._flush_at_repair = False

    def when_still(
        self,
        timeout_s: float,
        then: Callable[[], None] = _nothing,
        *,
        begin: Callable[[], None] = _nothing,
        undo: Callable[[], None] = _nothing,
        given_up: Callable[[], bool] = never,
    ) -> None:
        """Have ``then`` called once no request is in flight, before another one enters; return after it.

        ``begin`` is called at once, and ``undo`` if it took too long; all three in the scheduler's thread.

        Raises:
            DrainTimeoutError: it took longer than ``timeout_s``, or was given up. ``then`` was not called.
        """
        begun_at = time.monotonic()
        done: Future[None] = Future()
        still = (done, then)

        def start() -> None:
            begin()
            self._waiting.append(still)

        def give_up() -> None:
            if still in self._waiting:
                self._waiting.remove(still)
                undo()

        begun = self.submit(start)
        # Without any time left, too, one iteration is tried.
        self.is_done(begun, max(timeout_s, ITERATION_S), given_up)
        if begun.cancel():
            raise DrainTimeoutError(timeout_s, self.scheduler.in_flight())
        begun.result()
        if not self.is_done(done, begun_at + timeout_s - time.monotonic(), given_up):
            # If this one began just now, the iteration that it began in may still end it.
            self.is_done(self.submit(give_up), ITERATION_S)
            if not done.done():
                raise DrainTimeoutError(timeout_s, self.scheduler.in_flight())

    # In the scheduler's thread.

    def take(self, received: Sequence[Any]) -> Sequence[Any]:
        return [each for each in received if not (self._takes_calls and self._takes(each))]

    def after(self) -> None:
        if self._waiting and self.scheduler.is_still():
            waiting, self._waiting = self._waiting, []
            for done, then in waiting:
                then()
                done.set_result(None)

    def _takes(self, request: Any) -> bool:
        """Take ``request`` if the lifecycle carries it out; return whether it does."""
        name = type(request).__name__
        if name in ("ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput"):
            return self._in_thread(self._operate, request)
        if name.startswith("UpdateWeight") and "From" in name:
            return self._in_thread(self._update, request)
        return False

    def _in_thread(self, work: Callable[[Any], None], request: Any) -> bool:
        try:
            start_thread(f"memsaver-{self.name}", partial(work, request))
        except NoThreadError as error:
            self._answer(request, error)
        return True

    # In a thread for each call.

    @abstractmethod
    def _answer(self, request: Any, error: BaseException | None) -> None:
        """Answer a request that has failed by ``error``, or succeeded. From any thread."""

    def _operate(self, request: Any) -> None:
        try:
            tags = tuple(request.tags or ())
            if type(request).__name__.startswith("Release"):
                asked = Release(tags=tags, wait=True).resolved(self._settings.drain_timeout_s)
                operation = self._lifecycle.start(asked, client=self.name)
            else:
                operation = self._lifecycle.start(Resume(tags=tags, wait=True), client=self.name)
            operation.done.result()
            error = operation.error
        except Exception as refused:
            error = refused
        if error is not None:
            logger.error("%s's own %s failed: %s", self.name, type(request).__name__, error)
        self._answer(request, error)

    def _update(self, request: Any) -> None:
        """Have the engine write weights while no release or resume runs, and note whether it did.

        Each request of an update in several ones counts as all, as nothing marks the last: its clients resume the KV
        cache, or continue generation, after all of them.
        """
        answered: Future[Any] = Future()
        try:
            with suppress(_NotWrittenError), self._lifecycle.writing():
                self._write(request, answered)
                self.is_done(answered)
                if not answered.result().success:
                    raise _NotWrittenError
        except Exception as error:
            self._answer(request, error)

    def _write(self, request: Any, answered: Future[Any]) -> None:
        """Have the engine carry out an update of weights; ``answered`` gets its answer."""
        self._updates[answer_to(request)] = answered
        self.send(request)


def answer_to(request: Any) -> str:
    """Return the name of the class of the answer."""
    return type(request).__name__.replace("ReqInput", "ReqOutput")


# The scheduler processes, one for each rank, all on one host. Rank 0 receives requests, and the service runs there.
# Each process, rank 0 included, answers the messages of the rank protocol in a thread of its own.


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


class SchedulerMemory(RankMemory):
    """The memory of all ranks, each a ``SchedulerRank``. It is released and resumed while none of them iterates."""

    def __init__(self, loop: LeadingLoop, channel: SocketChannel) -> None:
        self._loop = loop
        self._channel = channel
        self._after = 0
        self._asking = threading.RLock()
        super().__init__(self)
        loop.failure = lambda: self.failure

    def start(self, message: Plain) -> Future[list[Plain]]:
        """Of the protocol ``Channel``."""
        return self._channel.start({"after": self._after, "message": message})

    def release(self, options: MemoryRequest, *, log: ms.PhaseLog | None = None) -> OperationReport:
        return self._at_rest(partial(super().release, options, log=log))

    def resume(self, options: Tagged, *, log: ms.PhaseLog | None = None) -> OperationReport:
        return self._at_rest(partial(super().resume, options, log=log))

    def check_release(self, options: MemoryRequest) -> None:
        with self._asking:
            super().check_release(options)

    def reserve(self, options: Tagged) -> None:
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
        with self._asking_after(number):
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
            with self._failing_if_late(), self._loop.standstill() as number, self._asking_after(number):
                return operate()

    @contextmanager
    def _asking_after(self, number: int) -> Iterator[None]:
        """Messages that are sent inside are carried out once a rank has come to that command."""
        with self._asking:
            self._after = number
            try:
                yield
            finally:
                self._after = 0

    @contextmanager
    def _failing_if_late(self) -> Iterator[None]:
        try:
            yield
        except LateError as error:
            stopped = stopped_ranks(self._group.rank_statuses())
            raise self._group.fail(f"{error}{stopped and f'; {stopped}'}") from error


def gather(group: Group, loop: LeadingLoop) -> SchedulerMemory:
    """Return the memory of all ranks, of which this is the first; raise MemsaverError if another did not ``join``."""
    listener = Listener(group.world_size, first=0)
    _shared(group, listener.path)
    _answer(group, loop, listener.path)
    return SchedulerMemory(loop, SocketChannel(None, listener.accept(CONNECT_S)))


def join(scheduler: Scheduler) -> None:
    """Have ``scheduler``, which is not the first rank, do what that sends, until it closes the connection."""
    _answer(scheduler.group, EventLoop(scheduler), _shared(scheduler.group, ""))


def _shared(group: Group, path: str) -> str:
    """Return the ``path`` of rank 0; every rank must call it."""
    paths = [path]
    torch.distributed.broadcast_object_list(paths, src=group.ranks[0], group=group.cpu_group)
    return paths[0]


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
