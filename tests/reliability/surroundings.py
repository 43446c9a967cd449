"""Restricted environments for a process: a control group with little memory, a disk with little space, few
descriptors.

If the machine does not allow one, the test is skipped with the reason.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import os
import resource
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

_FORK = multiprocessing.get_context("fork")
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


def in_child(body: Callable[[], None]) -> None:
    """Run in a forked child, with which the restrictions end. Fails if the child is killed."""

    def run(pipe: Connection) -> None:
        gc.disable()  # a collection writes to all objects of the parent, whose pages then count for the child's group
        try:
            body()
            pipe.send(("done", ""))
        except pytest.skip.Exception as reason:
            pipe.send(("skipped", str(reason)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))

    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=run, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.poll(600)
    try:
        outcome, reason = ours.recv()
    except EOFError:
        process.join()
        pytest.fail(f"the child ended with {process.exitcode}")
    process.join()
    if outcome == "skipped":
        pytest.skip(reason)
    if outcome == "failed":
        pytest.fail(f"in the child:\n{reason}")


class ControlGroup:
    """A control group, version 1 or 2, with a memory limit."""

    def __init__(self, folder: Path, bound: str) -> None:
        self._folder = folder
        self._bound = bound

    def limit(self, nbytes: int) -> None:
        (self._folder / self._bound).write_text(str(nbytes))

    def free(self) -> int:
        """Bytes below the limit."""
        used = {"memory.limit_in_bytes": "memory.usage_in_bytes", "memory.max": "memory.current"}[self._bound]
        return int((self._folder / self._bound).read_text()) - int((self._folder / used).read_text())

    def enter(self, process: int = 0) -> None:
        """Move a process into the group, this one by default. Memory that it had before still counts for its old
        group."""
        (self._folder / "cgroup.procs").write_text(str(process or os.getpid()))


@contextmanager
def control_group(nbytes: int, version: int) -> Iterator[ControlGroup]:
    """A new control group below this process's own, or below the nearest ancestor that may have such children."""
    name = f"memsaver-{uuid.uuid4().hex[:12]}"
    reasons = []
    for parent, bound in _places(version):
        folder = parent / name
        try:
            folder.mkdir()
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror}")
            continue
        try:
            if not (folder / bound).exists():
                reasons.append(f"{parent}: memory is not handed down")
                continue
            group = ControlGroup(folder, bound)
            group.limit(nbytes)
            yield group
            return
        finally:
            folder.rmdir()
    why = "; ".join(reasons or ["none is mounted"])
    pytest.skip(f"no control group of version {version} with a memory limit can be made here: {why}")


def _places(version: int) -> Iterator[tuple[Path, str]]:
    """Where a child group may be created, nearest first, and the file name of its limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if version == 1 and "memory" in controllers.split(","):
            root, bound = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        elif version == 2 and not controllers:
            root, bound = Path("/sys/fs/cgroup"), "memory.max"
        else:
            continue
        own = root / group.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_dir() and folder.is_relative_to(root):
                yield folder, bound


def keep_mounts_private() -> None:
    """From now on this process's mounts are private, and end with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0 or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
        pytest.skip(f"no mount namespace can be made here: {os.strerror(ctypes.get_errno())}")


def mount_small_disk(folder: Path, nbytes: int) -> None:
    """Mount an empty file system of this size; only after ``keep_mounts_private``."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, f"size={nbytes}".encode()) != 0:
        pytest.skip(f"nothing can be mounted here: {os.strerror(ctypes.get_errno())}")


@contextmanager
def no_descriptors(process: int) -> Iterator[None]:
    """The process can open nothing while the block runs; open files stay open."""
    before = resource.prlimit(process, resource.RLIMIT_NOFILE)
    first_free = next(number for number in itertools.count() if not os.path.lexists(f"/proc/{process}/fd/{number}"))
    resource.prlimit(process, resource.RLIMIT_NOFILE, (first_free, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process, resource.RLIMIT_NOFILE, before)
