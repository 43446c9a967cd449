"""The functions of torch_memory_saver's native library, in Python. They get and set the calling thread's region."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch

from memsaver_core import process
from memsaver_core.compat.torch_memory_saver import state
from memsaver_core.contract.errors import ConfigurationError

#: Room for a tag in the preload library, terminating zero included.
_TAG_BYTES = 512

_FIELDS: dict[str, Any] = {
    "interesting_region": ctypes.c_bool,
    "enable_cpu_backup": ctypes.c_bool,
    "enable_disk_backup": ctypes.c_bool,
    "current_tag": ctypes.c_char_p,
    "cpu_backup_backend": ctypes.c_char_p,
}


@cache
def _library(path: str) -> ctypes.CDLL:
    """Return the preload library, preloaded or not. It keeps each thread's region, which begins with the environment's
    values."""
    library = ctypes.CDLL(path)
    for field, kind in _FIELDS.items():
        getter, setter = getattr(library, f"tms_get_{field}"), getattr(library, f"tms_set_{field}")
        getter.restype, setter.argtypes, setter.restype = kind, [kind], None
    return library


#: ``stack`` brings a thread back into its region, which it has left by ``tms_set_interesting_region(False)``.
_suspension = threading.local()


@cache
def _cuda_runtime() -> ctypes.CDLL:
    """Return the library by which torch calls CUDA's runtime; without CUDA, this process's global functions."""
    everything = ctypes.CDLL(None)
    if torch.version.cuda is None or hasattr(everything, "cudaGetDeviceCount"):
        return everything
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")


class NativeFunctions:
    """The functions that users call on ``_impl._binary_wrapper.cdll``. Text is bytes, as with ctypes. Pause, resume,
    the margin, retention and the folder apply to the whole process, the rest to the calling thread. A tag or kind of
    backup that is set applies to raw allocations; torch's take theirs from their region."""

    def __init__(self, path: str) -> None:
        self._library = _library(path)

    def __getattr__(self, name: str) -> Any:
        """Return a getter or setter of a field; or a function of CUDA's runtime, which the original library exports."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._library if name.startswith("tms_") else _cuda_runtime(), name)

    def tms_set_interesting_region(self, value: bool) -> None:
        """Leave the region if False, keeping its tag; enter it again if True."""
        suspension = getattr(_suspension, "stack", None)
        if not value and self._library.tms_get_interesting_region() and suspension is None:
            _suspension.stack = ExitStack()
            _suspension.stack.enter_context(process.backend().outside_regions())
        elif value and suspension is not None:
            _suspension.stack = None
            suspension.close()
        self._library.tms_set_interesting_region(value)

    @contextmanager
    def own_region(self) -> Iterator[None]:
        """Restore the thread's state after the block."""
        before = {field: getattr(self._library, f"tms_get_{field}")() for field in _FIELDS}
        left_before, _suspension.stack = getattr(_suspension, "stack", None), None
        try:
            yield
        finally:
            self.tms_set_interesting_region(True)  # end a suspension that began inside
            _suspension.stack = left_before
            for field, value in before.items():
                getattr(self._library, f"tms_set_{field}")(value)

    @contextmanager
    def region_left(self) -> Iterator[None]:
        """Leave the thread's region; torch's memory comes from a pool that ends with the block."""
        if not self._library.tms_get_interesting_region():
            raise state.MisuseError(
                "disable() is for a thread in a region, or with TMS_INIT_ENABLE=1; this one is in none"
            )
        self._library.tms_set_interesting_region(False)
        try:
            with process.backend().outside_regions(own_pool=True):
                yield
        finally:
            self._library.tms_set_interesting_region(True)

    def tms_set_current_tag(self, tag: bytes) -> None:
        if not tag or len(tag) >= _TAG_BYTES:
            raise ConfigurationError(f"a tag is a name of 1 to {_TAG_BYTES - 1} bytes, not {tag!r}")
        self._library.tms_set_current_tag(tag)

    def tms_set_cpu_backup_backend(self, value: bytes) -> None:
        """Set ``pinned`` or ``mmap``. With the latter each resume of the process unmaps unused memory at once."""
        self._library.tms_set_cpu_backup_backend(state.check_backend(value.decode()).encode())
        state.this_process.frees_at_once |= value == b"mmap"

    def tms_pause(self, tag: bytes | None) -> int:
        state.this_process.pause(tag.decode() if tag else None)
        return 0

    def tms_resume(self, tag: bytes | None) -> int:
        state.this_process.resume(tag.decode() if tag else None)
        return 0

    def set_memory_margin_bytes(self, value: int) -> None:
        """Set how many bytes of the device an allocation in a region must leave free; else it is out of memory."""
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

    def __init__(self, path_binary: str) -> None:
        self.cdll = NativeFunctions(path_binary)

    def set_config(
        self,
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
