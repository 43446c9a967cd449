"""Engines that are a scheduler with an event loop on each rank: their ``Engine``, and the memory of all ranks as one.

The ranks iterate together. Each iteration begins with a broadcast of what rank 0 received, which every rank processes.
What all ranks must do in the same iteration is sent in that broadcast: the engine's own requests and our commands. A
method called on rank 0 alone would make the ranks compute different batches, and hang in the first collective.

Replicas have ranks each, which iterate by themselves. What the first replica's rank 0 broadcasts it also sends to the
first rank of every other replica, which broadcasts it there.
"""

from __future__ import annotations

import base64
import importlib
import itertools
import logging
import os
import pickle
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
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch

import memsaver_core as ms
from memsaver_core.contract.errors import (
    ConfigurationError,
    DrainTimeoutError,
    MemsaverError,
    NoThreadError,
    UnsupportedError,
)
from memsaver_core.contract.reports import OperationReport
from memsaver_core.contract.requests import MemoryRequest, Release, Resume, Tagged, Verb
from memsaver_core.manifests import WeightsKey
from memsaver_core.ranks.connection import SocketChannel, serve
from memsaver_core.ranks.protocol import Answer, Introduce, Plain, Request, Resize, WriteAsleep
from memsaver_core.ranks.rank import Rank, Result
from memsaver_core.ranks.remote import RemoteListener
from memsaver_core.rendezvous import Listener, path_in, settle
from memsaver_server.engine import LOCAL_MEMORY, Engine, Memory, never, waits
from memsaver_server.integrations.adapter.calls import is_done
from memsaver_server.ranks import RankMemory
from memsaver_server.ranks.memory import Steps
from memsaver_server.ranks.watch import stopped_ranks
from memsaver_server.settings import Settings
from memsaver_server.threads import start_thread

if TYPE_CHECKING:
    from memsaver_server.engine.lifecycle import Lifecycle

logger = logging.getLogger("memsaver")

#: Longer than any iteration of an idle event loop, seconds.
ITERATION_S = 2.0
#: How long after the first rank the last one may start its event loop, seconds.
CONNECT_S = 300.0
#: How long a rank may take to come to the iteration that another rank has come to, seconds.
ARRIVAL_S = 30.0
#: How long rank 0 may take to carry out a command, seconds: less than it waits in a collective for a rank that hangs.
COMMAND_S = 120.0
#: How many results of commands a rank remembers.
RESULTS = 32
#: How long the loop rests at most, milliseconds: after that the engine does what it does while it is idle.
REST_MS = 1000

T = TypeVar("T")
#: Something to do, mostly in the scheduler's thread.
Act = Callable[[], None]


class LateError(MemsaverError):
    """Rank 0 did not begin a command in time: its scheduler hangs, or waits for another rank."""


class StillRunningError(MemsaverError):
    """The requests ``running``, by name, are in flight on a rank."""

    running: list[str]


@dataclass(frozen=True)
class Topology:
    """The processes of an engine. Several replicas, all on one host, are one engine."""

    size: int  # ranks of a replica
    group: Sequence[int]  # the ranks of this replica in torch's default process group; the first receives requests
    place: int  # of this process in ``group``
    cpu_group: Any  # torch's group of these ranks, for messages without a device
    replica: int = 0  # this one's number
    replicas: int = 1
    folder: str = ""  # where the first replica awaits the ranks of all
    host: str = ""  # of the first rank, if there are ranks on other hosts
    several_receive: bool = False  # other ranks than the first receive requests of clients, too

    @property
    def rank(self) -> int:
        """This process's number among the ranks of all replicas."""
        return self.replica * self.size + self.place

    @property
    def ranks(self) -> int:
        return self.replicas * self.size


@dataclass(frozen=True)
class Command:
    """A call of ``Scheduler``'s method ``name`` on every rank; with an empty name nothing is called: a barrier. Numbers
    begin at 1; 0 is for commands that nobody waits for. If it ``rests``, the first rank of each replica then waits."""

    number: int
    name: str
    arguments: tuple[Any, ...] = ()
    rests: bool = False


