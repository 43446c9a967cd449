"""The one object that checkpoints this process's CUDA context and brings it back."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from enum import Enum
from functools import lru_cache

from memsaver_core import process
from memsaver_core.errors import ContextLostError, DriverError, MemsaverError, OutOfDeviceMemoryError, UnsupportedError
from memsaver_core.hibernation import preconditions
from memsaver_core.hibernation.helper import Helper, StepFailedError

#: The step that takes device memory again, as the host driver and the CUDA driver call it.
_WAKE_STEPS = ("restore", "cuCheckpointProcessRestore")

#: How long CUDA calls in flight may take to end before a hibernation is given up, milliseconds.
LOCK_TIMEOUT_MS = 10_000


_State = Enum("_State", "RUNNING CHECKPOINTING HIBERNATED LOST")


class Hibernation:
    """The hibernation of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # one request to the helper at a time
        self._helper: Helper | None = None
        self._state = _State.RUNNING
        self._failure = ""
        self._devices: dict[str, int] = {}  # index of each device in use, by uuid
        self._held: dict[str, int] = {}  # bytes that the checkpoint gave back and a wake needs again, by uuid
        self._wake_failed = False
        #: Held during NVML calls of this process: none may be in flight when the process is checkpointed.
        self.device_lock = threading.Lock()

    def obstacles(self) -> list[str]:
        """Return why this process cannot be hibernated now, each with what to do; empty if nothing is known to.

        Checks the helper, the driver, MPS, torch's NCCL groups, tensors shared by CUDA IPC, peer access and managed
        memory. What libraries do without torch is not seen.
        """
        if self._failure:
            return [self._failure]
        return [] if self.is_away() else preconditions.obstacles(preconditions.observe())

    def is_hibernated(self) -> bool:
        """Return whether the context is checkpointed, so that CUDA calls of this process block."""
        return self._state is _State.HIBERNATED

    def is_away(self) -> bool:
        """Return whether CUDA and NVML calls of this process would block. Ask with ``device_lock`` held."""
        return self._state is not _State.RUNNING

    def failure(self) -> str:
        """Return why this process can never be woken again, or an empty string."""
        return self._failure

    def raise_if_lost(self) -> None:
        """Raise ContextLostError if this process can never be woken again."""
        if self._failure:
            raise ContextLostError(self._failure)

    def helper_pid(self) -> int | None:
        """Return the process id of the helper, or None if none runs."""
        helper = self._helper
        return helper.pid if helper is not None and helper.alive else None

    def read_memory(self, uuid: str) -> tuple[int, int, int] | None:
        """Have the helper read a device: bytes in total, in use, and in use by this process.

        Returns:
            None if there is no helper, or it is busy.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._helper is None or not self._helper.alive:
                return None
            total, used, own = map(int, self._helper.ask("memory", uuid))
        except (MemsaverError, StepFailedError):
            return None
        finally:
            self._lock.release()
        return total, used, own

    def prepare(self) -> None:
        """Start what ``hibernate`` needs, so that it cannot fail for that once memory is released.

        Raises:
            MemsaverError: the helper cannot be started.
        """
        with self._lock:
            self._start_helper()

    def hibernate(self) -> dict[str, float]:
        """Checkpoint this process's CUDA state; its memory on every device is given back.

        Does nothing while hibernated. Release tags first: the driver copies what is still resident, at a fraction of
        the link's speed. Every CUDA call of this process then blocks until ``wake``.

        Returns:
            Seconds of the steps.

        Raises:
            UnsupportedError: a precondition does not hold; nothing was changed.
            DriverError: the driver refused; the message says whether the process runs on as before.
            ContextLostError: the driver lost the process; restart it.
            MemsaverError: the helper ended or did not answer in time; ``is_hibernated`` says which state the process
                is in.
        """
        self.raise_if_lost()
        if found := self.obstacles():
            raise UnsupportedError("this process cannot be hibernated: " + "; ".join(found))
        with self._lock:
            if self.is_hibernated():
                return {}
            self._start_helper()
            used = process.saver().devices() if process.backend().has_context else ()
            self._devices = {process.saver().device_info(index)["uuid"]: index for index in used}
            with self.device_lock:
                self._state = _State.CHECKPOINTING
            try:
                locked, checkpointed, *held = self._ask("hibernate", LOCK_TIMEOUT_MS, *self._devices)
            except (MemsaverError, StepFailedError) as error:
                raise self._undone(error) from None
            self._held = dict(zip(held[::2], map(int, held[1::2]), strict=True))
            self._state = _State.HIBERNATED
            _wake_at_exit(self)
            return {"lock_seconds": float(locked), "checkpoint_seconds": float(checkpointed)}

    def wake(self) -> dict[str, float]:
        """Bring the CUDA state back, at the same addresses. Does nothing if the process is not hibernated.

        Returns:
            Seconds of the steps.

        Raises:
            OutOfDeviceMemoryError: a device has less free than the process held; still hibernated, the call can be
                repeated.
            DriverError: the driver refused; the message says whether the process is still hibernated.
            ContextLostError: the driver cannot bring the process back; restart it.
            MemsaverError: the helper ended or did not answer in time; repeat the call.
        """
        self.raise_if_lost()
        with self._lock:
            if not self.is_hibernated():
                return {}
            try:
                woken, unlocked = self._ask("wake", *(word for item in self._held.items() for word in item))
            except (MemsaverError, StepFailedError) as error:
                raised = self._undone(error)
                if self.is_away():
                    raise raised from None
                return {"unlock_repeats": 1.0}  # only the unlock had failed, and its repeat worked
            self._wake_failed = False
            self._state = _State.RUNNING
            return {"restore_seconds": float(woken), "unlock_seconds": float(unlocked)}

    def _undone(self, error: MemsaverError | StepFailedError) -> MemsaverError:
        """Settle the state after a failed step: undo a half-done one, and return the error to raise."""
        state = self._driver_state()
        step = error if isinstance(error, StepFailedError) else None
        # Once a wake has failed half way, the driver (seen on 580) cannot bring the process back, and does not say so.
        stuck = False
        if step is not None and step.call in _WAKE_STEPS and not step.needed_bytes:
            stuck = self._wake_failed and step.code == "CUDA_ERROR_OPERATING_SYSTEM"
            self._wake_failed = True
        if state == "failed" or stuck:
            self._failure = f"{error}: the driver cannot restore this process; restart it"
            self._state = _State.LOST
            return ContextLostError(self._failure, step.call if step else "", step.code if step else "")
        # In an unknown state the process may be hibernated; a wake finds out.
        self._state = _State.RUNNING if state == "running" else _State.HIBERNATED
        if not isinstance(error, StepFailedError):
            return error
        if error.needed_bytes:
            # The helper names a device by its uuid, one of the host driver by its index.
            index = int(error.device) if error.device.isdecimal() else self._devices.get(error.device, -1)
            return OutOfDeviceMemoryError(
                f"{error} [device {error.device}, {error.needed_bytes} bytes needed, {error.free_bytes} free]; the "
                "process is still hibernated: free device memory and repeat the call",
                error.needed_bytes,
                error.free_bytes,
                index,
            )
        consequence = {
            "running": "the process runs on as before",
            "checkpointed": "the process is still hibernated; repeat the call",
            "locked": "the process is back on the device, but its calls still wait; resume again",
        }.get(state, "the driver does not tell what state the process is in; resume it")
        return DriverError(f"{error}; {consequence}", call=error.call, code=error.code)

    def _driver_state(self) -> str:
        """Return what the driver calls this process's state; unlocks it first if it is locked with its memory back."""
        try:
            [state] = self._ask("state")
            if state == "locked":
                self._ask("wake")
                state = "running"
        except StepFailedError as error:
            return error.state
        except MemsaverError:
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
        except MemsaverError as error:
            print(f"memsaver: the process ends hibernated: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    atexit.register(wake_or_leave)
