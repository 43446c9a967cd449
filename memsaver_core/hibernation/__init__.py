"""Hibernation: give back what remains of the process on the device, its CUDA context included.

The driver checkpoints a process only for another one, so a small helper process, started at the first use, makes the
calls. While the process is hibernated each of its CUDA calls blocks; ``wake`` brings the context back with addresses,
streams, modules and captured graphs. On the host driver what the process holds stops counting; its allocations block.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from functools import lru_cache, wraps

from memsaver_core import process
from memsaver_core.contract import errors
from memsaver_core.hibernation import preconditions
from memsaver_core.hibernation.helper import Helper, StepFailedError

#: The step that takes device memory again, as the host driver and the CUDA driver call it.
_RESTORE_STEPS = ("restore", "cuCheckpointProcessRestore")

#: How long CUDA calls in flight may take to end before a hibernation is given up, milliseconds.
LOCK_TIMEOUT_MS = 10_000

#: The request that undoes or repeats a step that failed half way, by the step and the state that the driver reports.
_UNDO = {("lock", "locked"): "unlock", ("checkpoint", "checkpointed"): "restore", ("unlock", "locked"): "unlock"}

#: States of the process, with the helper's words for them. UNKNOWN: the driver did not say; each step asks again.
_State = Enum(
    "_State",
    {"RUNNING": "running", "LOCKED": "locked", "HIBERNATED": "checkpointed", "UNKNOWN": "unknown", "LOST": "failed"},
)

_CONSEQUENCES = {
    _State.RUNNING: "the process runs on as before",
    _State.LOCKED: "the process holds its memory, but its calls still wait; resume again",
    _State.HIBERNATED: "the process is still hibernated; repeat the call",
    _State.UNKNOWN: "the driver does not say what state the process is in; resume it",
}

_Take = Callable[["Hibernation"], dict[str, float]]


def _one_step(take: _Take) -> _Take:
    """Return ``take`` as a method that excludes other steps, and whose errors name the state of the process."""

    @wraps(take)
    def one_step(self: Hibernation) -> dict[str, float]:
        self.raise_if_lost()
        with self._lock:
            try:
                return take(self)
            except errors.MemsaverError as error:
                raise self._described(error) from None

    return one_step


class Hibernation:
    """Checkpoints this process's CUDA context and brings it back; a process has one such object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # one request to the helper at a time
        self._helper: Helper | None = None
        self._state = _State.RUNNING
        #: Why this process can never be woken again; an empty string if it can.
        self.failure = ""
        self._devices: dict[str, int] = {}  # index of each device in use, by uuid
        self._held: dict[str, int] = {}  # bytes that the checkpoint gave back and a wake needs again, by uuid
        self._restore_failed = False
        #: Held during NVML calls of this process: none may be in flight when the process is checkpointed.
        self.device_lock = threading.Lock()

    def obstacles(self, suspending: bool = False) -> list[str]:
        """Return why this process cannot be hibernated now, each with what to do; empty if no reason is known.

        Checks the helper, the driver, MPS, NCCL communicators, what vLLM's and SGLang's ranks share, tensors shared by
        CUDA IPC, memory that memsaver imported, peer access, managed memory, and what ``preconditions.register_check``
        was given. The driver does not list imported memory: what other libraries import is not seen. ``suspending``:
        communicators are suspended and imported memory is dropped first, so neither is an obstacle.
        """
        if self.failure:
            return [self.failure]
        if not process.enabled():
            return ["memsaver is disabled (MEMSAVER_ENABLED=0)"]
        return [] if self.is_away() else preconditions.obstacles(suspending)

    def is_hibernated(self) -> bool:
        """Return whether CUDA calls of this process block until ``wake``: it is locked, and perhaps checkpointed."""
        return self._state not in (_State.RUNNING, _State.LOST)

    def is_away(self) -> bool:
        """Return whether CUDA and NVML calls of this process would block. Ask with ``device_lock`` held."""
        return self._state is not _State.RUNNING

    def raise_if_lost(self) -> None:
        """Raise ContextLostError if this process can never be woken again."""
        if self.failure:
            raise errors.ContextLostError(self.failure)

    def read_memory(self, uuid: str, pids: Iterable[int]) -> tuple[int, int, int] | None:
        """Have the helper read a device: bytes in total, in use, and in use by the processes ``pids``; None if there is
        no helper, or it is busy."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._helper is None or not self._helper.alive:
                return None
            total, used, own = map(int, self._helper.ask("memory", uuid, *pids))
        except errors.MemsaverError:
            return None
        finally:
            self._lock.release()
        return total, used, own

    def prepare(self) -> None:
        """Start the helper, so that ``hibernate`` cannot fail for that once memory is released; raise MemsaverError if
        that fails."""
        with self._lock:
            self._start_helper()

    @_one_step
    def hibernate(self) -> dict[str, float]:
        """Checkpoint this process's CUDA state; its memory on every device is given back. Returns seconds, by step.

        Does nothing while hibernated. Release tags first: the driver copies what is still resident, at a fraction of
        the link's speed. Every CUDA call of this process then blocks until ``wake``. For several processes that share
        device memory, take each step on all of them before the next: ``lock``, ``checkpoint``, ``restore``, ``unlock``.

        Raises:
            UnsupportedError: a precondition does not hold; nothing was changed.
            DriverError: the driver refused; the message says whether the process runs on as before.
            ContextLostError: the driver lost the process; restart it.
            MemsaverError: the helper ended or did not answer in time; ``is_hibernated`` says what became of it.
        """
        seconds = self._lock_calls()
        try:
            return seconds | self._checkpoint()
        except errors.MemsaverError:
            if self._state is _State.LOCKED:
                with suppress(errors.MemsaverError):
                    self._unlock()
            raise

    @_one_step
    def wake(self) -> dict[str, float]:
        """Bring the CUDA state back, at the same addresses; return seconds, by step. Does nothing if not hibernated.

        Raises:
            OutOfDeviceMemoryError: a device has less free than the process held; still hibernated, repeat the call.
            DriverError: the driver refused; the message says whether the process is still hibernated.
            ContextLostError: the driver cannot bring the process back; restart it.
            MemsaverError: the helper ended or did not answer in time; repeat the call.
        """
        return self._restore() | self._unlock()

    def _lock_calls(self) -> dict[str, float]:
        """Block device calls of this process, after those in flight: the first step of a hibernation. Does nothing in a
        process past this step. If it fails, device calls go on. Raises as ``hibernate``."""
        if self.is_away():
            return {}
        if found := self.obstacles():
            raise errors.UnsupportedError("this process cannot be hibernated: " + "; ".join(found))
        process.saver().stop_lending()
        used = process.saver().devices() if process.backend().has_context else ()
        self._devices = {process.saver().device_info(index)["uuid"]: index for index in used}
        _wake_at_exit(self)
        with self.device_lock:
            self._state = _State.LOCKED
        [seconds] = self._step("lock", LOCK_TIMEOUT_MS)
        return {"lock_seconds": float(seconds)}

    def _checkpoint(self) -> dict[str, float]:
        """Give back all device memory of this process, which is locked: the second step. Does nothing in a process past
        this step. If it fails, the process has its memory, and is still locked. Raises as ``hibernate``."""
        if self._state is _State.HIBERNATED:
            return {}
        seconds, *held = self._step("checkpoint", *self._devices)
        self._held = dict(zip(held[::2], map(int, held[1::2]), strict=True))
        self._state = _State.HIBERNATED
        return {"checkpoint_seconds": float(seconds)}

    def _restore(self) -> dict[str, float]:
        """Take the memory again: the first step of a wake. Does nothing in a process that holds it. Device calls still
        block. If it fails, the process is still checkpointed. Raises as ``wake``."""
        if self._state in (_State.RUNNING, _State.LOCKED):
            return {}
        [seconds] = self._step("restore", *(word for item in self._held.items() for word in item))
        self._state = _State.LOCKED
        self._restore_failed = False
        return {"restore_seconds": float(seconds)}

    def _unlock(self) -> dict[str, float]:
        """Let device calls go on: the second step of a wake, and what undoes ``lock``. Does nothing in a process that
        runs. If it fails, the process is still locked. Raises as ``wake``."""
        if self._state is _State.RUNNING:
            return {}
        try:
            [seconds] = self._step("unlock")
        except errors.MemsaverError:
            if self.is_away():
                raise
            return {"unlock_repeats": 1.0}  # its repeat in _state_after worked
        self._state = _State.RUNNING
        return {"unlock_seconds": float(seconds)}

    lock, checkpoint, restore, unlock = map(_one_step, (_lock_calls, _checkpoint, _restore, _unlock))

    def _step(self, step: str, *arguments: object) -> list[str]:
        """Have the helper take a step. If that fails, undo what was half done, and note the state that it left."""
        try:
            return self._ask(step, *arguments)
        except errors.MemsaverError as error:
            self._state = self._state_after(step, error)
            raise

    def _state_after(self, step: str, error: errors.MemsaverError) -> _State:
        now = self._driver_state()
        if undo := _UNDO.get((step, now)):
            with suppress(errors.MemsaverError):
                self._ask(undo)
            now = self._driver_state()
        # Driver 580 cannot bring a process back after a restore that failed half way, and does not say so.
        stuck = False
        if isinstance(error, StepFailedError) and error.call in _RESTORE_STEPS and not error.needed_bytes:
            stuck = self._restore_failed and error.code == "CUDA_ERROR_OPERATING_SYSTEM"
            self._restore_failed = True
        return _State.LOST if stuck else _State(now)

    def _described(self, error: errors.MemsaverError) -> errors.MemsaverError:
        """Return the error to raise for a failed step, with the state that the process is in."""
        if self._state is _State.LOST:
            self.failure = f"{error}: the driver cannot restore this process; restart it"
            return errors.ContextLostError(self.failure, getattr(error, "call", ""), getattr(error, "code", ""))
        if not isinstance(error, StepFailedError):
            return error
        if error.needed_bytes:
            # The helper names a device by its uuid, one of the host driver by its index.
            index = int(error.device) if error.device.isdecimal() else self._devices.get(error.device, -1)
            return errors.OutOfDeviceMemoryError(
                f"{error} [device {error.device}, {error.needed_bytes} bytes needed, {error.free_bytes} free]; the "
                "process is still hibernated: free device memory and repeat the call",
                error.needed_bytes,
                error.free_bytes,
                index,
            )
        return errors.DriverError(f"{error}; {_CONSEQUENCES[self._state]}", call=error.call, code=error.code)

    def _driver_state(self) -> str:
        try:
            [state] = self._ask("state")
        except StepFailedError as error:
            return error.state
        except errors.MemsaverError:
            return "unknown"
        return state

    def _ask(self, *request: object) -> list[str]:
        """Ask the helper. The driver holds the checkpoint, so a new helper can carry on for one that ended."""
        return self._start_helper().ask(*request)

    def _start_helper(self) -> Helper:
        if self._helper is None or not self._helper.alive:
            self._helper = Helper(process.driver_name(), process.saver().accounts())
        return self._helper


@lru_cache
def _wake_at_exit(hibernation: Hibernation) -> None:
    """Wake the process when the interpreter exits: torch's teardown calls CUDA, and would block forever."""
    if not process.backend().has_context:
        return

    def wake_or_leave() -> None:
        try:
            hibernation.wake()
        except errors.MemsaverError as error:
            print(f"memsaver: the process ends hibernated: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    atexit.register(wake_or_leave)


this_process = Hibernation()
checkpoint = this_process.checkpoint
device_lock = this_process.device_lock
hibernate = this_process.hibernate
is_away = this_process.is_away
is_hibernated = this_process.is_hibernated
lock = this_process.lock
obstacles = hibernation_obstacles = this_process.obstacles
prepare = this_process.prepare
raise_if_lost = this_process.raise_if_lost
read_memory = this_process.read_memory
restore = this_process.restore
unlock = this_process.unlock
wake = this_process.wake