class Scheduler(ABC):
    """What memsaver needs of an engine's scheduler. Each engine has a derived class, which alone knows the engine's own
    object, ``own``. ``engine`` is its name, and in lower case that of its page in ``docs/``. Methods that return
    nothing may be commands, which are carried out in the scheduler's thread."""

    engine: ClassVar[str]

    #: Why the last update of weights failed on this rank, or an empty string.
    update_failure = ""

    def __init__(self, own: Any) -> None:
        self.own = own
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # each buffer with its copy on the host

    @property
    @abstractmethod
    def topology(self) -> Topology: ...

    def admit(self, received: Sequence[Any]) -> Sequence[Any]:
        """Return those of the ``received`` requests that a rank other than the first broadcasts."""
        return received

    @abstractmethod
    def missing(self) -> list[str]:
        """Return the names that memsaver needs and that this version of the engine lacks."""

    @abstractmethod
    def obstacles(self) -> Iterator[str]:
        """Yield the reasons why it cannot be served."""

    def check(self) -> None:
        """Raise ConfigurationError, with the reason, if this scheduler cannot be served."""
        if missing := self.missing():
            raise ConfigurationError(
                f"this version of {self.engine} cannot be served: it has no {', '.join(missing)}; "
                f"docs/{self.engine.lower()}.md lists versions that can"
            )
        for problem in self.obstacles():
            raise ConfigurationError(f"{self.engine}'s scheduler cannot be served: {problem}")

    @abstractmethod
    def take_over(self, loop: EventLoop) -> None:
        """Have each iteration receive by ``loop.beginning``, and process what it received by ``loop.process``."""

    @abstractmethod
    def lead(self, loop: LeadingLoop) -> IdleRest:
        """Have rank 0 broadcast what ``loop.handle`` returns for what it received; return how its thread rests."""

    @abstractmethod
    def is_ending(self) -> bool:
        """Return whether the event loop is about to end, or has ended. Called from any thread."""

    @abstractmethod
    def is_still(self) -> bool:
        """Return whether no request computes, and no copy of the cache or of weights is under way."""

    @abstractmethod
    def has_nothing_to_do(self) -> bool:
        """Return whether the event loop would do nothing until it receives something."""

    @abstractmethod
    def in_flight(self) -> list[str]:
        """Return the names of the requests in flight. Called from any thread."""

    def check_still(self) -> None:
        """Raise StillRunningError if requests are in flight on this rank."""
        if not self.is_still():
            raise StillRunningError("requests are in flight", self.in_flight())

    @abstractmethod
    def models(self) -> Iterable[Any]:
        """Return the models whose weights are released."""

    @abstractmethod
    def flush(self) -> None:
        """Forget every cached prefix; raise MemsaverError if pages are in use."""

    def back_pages(self, pages: int) -> None:
        """Back only the first ``pages`` pages of the KV cache with memory; no other is in use. Raises MemsaverError."""
        raise UnsupportedError(f"the KV cache of {self.engine} cannot be resized")

    def save_buffers(self) -> None:
        """Copy the models' buffers, which no weight update writes, to the host; does nothing if they are released."""
        if any(tag.released_bytes for tag in ms.status().tags if tag.tag == "weights"):
            return
        pinned = torch.cuda.is_available()  # copies then run at the speed of the link; some have tens of MiB
        shared = {id(buffer): buffer for model in self.models() for buffer in model.buffers()}
        self._buffers = []  # torch uses the pinned memory of the last copies again
        for buffer in shared.values():
            copy = torch.empty_like(buffer, device="cpu", pin_memory=pinned)
            self._buffers.append((buffer, copy.copy_(buffer, non_blocking=True)))
        if pinned:
            torch.cuda.current_stream().synchronize()

    def repair(self, lost: Sequence[str]) -> None:
        """Write back the buffers of ``lost`` weights, and forget the prefixes of a lost cache."""
        if "weights" in lost:
            with torch.inference_mode():
                for buffer, content in self._buffers:
                    buffer[...] = content
        if "kv_cache" in lost:
            self.flush()


