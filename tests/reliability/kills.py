"""Kills an engine (SIGKILL) before and after each of its system calls: ``python -m tests.reliability.kills``, with
standstill preloaded and the tests' native module, which has the account's audit.

Each engine is a fork of this process. It is held and killed at the nth system call of one operation, where the host
driver's account may disagree with the system, or the saver's data with the driver's. A co-tenant works meanwhile; if
the engine holds the account's lock, the co-tenant waits for it. Prints figures. ``--every N`` kills at every Nth place.

With ``--store``, on the core with small units, the three of them keep packed content in one store: the engine, its
co-tenant, and a process on another device, which releases at the same time.
"""

from __future__ import annotations

import ctypes
import gc
import glob
import itertools
import json
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from memsaver_core import _native
from tests.reliability.neighbours import COMMON, Neighbour
from tests.unit.saver_memory import PAGE, content, fill, noise, view
from tests.waiting import wait_until

CAPACITY = 1 << 20
#: The store in which all keep their backups; empty: each has its own memory.
STORE = f"kills-{uuid.uuid4().hex[:12]}" if "--store" in sys.argv else ""
#: Which places are tried: all of them or, from another one in each round, every few.
EVERY = int(sys.argv[sys.argv.index("--every") + 1]) if "--every" in sys.argv else 1
FIRST = itertools.cycle(range(1, EVERY + 1))
WEIGHTS = (40 if STORE else 9) * PAGE  # with a store the core has small units, and 40 pages are packed in part
SAME = 32 * PAGE
#: Tag, policy and bytes of an engine's memory.
HELD = (("weights", "host", WEIGHTS), ("disk", "file", 5 * PAGE), ("cache", "zero", 3 * PAGE), ("t", "discard", PAGE))
OPERATIONS = ("start", "allocate", "release", "resume", "rewrite", "reserve", "commit", "free", "end")
#: The co-tenant's operations while an engine is killed, in turn.
TENANTS_OPERATIONS = ("allocate", "release", "resume")


def make(device: str, folder: Path) -> Any:
    return _native.Saver(
        driver="host",
        host_devices=[device],
        host_capacity=CAPACITY,
        file_folder=str(folder),
        verify="full",
        shared_backups=STORE,
    )


def write(address: int, nbytes: int, seed: int) -> bytes:
    """Content of its own; in a store the first pages are those that all have."""
    fill(address, nbytes, seed)
    if STORE and nbytes > SAME:
        view(address, SAME)[:] = COMMON.view(np.uint8).reshape(-1)[:SAME]
    return content(address, nbytes)


def engine(operation: str, nth: int, after: bool, report: int, device: str, folder: Path) -> None:
    """An engine's life, up to the end of the operation or the place where it is held."""
    stand_still_at = ctypes.CDLL(None).stand_still_at

    def reached(now: str) -> None:
        stand_still_at(nth if now == operation else 0, after, report)

    reached("start")
    saver = make(device, folder)
    reached("allocate")
    addresses = [saver.allocate(0, tag, policy, nbytes) for tag, policy, nbytes in HELD]
    reached("")
    for address, (_, _, nbytes) in zip(addresses, HELD, strict=True):
        write(address, nbytes, 1)
    reached("release")
    saver.release([], [], {})
    reached("resume")
    saver.resume([])
    reached("")
    saver.release([], [], {})
    pages = mmap.mmap(-1, WEIGHTS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = ctypes.addressof(ctypes.c_uint8.from_buffer(pages))
    saver.backup_of(addresses[0], WEIGHTS, memory)
    pages[-2 * PAGE : -PAGE] = noise(PAGE, 2).tobytes()
    reached("rewrite")
    _native.Rewrite(saver, [(addresses[0], memory)]).commit()
    reached("reserve")
    saver.reserve([])
    reached("commit")
    saver.resume([])
    reached("free")
    for address in addresses:
        saver.free(address)
    reached("end")
    del saver
    gc.collect()
    reached("")


def run_until(operation: str, nth: int, after: bool, device: str, folder: Path, tenant: Tenant | None) -> str:
    """Kill an engine at the nth system call of an operation. Returns the call; empty if there are fewer."""
    if tenant is not None:
        tenant.prepare()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ours)
            engine(operation, nth, after, theirs, device, folder)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(theirs)
    call = os.read(ours, 100).decode()  # empty if the engine ended by itself
    if call:
        if tenant is not None:
            tenant.begin()
        os.kill(child, signal.SIGKILL)
    os.close(ours)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if call else 0)
    return call


