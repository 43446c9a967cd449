"""Ranks for tests: processes with a little memory and one communicator, which fail where a test wants them to.

``python -m tests.reliability.rank_processes`` imports everything once. For each line of JSON on its standard input (how
many ranks, their socket, their folder, their settings) it forks the ranks of one engine, and prints their process ids.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which torch imports at the first use of a region: seconds for each rank

import memsaver_core as ms
from memsaver_core import communicators, hibernation, process
from memsaver_core.contract.errors import DriverError
from memsaver_core.ranks import protocol
from memsaver_core.ranks.connection import serve
from memsaver_core.ranks.protocol import Plain
from memsaver_core.ranks.rank import Rank, Result
from tests.native import nccl

#: Tag, policy and bytes of a rank's memory.
HELD = (("weights", "host", 3 << 16), ("disk", "file", 1 << 16), ("kv_cache", "zero", 1 << 16), ("t", "discard", 4096))


def step_of(request: protocol.Request) -> str:
    """What the tests call the step that ``request`` is."""
    match request:
        case protocol.Move("release", memory):
            return "release kept" if "weights" in memory.tags else "release discarded"
        case protocol.Prepare(operation):
            return f"prepare {operation}"
        case protocol.Move("resume"):
            return "resume"
        case protocol.MoveCommunicators(operation, begin=False):
            return f"communicators {operation}"
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
            self._memory[tag] = _allocate(tag, policy, size, 100 * rank + number)

    def answer(self, message: Plain) -> Plain:
        mine = message.get("rank") == self._rank
        match message["type"]:
            case "Fault" if mine:
                self._fault = message
            case "FailCall" if mine:
                process.saver().fail(message["call"], nth=message["nth"])
            case "Hold" if mine:
                self._memory["held"] = _allocate("held", "discard", message["bytes"], 0)
            case "LetGo":
                self._memory.pop("held", None)
            case "Look":
                return self._look()
            case "Fault" | "FailCall" | "Hold":
                pass
            case _:
                return super().answer(message)
        return {}

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


def _allocate(tag: str, policy: str, size: int, seed: int) -> torch.Tensor:
    with ms.region(tag, restore=policy):
        return torch.randint(256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def _fail(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        threading.Event().wait()
    raise DriverError("this rank was told to fail", call="test")


def run(rank: int, prelude: str, ranks: int, path: str, folder: str, settings: dict[str, Any]) -> None:
    """The life of a rank."""
    ms.configure(host_device=f"{Path(folder).name}-{rank}", host_capacity=1 << 20, file_dir=folder, **settings)
    made: dict[str, Any] = {}
    exec(prelude, made)
    comm = made["join"](f"{folder}/tp", ranks, rank)
    communicators.register("tp", comm, ranks=ranks, rank=rank)
    serve(path, rank, FaultyRank(rank).answer)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    prelude = nccl.prelude()  # builds the library
    for line in sys.stdin:
        asked = json.loads(line)
        pids = []
        for rank in range(asked[0]):
            if not (pid := os.fork()):
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                sys.stdin.close()
                os.dup2(2, 1)  # the tests read standard output to its end
                try:
                    run(rank, prelude, *asked)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            pids.append(pid)
        print(json.dumps(pids), flush=True)


if __name__ == "__main__":
    main()