def lacking(owner: Any, paths: Iterable[str], prefix: str) -> list[str]:
    """Return which of ``paths`` (attributes, joined by dots) ``owner`` lacks, each after ``prefix`` and a dot."""
    found = []
    for path in paths:
        try:
            attrgetter(path)(owner)
        except AttributeError:
            found.append(f"{prefix}.{path}")
    return found


def memory_obstacles(saves_memory: bool, module: str) -> Iterator[str]:
    """Yield the reasons why the memory of an engine cannot be released. ``saves_memory``: it is in regions of
    torch_memory_saver. ``module``: the engine's module that imports torch_memory_saver."""
    if not ms.enabled():
        return
    if not saves_memory:
        yield "its memory is in no region; start it with --enable-memory-saver"
    saver = getattr(importlib.import_module(module), "torch_memory_saver", None)
    if not getattr(saver, "__name__", "").startswith("memsaver_core."):
        yield (
            "it uses another torch_memory_saver; set MEMSAVER_SGLANG=1 for SGLang or MEMSAVER_TOKENSPEED=1 for "
            "tokenspeed, or call memsaver_core.compat.install() before it is imported"
        )


class EventLoop:
    """The event loop of one rank: in each iteration the scheduler's own calls ``begin``, then ``process``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._done = 0  # the number of the last command that was done
        self._arrived = 0  # the number of the last command whose iteration is over
        #: The results of the last commands, by number: more may be done before one is asked for.
        self._results: dict[int, Future[None]] = {}
        self._changed = threading.Condition()
        scheduler.take_over(self)

    def wait_for(self, number: int) -> None:
        """Return once command ``number`` is done and its iteration is over: this rank then waits for a broadcast.
        Raises what the command raised, or MemsaverError if the iteration did not end in ``ARRIVAL_S``."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._arrived >= number, ARRIVAL_S):
                raise MemsaverError(f"the scheduler did not reach the next iteration in {ARRIVAL_S:g} s")
        if (result := self._results.get(number)) is not None:
            result.result()

    # In the scheduler's thread.

    def begin(self) -> None:
        """Note that an iteration begins: this rank is about to wait for the broadcast."""
        with self._changed:
            self._arrived = self._done
            self._changed.notify_all()

    def beginning(self, receive: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call ``begin``, then the scheduler's ``receive``; return what that returns."""
        self.begin()
        return receive(*arguments, **named)

    def process(self, received: Sequence[Any], process: Callable[[list[Any]], T]) -> T:
        """Carry out the commands in what was broadcast; return what ``process`` returns for the other requests."""
        for each in received:
            if isinstance(each, Command):
                self._carry_out(each)
        return process([each for each in received if not isinstance(each, Command)])

    def _carry_out(self, command: Command) -> None:
        call = partial(getattr(self.scheduler, command.name), *command.arguments) if command.name else lambda: None
        if not command.number:
            call()
            return
        self._done = command.number
        settle(self._results.setdefault(command.number, Future()), call)
        self._results.pop(command.number - RESULTS, None)


class LeadingLoop(EventLoop):
    """The event loop of rank 0, which receives and admits requests for all ranks. ``failure()`` says why ranks have
    failed, ``relay`` sends the other replicas what is broadcast here. Any thread may call its methods, except those
    below the comment "In the scheduler's thread"."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._thread: threading.Thread | None = None
        self._pending: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._outgoing: deque[Any] = deque()
        self._numbers = itertools.count(1)
        self._sending = threading.RLock()
        self._rests: dict[int, threading.Event] = {}
        self.failure: Callable[[], str] = str
        self.relay: Callable[[Any], None] = lambda item: None
        self._idle = scheduler.lead(self)
        super().__init__(scheduler)

    def is_alive(self) -> bool:
        """Return whether the event loop runs, or has not begun yet, and the device's context works."""
        running = self._thread is None or self._thread.is_alive()
        return running and not self.scheduler.is_ending() and not self.failure() and ms.status().state != "failed"

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have ``work`` run in the scheduler's thread of this rank, before the next broadcast."""
        future: Future[T] = Future()
        self._pending.append((future, work))
        self._idle.wake()
        return future

    def send(self, request: Any) -> None:
        """Have every rank process ``request``, one of the engine's own requests."""
        with self._sending:
            self._outgoing.append(request)
            self.relay(request)
        self._idle.wake()

    def post(self, name: str, *arguments: Any) -> None:
        """Have every rank carry out a command that cannot fail; do not wait for it."""
        self.send(Command(0, name, arguments))

    def run(self, name: str, *arguments: Any) -> None:
        """Have every rank carry out a command. Raises what it raised on this rank, or as ``command``."""
        self._results[self.command(name, *arguments)].result()

    def command(self, name: str, *arguments: Any, over: threading.Event | None = None) -> int:
        """Have every rank carry out a command; return its number once this rank has. If ``over`` is given, this rank
        begins its next iteration only after that is set. Raises LateError after ``COMMAND_S``, or MemsaverError if the
        event loop ended first, or the ranks have failed."""
        done: Future[None] = Future()
        with self._sending:
            number = next(self._numbers)
            self._results[number] = done
            if over is not None:
                self._rests[number] = over
            self.send(Command(number, name, arguments, rests=over is not None))
        if not self.is_done(done, COMMAND_S):
            raise LateError(f"the scheduler of rank 0 did not reach its next iteration in {COMMAND_S:g} s")
        return number

    @contextmanager
    def standstill(self) -> Iterator[int]:
        """Keep every rank between two iterations during the block; yield the number of the command that stops them.
        The first rank of each replica does not begin its next broadcast, so all others wait for it."""
        over = threading.Event()
        try:
            yield self.command("", over=over)
        finally:
            over.set()
            self.relay(None)

    def is_done(
        self, future: Future[Any], timeout_s: float = float("inf"), given_up: Callable[[], bool] = never
    ) -> bool:
        """See ``calls.is_done``; raises MemsaverError once the event loop has ended, or the ranks have failed."""

        def is_hopeless() -> bool:
            if not self.is_alive():
                raise MemsaverError(self.failure() or "the engine's scheduler has stopped; restart the engine")
            return given_up()

        return is_done(future, timeout_s, is_hopeless)

    # In the scheduler's thread.

    def take(self, received: Sequence[Any]) -> Sequence[Any]:
        """Return the requests that are admitted now, of those ``received`` and of those held before."""
        return received

    def after(self) -> None:
        """Called once the scheduler has processed what it received."""

    def handle(self, received: Sequence[Any]) -> list[Any]:
        """Return what is broadcast in place of ``received``, in each iteration. Requests are held or refused here."""
        while self._pending:
            future, work = self._pending.popleft()
            if future.set_running_or_notify_cancel():
                settle(future, work)
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


class ReplicaLoop(LeadingLoop):
    """The event loop of the first rank of another replica: broadcasts there what the first replica's rank 0 sends."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._over = threading.Event()
        super().__init__(scheduler)

    def receive(self, message: Plain) -> None:
        """Take what ``LeadingLoop.relay`` sent; None ends a rest. Both processes and the socket are the same user's."""
        item = pickle.loads(base64.b64decode(message["item"]))
        if item is None:
            self._over.set()
            return
        if isinstance(item, Command) and item.rests:
            self._over = self._rests[item.number] = threading.Event()
        self.send(item)

    def take(self, received: Sequence[Any]) -> Sequence[Any]:
        return self.scheduler.admit(received)


class IdleRest:
    """Lets the scheduler's thread sleep while there is nothing to do, until a message comes or ``wake`` is called.
    Without it the event loop never sleeps, and other threads wait up to 5 ms for the interpreter's lock (Python's
    switch interval) at each step. ``poller`` waits for messages and ``wake``; it is None without ZeroMQ's sockets."""

    def __init__(self, sockets: Sequence[Any], nothing_to_do: Callable[[], bool], iterations: int = 1) -> None:
        """``sockets`` are those that the scheduler receives from, or None. ``nothing_to_do()``, called in its thread,
        says whether an iteration would do nothing. The thread rests after more than ``iterations`` such iterations."""
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
        """End the rest, or prevent the next one. From any thread."""
        os.eventfd_write(self._wake, 1)

    def rest(self) -> None:
        """Return once there may be something to do. Called in the scheduler's thread, before it receives."""
        self._idle = self._idle + 1 if self._nothing_to_do() else 0
        if self.poller is not None and self._idle > self._settling:
            self.poller.poll(REST_MS)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)


