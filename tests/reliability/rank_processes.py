"""Ranks for tests: processes with a little memory and one communicator, which fail where a test wants them to.

``python -m tests.reliability.rank_processes`` imports everything once. For each line of JSON on its standard input it
forks the ranks of one engine, and prints their process ids.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which torch imports at the first use of a region: seconds for each rank

import memsaver_core as ms
from memsaver_core import communicators, hibernation
from memsaver_core.errors import DriverError
from memsaver_core.ranks import protocol
from memsaver_core.ranks.connection import Listener, SocketChannel, serve
from memsaver_core.ranks.protocol import Plain
from memsaver_core.ranks.rank import Rank, Result
from tests.native import injection, nccl
from tests.programs import Child

#: Tag, policy and bytes of a rank's memory.
HELD = (("weights", "host", 3 << 16), ("disk", "file", 1 << 16), ("kv_cache", "zero", 1 << 16), ("t", "discard", 4096))
KEPT = ("disk", "weights")
RANKS = 4


def step_of(request: protocol.Request) -> str:
    """What the tests call the step that ``request`` is."""
    match request:
        case protocol.Release(options):
            return "release kept" if "weights" in options.tags else "release discarded"
        case protocol.HibernationStep(step):
            return step
    return type(request).__name__


class FaultyRank(Rank):
    """Fails once, at the step and in the way that a ``Fault`` message names."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._fault: Plain = {}
        self._memory: dict[str, torch.Tensor] = {}
        for number, (tag, policy, size) in enumerate(HELD):
            with ms.region(tag, restore=policy):
                generator = torch.Generator().manual_seed(100 * rank + number)
                self._memory[tag] = torch.randint(256, (size,), generator=generator, dtype=torch.uint8)

    def answer(self, message: Plain) -> Plain:
        if message["type"] == "Fault":
            self._fault = message if message["rank"] == self._rank else {}
            return {}
        return self._look() if message["type"] == "Look" else super().answer(message)

    def carry_out(self, request: protocol.Request) -> Result:
        fault = self._fault if self._fault.get("step") == step_of(request) else {}
        if fault:
            self._fault = {}
        if fault and not fault["after"]:
            _fail(fault["kind"])
        result = super().carry_out(request)
        if fault:
            _fail(fault["kind"])
        return result

    def _look(self) -> Plain:
        """What this rank holds; content of what can be read."""
        communicators.found()
        released = {tag.tag: tag.released_bytes for tag in ms.status().tags}
        content = {
            tag: hashlib.sha256(held.numpy()).hexdigest() for tag, held in self._memory.items() if not released[tag]
        }
        return {"released": released, "content": content, "away": hibernation.is_away()}


def _fail(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        threading.Event().wait()
    raise DriverError("this rank was told to fail", call="test")


def run(rank: int, prelude: str, path: str, folder: str) -> None:
    """The life of a rank."""
    ms.configure(host_device=f"{Path(folder).name}-{rank}", host_capacity=1 << 20, file_dir=folder)
    made: dict[str, Any] = {}
    exec(prelude, made)
    comm = made["join"](f"{folder}/tp", RANKS, rank)
    communicators.register("tp", comm, ranks=RANKS, rank=rank)
    serve(path, rank, FaultyRank(rank).answer)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    prelude = nccl.prelude()  # builds the library
    for line in sys.stdin:
        pids = []
        for rank in range(RANKS):
            if not (pid := os.fork()):
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                sys.stdin.close()
                os.dup2(2, 1)  # the tests read standard output to its end
                try:
                    run(rank, prelude, *json.loads(line))
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            pids.append(pid)
        print(json.dumps(pids), flush=True)


class Zygote:
    """The process that forks ranks."""

    def __init__(self) -> None:
        self._child = Child("-m", "tests.reliability.rank_processes", MEMSAVER_DRIVER="host", **injection.in_child())
        self._lock = threading.Lock()

    def fork(self, folder: Path) -> Group:
        listener = Listener(RANKS, first=0)
        with self._lock:
            pids = json.loads(self._child.ask(json.dumps([listener.path, str(folder)])))
        return Group(SocketChannel(None, listener.accept(60)), pids)

    def close(self) -> None:
        self._child.end()


class Group:
    """The ranks of one engine."""

    def __init__(self, channel: SocketChannel, pids: Sequence[int]) -> None:
        self.channel = channel
        self.pids = pids
        self._handles = [os.pidfd_open(pid) for pid in pids]

    def arm(self, rank: int, step: str, kind: str, *, after: bool) -> None:
        """Have ``rank`` fail the next ``step``: before or after it took effect."""
        self._all({"type": "Fault", "rank": rank, "step": step, "kind": kind, "after": after})

    def look(self) -> list[Plain]:
        """What each rank holds."""
        return self._all({"type": "Look"})

    def kill(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        self.channel.close()

    def _all(self, message: Plain) -> list[Plain]:
        return self.channel.start(message).result(60)


if __name__ == "__main__":
    main()
