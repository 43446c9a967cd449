"""The saver object that engines hold."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

import memsaver_core as ms
from memsaver_core import _native, process
from memsaver_core.compat.torch_memory_saver import state
from memsaver_core.compat.torch_memory_saver.binary_wrapper import BinaryWrapper
from memsaver_core.compat.torch_memory_saver.hooks import HookMode, HookUtilBase, HookUtilModePreload
from memsaver_core.compat.torch_memory_saver.state import MisuseError
from memsaver_core.resizing import piece_bytes

CpuBackupBackend = Literal["mmap", "pinned"]

_TAG_DEFAULT = "default"

# By torch's id of the pool that the caller gave, and the tag: graphs that are given the same pool share memory.
_graph_pools: weakref.WeakValueDictionary[tuple[Any, str], ms.GraphPool] = weakref.WeakValueDictionary()


class TorchMemorySaver:
    """Pauses and resumes memory by tag. All instances share the one saver of the process."""

    def __init__(self) -> None:
        self._hook_mode: HookMode = "preload"
        self._lock = threading.Lock()
        self._impl: _TorchMemorySaverImpl | None = None

    @contextmanager
    def region(
        self,
        tag: str = _TAG_DEFAULT,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Make what is allocated inside pausable under ``tag``. Regions nest. Raises ConfigurationError if arguments
        exclude each other, or memory cannot be saved in this process.

        Args:
            tag: any name.
            enable_cpu_backup: keep the content in host memory while paused. Without a backup, content is undefined
                after a resume (under the tags ``kv_cache`` and ``workspace``: zeros).
            enable_disk_backup: keep the content on disk instead, in ``TMS_DISK_BACKUP_DIR``.
            cpu_backup_backend: ``pinned`` or ``mmap``; both are pinned memory. Once ``mmap`` was asked for, each resume
                returns after the memory of its backups is unmapped.
        """
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        if enable_cpu_backup and enable_disk_backup:
            raise MisuseError("enable_cpu_backup and enable_disk_backup exclude each other; choose one")
        wrapper = self._ensure_initialized()._binary_wrapper
        tag.encode()  # if it is no string, raises what torch_memory_saver raises
        restore = _native.restore_for(tag, enable_cpu_backup, enable_disk_backup)
        with ms.region(tag, restore=restore, chunk_bytes=piece_bytes(tag)), wrapper.cdll.own_region():
            wrapper.set_config(tag, True, enable_cpu_backup, cpu_backup_backend, enable_disk_backup)
            yield
        if enable_cpu_backup:
            state.this_process.prepare_pause()

    @contextmanager
    def cuda_graph(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        tag: str = _TAG_DEFAULT,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Capture into ``cuda_graph``, as ``torch.cuda.graph`` does, with the graph's own memory under ``tag``. The
        content is always kept, even without ``enable_cpu_backup``, as some is written only at capture. Graphs with the
        same ``pool`` and tag share memory."""
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        wrapper = self._ensure_initialized()._binary_wrapper
        capture: AbstractContextManager[Any]
        options: dict[str, Any] = {"stream": stream, "capture_error_mode": capture_error_mode}
        if process.enabled():
            capture = ms.graph(cuda_graph, tag=tag, restore="host", pool=graph_pool(pool, tag), **options)
        else:
            capture = torch.cuda.graph(cuda_graph, pool=pool, **options)
        with capture, wrapper.cdll.own_region():
            wrapper.set_config(tag, True, enable_cpu_backup, cpu_backup_backend)
            yield

    def disable(self) -> AbstractContextManager[None]:
        """Leave the region, or raise ConfigurationError if the thread is in none: what is allocated inside the block is
        ordinary memory, given back at the end of it."""
        return self._ensure_initialized()._binary_wrapper.cdll.region_left()

    def pause(self, tag: str | None = None) -> None:
        """Give the memory of a tag, or all, back to the driver. A tag that is paused already or unknown is ignored.
        Raises OutOfHostMemoryError if the backups would not fit: nothing was paused; MemsaverError if a driver call
        failed: a repeat and a resume both work."""
        self._ensure_initialized()
        state.this_process.pause(tag)

    def resume(self, tag: str | None = None) -> None:
        """Bring the memory of a tag, or all, back at the same addresses. A resident or unknown tag is ignored. Raises
        OutOfDeviceMemoryError if the device has too little free memory: all is still paused, with its backup;
        MemsaverError if a driver call failed: all is as before."""
        self._ensure_initialized()
        state.this_process.resume(tag)

    @property
    def enabled(self) -> bool:
        return True

    @property
    def hook_mode(self) -> HookMode:
        """Write-only, before the first use: ``preload`` (the default) or ``torch``."""
        raise AttributeError("hook_mode can be set and not read")

    @hook_mode.setter
    def hook_mode(self, hook_mode: HookMode) -> None:
        if hook_mode not in ("preload", "torch"):
            raise MisuseError(f"hook_mode is 'preload' or 'torch', not {hook_mode!r}")
        with self._lock:
            if self._impl is not None and self._impl._hook_mode != hook_mode:
                raise MisuseError("hook_mode cannot change any more; set it before the first use")
            self._hook_mode = hook_mode

    @property
    def memory_margin_bytes(self) -> int:
        """Write-only: an allocation in a region that would leave less free on the device is out of memory."""
        raise NotImplementedError("memory_margin_bytes can be set and not read")

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        self._ensure_initialized()._binary_wrapper.cdll.set_memory_margin_bytes(value)

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether backups stay in host memory after a resume, which makes the next pause faster."""
        return self._ensure_initialized()._binary_wrapper.cdll.tms_get_retain_cpu_backup()

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._ensure_initialized()._binary_wrapper.cdll.tms_set_retain_cpu_backup(value)

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """Return the kept content of a tensor that is paused, or resumed with its backup retained, in host memory; None
        if it is resident without a retained backup, or backed up on disk. Raises ConfigurationError if ``x`` is in no
        region's memory, not contiguous, or paused without a backup. With ``zero_copy`` the backup itself is returned if
        it is contiguous (one that spans 32 MiB blocks may not be): it is valid until the next pause, or resume without
        retention, and must not be written."""
        self._ensure_initialized()
        if not x.is_contiguous():
            layout = f"shape {tuple(x.shape)} and strides {x.stride()}"
            raise MisuseError(f"only of a contiguous tensor, not one of {layout}")
        if x.nbytes == 0 or not process.enabled():
            return None
        saver = process.saver()
        view = saver.backup_of(x.data_ptr(), x.nbytes, 0)
        if view["on_disk"]:
            return None
        if not view["released"]:
            if not (view["in_host_memory"] and view["tag"] in state.this_process.retained_tags):
                return None
        elif not view["in_host_memory"]:
            raise MisuseError(
                f"the tensor is paused under tag {view['tag']!r} without a backup; make it in a region with "
                "enable_cpu_backup=True"
            )
        with _disable_current_modes():
            if zero_copy and view["memory"]:
                content = (ctypes.c_uint8 * x.nbytes).from_address(view["memory"])
                return torch.frombuffer(content, dtype=torch.uint8).view(x.dtype).view(x.shape)
            copy = torch.empty(x.shape, dtype=x.dtype, device="cpu")
            saver.backup_of(x.data_ptr(), x.nbytes, copy.data_ptr())
            return copy

    def set_disk_backup_dir(self, path: str) -> None:
        """Put backups on disk into this folder from now on, for the whole process; creates it if it is missing. Raises
        ConfigurationError if paused memory has its backup in the present folder."""
        self._ensure_initialized()._binary_wrapper.cdll.tms_set_disk_backup_dir(str(path).encode())

    def _ensure_initialized(self) -> _TorchMemorySaverImpl:
        with self._lock:
            if self._impl is None:
                self._impl = _TorchMemorySaverImpl(self._hook_mode)
            return self._impl


class _TorchMemorySaverImpl:
    def __init__(self, hook_mode: HookMode = "preload") -> None:
        self._is_xpu = False
        self._hook_mode = hook_mode
        self._hook_util = HookUtilBase.create(hook_mode)
        self._binary_wrapper = BinaryWrapper(HookUtilModePreload.get_path_binary())
        self._mem_pools = MemPools()
        state.this_process.initialize()


class MemPools:
    """The pools of regions, for projects that drop them: torch keeps what is freed in a pool until then. After that
    ``torch.cuda.empty_cache()`` gives back the free memory; its tensors live on, under their tag. None on the host."""

    def pop(self, key: tuple[Any, ...], *default: Any) -> Any:
        """Drop the pools of ``(tag, enable_cpu_backup[, enable_disk_backup, ...])``. If there are none, return
        ``default``, or raise KeyError without one."""
        restore = _native.restore_for(key[0], bool(key[1]), len(key) > 2 and key[2] is True)
        if process.backend().forget_pools(key[0], restore):
            return None
        if not default:
            raise KeyError(key)
        return default[0]

    def clear(self) -> None:
        process.backend().forget_pools()


def _check_backend(enable_cpu_backup: bool, backend: str | None) -> None:
    if backend is not None and not enable_cpu_backup:
        raise MisuseError("cpu_backup_backend requires enable_cpu_backup=True")


def graph_pool(pool: Any, tag: str) -> ms.GraphPool:
    """Return the pool of all graphs that are given the same ``pool`` (torch's id) and tag; a new one if it is None."""
    if pool is None:
        return ms.GraphPool(tag, restore="host")
    key = (tuple(pool), tag)
    if (found := _graph_pools.get(key)) is None:
        found = _graph_pools[key] = ms.GraphPool(tag, restore="host")
    return found
