"""Processes that die, end or fork in the middle of something: what the device and the next process see."""

from __future__ import annotations

import glob
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from memsaver_core import _native
from memsaver_core.errors import OutOfDeviceMemoryError
from tests.native.build import ROOT, built
from tests.programs import Child, run_python
from tests.reliability.figures import keep, kept
from tests.unit.saver_memory import MIB, PAGE, content, fill

CAPACITY = 32 * MIB
FORK = multiprocessing.get_context("fork")
PHASES = [
    *(("release", call) for call in ("synchronize", "digest", "copy_to_host", "record", "wait", "unmap", "release")),
    *(("resume", call) for call in ("memory_info", "create", "map", "allow_access", "copy_to_device", "fill_zero")),
    *(("resume", call) for call in ("digest", "record", "wait")),
]


@pytest.fixture
def device() -> Iterator[str]:
    name = f"deaths-{uuid.uuid4().hex[:12]}"
    yield name
    for path in glob.glob(f"/dev/shm/memsaver-{os.getuid()}-{name}"):
        os.unlink(path)


def shared_memory(device: str) -> list[str]:
    """What names the device; others of this machine may use theirs meanwhile."""
    return glob.glob(f"/dev/shm/*{device}*")


def make(device: str, folder: Path, **settings: Any) -> _native.Saver:
    return _native.Saver(
        driver="host",
        host_devices=[device],
        host_capacity=CAPACITY,
        file_folder=str(folder),
        verify="full",
        faulty=True,
        **settings,
    )


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


def full_cycle(saver: _native.Saver, memories: list[tuple[int, int, bytes]]) -> None:
    saver.release([], [], {})
    saver.resume([])
    for address, nbytes, written in memories:
        assert content(address, nbytes) == written


def engine(device: str, folder: Path, operation: str, call: str, pipe: Connection) -> None:
    """Stands still in the first `call` of the operation, and says so."""
    saver = make(device, folder)
    populate(saver)
    if operation == "resume":
        saver.release([], [], {})
    before = saver.counts().get(call, 0)
    saver.delay(call, 3600)
    run = (lambda: saver.release([], [], {})) if operation == "release" else (lambda: saver.resume([]))
    threading.Thread(target=run, daemon=True).start()
    while saver.counts().get(call, 0) == before:
        time.sleep(0.001)
    pipe.send((saver.status()["state"], saver.status()["operation"]))
    signal.pause()


@pytest.mark.parametrize(("operation", "call"), PHASES)
def test_killed_in_the_middle(device: str, tmp_path: Path, operation: str, call: str) -> None:
    """S5: killed in any phase of a release or a resume, its memory is free at once, no file is left, and neither the
    co-tenant nor the next engine notices anything; B6: no backup file stays."""
    tenant = make(device, tmp_path)
    memories = populate(tenant)
    held = CAPACITY - tenant.memory_info(0)[0]
    before = shared_memory(device)
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=engine, args=(device, tmp_path, operation, call, theirs))
    process.start()
    state, running = ours.recv()
    if call not in ("synchronize", "memory_info"):
        assert (state, running) == (operation[:-1] + "ing", operation)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert CAPACITY - tenant.memory_info(0)[0] == held
    assert tenant.audit() == []
    assert list(tmp_path.iterdir()) == []
    assert shared_memory(device) == before
    full_cycle(tenant, memories)
    successor = make(device, tmp_path)
    full_cycle(successor, populate(successor))
    figures = kept("deaths")
    figures[f"{operation}, {call}"] = "account right at once, nothing left, successor works"
    keep("deaths", figures)


