"""The ranks of a tensor-parallel engine, seen from rank 0: the others are processes that take every step with it."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from memsaver_core.errors import MemsaverError
from memsaver_core.ranks.connection import Listener, SocketChannel, started
from memsaver_core.ranks.protocol import Plain
from memsaver_core.ranks.rank import Rank
from memsaver_server.ranks.watch import is_stopped
from memsaver_server.reference import tensor_parallel
from memsaver_server.reference.options import EngineOptions
from memsaver_server.reference.requests import Row
from memsaver_server.reference.runner import ModelRunner
from memsaver_server.reference.sampling import Sampler
from memsaver_server.reference.tensor_parallel import Place

log = logging.getLogger("memsaver.engine")

#: How long a rank's process may take to start, and to end by itself, seconds.
_START_S = 300.0
_END_S = 10.0
#: How long the ranks may take to load a model, seconds; a large one takes minutes.
LOAD_S = 1800.0
#: How long a step that failed may wait for the end of the process that explains it, seconds.
_EXPLAIN_S = 0.5
#: How long a step may take, seconds; it takes milliseconds.
STEP_S = 60.0
#: How long the ranks may take for a part of an update or for the capture of lost graphs, seconds.
ANSWER_S = 300.0
#: Interval at which waits for the ranks are looked at, seconds.
_LOOK_S = 1.0


class RanksFailedError(MemsaverError):
    """A rank's process has ended, or a step failed on one of them. The engine has to be restarted."""

    kind = "ranks_failed"


@dataclass(eq=False)
class _Wait:
    """Something that does not end before every rank has done it.

    Attributes:
        waited_s: counted in looks, so that time in which this process was stopped itself does not count.
    """

    what: str
    limit_s: float
    waited_s: float = 0.0


