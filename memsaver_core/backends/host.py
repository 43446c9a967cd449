"""The host device: real pages of this machine, for tests and development without a GPU."""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn.modules import module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from memsaver_core import _native
from memsaver_core.backends import Backend, Stack
from memsaver_core.contract.status import DeviceMemory
from memsaver_core.storages import is_plain, objects_of, rebase

# Operators whose result has undefined content: nothing to copy.
_UNDEFINED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class HostRegion(TorchDispatchMode):
    """Moves what is allocated inside to the arena of these arguments. torch's dispatcher calls this mode for each
    operator in the thread that entered it. Parameters and buffers that reach a module without it, from a file or other
    threads, are noted by torch's registration hooks, and move when the region ends."""

    def __init__(
        self, saver: _native.Saver, stack: Stack, device: int, tag: str, restore: str, chunk_bytes: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saver = saver
        self._stack = stack
        self._arena = (device, tag, restore)
        self._chunk_bytes = chunk_bytes
        self._filled: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules that got a tensor inside
        self._hooks: list[Any] = []

    def __enter__(self) -> HostRegion:
        self._hooks = [
            module.register_module_parameter_registration_hook(self._note),
            module.register_module_buffer_registration_hook(self._note),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        self._stack.entered.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.entered.pop()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        if exception[0] is None:
            self._sweep()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._stack.entered[-1] is not self:  # only the innermost region moves
            return func(*args, **kwargs)
        # torch.tensor() fills a tensor without the dispatcher, and passes it to lift_fresh.
        lifted = func is torch.ops.aten.lift_fresh.default
        known = {
            tensor.untyped_storage()._cdata
            for tensor in (() if lifted else tree_leaves((args, kwargs)))
            if is_plain(tensor) and tensor.untyped_storage().nbytes() > 0
        }
        result = func(*args, **kwargs)
        fresh = [
            tensor
            for tensor in tree_leaves(result)
            if is_plain(tensor) and tensor.untyped_storage()._cdata not in known and self._is_foreign(tensor)
        ]
        if fresh:
            self._move(fresh, copy=func not in _UNDEFINED)
        return result

    def _is_foreign(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return storage.device.type == "cpu" and storage.nbytes() > 0 and not self._saver.owns(storage.data_ptr())

    def _move(self, tensors: list[torch.Tensor], *, copy: bool) -> None:
        storages: dict[int, torch.UntypedStorage] = {}
        with _disable_current_modes():
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage._cdata in storages:
                    continue
                buffer = _native.HostBuffer(self._saver, *self._arena, storage.nbytes(), self._chunk_bytes)
                moved = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
                if copy:
                    moved.copy_(storage, non_blocking=False)
                storages[storage._cdata] = moved
        rebase(tensors, storages)

    def _note(self, module: torch.nn.Module, name: str, tensor: Any) -> None:
        self._filled.add(module)

    def _sweep(self) -> None:
        tensors = {
            id(tensor): tensor
            for module in self._filled
            for tensor in _own_tensors(module)
            if is_plain(tensor) and self._is_foreign(tensor)
        }
        if not tensors:
            return
        outside = {
            tensor.untyped_storage()._cdata
            for module in objects_of(torch.nn.Module)
            if hasattr(module, "_buffers") and module not in self._filled
            for tensor in _own_tensors(module)
            if is_plain(tensor)
        }
        fresh = [tensor for tensor in tensors.values() if tensor.untyped_storage()._cdata not in outside]
        self._move(fresh, copy=True)


class HostBackend(Backend):
    """Host memory, in arenas as on a GPU."""

    name = "host"

    def region(
        self, saver: _native.Saver, device: int | None, tag: str, restore: str, chunk_bytes: int
    ) -> AbstractContextManager[Any]:
        return HostRegion(saver, self._stack, device or 0, tag, restore, chunk_bytes)

    def ends(self, saver: _native.Saver, storages: Iterable[torch.UntypedStorage]) -> dict[int, int]:
        unit = saver.device_info(0)["granularity"]  # an allocation has one storage, and whole units
        return {begin: end + -end % unit for begin, end in super().ends(saver, storages).items()}

    def storage_in(self, buffer: _native.HostBuffer, device: int, offset: int, nbytes: int) -> torch.UntypedStorage:
        return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()

    @contextmanager
    def outside_regions(self, *, own_pool: bool = False) -> Iterator[None]:
        self._stack.entered.append(None)  # a region takes only what is made while it is the innermost
        try:
            yield
        finally:
            self._stack.entered.pop()

    def empty_cache(self) -> None:
        super().empty_cache()
        ctypes.CDLL(None).malloc_trim(0)  # the C library's cache is host memory, too

    def read_device(self, saver: _native.Saver, index: int) -> DeviceMemory:
        """Read the host device's count over all processes that share it. ``process_bytes`` is this process's resident
        memory, or None if it may open no more files: a resume must work without."""
        free, total = saver.memory_info(index)
        now = {"total_bytes": total, "used_bytes": total - free, "process_bytes": _resident_bytes()}
        return DeviceMemory(index=index, **{**saver.device_info(index), **now})


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return None


def _own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for table in (module._parameters, module._buffers):
        yield from (tensor for tensor in table.values() if tensor is not None)
