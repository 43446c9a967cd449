"""The ranks of a tensor-parallel engine: rank 0 starts the other processes, and all compute every step together.

Every other rank runs `main`. Rank 0 sends it messages over one connection, in order: those of the rank protocol, and
``{"engine": METHOD, ...}``, a method of the rank's runner with its arguments.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed

from memsaver_core import communicators, hibernation
from memsaver_core.contract.errors import MemsaverError
from memsaver_core.ranks.connection import SocketChannel, serve
from memsaver_core.ranks.protocol import Plain
from memsaver_core.ranks.rank import Rank
from memsaver_core.rendezvous import Listener, settle, started
from memsaver_server.ranks import RankMemory
from memsaver_server.ranks.watch import ProcessWatch, is_ending, is_stopped
from memsaver_server.reference import PYTHON
from memsaver_server.reference.runner import ModelRunner, Options, Row
from memsaver_server.threads import start_thread

dist: Any = torch.distributed  # typed in part
log = logging.getLogger("memsaver.engine")

#: Time limits for what all ranks do together, seconds. Loading a large model takes minutes, a step milliseconds.
LIMITS_S = {"load": 1800.0, "step": 60.0, "repair": 300.0, "update": 300.0}
#: How long to wait for the end of a rank's process or of this rank's load, seconds.
END_S = 10.0
#: After a step has failed: how long to wait for the end of another rank's process, which would explain it, seconds.
_EXPLAIN_S = 0.5
#: Interval at which the time limits are checked, seconds.
_CHECK_S = 1.0
#: Environment variables that are 0 unless they are set. A captured graph hangs after a resume if NCCL has registered
#: its memory; a process with NVLS memory cannot be checkpointed; torch's monitors end a process that waits for a rank
#: or is hibernated.
_OFF = ("NCCL_GRAPH_REGISTER", "NCCL_NVLS_ENABLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")


class RanksFailedError(MemsaverError, kind="ranks_failed"):
    """A rank's process has ended or hangs, or a step failed on a rank. The engine has to be restarted."""


class RankGroup:
    """The processes of ranks 1 and up, and ``memory``, that of all ranks, set once they are loaded. ``failed`` is done,
    with the reason, once the ranks can compute nothing more."""

    memory: RankMemory

    def __init__(self, options: Options) -> None:
        """Start the processes; raise RuntimeError if this process has a default process group already."""
        if dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is in use in this process already; an engine with tensor_parallel > 1 needs its "
                "default process group, so serve it in a separate process"
            )
        ranks, self._options = options.tensor_parallel, options
        self.failed: Future[Any] = Future()
        self._channel = SocketChannel(None, ())
        self._closed = threading.Event()
        self._aborting = threading.Lock()
        #: How long `_check_limits` has run: unlike a clock's, this time stands still while this process is stopped.
        self._ran_s = 0.0
        self._waits: dict[str, float] = {}  # what is waited for, and `_ran_s` when that began
        self._folder = tempfile.mkdtemp(prefix="memsaver-ranks-")  # for this user alone
        meeting = f"{self._folder}/meeting"
        # Opened before any other rank does: torch waits for the file's lock while it holds the interpreter's lock. If a
        # rank was stopped while it had the file's lock, this whole process would stop, _check_limits included.
        self._store = dist.FileStore(meeting, ranks)
        self._listener = Listener(ranks)
        pickled = pickle.dumps((os.getpid(), self._listener.path, meeting, options)).hex()
        processes: Future[dict[int, Any]] = Future()
        start_thread("memsaver-rank-waits", partial(self._check_limits, processes, pickled))
        self._processes = processes.result()
        self._watch = ProcessWatch([process.pid for process in self._processes.values()], self._ended)

    def make_runner(self) -> ModelRunner:
        """Return rank 0's runner once every other rank has made its own; raise as ``load``."""
        _join(self._store, 0, self._options)
        runner = LeadingRunner(self, self._options)
        connected = started(lambda: self._listener.accept(LIMITS_S["load"]))
        wait_for({connected, self.failed}, return_when=FIRST_COMPLETED)
        self.check()
        self._channel = SocketChannel(_answer_for(runner), connected.result())
        self.memory = RankMemory(self._channel)
        self.failed.add_done_callback(lambda failed: self.memory.fail(failed.result()))
        return runner

    def load(self, runner: Future[ModelRunner]) -> None:
        """Wait for the result of a thread that calls ``make_runner``; raise RanksFailedError, or as ``ModelRunner``."""
        with self._bounded("load"):
            wait_for({runner, self.failed}, return_when=FIRST_COMPLETED)
        wait_for({runner}, END_S)  # it ends after a failure too, unless its thread waits for a rank to join the group
        if not runner.done() or not isinstance(runner.exception(), ValueError | None):
            self.check()
        runner.result()

    def ask(self, method: str, **fields: Any) -> list[Plain]:
        """Have every rank call ``method``; return their answers, or raise the ValueError or RuntimeError of one."""
        with self.together("update"):
            answers = self._channel.start({"engine": method, **fields}).result()
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise (ValueError if answer["invalid"] else RuntimeError)(f"rank {rank}: {answer['error']}")
        return answers

    @contextmanager
    def together(self, what: str, method: str = "", **fields: Any) -> Iterator[None]:
        """Have the other ranks call ``method``, if any, while the block does the same on this one. If a rank or the
        block fails, so does the group: the ranks may then be at different points of a step."""
        self.check()
        if method:
            with suppress(OSError):  # a process has ended: the watch reports that
                self._channel.send({"engine": method, **fields})  # waits while an update is read
        try:
            with self._bounded(what):
                yield
        except Exception as error:
            wait_for({self.failed}, _EXPLAIN_S)  # another rank may have ended, and be reported a moment later
            self._fail(f"the {what} failed on rank 0: {error}")
            self.check()
            raise

    def check(self) -> None:
        """Raise RanksFailedError if they have failed."""
        if self.failed.done():
            raise self.error()

    def error(self) -> RanksFailedError:
        return RanksFailedError(f"{self.failed.result()}; restart the engine")

    def kill(self, why: str) -> None:
        """Fail because of ``why``, and kill the other ranks, which ends every wait for one of them."""
        self._fail(why)
        for process in self._processes.values():
            process.kill()

    def close(self) -> None:
        """End the processes and leave the group. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._listener.close()
        self._channel.close()
        for process in self._processes.values():
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        if self._aborting.acquire(timeout=END_S) and _in_group():  # not acquired: an abort still runs inside NCCL
            dist.destroy_process_group()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def _bounded(self, what: str) -> Iterator[None]:
        """Fail, and kill the other ranks, if the block takes longer than the limit of ``what``."""
        self._waits[what] = self._ran_s
        try:
            yield
        finally:
            del self._waits[what]

    def _fail(self, why: str) -> None:
        """Note that the ranks can compute nothing more, and end every wait for one of them."""
        if self._closed.is_set():
            return
        try:
            self.failed.set_result(why)
        except InvalidStateError:  # the first reason counts
            return
        log.critical("%s", self.error())
        # A backend that cannot abort fails by itself when the connection to a rank ends.
        with self._aborting, suppress(AttributeError, RuntimeError):
            if _in_group():
                dist.group.WORLD.abort()

    def _ended(self, pid: int) -> None:
        rank, process = next(each for each in self._processes.items() if each[1].pid == pid)
        code = process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._fail(f"{self._names([rank])} {how}")

    def _check_limits(self, processes: Future[dict[int, Any]], pickled: str) -> None:
        """Start the processes, which the kernel kills when this thread ends; check the time limits until then."""

        def start() -> dict[int, Any]:  # they write to standard error alone: standard output belongs to the service
            command = [*PYTHON, "-m", __name__, pickled]
            ranks = range(1, self._options.tensor_parallel)
            return {rank: subprocess.Popen([*command, str(rank)], stdin=subprocess.DEVNULL, stdout=2) for rank in ranks}

        settle(processes, start)
        while not self._closed.wait(_CHECK_S):
            self._ran_s += _CHECK_S
            for what, began_s in tuple(self._waits.items()):
                if self._ran_s - began_s > LIMITS_S[what]:
                    stopped = [rank for rank, process in self._processes.items() if is_stopped(process.pid)]
                    who = self._names(stopped or self._processes)
                    self.kill(f"{who} does not answer: the {what} did not end in {LIMITS_S[what]:g} s")

    def _names(self, ranks: Iterable[int]) -> str:
        return " or ".join(f"rank {rank} (process {self._processes[rank].pid})" for rank in ranks)


class LeadingRunner(ModelRunner):
    """Rank 0's runner: has every other rank do the same."""

    def __init__(self, group: RankGroup, options: Options) -> None:
        self._group = group
        super().__init__(options)

    def compute(self, rows: Sequence[Row]) -> list[int]:
        with self._group.together("step", "compute", rows=rows):
            return super().compute(rows)

    def repair(self, lost: Sequence[str]) -> None:
        with self._group.together("repair", "repair", lost=list(lost)):
            super().repair(lost)

    def read_update(self, *_: Any, **source: Any) -> None:
        self._group.ask("read_update", **source)

    def write_update(self) -> int:
        return int(self._group.ask("write_update")[0]["result"])