class RankGroup:
    """Starts the processes of ranks 1 and up, and reaches them by one ordered connection each.

    A message of the engine is ``{"engine": NAME, ...}``; all others are of the rank protocol.

    Attributes:
        channel: reaches all ranks; this process is rank 0.
        failure: why the ranks can compute nothing more, or None.
    """

    def __init__(self, options: EngineOptions, ranks: int, on_failure: Callable[[str, RanksFailedError], None]) -> None:
        """Return once every process runs, and makes its runner.

        Args:
            on_failure: is called once with the reason of a failure, and with the error for what waits.

        Raises:
            RanksFailedError: one has ended, or did not start in time.
        """
        self.ranks = ranks
        self.failure: RanksFailedError | None = None
        self._failing = threading.Lock()
        self._failed: Future[None] = Future()
        self._on_failure = on_failure
        self._closing = False
        self._waits: set[_Wait] = set()
        self._closed = threading.Event()
        self._folder = tempfile.mkdtemp(prefix="memsaver-ranks-")  # for this user alone
        listener = Listener(ranks)
        self._processes = [_start(rank, listener.path) for rank in range(1, ranks)]
        self._watches = [
            threading.Thread(target=self._watch, args=each, name="memsaver-rank-watch", daemon=True)
            for each in enumerate(self._processes, 1)
        ]
        self._watches.append(threading.Thread(target=self._watch_waits, name="memsaver-rank-waits", daemon=True))
        for watch in self._watches:
            watch.start()
        rank = Rank()
        connected = started(lambda: listener.accept(_START_S))
        either: set[Future[Any]] = {connected, self._failed}
        wait_for(either, return_when=FIRST_COMPLETED)
        connections = connected.result() if connected.done() and connected.exception() is None else []
        self.channel = SocketChannel(lambda told: {} if "engine" in told else rank.answer(told), connections)
        if not connections:
            self.close()
            raise self.failure or RanksFailedError(str(connected.exception()))
        meeting = Path(self._folder) / "meeting"
        self._store = tensor_parallel.meet(meeting, ranks)
        setup = {"options": asdict(options), "ranks": ranks, "meeting": str(meeting)}
        self._ready = self.channel.start({"engine": "setup", **setup})

    def load(self, load: Callable[[], None]) -> None:
        """Run ``load``, which does not end before every rank has done its part.

        Raises:
            RanksFailedError: one has ended, or does not answer.
        """
        loaded = started(load)
        waited: set[Future[Any]] = {loaded, self._failed}
        with self.bounded("load", LOAD_S):
            wait_for(waited, return_when=FIRST_COMPLETED)
        wait_for({loaded}, _END_S)  # a failure ends it, unless it waits for another rank to join the group
        if not loaded.done():
            self.check()
        loaded.result()

    def join(self, device: torch.device) -> None:
        """Make the group in which the ranks compute, at the same time as the others."""
        tensor_parallel.join(Place(0, self.ranks), self._store, device)

    def await_ready(self) -> None:
        """Wait until every rank has made its runner.

        Raises:
            RanksFailedError: one could not; its log says why.
        """
        self._result(self._ready)

    def tell(self, name: str, **fields: Any) -> None:
        """Have every other rank do what ``name`` says, after all that it was told before. Does not wait for it."""
        with suppress(OSError):  # the watch tells that a process has ended
            self.channel.tell({"engine": name, **fields})

    def ask(self, name: str, **fields: Any) -> None:
        """As ``tell``; wait until they have.

        Raises:
            ValueError, RuntimeError: one could not; the message names it.
            RanksFailedError: one has ended, or did not answer in ``ANSWER_S``.
        """
        with self.bounded("update", ANSWER_S):
            answers = self._result(self.channel.start({"engine": name, **fields}))
        for rank, answer in enumerate(answers):
            if "error" in answer:
                kind = ValueError if answer["invalid"] else RuntimeError
                raise kind(f"rank {rank}: {answer['error']}")

    def check(self) -> None:
        """Raise RanksFailedError if the ranks can compute nothing more."""
        if self.failure is not None:
            raise self.failure

    def fail_step(self, error: Exception) -> RanksFailedError:
        """Return why a step failed on rank 0: because another rank has ended, which may be seen a moment later, or by
        ``error``."""
        wait_for({self._failed}, _EXPLAIN_S)
        self.fail(f"a step failed on rank 0: {error}")
        return self.failure or RanksFailedError("the engine was shut down")

    def fail(self, why: str) -> None:
        """From now on the ranks can compute nothing more: end what waits for one of them."""
        with self._failing:
            if self.failure is not None or self._closing:
                return
            self.failure = RanksFailedError(f"{why}; restart the engine")
        log.critical("%s", self.failure)
        self._failed.set_result(None)
        self._on_failure(why, self.failure)
        tensor_parallel.abort()

    @contextmanager
    def bounded(self, what: str, limit_s: float) -> Iterator[None]:
        """Fail, and kill the other ranks, if the block takes longer: it waits for one that does not answer."""
        wait = _Wait(what, limit_s)
        self._waits.add(wait)
        try:
            yield
        finally:
            self._waits.discard(wait)

    def kill(self, why: str) -> None:
        """Fail because of ``why``, and kill the other ranks, which ends what waits for one of them."""
        self.fail(why)
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """End the processes and leave the group."""
        if self._closing:
            return
        self._closing = True
        self.channel.close()
        for rank, process in enumerate(self._processes, 1):
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                log.warning("rank %d (process %d) did not end and is killed", rank, process.pid)
                process.kill()
        self._closed.set()
        for watch in self._watches:
            watch.join(_END_S)
        if not any(watch.is_alive() for watch in self._watches):  # one that still aborts the group is inside of NCCL
            tensor_parallel.leave()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self.fail(f"rank {rank} (process {process.pid}) {how}")

    def _watch_waits(self) -> None:
        while not self._closed.wait(_LOOK_S):
            for wait in tuple(self._waits):
                wait.waited_s += _LOOK_S
                if wait.waited_s > wait.limit_s:
                    self.kill(f"{self._silent()} does not answer: the {wait.what} did not end in {wait.limit_s:g} s")
                    return

    def _silent(self) -> str:
        """Return what messages call the ranks that may be the one that does not answer: if any is stopped, those."""
        ranks = list(enumerate(self._processes, 1))
        stopped = [(rank, process) for rank, process in ranks if is_stopped(process.pid)]
        return " or ".join(f"rank {rank} (process {process.pid})" for rank, process in stopped or ranks)

    def _result(self, answers: Future[list[Plain]]) -> list[Plain]:
        try:
            return answers.result()
        except (OSError, ValueError) as error:
            self.fail(f"a rank cannot be reached: {error}")
            raise self.failure or error from error


def _start(rank: int, path: str) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-m", "memsaver_server.reference.rank_process", path, str(rank)]
    return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=2)  # standard output is the service's own


class LeadingRunner(ModelRunner):
    """Rank 0's runner: the other ranks take every step with it."""

    def __init__(self, group: RankGroup, make_model: Callable[[], Any], **options: Any) -> None:
        self._group = group
        super().__init__(make_model, **options)

    def prefill(self, slot: int, tokens: Sequence[int], start: int, sampler: Sampler | None) -> int | None:
        with self._together("prefill", STEP_S, slot=slot, tokens=list(tokens), start=start):
            return super().prefill(slot, tokens, start, sampler)

    def decode(self, rows: Sequence[Row]) -> list[int]:
        with self._together("decode", STEP_S, rows=[[row.slot, row.position, row.token] for row in rows]):
            return super().decode(rows)

    def repair(self, lost: Sequence[str]) -> None:
        with self._together("repair", ANSWER_S, lost=list(lost)):
            super().repair(lost)

    def check(self) -> None:
        self._group.check()
        super().check()

    @contextmanager
    def _together(self, name: str, limit_s: float, **fields: Any) -> Iterator[None]:
        """Tell the others to do what the block does. If it fails the ranks may be at different points of a step."""
        self._group.check()
        self._group.tell(name, **fields)  # waits while an update is read
        try:
            with self._group.bounded(name, limit_s):
                yield
        except Exception as error:
            raise self._group.fail_step(error) from error
