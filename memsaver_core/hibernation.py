"""Hibernation: give back what remains of the process on the device, its CUDA context included.

The driver checkpoints a process on behalf of another one only, so the calls come from a small helper process, started
at the first use. While hibernated, every CUDA call of this process waits; ``wake`` brings the context back as it was:
addresses, streams, modules and captured graphs.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

import torch

from memsaver_core import _native, _process
from memsaver_core.errors import DriverError, MemsaverError, UnsupportedError

#: The first driver that can checkpoint (CUDA 12.8).
OLDEST_DRIVER = "570"

#: How long CUDA calls in flight may take to end before a hibernation is given up, milliseconds.
LOCK_TIMEOUT_MS = 10_000

_lock = threading.Lock()  # one request to the helper at a time
_helper: _Helper | None = None
_hibernated = False

#: Held by whoever calls NVML in this process: such a call must not be in flight when the process is checkpointed.
device_lock = threading.Lock()
_away = False


class _Helper:
    """The helper process and the socket to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [_helper_path(), str(os.getpid())], stdin=theirs.fileno(), stdout=theirs.fileno()
            )
        except OSError as error:
            ours.close()
            raise MemsaverError(f"the hibernation helper cannot be started: {error}") from error
        finally:
            theirs.close()
        self._socket = ours
        self._answers = ours.makefile("r")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: str) -> list[str]:
        """The words of the answer. Raises MemsaverError where the helper is gone."""
        try:
            self._socket.sendall(f"{request}\n".encode())
            answer = self._answers.readline()
        except OSError as error:
            answer = ""
            self._process.kill()
            reason: OSError | None = error
        else:
            reason = None
        if not answer:
            self._process.wait()
            raise MemsaverError(
                f"the hibernation helper (process {self.pid}) ended during {request.split()[0]!r}; repeat the call"
            ) from reason
        return answer.split()


def blockers() -> list[str]:
    """Why this process cannot be hibernated now, each with what to do; empty where nothing seems to stand in the way.

    Looks at what can be seen from here: the driver, MPS, NCCL, memory shared with other processes, peer access. It does
    not see managed memory, or what libraries do behind torch's back; the driver refuses what it cannot checkpoint.
    """
    if not _process.enabled():
        return ["memsaver is disabled (MEMSAVER_ENABLED=0)"]
    if _process.driver_name() != "cuda":
        return ["the host driver has no device context to hibernate"]
    found = []
    if not _native.can_checkpoint():
        found.append(f"the NVIDIA driver cannot checkpoint processes; version {OLDEST_DRIVER} or later is needed")
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ or Path("/tmp/nvidia-mps/control").exists():
        found.append("the process runs under CUDA MPS, which cannot be checkpointed; run it without MPS")
    # get_backend() says "undefined" where torch chose a backend for each kind of device by itself.
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and "nccl" in str(torch.distributed.get_backend_config()):
        found.append("NCCL communicators are alive; destroy the process group first")
    reductions = sys.modules.get("torch.multiprocessing.reductions")
    if reductions is not None and len(reductions.shared_cache):
        found.append("tensors are shared with other processes by CUDA IPC; drop them first")
    if _process.settings().peer_access and len(_process.saver().devices()) > 1:
        found.append("devices reach each other's memory (MEMSAVER_PEER_ACCESS); turn that off")
    return found


def is_hibernated() -> bool:
    """Whether the context is checkpointed, so that CUDA calls of this process wait."""
    return _hibernated


def helper_pid() -> int | None:
    """Process id of the helper, or None where none runs."""
    helper = _helper
    return helper.pid if helper is not None and helper.alive else None


def is_away() -> bool:
    """Whether CUDA and NVML calls of this process would wait. Ask with ``device_lock`` held."""
    return _away


def read_memory(uuid: str) -> tuple[int, int, int] | None:
    """Total, used and this process's bytes of a device, told by the helper; None while that is busy or not there."""
    if not _lock.acquire(blocking=False):
        return None
    try:
        if _helper is None or not _helper.alive:
            return None
        answer = _helper.ask(f"memory {uuid}")
    except MemsaverError:
        return None
    finally:
        _lock.release()
    return (int(answer[1]), int(answer[2]), int(answer[3])) if answer[0] == "ok" else None


def hibernate() -> dict[str, float]:
    """Checkpoint this process's CUDA state; its memory on every device is given back. Does nothing while hibernated.

    Release tags first: what is still resident is copied by the driver, at a fraction of the link's speed. Nothing may
    call CUDA from now on until ``wake``; such a call would wait.

    Returns:
        Seconds of the steps.

    Raises:
        UnsupportedError: something stands in the way; nothing was changed.
        DriverError: the driver refused; the process runs on as before.
        MemsaverError: the helper ended; the process runs on as before, or is hibernated: ``is_hibernated`` tells.
    """
    reasons = [] if _hibernated else blockers()
    if reasons:
        raise UnsupportedError("this process cannot be hibernated: " + "; ".join(reasons))
    with _lock:
        if _hibernated:
            return {}
        with device_lock:
            _set(away=True, hibernated=False)
        try:
            answer = _ask(f"hibernate {LOCK_TIMEOUT_MS}")
        except MemsaverError:
            _find_out()
            raise
        _set(away=True, hibernated=True)
        _wake_at_exit()
        return {"lock_seconds": float(answer[1]), "checkpoint_seconds": float(answer[2])}


def wake() -> dict[str, float]:
    """Bring the CUDA state back, at the same addresses. Does nothing where the process is not hibernated.

    Returns:
        Seconds of the steps.

    Raises:
        DriverError: the driver refused (the devices lack memory for the context, say); still hibernated, repeat it.
    """
    with _lock:
        if not _hibernated:
            return {}
        try:
            answer = _ask("wake")
        except MemsaverError:
            _find_out()
            raise
        _set(away=False, hibernated=False)
        return {"restore_seconds": float(answer[1]), "unlock_seconds": float(answer[2])}


@lru_cache
def _wake_at_exit() -> None:
    """Have the interpreter's exit wake the process: torch's teardown calls CUDA, and would wait for ever."""

    def wake_or_leave() -> None:
        try:
            wake()
        except MemsaverError as error:
            print(f"memsaver: the process ends hibernated: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    atexit.register(wake_or_leave)


def _set(*, away: bool, hibernated: bool) -> None:
    global _away, _hibernated
    _away, _hibernated = away, hibernated


def _find_out() -> None:
    """Learn from the driver what a failed step has left, and undo half of one: a process is never left locked."""
    try:
        state = _ask("state")[1]
        if state == "locked":
            _ask("wake")
            state = "running"
    except MemsaverError:
        state = "unknown"  # as it was
    if state != "unknown":
        _set(away=state != "running", hibernated=state != "running")


def _ask(request: str) -> list[str]:
    """Ask the helper, starting one if need be: what is checkpointed is the driver's, so any helper will do."""
    global _helper
    if _helper is None or not _helper.alive:
        _helper = _Helper()
    answer = _helper.ask(request)
    if answer[0] == "ok":
        return answer
    _, call, code, state = answer
    consequence = {
        "running": "the process runs on as before",
        "checkpointed": "the process is still hibernated; free device memory and repeat the call",
        "locked": "the process is locked; repeat the call",
        "failed": "the process cannot be restored: restart it",
    }.get(state, "the driver does not tell what state the process is in")
    raise DriverError(f"{call} failed: {code}; {consequence}", call=call, code=code)


def _helper_path() -> str:
    return str(Path(_native.__file__).with_name("memsaver-hibernate"))
