"""NVIDIA GPUs: tags by torch memory pools, device memory as NVML counts it, one CUDA context for a process."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch

from memsaver_core import _native, nvml
from memsaver_core.backends.cuda_pools import PooledBackend
from memsaver_core.backends.cuda_region import CudaRegion, OutsideRegions
from memsaver_core.reports import DeviceMemory, TorchMemory

#: With more blocks than this in torch's allocator, listing them would stop the whole process for too long.
LISTED_BLOCKS = 2048


class CudaBackend(PooledBackend):
    """NVIDIA GPUs through the CUDA driver."""

    name = "cuda"
    has_context = True

    def torch_device(self, index: int = 0) -> torch.device:
        return torch.device("cuda", index)

    def prepare(self) -> None:
        _native.set_nvrtc_path(_nvrtc_path())

    def region(self, saver: _native.Saver, device: int | None, tag: str, restore: str) -> AbstractContextManager[Any]:
        return CudaRegion(self._stack, device, lambda index: self.pool_for(saver, index, tag, restore))

    def outside_regions(self, *, own_pool: bool = False) -> AbstractContextManager[Any]:
        return OutsideRegions(self._stack, own_pool)

    def make_room(self) -> bool:
        torch.cuda.empty_cache()
        return True

    def read_device(self, saver: _native.Saver, index: int) -> DeviceMemory:
        """Read NVML's figures, or the CUDA driver's if NVML is unavailable.

        Devices are matched by UUID, so CUDA_VISIBLE_DEVICES makes no difference.
        """
        info = _device_info(saver, index)
        uuid, name = info["uuid"], info["name"]
        memory = nvml.read_memory(uuid, {os.getpid()})
        if memory is None:
            free, total = saver.memory_info(index)
            memory = (total, total - free, None)
        return DeviceMemory(index, uuid, name, *memory)

    def graph_memory(self, saver: _native.Saver, index: int) -> int:
        return saver.graph_memory(index)

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


@lru_cache
def _device_info(saver: _native.Saver, index: int) -> dict[str, Any]:
    return saver.device_info(index)


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