class _NotWrittenError(Exception):
    """The engine has answered that it wrote no weights."""


class LoopEngine(LeadingLoop, Engine):
    """The engine on rank 0; each other rank calls ``join``. A scheduler is touched only in its own thread, once per
    iteration of its event loop: there the service's work is done on every rank, between two batches. Memory calls and
    weight updates of the engine's own server or class are taken out of what the scheduler receives; the service's
    lifecycle carries them out. ``unwritten_weights``: see ``memsaver_server.engine.unwritten_weights``."""

    scheduler_class: ClassVar[type[Scheduler]]
    _takes_calls = False
    _messages: Any  # the engine's module of requests and answers
    _lifecycle: Lifecycle
    _settings: Settings

    def __init__(self, scheduler: Any) -> None:
        """Take over what ``scheduler`` receives. It must have passed ``check``, and its event loop must not run yet."""
        self.name = scheduler.engine.lower()
        super().__init__(scheduler)
        several = gather(scheduler, self) if scheduler.topology.ranks > 1 else None
        self.memory: Memory = several or LOCAL_MEMORY
        #: Has every rank carry out a command; raises what it raised on any of them.
        self.run_on_all: Callable[..., object] = (several or self).run
        #: Returns the requests in flight on all ranks.
        self.in_flight = several.in_flight if several and scheduler.topology.several_receive else scheduler.in_flight
        self._waiting: list[tuple[Future[None], Act]] = []  # used in the scheduler's thread alone
        self._flush_at_repair = False
        self.unwritten_weights: tuple[str, ...] = ()
        self._updates: dict[str, Future[Any]] = {}  # updates of weights in progress, by the class of the answer

    def take_calls(self, lifecycle: Lifecycle, settings: Settings) -> None:
        """Have ``lifecycle`` carry out the engine's own calls."""
        self._lifecycle, self._settings, self._takes_calls = lifecycle, settings, True

    # Methods of ``Engine``.

    def flush_cache(self) -> None:
        """See ``Engine``. In a hibernated process the flush would wait for the device; it is done after the wake-up."""
        if self.memory.status().hibernated:
            self._flush_at_repair = True
        else:
            self.run_on_all("flush")

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> None:
        """See ``Engine``. Of lost weights only buffers are written; the engine's own update calls write the rest."""
        self.run_on_all("repair", tuple(lost))
        if self._flush_at_repair:
            self.run_on_all("flush")
            self._flush_at_repair = False

    def when_still(
        self,
        timeout_s: float,
        then: Act = lambda: None,
        *,
        begin: Act = lambda: None,
        undo: Act = lambda: None,
        given_up: Callable[[], bool] = never,
    ) -> None:
        """In the scheduler's thread call ``begin`` at once, and ``then`` once no request is in flight, before another
        one enters. After ``timeout_s``, or if it is given up, call ``undo`` instead and raise DrainTimeoutError. If
        several ranks receive requests, ``then`` is called here, once no request is in flight on any of them."""
        if not self.scheduler.topology.several_receive:
            self._when_this_rank_is_still(timeout_s, then, begin, undo, given_up)
            return
        deadline = time.monotonic() + timeout_s
        self._when_this_rank_is_still(timeout_s, lambda: None, begin, undo, given_up)
        for wait_s in waits(deadline, given_up, time.monotonic):
            self.is_done(Future(), wait_s)  # a pause, which ends early if the ranks fail
            if not (running := self.in_flight()):  # a rank whose admission is closed gets no new ones
                then()
                return
        self.is_done(self.submit(undo), ITERATION_S)
        raise DrainTimeoutError(timeout_s, running)

    def _when_this_rank_is_still(
        self, timeout_s: float, then: Act, begin: Act, undo: Act, given_up: Callable[[], bool]
    ) -> None:
        """As ``when_still``, for the requests of this rank alone."""
        deadline = time.monotonic() + timeout_s
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
        # One iteration is tried even if no time is left.
        self.is_done(begun, max(timeout_s, ITERATION_S), given_up)
        if begun.cancel():
            raise DrainTimeoutError(timeout_s, self.in_flight())
        begun.result()
        if not self.is_done(done, deadline - time.monotonic(), given_up):
            # The iteration in progress may still call `then`.
            self.is_done(self.submit(give_up), ITERATION_S)
            if not done.done():
                raise DrainTimeoutError(timeout_s, self.in_flight())

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
        """Have the lifecycle carry out ``request`` if it is a memory call or an update; return whether it is one."""
        name = type(request).__name__
        if name in ("ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput"):
            return self._in_thread(self._operate, request)
        if name.startswith("UpdateWeight") and "From" in name:
            return self._in_thread(self._update, request)
        return False

    def _in_thread(self, work: Callable[[Any], None], request: Any) -> bool:
        """Have ``work`` carry out ``request`` and answer it; if it raises, answer with the error."""

        def run() -> None:
            try:
                work(request)
            except Exception as error:
                self._answer(request, error)

        try:
            start_thread(f"memsaver-{self.name}", run)
        except NoThreadError as error:
            self._answer(request, error)
        return True

    # In a thread for each call.

    def _answer(self, request: Any, error: BaseException | None) -> None:
        """Answer ``request``, which has failed with ``error``, or succeeded if that is None. From any thread."""
        kind = getattr(self._messages, answer_to(request))
        self._reply(request, kind(success=error is None, message=str(error or "")))

    @abstractmethod
    def _reply(self, request: Any, output: Any) -> None:
        """Send ``output``, this rank's answer to ``request``. From any thread."""

    def _operate(self, request: Any) -> None:
        try:
            kind = Release if type(request).__name__.startswith("Release") else Resume
            asked = kind(tags=tuple(request.tags or ()), wait=True).resolved(self._settings.drain_timeout_s)
            operation = self._lifecycle.start(asked, client=self.name)
            operation.done.result()
            error = operation.error
        except Exception as refused:
            error = refused
        if error is not None:
            logger.error("%s's own %s failed: %s", self.name, type(request).__name__, error)
        self._answer(request, error)

    def _update(self, request: Any) -> None:
        """Have the engine write weights while no release or resume runs, note whether it did, and pass its answer on.
        Nothing marks the last request of an update, so each counts as a whole one. Clients resume the KV cache only
        after the last."""
        answered: Future[Any] = Future()
        version = self.version_after(request)
        try:
            asleep, path = self.can_write_asleep(request), self.path_of(request)
            with suppress(_NotWrittenError), self._lifecycle.writing(version, asleep=asleep, path=path):
                self._write(request, answered)
                self.is_done(answered)
                if not answered.result().success:
                    raise _NotWrittenError
        except Exception as error:
            if not answered.done():
                raise
            answered.result().success, answered.result().message = False, str(error)
        self._reply(request, answered.result())

    def version_after(self, request: Any) -> str | None:
        """Return what the weights hold once an update, ``request``, has succeeded; None if nothing names that."""
        named = getattr(request, "weight_version", None)
        return None if named is None else str(named)

    def path_of(self, request: Any) -> str | None:
        """Return the checkpoint from which an update, ``request``, loads all weights; None if there is none, or the
        engine must load it in any case."""
        return None

    def can_write_asleep(self, request: Any) -> bool:
        """Return whether the engine can carry out an update, ``request``, while the weights are released."""
        return False

    def _write(self, request: Any, answered: Future[Any]) -> None:
        """Have the engine carry out an update of weights, and set ``answered`` to its answer, which is not sent yet."""
        self._updates[answer_to(request)] = answered
        self.send(request)


