"""NVIDIA GPUs: tags by torch memory pools on a pluggable allocator whose C functions are the native core's, device
memory as NVML counts it, one CUDA context for a process."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import pathlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch

from memsaver_core import _native, nvml
from memsaver_core.backends import Backend, Stack
from memsaver_core.contract.status import DeviceMemory, TorchMemory

logger = logging.getLogger("memsaver")

_DEFAULT_POOL_ID = (0, 0)

#: With more blocks than this in torch's allocator, listing them would stop the whole process for too long.
LISTED_BLOCKS = 2048

#: Of a saver and the index of a device; asks the driver once.
_device_info = lru_cache(_native.Saver.device_info)


class Pool:
    """A torch memory pool. Once nothing refers to it, its free memory goes back with torch's caches. torch's object of
    it is never destroyed: to do that while any thread uses a pool or captures a graph would end the process."""

    def __init__(self, device: int, allocator: Any = None) -> None:
        with torch.cuda.device(device):
            self.torch_pool = torch.cuda.MemPool(allocator)
        self.id: tuple[int, int] = self.torch_pool.id
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.torch_pool))
        weakref.finalize(self, torch._C._cuda_releasePool, device, self.id).atexit = False


class _Routing:
    """Routes this thread's allocations on a device to a pool. torch versions differ in which of two nested pools they
    prefer, so only the innermost is in use at a time."""

    def __init__(self, stack: Stack, device: int | None) -> None:
        self._stack = stack
        self._device = torch.cuda.current_device() if device is None else device
        self._pool: Pool | None = None
        self._routed: AbstractContextManager[Any] | None = None

    def __enter__(self) -> _Routing:
        outer = self._stack.entered[-1:]
        for each in outer:
            each._leave()
        try:
            self._route()
        except BaseException:
            for each in outer:
                each._route()
            raise
        self._stack.entered.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._leave()
        self._stack.entered.pop()
        for outer in self._stack.entered[-1:]:
            outer._route()

    def _route(self) -> None:
        if self._pool is not None:
            routed = torch.cuda.use_mem_pool(self._pool.torch_pool, device=self._device)
            routed.__enter__()
            self._routed = routed  # not if entering failed

    def _leave(self) -> None:
        if self._routed is not None:
            self._routed.__exit__(None, None, None)
            self._routed = None


class CudaRegion(_Routing):
    """Routes torch's allocations of this thread on ``device`` to the pool that ``pool_for`` returns for the device."""

    def __init__(self, stack: Stack, device: int | None, pool_for: Callable[[int], Pool]) -> None:
        super().__init__(stack, device)
        self._pool_for = pool_for

    def __enter__(self) -> _Routing:
        self._pool = self._pool_for(self._device)
        if not self._stack.entered and not torch.cuda.is_current_stream_capturing():
            # While a pool is in use, torch does not give its other caches back to make room for it.
            torch.cuda.empty_cache()
        return super().__enter__()

    def _route(self) -> None:
        self._pool = self._pool or self._pool_for(self._device)
        super()._route()

    def forget_pool(self) -> None:
        """Have another pool from now on, if this region is suspended."""
        if self._routed is None:
            self._pool = None


class OutsideRegions(_Routing):
    """Suspends the region of this thread, in favour of a separate pool of torch's, or of none."""

    def __init__(self, stack: Stack, own_pool: bool) -> None:
        super().__init__(stack, None)
        self._pool = Pool(self._device) if own_pool else None

    def __exit__(self, *exception: Any) -> None:
        self._leave()
        if self._pool is not None:
            self._pool = None
            torch.cuda.empty_cache()  # now, because torch gives caches back only while no pool is in use
        super().__exit__(*exception)


