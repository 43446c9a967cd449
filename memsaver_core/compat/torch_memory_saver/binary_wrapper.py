"""The functions of torch_memory_saver's native library, in Python: they get and set the calling thread's region."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch

from memsaver_core import process
from memsaver_core.compat.torch_memory_saver import state
from memsaver_core.errors import ConfigurationError

#: Room for a tag in the preload library, terminating zero included.
_TAG_BYTES = 512

_FIELDS: dict[str, Any] = {
    "interesting_region": ctypes.c_bool,
    "enable_cpu_backup": ctypes.c_bool,
    "enable_disk_backup": ctypes.c_bool,
    "current_tag": ctypes.c_char_p,
    "cpu_backup_backend": ctypes.c_char_p,
}


class _ThreadState(threading.local):
    """A thread's region if there is no preload library. Each thread starts with the environment's values."""

    def __init__(self) -> None:
        self.interesting_region = state.flag("TMS_INIT_ENABLE")
        self.enable_cpu_backup = state.flag("TMS_INIT_ENABLE_CPU_BACKUP")
        self.enable_disk_backup = state.flag("TMS_INIT_ENABLE_DISK_BACKUP")
        self.current_tag = b"default"
        self.cpu_backup_backend = os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND", "pinned").encode()


class _LibraryState:
    """A thread's region as the preload library holds it: it needs it at every allocation."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        for name, kind in _FIELDS.items():
            getter = library[f"tms_get_{name}"]
            getter.argtypes, getter.restype = [], kind
            setter = library[f"tms_set_{name}"]
            setter.argtypes, setter.restype = [kind], None
            self.__dict__[name] = (getter, setter)

    def __getattribute__(self, name: str) -> Any:
        if name not in _FIELDS:
            return super().__getattribute__(name)
        return self.__dict__[name][0]()

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name][1](value)


class _Suspension(threading.local):
    """What a thread that has left its region by ``tms_set_interesting_region(False)`` ends to be back in it."""

    stack: ExitStack | None = None


_suspension = _Suspension()
_states: dict[str, Any] = {}


@cache
def _cuda_runtime() -> ctypes.CDLL:
    """Return where torch's calls of CUDA's runtime go; without CUDA, where this process's global functions are."""
    everything = ctypes.CDLL(None)
    if torch.version.cuda is None or hasattr(everything, "cudaGetDeviceCount"):
        return everything
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")


class NativeFunctions:
    """The functions that users call on ``_impl._binary_wrapper.cdll``. Text is bytes, as with ctypes.

    Pause, resume, the margin, retention and the folder are of the whole process, the rest is of the calling thread. A
    tag or kind of backup that is set applies to raw allocations; those of torch take theirs from their region. Errors
    are ``MemsaverError``.
    """

    def __init__(self, path: str) -> None:
        self._state = _states.setdefault(path, _LibraryState(path) if path else _ThreadState())

    def __getattr__(self, name: str) -> Any:
        """Resolve functions of CUDA's runtime, as a library that is linked with it does."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_cuda_runtime(), name)

    def tms_get_interesting_region(self) -> bool:
        return bool(self._state.interesting_region)

    def tms_set_interesting_region(self, value: bool) -> None:
        """Leave the region if False, keeping its tag; enter it again if True."""
        if not value and self._state.interesting_region and _suspension.stack is None:
            _suspension.stack = ExitStack()
            _suspension.stack.enter_context(process.backend().outside_regions())
        elif value and _suspension.stack is not None:
            stack, _suspension.stack = _suspension.stack, None
            stack.close()
        self._state.interesting_region = bool(value)

    @contextmanager
    def own_region(self) -> Iterator[None]:
        """Restore the thread's state after the block."""
        before = {name: getattr(self._state, name) for name in _FIELDS}
        left_before, _suspension.stack = _suspension.stack, None
        try:
            yield
        finally:
            self.tms_set_interesting_region(True)  # end a suspension that began inside
            _suspension.stack = left_before
            for name, value in before.items():
                setattr(self._state, name, value)

    @contextmanager
    def region_left(self) -> Iterator[None]:
        """Suspend the thread's region; torch's memory comes from a pool that ends with the block."""
        self._state.interesting_region = False
        try:
            with process.backend().outside_regions(own_pool=True):
                yield
        finally:
            self._state.interesting_region = True

    def tms_get_current_tag(self) -> bytes:
        return bytes(self._state.current_tag)

    def tms_set_current_tag(self, tag: bytes) -> None:
        if not tag or len(tag) >= _TAG_BYTES:
            raise ConfigurationError(f"a tag is a name of 1 to {_TAG_BYTES - 1} bytes, not {tag!r}")
        self._state.current_tag = tag

    def tms_get_enable_cpu_backup(self) -> bool:
        return bool(self._state.enable_cpu_backup)

    def tms_set_enable_cpu_backup(self, value: bool) -> None:
        self._state.enable_cpu_backup = bool(value)

    def tms_get_enable_disk_backup(self) -> bool:
        return bool(self._state.enable_disk_backup)

    def tms_set_enable_disk_backup(self, value: bool) -> None:
        self._state.enable_disk_backup = bool(value)

    def tms_get_cpu_backup_backend(self) -> bytes:
        return bytes(self._state.cpu_backup_backend)

    def tms_set_cpu_backup_backend(self, value: bytes) -> None:
        """Set ``pinned`` or ``mmap``; with the latter each resume of the process unmaps unused memory at once."""
        self._state.cpu_backup_backend = state.check_backend(value.decode()).encode()
        state.this_process.frees_at_once |= value == b"mmap"

    def tms_pause(self, tag: bytes | None) -> int:
        state.this_process.pause(tag.decode() if tag else None)
        return 0

    def tms_resume(self, tag: bytes | None) -> int:
        state.this_process.resume(tag.decode() if tag else None)
        return 0

    def set_memory_margin_bytes(self, value: int) -> None:
        """Set what an allocation in a region must leave free on the device, else it is out of memory."""
        if value < 0:
            raise ConfigurationError(f"a memory margin is a number of bytes, not {value}")
        if process.enabled():
            process.saver().set_memory_margin(value)

    def tms_get_retain_cpu_backup(self) -> bool:
        return state.this_process.retaining

    def tms_set_retain_cpu_backup(self, value: bool) -> None:
        """Set whether a resume leaves backups in host memory, from the next one on."""
        state.this_process.retaining = bool(value)

    def tms_set_disk_backup_dir(self, folder: bytes) -> None:
        state.set_disk_folder(folder.decode())


class BinaryWrapper:
    """Holds the functions as ``cdll``."""

    def __init__(self, path_binary: str = "") -> None:
        self.cdll = NativeFunctions(path_binary)

    def set_config(
        self,
        *,
        tag: str,
        interesting_region: bool,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None = None,
        enable_disk_backup: bool = False,
    ) -> None:
        """Set all of the calling thread's region."""
        self.cdll.tms_set_current_tag(tag.encode())
        self.cdll.tms_set_interesting_region(interesting_region)
        self.cdll.tms_set_enable_cpu_backup(enable_cpu_backup)
        if cpu_backup_backend is not None:
            self.cdll.tms_set_cpu_backup_backend(cpu_backup_backend.encode())
        self.cdll.tms_set_enable_disk_backup(enable_disk_backup)