class Tenant:
    """A co-tenant in this process: whatever happens to the engine, its operations succeed and its content is intact."""

    def __init__(self, device: str, folder: Path) -> None:
        self.saver = make(device, folder)
        self.address = self.saver.allocate(0, "tenant", "host", WEIGHTS)
        self.written = write(self.address, WEIGHTS, 2)
        self.neighbour = Neighbour(STORE, CAPACITY) if STORE else None
        self.turns = itertools.cycle(TENANTS_OPERATIONS)
        self.waited: Counter[str] = Counter()

    def prepare(self) -> None:
        """Get ready for the next operation while no engine holds the lock."""
        self.operation = next(self.turns)
        if self.operation == "resume":
            self.saver.release([], [], {})

    def begin(self) -> None:
        """Run the operation in a thread; return when it is done or waits for the lock that the engine holds."""
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        if self.neighbour is not None:
            self.neighbour.say("release")
        while self.thread.is_alive():
            if waits_for_a_lock():
                self.waited[self.operation] += 1
                return

    def _run(self) -> None:
        try:
            if self.operation == "allocate":
                self.saver.free(self.saver.allocate(0, "more", "discard", PAGE))
            elif self.operation == "release":
                self.saver.release([], [], {})
            else:
                self.saver.resume([])
        except BaseException as failure:
            self.failure = failure

    def check(self) -> None:
        self.thread.join()
        assert self.failure is None, self.failure
        if self.neighbour is not None:
            assert self.neighbour.answer() == "ok"
            assert self.neighbour.obey("resume") == "ok"
        assert self.saver.audit() == []  # the device's account holds the co-tenant's memory and no more
        self.saver.resume([])
        self.saver.free(self.saver.allocate(0, "rest", "discard", CAPACITY - WEIGHTS))
        self.saver.release([], [], {})
        self.saver.resume([])
        assert content(self.address, WEIGHTS) == self.written

    def leave_store(self) -> None:
        """Nothing in it is used at the end."""
        if self.neighbour is None:
            return
        self.neighbour.end()
        self.saver.resume([])  # it got ready for an operation that was not needed
        self.saver.drop_backups([])
        wait_until(lambda: self.saver.status()["host_backup"]["shared_store"]["used_bytes"] == 0)


def waits_for_a_lock() -> bool:
    """Whether a thread of this process waits for a file lock, which /proc/locks marks by an arrow."""
    with open("/proc/locks") as locks:
        waiting = [line.split() for line in locks if "->" in line]
    return any(int(fields[5]) == os.getpid() for fields in waiting)


def check_successor(device: str, folder: Path) -> None:
    saver = make(device, folder)
    addresses = [saver.allocate(0, tag, policy, nbytes) for tag, policy, nbytes in HELD]
    written = [write(address, nbytes, 3) for address, (_, _, nbytes) in zip(addresses, HELD, strict=True)]
    saver.release([], [], {})
    saver.resume([])
    for address, expected, (_, policy, nbytes) in zip(addresses, written, HELD, strict=True):
        if policy in ("host", "file"):
            assert content(address, nbytes) == expected


def kill_everywhere(folder: Path, tenant: Tenant | None, device: str) -> Counter[str]:
    """Kill an engine at every place, alone on its device or beside a co-tenant."""
    kills: Counter[str] = Counter()
    for operation in OPERATIONS:
        for after in (False, True):
            places = itertools.count(next(FIRST), EVERY)
            while call := run_until(operation, next(places), after, device, folder, tenant):
                kills[f"{operation}, {call}"] += 1
                if tenant is not None:
                    tenant.check()
                check_successor(device, folder)
                assert list(folder.iterdir()) == []
                assert (tenant is not None) == bool(shared_memory(device))
    return kills


def shared_memory(device: str) -> list[str]:
    return glob.glob(f"/dev/shm/*{device}*")


def main() -> None:
    start = time.monotonic()
    device = f"kills-{uuid.uuid4().hex[:12]}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kills = Counter() if STORE else kill_everywhere(folder, None, device)
        tenant = Tenant(device, folder)
        kills += kill_everywhere(folder, tenant, device)
        waited = dict(sorted(tenant.waited.items()))
        tenant.leave_store()
        del tenant
        gc.collect()
        assert shared_memory(device) == []
    figures = {
        "kills": sum(kills.values()),
        "waited": sum(waited.values()),
        "seconds": round(time.monotonic() - start, 1),
        "by_place": dict(sorted(kills.items())),
        "waited_by_operation": waited,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
