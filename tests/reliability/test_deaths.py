"""Processes that die, exit or fork in the middle of an operation: effects on the device and the next process."""

from __future__ import annotations

import glob
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memsaver_core import _native
from memsaver_core.contract.errors import OutOfDeviceMemoryError
from tests.amount import amount
from tests.native import injection
from tests.native.build import ROOT, built
from tests.programs import Child
from tests.reliability.figures import keep
from tests.unit.saver_memory import MIB, PAGE, content, fill, view
from tests.waiting import wait_until

CAPACITY = 32 * MIB
PACKED = 256 * MIB  # the first 192 MiB stay as they are
FORK = multiprocessing.get_context("fork")
PHASES = [
    *(("release", call) for call in ("synchronize", "digest", "copy_to_host", "record", "wait", "unmap", "release")),
    *(("resume", call) for call in ("memory_info", "create", "map", "allow_access", "copy_to_device", "copy_to_host")),
    *(("resume", call) for call in ("digest", "record", "wait")),
]
IDLE = ("", "")


@pytest.fixture
def device() -> Iterator[str]:
    name = f"deaths-{uuid.uuid4().hex[:12]}"
    yield name
    for path in glob.glob(f"/dev/shm/memsaver-{os.getuid()}-{name}"):
        os.unlink(path)


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, str]]:
    """The places at which this run killed processes, recorded once at the end, without those of earlier runs."""
    found: dict[str, str] = {}
    yield found
    keep("deaths", found)


Fork = Callable[..., tuple[multiprocessing.process.BaseProcess, Connection]]


@pytest.fixture
def fork() -> Iterator[Fork]:
    """Runs a function in a forked child, with a pipe to the test as its last argument; children end with the test."""
    children = []

    def start(target: Callable[..., None], *arguments: Any) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        ours, theirs = FORK.Pipe()
        child = FORK.Process(target=target, args=(*arguments, theirs))
        children.append(child)
        child.start()
        theirs.close()  # so that a child that dies early is an error to the reader
        return child, ours

    yield start
    for child in children:
        child.kill()
        child.join()


def kill(process: multiprocessing.process.BaseProcess) -> None:
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def shared_memory(device: str) -> list[str]:
    """A name for the device; other users of this machine may use theirs meanwhile."""
    return glob.glob(f"/dev/shm/*{device}*")


def make(device: str, folder: Path, capacity: int = CAPACITY, **settings: Any) -> _native.Saver:
    return _native.Saver(
        driver="host",
        host_devices=[device],
        host_capacity=capacity,
        file_folder=str(folder),
        verify="full",
        **settings,
    )


def used_bytes(saver: _native.Saver) -> int:
    """The bytes that all processes hold of the device, as reported to one of them."""
    free, total = saver.memory_info(0)
    return total - free


def populate(saver: _native.Saver) -> list[tuple[int, int, bytes]]:
    kept_memories = []
    for seed, (tag, policy, nbytes) in enumerate(
        [("weights", "host", 6 * MIB), ("disk", "file", 2 * MIB), ("cache", "zero", 3 * MIB), ("t", "discard", PAGE)]
    ):
        address = saver.allocate(0, tag, policy, nbytes)
        written = fill(address, nbytes, seed)
        if policy in ("host", "file"):
            kept_memories.append((address, nbytes, written))
    return kept_memories


def check_content(memories: list[tuple[int, int, bytes]]) -> None:
    for address, nbytes, written in memories:
        assert content(address, nbytes) == written


def full_cycle(saver: _native.Saver, memories: list[tuple[int, int, bytes]]) -> None:
    saver.release([], [], {})
    saver.resume([])
    check_content(memories)


class Operation(threading.Thread):
    """A release or a resume of everything in a thread, held at its first `call`."""

    def __init__(self, saver: _native.Saver, operation: str, call: str) -> None:
        super().__init__(daemon=True)
        self.saver, self.operation = saver, operation
        self.failure: BaseException | None = None
        before = saver.counts().get(call, 0)
        saver.delay(call, 3600)
        self.start()
        wait_until(lambda: saver.counts().get(call, 0) != before)

    def run(self) -> None:
        try:
            if self.operation == "release":
                self.saver.release([], [], {})
            else:
                self.saver.resume([])
        except BaseException as failure:
            self.failure = failure

    def finish(self) -> None:
        """Let it continue, and check that it succeeds."""
        self.saver.heal()
        self.join()
        assert self.failure is None, self.failure


def engine(device: str, folder: Path, operation: str, call: str, pipe: Connection) -> None:
    """Runs the operation, held at its first `call`, if any, and reports that."""
    saver = make(device, folder)
    populate(saver)
    if operation == "resume":
        saver.release([], [], {})
    if call:
        Operation(saver, operation, call)
    pipe.send((saver.status()["state"], saver.status()["operation"]))
    signal.pause()