class CudaBackend(Backend):
    """NVIDIA GPUs through the CUDA driver. Keeps the pools of this process, by device, tag and policy."""

    name = "cuda"
    has_memory_pools = True
    has_context = True

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._allocators: dict[int, torch.cuda.memory.CUDAPluggableAllocator] = {}
        #: Each pool with the number of its tag's releases before it was made; by device, tag, policy, chunk size, and
        #: whether the tag lacks memory.
        self._pools: dict[tuple[int, str, str, int, bool], tuple[int, Pool]] = {}
        self._region_pool_ids: set[tuple[int, ...]] = set()
        self._releases: Counter[str] = Counter()

    def torch_device(self, index: int = 0) -> torch.device:
        return torch.device("cuda", index)

    def prepare(self) -> None:
        _native.set_nvrtc_path(_nvrtc_path())

    def region(
        self, saver: _native.Saver, device: int | None, tag: str, restore: str, chunk_bytes: int
    ) -> AbstractContextManager[Any]:
        return CudaRegion(self._stack, device, lambda index: self.pool_for(saver, index, tag, restore, chunk_bytes))

    def outside_regions(self, *, own_pool: bool = False) -> AbstractContextManager[Any]:
        return OutsideRegions(self._stack, own_pool)

    def note_release(self, tags: Sequence[str]) -> None:
        with self._lock:
            self._releases.update(tags)

    def new_graph_pool(self, tag: str, restore: str) -> Pool:
        # Not among the pools of regions: all of its segments are content, as replays use blocks that torch holds free.
        with self._lock:
            return self._new_pool(torch.cuda.current_device(), tag, restore)

    def pool_for(self, saver: _native.Saver, device: int, tag: str, restore: str, chunk_bytes: int) -> Pool:
        """Return the pool that a region allocates from now."""
        lacking = any(each["tag"] == tag and each["resident_bytes"] < each["bytes"] for each in saver.status()["tags"])
        key = (device, tag, restore, chunk_bytes, lacking)
        with self._lock:
            # torch may hold free blocks in segments that lack memory now, and would hand them out without a call to
            # memsaver. So allocations made while the tag is released or shrunk come from a pool without such blocks.
            epoch = self._releases[tag] if lacking else 0
            if not lacking:
                # Its free segments go back to the driver with it; those in use stay until their tensors end.
                self._pools.pop((*key[:-1], True), None)
            present = self._pools.get(key)
            if present is None or present[0] != epoch:
                present = self._pools[key] = (epoch, self._new_pool(device, tag, restore, chunk_bytes))
                self._region_pool_ids.add(present[1].id)
            return present[1]

    def forget_pools(self, tag: str | None = None, restore: str | None = None) -> bool:
        with self._lock:
            keys = [key for key in self._pools if tag in (None, key[1]) and restore in (None, key[2])]
            for key in keys:
                del self._pools[key]
        for region in self._stack.entered:
            if isinstance(region, CudaRegion):
                region.forget_pool()
        return bool(keys)

    def dead_ranges(self, saver: _native.Saver) -> list[tuple[int, int]]:
        """Return free blocks of the pools of regions, and of torch's default pool, which a preload library may fill.
        Any other pool may belong to graphs, which use its free blocks at every replay."""
        if not torch.cuda.is_initialized() or torch.cuda.get_allocator_backend() != "native":
            return []
        dead = []
        for segment in torch.cuda.memory_snapshot():
            pool = tuple(segment["segment_pool_id"])
            if not saver.owns(segment["address"]) or (pool != _DEFAULT_POOL_ID and pool not in self._region_pool_ids):
                continue
            dead += [(block["address"], block["size"]) for block in segment["blocks"] if block["state"] == "inactive"]
        return sorted(dead)

    def ends(self, saver: _native.Saver, storages: Iterable[torch.UntypedStorage]) -> dict[int, int]:
        wanted = {storage.data_ptr() for storage in storages}
        blocks = (block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"])
        return {each["address"]: each["address"] + each["size"] for each in blocks if each["address"] in wanted}

    def storage_in(self, buffer: _native.HostBuffer, device: int, offset: int, nbytes: int) -> torch.UntypedStorage:
        return torch.as_tensor(_Part(buffer, offset, nbytes), device=self.torch_device(device)).untyped_storage()

    def make_room(self) -> bool:
        torch.cuda.empty_cache()
        return True

    def read_device(self, saver: _native.Saver, index: int) -> DeviceMemory:
        """Read NVML's figures, or else the CUDA driver's. UUIDs match devices, whatever CUDA_VISIBLE_DEVICES says."""
        info = _device_info(saver, index)
        uuid, name = info["uuid"], info["name"]
        memory = nvml.read_memory(uuid, {os.getpid()})
        if memory is None:
            free, total = saver.memory_info(index)
            memory = (total, total - free, None)
        total, used, own = memory
        return DeviceMemory(index=index, uuid=uuid, name=name, total_bytes=total, used_bytes=used, process_bytes=own)

    def has_host_memory(self, index: int) -> bool:
        return _is_integrated(index)

    def read_torch_memory(self, saver: _native.Saver | None, index: int) -> TorchMemory:
        if not torch.cuda.is_initialized():
            return TorchMemory(0, 0)
        stats = torch.cuda.memory_stats_as_nested_dict(index)
        if not stats:  # torch uses another allocator than its own
            return TorchMemory(0, None)
        names = ("reserved_bytes", "allocated_bytes", "segment", "active")
        mark = tuple(stats[name]["all"]["current"] for name in names)
        blocks = mark[3] + stats["inactive_split"]["all"]["current"]
        return TorchMemory(mark[0], _cached_bytes(saver, index, mark) if blocks <= LISTED_BLOCKS else None)

    def peers(self, saver: _native.Saver | None, peer_access: bool) -> tuple[tuple[int, int], ...]:
        if saver is not None and peer_access and len(saver.devices()) > 1:
            return tuple((one, other) for one in saver.devices() for other in saver.devices() if one != other)
        if not torch.cuda.is_initialized():
            return ()
        has_context: Any = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
        used = [index for index in range(torch.cuda.device_count()) if has_context(index)]
        if len(used) < 2:
            return ()
        # Peer access is between whole devices, so one address of each is enough; the saver's are mapped one by one.
        addresses: dict[int, int] = {}
        for segment in torch.cuda.memory_snapshot():
            if saver is None or not saver.owns(segment["address"]):
                addresses.setdefault(segment["device"], segment["address"])
        return tuple(
            (one, other)
            for other, address in addresses.items()
            for one in used
            if one != other and _native.reaches(one, address)
        )

    def _new_pool(self, device: int, tag: str, restore: str, chunk_bytes: int = 0) -> Pool:
        number = _native.allocator_for(tag, restore, chunk_bytes)
        allocator = self._allocators.get(number)
        if allocator is None:
            if self.has_host_memory(device):
                logger.warning("device %d has no memory but the host's: only file and discard free memory", device)
            functions = (f"memsaver_torch_malloc_{number}", "memsaver_torch_free")
            allocator = torch.cuda.memory.CUDAPluggableAllocator(_native.__file__, *functions)
            self._allocators[number] = allocator  # torch calls into it for as long as any segment lives
        return Pool(device, allocator.allocator())


class _Part:
    """Device memory as torch takes it from other libraries; torch keeps this object for as long as it uses it."""

    def __init__(self, buffer: _native.HostBuffer, offset: int, nbytes: int) -> None:
        self._buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (buffer.address + offset, False), "version": 2
        }  # fmt: skip


@lru_cache
def _is_integrated(index: int) -> bool:
    return bool(torch.cuda.get_device_properties(index).is_integrated)


@lru_cache(maxsize=64)
def _cached_bytes(saver: _native.Saver | None, index: int, _mark: tuple[int, ...]) -> int:
    """Return what torch only caches of a device outside of regions: the same until ``_mark`` changes."""
    return sum(
        segment["total_size"] - segment["active_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and not (saver is not None and saver.owns(segment["address"]))
    )


def _nvrtc_path() -> str:
    """Return the path of the NVRTC library in torch's packages, or an empty string."""
    for package in ("nvidia.cu13", "nvidia.cuda_nvrtc", "nvidia.cu12"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in spec.submodule_search_locations or () if spec else ():
            for library in sorted(pathlib.Path(folder).glob("lib/libnvrtc.so.*")):
                return str(library)
    return ""
