"""Hibernation: give back what remains of the process on the device, its CUDA context included.

The driver checkpoints a process on behalf of another one only, so the calls come from a small helper process, started
at the first use. While hibernated, every CUDA call of this process waits; ``wake`` brings the context back as it was:
addresses, streams, modules and captured graphs. On the host driver, which has no context, what the process still holds
of the device stops counting, and what it asks for waits.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from functools import lru_cache

from memsaver_core import process
from memsaver_core.errors import (
    ContextLostError,
    DriverError,
    MemsaverError,
    OutOfDeviceMemoryError,
    UnsupportedError,
)
from memsaver_core.hibernation.helper import Helper, StepFailedError
from memsaver_core.hibernation.preconditions import observe, reasons

#: What the host driver, an injected fault and the CUDA driver call the step that takes the memory back.
_RESTORES = ("restore", "cuCheckpointProcessRestore")

#: How long CUDA calls in flight may take to end before a hibernation is given up, milliseconds.
LOCK_TIMEOUT_MS = 10_000

_lock = threading.Lock()  # one request to the helper at a time
_helper: Helper | None = None
_hibernated = False
_failure = ""
_devices: dict[str, int] = {}  # numbers of the devices in use, by uuid
_held: dict[str, int] = {}  # what the checkpoint gave back, by uuid: a restore needs it again
_restore_failed = False

#: Held by whoever calls NVML in this process: such a call must not be in flight when the process is checkpointed.
device_lock = threading.Lock()
_away = False


def blockers() -> list[str]:
    """Why this process cannot be hibernated now, each with what to do; empty where nothing seems to stand in the way.

    Looks at what can be seen from here: the helper, the driver, MPS, torch's NCCL groups, tensors shared by CUDA IPC,
    peer access. It does not see what libraries do behind torch's back.
    """
    if _failure:
        return [_failure]
    return [] if _away else reasons(observe())


def is_hibernated() -> bool:
    """Whether the context is checkpointed, so that CUDA calls of this process wait."""
    return _hibernated


def failure() -> str:
    """Why this process can never be woken again, or an empty string."""
    return _failure


def check() -> None:
    """Raises ContextLostError where this process can never be woken again."""
    if _failure:
        raise ContextLostError(_failure)


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
        total, used, own = map(int, _helper.ask("memory", uuid))
    except (MemsaverError, StepFailedError):
        return None
    finally:
        _lock.release()
    return total, used, own


def hibernate() -> dict[str, float]:
    """Checkpoint this process's CUDA state; its memory on every device is given back. Does nothing while hibernated.

    Release tags first: what is still resident is copied by the driver, at a fraction of the link's speed. Nothing may
    call CUDA from now on until ``wake``; such a call would wait.

    Returns:
        Seconds of the steps.

    Raises:
        UnsupportedError: something stands in the way; nothing was changed.
        DriverError: the driver refused; the message says whether the process runs on as before.
        ContextLostError: the driver lost the process; nothing but a restart helps.
        MemsaverError: the helper ended, or did not answer in time; the process runs on as before, or is hibernated:
            ``is_hibernated`` tells.
    """
    check()
    if found := blockers():
        raise UnsupportedError("this process cannot be hibernated: " + "; ".join(found))
    with _lock:
        if _hibernated:
            return {}
        _note_devices()
        with device_lock:
            _set(away=True, hibernated=False)
        try:
            locked, checkpointed, *held = _ask("hibernate", LOCK_TIMEOUT_MS, *_devices)
        except (MemsaverError, StepFailedError) as error:
            raise _undone(error) from None
        _held.clear()
        _held.update(zip(held[::2], map(int, held[1::2]), strict=True))
        _set(away=True, hibernated=True)
        _wake_at_exit()
        return {"lock_seconds": float(locked), "checkpoint_seconds": float(checkpointed)}


def wake() -> dict[str, float]:
    """Bring the CUDA state back, at the same addresses. Does nothing where the process is not hibernated.

    Returns:
        Seconds of the steps.

    Raises:
        OutOfDeviceMemoryError: a device has less free than the process held; still hibernated, repeat it.
        DriverError: the driver refused; the message says whether the process is still hibernated.
        ContextLostError: the driver cannot restore the process; nothing but a restart helps.
        MemsaverError: the helper ended, or did not answer in time; repeat it.
    """
    global _restore_failed
    check()
    with _lock:
        if not _hibernated:
            return {}
        try:
            restored, unlocked = _ask("wake", *(word for item in _held.items() for word in item))
        except (MemsaverError, StepFailedError) as error:
            raised = _undone(error)
            if _away:
                raise raised from None
            return {"unlock_repeats": 1.0}  # all was back but for the unlock, which worked the second time
        _restore_failed = False
        _set(away=False, hibernated=False)
        return {"restore_seconds": float(restored), "unlock_seconds": float(unlocked)}


@lru_cache
def _wake_at_exit() -> None:
    """Have the interpreter's exit wake the process: torch's teardown calls CUDA, and would wait for ever."""
    if process.driver_name() != "cuda":
        return

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


def _undone(error: MemsaverError | StepFailedError) -> MemsaverError:
    """Learn from the driver what a failed step has left, undo half of one, and return the error to raise."""
    global _failure, _restore_failed
    state = _state_after_undo()
    # The driver (seen on 580) cannot restore a process once a restore of it has failed half way, and does not say so.
    stuck = False
    if isinstance(error, StepFailedError) and error.call in _RESTORES and not error.needed_bytes:
        stuck = _restore_failed and error.code == "CUDA_ERROR_OPERATING_SYSTEM"
        _restore_failed = True
    if state == "failed" or stuck:
        _failure = f"{error}: the driver cannot restore this process; restart it"
        _set(away=True, hibernated=False)
        call, code = (error.call, error.code) if isinstance(error, StepFailedError) else ("", "")
        return ContextLostError(_failure, call, code)
    # Where nobody can tell, it may be hibernated; a wake finds out.
    running = state == "running"
    _set(away=not running, hibernated=not running)
    if not isinstance(error, StepFailedError):
        return error
    if error.needed_bytes:
        return OutOfDeviceMemoryError(
            f"{error} [device {error.device}, {error.needed_bytes} bytes needed, {error.free_bytes} free]; the process "
            "is still hibernated: free device memory and repeat the call",
            error.needed_bytes,
            error.free_bytes,
            _index_of(error.device),
        )
    consequence = {
        "running": "the process runs on as before",
        "checkpointed": "the process is still hibernated; repeat the call",
        "locked": "the process is back on the device, but its calls still wait; resume again",
    }.get(state, "the driver does not tell what state the process is in; resume it")
    return DriverError(f"{error}; {consequence}", call=error.call, code=error.code)


def _state_after_undo() -> str:
    """The process's state in the driver's eyes. One left locked, with its memory in place, is unlocked first."""
    try:
        [state] = _ask("state")
        if state == "locked":
            _ask("wake")
            state = "running"
    except StepFailedError as error:
        return error.state
    except MemsaverError:
        return "unknown"
    return state


def _ask(*request: object) -> list[str]:
    """Ask the helper, starting one if need be: what is checkpointed is the driver's, so any helper will do."""
    global _helper
    if _helper is None or not _helper.alive:
        saver = process.saver()
        _helper = Helper(saver.driver_name(), saver.accounts())
    return _helper.ask(*request)


def _note_devices() -> None:
    saver = process.saver()
    _devices.clear()
    if saver.driver_name() == "cuda":
        _devices.update((saver.device_info(index)["uuid"], index) for index in saver.devices())


def _index_of(device: str) -> int:
    """The number of a device that the helper named: by its uuid, or on the host driver by the number itself."""
    return int(device) if device.isdecimal() else _devices.get(device, -1)