@pytest.mark.parametrize(("operation", "call"), PHASES)
@pytest.mark.guards("a process was killed in the middle of an operation", "backup files were left behind")
def test_killed_in_the_middle(
    device: str, tmp_path: Path, operation: str, call: str, fork: Fork, places: dict[str, str]
) -> None:
    """Its memory is free at once, no backup file remains, and the co-tenant and the next engine are unaffected."""
    tenant = make(device, tmp_path)
    memories = populate(tenant)
    held = used_bytes(tenant)
    before = shared_memory(device)
    process, pipe = fork(engine, device, tmp_path, operation, call)
    state, running = pipe.recv()
    if call not in ("synchronize", "memory_info"):
        assert (state, running) == (operation[:-1] + "ing", operation)
    kill(process)
    assert used_bytes(tenant) == held
    assert tenant.audit() == []
    assert list(tmp_path.iterdir()) == []
    assert shared_memory(device) == before
    full_cycle(tenant, memories)
    successor = make(device, tmp_path)
    full_cycle(successor, populate(successor))
    places[f"{operation}, {call}"] = "account right at once, nothing left, successor works"


@pytest.mark.parametrize(("operation", "call"), PHASES)
@pytest.mark.guards("a process was killed in the middle of an operation")
def test_a_co_tenant_killed_while_in_the_middle(
    device: str, tmp_path: Path, operation: str, call: str, fork: Fork
) -> None:
    """The engine is in any phase, the co-tenant idle or in the middle itself: its memory is free at once, the
    engine's operation succeeds, and the content is intact."""
    opposite = PHASES[(PHASES.index((operation, call)) + len(PHASES) // 2) % len(PHASES)]
    observer = make(device, tmp_path)
    for place in (IDLE, (operation, call), opposite):
        process, pipe = fork(engine, device, tmp_path, *place)  # before the survivor has threads
        pipe.recv()
        held = used_bytes(observer)
        survivor = make(device, tmp_path)
        memories = populate(survivor)
        if operation == "resume":
            survivor.release([], [], {})
        under_way = Operation(survivor, operation, call)
        both = used_bytes(observer)
        kill(process)
        assert used_bytes(observer) == both - held
        under_way.finish()
        if operation == "release":
            survivor.resume([])
        check_content(memories)
        assert survivor.audit() == []
        del survivor, under_way
        assert used_bytes(observer) == 0
    assert list(tmp_path.iterdir()) == []


def packing_engine(device: str, folder: Path, operation: str, call: str, pipe: Connection) -> None:
    """As engine(), with content that is packed: bfloat16 values of one exponent, behind what stays as it is."""
    saver = make(device, folder, PACKED)
    memory = view(saver.allocate(0, "weights", "host", PACKED), PACKED).view(np.uint16)
    memory[:] = np.resize(np.random.default_rng(1).integers(0, 128, 1 << 20, dtype=np.uint16) | 0x3F80, PACKED // 2)
    if operation == "resume":
        saver.release([], [], {})
    Operation(saver, operation, call)
    pipe.send(used_bytes(saver))
    signal.pause()


@pytest.mark.parametrize(("operation", "call"), [("release", "sample"), ("release", "pack"), ("resume", "unpack")])
@pytest.mark.guards("a process was killed in the middle of an operation")
def test_killed_while_packing(
    device: str, tmp_path: Path, operation: str, call: str, fork: Fork, places: dict[str, str]
) -> None:
    """It never held more than its content, and its memory for packing is free at once, too."""
    tenant = make(device, tmp_path, PACKED)
    process, pipe = fork(packing_engine, device, tmp_path, operation, call)
    assert pipe.recv() <= PACKED
    kill(process)
    assert used_bytes(tenant) == 0
    assert tenant.audit() == []
    full_cycle(tenant, populate(tenant))
    places[f"{operation}, {call}"] = "account right at once, nothing left, successor works"


def take_all(device: str, folder: Path, pipe: Connection) -> None:
    """Takes the whole device, held at a point where a release has backed up nothing yet."""
    saver = make(device, folder)
    fill(saver.allocate(0, "all", "host", CAPACITY), CAPACITY, 9)
    Operation(saver, "release", "copy_to_host")
    pipe.send(used_bytes(saver))
    signal.pause()


@pytest.mark.guards("a process was killed in the middle of an operation")
def test_what_a_dead_co_tenant_held_is_there_for_a_resume(device: str, tmp_path: Path, fork: Fork) -> None:
    """The resume has too little memory until the co-tenant is killed, just before the resume checks."""
    survivor = make(device, tmp_path)
    memories = populate(survivor)
    survivor.release([], [], {})
    process, pipe = fork(take_all, device, tmp_path)
    assert pipe.recv() == CAPACITY
    with pytest.raises(OutOfDeviceMemoryError):
        survivor.resume([])
    under_way = Operation(survivor, "resume", "memory_info")
    kill(process)
    under_way.finish()
    check_content(memories)
    assert survivor.audit() == []


def killed_everywhere(*options: str) -> dict[str, Any]:
    """The figures of a run of kills."""
    every = amount(36, long=1)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.reliability.kills", "--every", str(every), *options],
        cwd=ROOT,
        env={
            **os.environ,
            **injection.in_child(small=bool(options)),
            "LD_PRELOAD": str(built() / "libstandstill.so"),
        },
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    figures: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return figures


@pytest.mark.long
@pytest.mark.guards("a process was killed in the middle of an operation")
def test_killed_before_and_after_each_system_call() -> None:
    """Inside the host driver too, between a system call and its record in the account: the account is correct at
    once, the next engine works, and a co-tenant's operation succeeds, even if it waits for the account's lock that
    the killed engine held."""
    figures = killed_everywhere()
    keep("kills", figures)
    assert figures["kills"] > amount(6, long=300)
    assert {"allocate", "release", "resume", "reserve"} <= {place.split(",")[0] for place in figures["by_place"]}
    if amount(0, long=1):
        assert {f"{each}, fallocate" for each in ("release", "resume", "reserve")} <= figures["by_place"].keys()
        assert set(figures["waited_by_operation"]) == {"allocate", "release", "resume"}


@pytest.mark.long
@pytest.mark.timeout(1200)  # it may have to build the core
@pytest.mark.guards(
    "a process was killed in the middle of an operation", "the process that had written a shared backup died"
)
def test_killed_at_each_system_call_in_a_store_of_three() -> None:
    """The others go on with their content, packed in part, and nothing is left in the store."""
    figures = killed_everywhere("--store")
    keep("kills_in_a_store", figures)
    assert figures["kills"] > amount(6, long=300)


PROGRAM = """
import os, sys, threading, time
import torch, torch._dynamo  # otherwise loaded at the first region
import memsaver_core as ms
from memsaver_core import process

# One fork per line: each starts with everything loaded and nothing used.
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

device, folder, said, state, then = line.split()
process.configure(driver="host", host_device=device, host_capacity=32 << 20, file_dir=folder)
with ms.region("weights"):
    weights = torch.full((4 << 20,), 3, dtype=torch.uint8)
with ms.region("disk", restore="file"):
    disk = torch.full((1 << 20,), 5, dtype=torch.uint8)
saver = process.saver()

def stand_still_in(call, run):
    before = saver.counts().get(call, 0)
    saver.delay(call, 3600)
    threading.Thread(target=run, daemon=True).start()
    while saver.counts().get(call, 0) == before:
        time.sleep(0.001)

def allocate():
    with ms.region("more"):
        torch.full((1 << 20,), 7, dtype=torch.uint8)

if state in ("released", "resuming", "resumed"):
    ms.release()
if state == "partly_released":
    ms.release(["disk"])
elif state == "releasing":
    stand_still_in("copy_to_host", ms.release)
elif state == "resuming":
    stand_still_in("copy_to_device", ms.resume)
elif state == "resumed":
    ms.resume()
elif state == "failed":
    saver.fail("copy_to_host", kind="context_lost")
    try:
        ms.release()
    except ms.ContextLostError:
        pass
elif state == "allocating":
    stand_still_in("create", allocate)
os.dup2(os.open(said, os.O_WRONLY), 2)  # its output from now on
print(ms.status().state, os.getpid(), flush=True)
if then == "wait":
    sys.stdin.readline()
"""


class Ending:
    """Processes that reach a given state, one after another, on a device and with a folder of their own."""

    def __init__(self, program: Child, device: str, folder: Path) -> None:
        self.program, self.device, self.folder = program, device, folder / "backups"
        self.said = folder / "stderr"
        self.said.touch()
        self.folder.mkdir()

    def start(self, state: str, then: str) -> str:
        """Start one; it then exits or waits. Returns what it reports of its state."""
        said, pid = self.program.ask(f"{self.device} {self.folder} {self.said} {state} {then}").split()
        self.pid = int(pid)
        return said

    def exit_code(self) -> int:
        return int(self.program.read_line())


@pytest.fixture(scope="module")
def program() -> Iterator[Child]:
    with Child("-c", PROGRAM, **injection.in_child()) as program:
        yield program


@pytest.fixture
def ending(program: Child, device: str, tmp_path: Path) -> Ending:
    return Ending(program, device, tmp_path)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ("resident", "resident"),
        ("releasing", "releasing"),
        ("released", "released"),
        ("resuming", "resuming"),
        ("resumed", "resident"),
        ("failed", "failed"),
        ("allocating", "resident"),
    ],
)
@pytest.mark.guards("the process aborted at exit")
def test_exit_in_each_state(ending: Ending, state: str, says: str) -> None:
    """Even with an operation or an allocation running in another thread; nothing is left behind."""
    assert ending.start(state, "end") == says
    assert (ending.exit_code(), ending.said.read_text()) == (0, "")
    assert shared_memory(ending.device) == []
    assert used_bytes(make(ending.device, ending.folder)) == 0
    assert list(ending.folder.iterdir()) == []


@pytest.mark.parametrize("state", ["partly_released", "released", "releasing"])
@pytest.mark.guards("a process was killed in the middle of an operation")
def test_terminated_in_each_state(ending: Ending, state: str) -> None:
    """The library does not handle SIGTERM. The process ends, its memory, resident or released, is free at once, and
    no file is left."""
    observer = make(ending.device, ending.folder)
    assert ending.start(state, "wait") == state.removeprefix("partly_")
    assert (used_bytes(observer) > 0) == (state != "released")
    os.kill(ending.pid, signal.SIGTERM)
    assert ending.exit_code() == -signal.SIGTERM
    assert used_bytes(observer) == 0
    assert list(ending.folder.iterdir()) == []


@pytest.mark.parametrize("state", ["resident", "released", "releasing"])
@pytest.mark.guards("a forked child used or damaged its parent's memory")
def test_forked_child_that_ends(device: str, tmp_path: Path, state: str, fork: Fork) -> None:
    """In every state of its parent, a child's calls are refused, it may drop its references, and its parent is
    unaffected."""
    saver: Any = make(device, tmp_path)
    memories = populate(saver)
    if state == "released":
        saver.release([], [], {})
    under_way = Operation(saver, "release", "copy_to_host") if state == "releasing" else None
    assert saver.status()["state"] == state
    observer = make(device, tmp_path)
    held = used_bytes(observer)

    def child(pipe: Connection) -> None:
        nonlocal saver
        refused = []
        for name, *arguments in (
            ("release", [], [], {}),
            ("resume", []),
            ("allocate", 0, "t", "zero", PAGE),
            ("free", memories[0][0]),
            ("status",),
            ("known_tags",),
            ("prepare_backup",),
            ("synchronize",),
        ):
            try:
                getattr(saver, name)(*arguments)
            except Exception as error:
                refused.append(type(error).__name__)
        if under_way is None:  # else the frames of the other thread, which the fork does not have, hold it too
            assert sys.getrefcount(saver) == 2
        saver = None  # its destructor runs in the child
        fresh = make(device, tmp_path)  # it may have a saver of its own
        full_cycle(fresh, populate(fresh))
        pipe.send(refused)

    process, pipe = fork(child)
    assert pipe.poll(600)
    assert pipe.recv() == ["ForkedProcessError"] * 8
    process.join()
    assert process.exitcode == 0
    assert used_bytes(observer) == held
    if under_way is not None:
        under_way.finish()
    saver.resume([])
    check_content(memories)
    assert saver.audit() == []
    full_cycle(saver, memories)


@pytest.mark.long
@pytest.mark.guards("two engines on one GPU hung")
def test_two_engines_at_once(device: str, tmp_path: Path) -> None:
    """Both finish with their content, although together they do not fit."""
    cycles = amount(4, long=100)

    def run(pipe: Connection) -> None:
        saver = _native.Saver(
            driver="host", host_devices=[device], host_capacity=CAPACITY, file_folder=str(tmp_path), verify="full"
        )
        done = refused = 0
        address = saver.allocate(0, "weights", "host", 12 * MIB)
        written = fill(address, 12 * MIB, os.getpid())
        saver.release([], [], {})
        pipe.send("ready")
        while done < cycles:
            try:
                saver.resume([])
                extra = saver.allocate(0, "kv_cache", "zero", 8 * MIB)
            except OutOfDeviceMemoryError:
                refused += 1
                saver.release([], [], {})
                continue
            assert content(address, 12 * MIB) == written
            saver.release([], [], {})
            saver.free(extra)
            done += 1
        pipe.send((done, refused))

    pipes, processes = [], []
    for _ in range(2):
        ours, theirs = FORK.Pipe()
        processes.append(FORK.Process(target=run, args=(theirs,)))
        processes[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    for pipe, process in zip(pipes, processes, strict=True):
        assert pipe.poll(600)
        assert pipe.recv()[0] == cycles
        process.join()
        assert process.exitcode == 0
    assert make(device, tmp_path).memory_info(0)[0] == CAPACITY
