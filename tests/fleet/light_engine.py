"""Light engines, many to a process: the real service and core, with a few pages of memory each.

All memory of a process belongs to one core. Each engine sees its own tags of it, whose names begin with its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core import MemsaverError, PhaseLog
from memsaver_core.contract.errors import DrainTimeoutError
from memsaver_core.contract.reports import OperationReport
from memsaver_core.contract.requests import CacheMode, MemoryRequest, Tagged
from memsaver_core.contract.status import Status
from memsaver_server import attach
from memsaver_server.engine import DRAIN_POLL_S, LOCAL_MEMORY, CachePages, never
from memsaver_server.engine.gate import Gate

MIB = 1 << 20
TAGS = ("kv_cache", "weights")


class LightEngine(Gate):
    """A gate with weights, which are kept, and a KV cache, which comes back as zeros."""

    def __init__(
        self, name: str, *, weights_bytes: int = MIB, kv_bytes: int = MIB, model: str = "", more: Sequence[str] = ()
    ) -> None:
        super().__init__(name)
        self.model_name = model
        self.memory = LightMemory(f"{name}/")
        device = ms.torch_device()
        with ms.region(f"{name}/weights", restore="host"):
            self.weights = torch.arange(weights_bytes // 8, device=device)
        with ms.region(f"{name}/kv_cache", restore="zero"):
            self.kv = torch.zeros(kv_bytes // 8, dtype=torch.int64, device=device)
        self.memory.names += tuple(more)
        self.others = []
        for tag in more:
            with ms.region(f"{name}/{tag}", restore="host"):
                self.others.append(torch.zeros(1024, device=device))

    def whole(self) -> bool:
        """Whether all memory is resident with its content."""
        return self.resident() == set(self.memory.names) and bool(
            (self.weights == torch.arange(len(self.weights))).all()
        )

    def resident(self) -> set[str]:
        """The tags that are mapped."""
        return {tag.tag for tag in self.memory.status().tags if not tag.released_bytes}

    def close(self) -> None:
        """End faults, and bring everything back."""
        self.memory.heal()
        self.memory.give_back_reserved()
        self.memory.resume(Tagged())


class ElasticEngine(LightEngine):
    """A light engine whose KV cache has pages of a MiB, and can be resized while it serves."""

    def __init__(self, name: str, *, model: str = "", pages: int = 4) -> None:
        super().__init__(name, model=model)
        with ms.region(f"{name}/kv_cache", restore="zero", chunk_bytes=MIB):
            self.kv = torch.zeros(pages * MIB // 8, dtype=torch.int64, device=ms.torch_device())
        self.total = self.kept = pages
        self.needed = 0  # pages that requests in flight use
        self.limits: list[int] = []  # in pages, as they came
        self.refuses = False

    def kv_cache(self) -> CachePages:
        return CachePages(self.total, self.kept, self.needed, self.needed, MIB, page_tokens=16)

    def limit_kv_cache(
        self, pages: int, timeout_s: float, mode: CacheMode = "wait", given_up: Callable[[], bool] = never
    ) -> None:
        self.limits.append(pages)
        while pages < self.needed:
            if given_up():
                raise DrainTimeoutError(timeout_s, [], "the KV cache is as before")
            time.sleep(DRAIN_POLL_S)

    def resize_kv_cache(self, pages: int) -> CachePages:
        if self.refuses:
            raise MemsaverError("told to refuse")
        ms.resize(f"{self.name}/kv_cache", unused=[self.kv[pages * MIB // 8 :]])
        self.kept = pages
        return self.kv_cache()

    def close(self) -> None:
        """Free its memory, so that the next engine of its name has the tags to itself."""
        super().close()
        del self.weights, self.kv


class LightMemory:
    """The tags of the core's memory whose names begin with ``prefix``, without it."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.names: tuple[str, ...] = TAGS
        self._failing: dict[str, MemsaverError] = {}
        self._holding: dict[str, threading.Event] = {}
        self.reached: dict[str, int] = {}
        self._ends = False
        self._ended = ""

    def fail(self, call: str, error: MemsaverError, *, ends: bool = False) -> None:
        """Make the next ``call`` fail before it does anything; ``ends``: for good, as if a rank had ended."""
        self._failing[call] = error
        self._ends = ends

    def hold(self, call: str) -> None:
        """From now on, hold ``call`` until ``heal``."""
        self._holding[call] = threading.Event()

    def heal(self) -> None:
        """Undo ``fail`` and ``hold``; held calls continue."""
        self._failing.clear()
        self._ended = ""
        for event in self._holding.values():
            event.set()
        self._holding.clear()

    # -- the protocol --------------------------------------------------------------------------------------------------

    enabled = staticmethod(LOCAL_MEMORY.enabled)
    read_devices = staticmethod(LOCAL_MEMORY.read_devices)
    prepare_backup = staticmethod(lambda: None)
    hibernation_obstacles = staticmethod(lambda: ["light engines share a process"])

    def check_tags(self, tags: Sequence[str] | None) -> list[str]:
        return [self._short(tag) for tag in LOCAL_MEMORY.check_tags(self._long(tags or ()))]

    def check_release(self, request: MemoryRequest) -> None:
        self._reach("check_release")
        LOCAL_MEMORY.check_release(self._own(request))

    def release(self, request: MemoryRequest, *, log: PhaseLog | None = None) -> OperationReport:
        self._reach("release")
        return self._named(LOCAL_MEMORY.release(self._own(request), log=log))

    def reserve(self, request: Tagged) -> Any:
        self._reach("reserve")
        return LOCAL_MEMORY.reserve(self._own(request))

    def give_back_reserved(self, *arguments: Any) -> None:
        LOCAL_MEMORY.give_back_reserved(*arguments)

    def resume(self, request: Tagged, *, log: PhaseLog | None = None) -> OperationReport:
        self._reach("resume")
        return self._named(LOCAL_MEMORY.resume(self._own(request), log=log))

    def status(self) -> Status:
        status = LOCAL_MEMORY.status()
        tags = tuple(self._renamed(tag) for tag in status.tags if tag.tag.startswith(self._prefix))
        released = any(tag.released_bytes for tag in tags)
        state: Any = "failed" if self._ended else "released" if released else "resident"
        return status.model_copy(update={"tags": tags, "state": state, "failure": self._ended})

    def written_asleep(self, tag: str, source: Any = None) -> Any:
        return LOCAL_MEMORY.written_asleep(f"{self._prefix}{tag}", source)

    def _reach(self, call: str) -> None:
        self.reached[call] = self.reached.get(call, 0) + 1
        if call in self._holding:
            self._holding[call].wait()
        if call in self._failing:
            error = self._failing.pop(call)
            self._ended = str(error) if self._ends else ""
            raise error

    def _own(self, request: Any) -> Any:
        tags = self._long(request.tags or self.names)
        if isinstance(request, MemoryRequest):
            restore = {f"{self._prefix}{tag}": policy for tag, policy in request.restore.items()}
            return request.model_copy(update={"tags": tags, "restore": restore})
        return request.model_copy(update={"tags": tags})

    def _renamed(self, tag: Any) -> Any:
        return tag.model_copy(update={"tag": self._short(tag.tag)})

    def _named(self, report: OperationReport) -> OperationReport:
        return report.model_copy(update={"tags": tuple(map(self._renamed, report.tags))})

    def _long(self, tags: Iterable[str]) -> tuple[str, ...]:
        return tuple(f"{self._prefix}{tag}" for tag in tags)

    def _short(self, tag: str) -> str:
        return tag.removeprefix(self._prefix)


def serve() -> None:
    """Serve COUNT engines, PER_PROCESS to a process, until standard input ends. Each process prints its members as a
    line of JSON; each line of input is a call of the first engine that is to fail."""
    count, per_process = int(sys.argv[1]), int(sys.argv[2])
    children = []
    for first in range(0, count, per_process):  # forked, as torch takes seconds to import
        child = os.fork()
        if child == 0:
            _serve(range(first, min(first + per_process, count)))
            os._exit(0)
        children.append(child)
    os.waitpid(children[0], 0)
    for child in children[1:]:
        os.kill(child, signal.SIGKILL)


def _serve(numbers: range) -> None:
    engines = [LightEngine(f"e{number}") for number in numbers]
    served = [attach(engine) for engine in engines]
    pairs = zip(engines, served, strict=True)
    line = json.dumps([{"name": engine.name, "url": attachment.url} for engine, attachment in pairs])
    os.write(1, f"{line}\n".encode())
    if numbers[0]:
        signal.pause()
    for call in sys.stdin:
        engines[0].memory.fail(call.strip(), MemsaverError("told to fail"))
        os.write(1, b"failing\n")