def answer_to(request: Any) -> str:
    """Return the name of the class of the engine's answer to ``request``."""
    return type(request).__name__.replace("ReqInput", "ReqOutput")


# The scheduler processes, one for each rank. The service runs in rank 0's, which receives requests. Each process, rank
# 0's included, answers the messages of the rank protocol in a separate thread.


class SchedulerRank(Rank):
    """Answers messages of the rank protocol, each after the command whose number comes with it."""

    def __init__(self, loop: EventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._after = 0

    def answer(self, message: Plain) -> Plain:
        self._after = message["after"]
        return super().answer(message["message"])

    def carry_out(self, request: Request) -> Result:
        self._loop.wait_for(self._after)
        scheduler = self._loop.scheduler
        if isinstance(request, Resize):
            scheduler.back_pages(request.pages)
            return OperationReport(operation="resume")
        if isinstance(request, WriteAsleep) and request.step == "keep" and scheduler.update_failure:
            raise MemsaverError(scheduler.update_failure)
        return super().carry_out(request)


class SchedulerMemory(RankMemory):
    """The memory of all ranks, each a ``SchedulerRank``. It is released and resumed while no rank iterates."""

    def __init__(self, loop: LeadingLoop, channel: SocketChannel) -> None:
        self._loop = loop
        self._sockets = channel
        self._after = 0
        self._asking = threading.RLock()
        super().__init__(self)
        loop.failure = lambda: self.failure
        elsewhere = [rank for rank in range(len(self.ranks)) if rank not in self.progress.seen]
        channel.watch(elsewhere, lambda rank: self.fail(f"{self.name(rank)} has closed its connection"))

    def start(self, message: Plain) -> Future[list[Plain]]:
        return self._sockets.start({"after": self._after, "message": message})

    def release(self, request: MemoryRequest, *, log: ms.PhaseLog | None = None) -> OperationReport:
        return self._at_rest(partial(super().release, request, log=log))

    def resume(self, request: Tagged, *, log: ms.PhaseLog | None = None) -> OperationReport:
        return self._at_rest(partial(super().resume, request, log=log))

    def resize(self, pages: int, before: int) -> None:
        self._at_rest(partial(super().resize, pages, before))

    @contextmanager
    def written_asleep(self, tag: str, source: WeightsKey | None = None) -> Iterator[None]:
        with self._asking, super().written_asleep(tag, source):
            yield
            self.run("")  # after this every rank has done what the block had it do

    @contextmanager
    def _operating(self, operation: Verb, log: ms.PhaseLog, request: Tagged) -> Iterator[Steps]:
        with self._asking, super()._operating(operation, log, request) as steps:
            yield steps

    def give_back_reserved(self) -> None:
        with self._asking:
            super().give_back_reserved()

    def run(self, name: str, *arguments: Any) -> None:
        """Have every rank carry out a command, after the operation in progress. Raises MemsaverError if it fails on
        some rank, or the event loop has ended."""
        self.check(self._carry_out(name, *arguments))

    def in_flight(self) -> list[str]:
        """Return the requests in flight on any rank, as each sees them in an iteration that begins after this call."""
        answers = self._carry_out("check_still")
        running: set[str] = set()
        for failure in (each.failure for each in answers if each.failure is not None):
            if failure.error != StillRunningError.__name__:
                raise failure.to_error()
            running.update(map(str, cast(list[str], failure.attributes["running"])))
        return sorted(running)

    def _carry_out(self, name: str, *arguments: Any) -> list[Answer]:
        with self._asking:
            self.raise_if_failed()
            with self._failing_if_late():
                number = self._loop.command(name, *arguments)
            with self._asking_after(number):
                self.step = f"command {name}"
                try:
                    return self.ask(Introduce(), self.deadlines.prepare_s)
                finally:
                    self.step = ""

    def _at_rest(self, operate: Callable[[], T]) -> T:
        with self._asking:
            self.raise_if_failed()
            if self.hibernated:
                # Device calls block until the wake-up, and a loop inside one cannot rest. It has nothing to compute.
                return operate()
            with self._failing_if_late(), self._loop.standstill() as number, self._asking_after(number):
                return operate()

    @contextmanager
    def _asking_after(self, number: int) -> Iterator[None]:
        """Have each rank do command ``number`` before the messages of the block. The caller holds the lock."""
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
            stopped = stopped_ranks(self.rank_statuses())
            raise self.fail(f"{error}{stopped and f'; {stopped}'}") from error


def gather(scheduler: Scheduler, loop: LeadingLoop) -> SchedulerMemory:
    """On the first rank, return the memory of all; raise MemsaverError if one does not ``join`` in ``CONNECT_S``. The
    first rank of each further replica has a second connection, with a number after those of all ranks."""
    topology = scheduler.topology
    ranks = topology.ranks
    try:
        if topology.host:
            listener: Listener = RemoteListener(ranks, topology.host, key())
        else:
            listener = Listener(ranks + topology.replicas - 1, first=0, folder=topology.folder)
    except Exception:
        _shared(topology, "")  # the others wait for it
        raise
    _shared(topology, listener.path)
    _answer(scheduler, loop, listener.path)
    connections: Sequence[Any] = listener.accept(CONNECT_S)
    if topology.replicas > 1:
        others = SocketChannel(None, connections[ranks:])

        def relay(item: Any) -> None:
            with suppress(OSError):  # the watch of the ranks reports one that has ended
                others.send({"item": base64.b64encode(pickle.dumps(item)).decode()})

        loop.relay = relay
    return SchedulerMemory(loop, SocketChannel(None, connections[:ranks]))


def key() -> bytes:
    """Return the key by which ranks on several hosts know each other; empty if there is none."""
    found = Settings().api_key
    return found.get_secret_value().encode() if found is not None else b""


def join(scheduler: Scheduler) -> None:
    """Have ``scheduler`` do what the first rank, in another process, sends, until that closes the connection."""
    topology = scheduler.topology
    if not (path := _shared(topology, path_in(topology.folder))):
        raise ConfigurationError("the engine's first rank cannot be reached; its log says why")
    if not (topology.replica and topology.place == 0):
        _answer(scheduler, EventLoop(scheduler), path)
        return
    loop = ReplicaLoop(scheduler)
    _answer(scheduler, loop, path)
    relayed = partial(serve, path, topology.ranks + topology.replica - 1, loop.receive, CONNECT_S)
    threading.Thread(target=relayed, name="memsaver-replica", daemon=True).start()


def _shared(topology: Topology, path: str) -> str:
    """Return the first rank's ``path`` on every rank of a replica, each of which must call this."""
    paths = [path]
    if topology.size > 1:
        torch.distributed.broadcast_object_list(paths, src=topology.group[0], group=topology.cpu_group)
    return paths[0]


def _answer(scheduler: Scheduler, loop: EventLoop, path: str) -> None:
    """Answer messages in a separate thread: in a hibernated process the scheduler's may be inside a device call."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    rank = SchedulerRank(loop)

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        serve(path, scheduler.topology.rank, rank.answer, CONNECT_S, key())

    threading.Thread(target=run, name="memsaver-rank", daemon=True).start()
    ms.prepare_backup()