def _answer_for(runner: ModelRunner) -> Callable[[Plain], Any]:
    """Return the function by which a rank with ``runner`` answers a message; None is no answer. An error of
    ``read_update`` is an answer. Any other ends the rank's process, which is no longer at the others' step."""
    rank = Rank()

    def answer(message: Plain) -> Plain | None:
        if "engine" not in message:
            return rank.answer(message)
        method = message.pop("engine")
        try:
            with torch.no_grad():
                result = getattr(ModelRunner, method)(runner, **message)
        except Exception as error:
            if method != "read_update":
                raise
            return {"error": str(error), "invalid": isinstance(error, (ValueError, OSError))}
        return None if method in ("compute", "repair") else {"result": result}  # rank 0 goes on without an answer

    return answer


def _join(store: Any, rank: int, options: Options) -> None:
    device = options.device_of(rank)
    backend: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        for name in _OFF:
            os.environ.setdefault(name, "0")
        backend = {"backend": "nccl", "device_id": device}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
    dist.init_process_group(**backend, store=store, rank=rank, world_size=options.tensor_parallel)


def _in_group() -> bool:
    """Return whether this process is in a group that can be taken down: not while its communicators' memory is away."""
    return dist.is_initialized() and communicators.usable() and not hibernation.is_hibernated()


def main(pickled: str, number: str) -> None:
    """Make the runner of one rank, and call the methods that rank 0 sends until it closes the connection. Ends at once
    with rank 0's process, even in the middle of a step or while it is stopped."""
    leader, path, meeting, options = pickle.loads(bytes.fromhex(pickled))
    rank = int(number)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: when the thread that started this process ends
    if is_ending(leader):  # perhaps before that call
        os._exit(1)
    for ignored in (signal.SIGINT, signal.SIGTERM):  # from a terminal or a service manager: rank 0 ends this process
        signal.signal(ignored, signal.SIG_IGN)
    _join(dist.FileStore(meeting, options.tensor_parallel), rank, options)
    serve(path, rank, _answer_for(ModelRunner(options, rank)))
    os._exit(0)  # the driver takes all memory back; torch would first wait for the other ranks


if __name__ == "__main__":
    main(*sys.argv[1:])