@pytest.mark.slow
def test_killed_before_and_after_each_system_call() -> None:
    """S5: wherever an engine is killed, inside of the host driver's calls too, between what the system did and what the
    account says of it, the account is right at once and the next engine works."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.reliability.kills"],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(built() / "libstandstill.so")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    keep("kills", figures)
    assert figures["kills"] > 300
    assert {"release, fallocate", "resume, fallocate", "allocate, unlock"} <= set(figures["by_place"])


PROGRAM = """
import sys, threading, time
import torch
import memsaver_core as ms
from memsaver_core import _process
_process.configure(driver="host", host_device=sys.argv[1], host_capacity=32 << 20, file_dir=sys.argv[2],
                   fault_injection=True)
with ms.region("weights"):
    weights = torch.full((4 << 20,), 3, dtype=torch.uint8)
with ms.region("disk", restore="file"):
    disk = torch.full((1 << 20,), 5, dtype=torch.uint8)
state = sys.argv[3]
if state != "resident":
    if state == "releasing":
        saver = _process.saver()
        saver.delay("copy_to_host", 1)
        threading.Thread(target=ms.release, daemon=True).start()
        while ms.status().state != "releasing":
            time.sleep(0.001)
    else:
        ms.release()
    if state == "resumed":
        ms.resume()
print(ms.status().state, flush=True)
if sys.argv[4] == "wait":
    sys.stdin.readline()
"""


@pytest.mark.parametrize("state", ["resident", "releasing", "released", "resumed"])
def test_exit_in_each_state(device: str, tmp_path: Path, state: str) -> None:
    """T2: a process ends well in whatever state it is, and leaves nothing behind."""
    ran = run_python(PROGRAM, device, str(tmp_path), state, "exit")
    assert (ran.returncode, ran.stderr) == (0, "")
    observer = make(device, tmp_path)
    assert observer.memory_info(0)[0] == CAPACITY
    assert list(tmp_path.iterdir()) == []


def test_terminated_while_released(device: str, tmp_path: Path) -> None:
    """S5: SIGTERM while released ends the process, and all that it held is free."""
    observer = make(device, tmp_path)
    with Child("-c", PROGRAM, device, str(tmp_path), "released", "wait") as engine:
        assert engine.read_line() == "released"
        engine.process.terminate()
        assert engine.process.wait(60) == -signal.SIGTERM  # no handler of ours is in the way
    assert observer.memory_info(0)[0] == CAPACITY
    assert list(tmp_path.iterdir()) == []


def test_forked_child_that_ends(device: str, tmp_path: Path) -> None:
    """T4: a forked child is refused by every call, may drop its references, and changes nothing of its parent."""
    saver: Any = make(device, tmp_path)
    memories = populate(saver)
    held = CAPACITY - saver.memory_info(0)[0]

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
        assert sys.getrefcount(saver) == 2
        saver = None  # its destructor runs in the child
        fresh = make(device, tmp_path)  # a saver of its own is welcome
        full_cycle(fresh, populate(fresh))
        pipe.send(refused)

    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=child, args=(theirs,))
    process.start()
    assert ours.poll(60)
    assert ours.recv() == ["ForkedProcessError"] * 8
    process.join()
    assert process.exitcode == 0
    assert CAPACITY - saver.memory_info(0)[0] == held
    assert saver.audit() == []
    full_cycle(saver, memories)


def test_two_engines_at_once(device: str, tmp_path: Path) -> None:
    """S1: two processes that release and resume on one device at the same time finish, each with its content, although
    both together do not fit."""

    def run(pipe: Connection) -> None:
        saver = _native.Saver(
            driver="host", host_devices=[device], host_capacity=CAPACITY, file_folder=str(tmp_path), verify="full"
        )
        done = refused = 0
        address = saver.allocate(0, "weights", "host", 12 * MIB)
        written = fill(address, 12 * MIB, os.getpid())
        saver.release([], [], {})
        pipe.send("ready")
        while done < 100:
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
        assert pipe.poll(120)
        assert pipe.recv()[0] == 100
        process.join()
        assert process.exitcode == 0
    assert make(device, tmp_path).memory_info(0)[0] == CAPACITY
