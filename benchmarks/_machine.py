"""The machine that is measured: its GPUs, what is in use of them, and its host memory."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pynvml
import torch

MIB = 1 << 20


def visible_gpu(gpu: int = 0) -> str:
    """Number or UUID of a GPU for a process's CUDA_VISIBLE_DEVICES; ``gpu`` counts those that this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[gpu].strip() if visible else str(gpu)


def _nvml_device(gpu: int) -> Any:
    pynvml.nvmlInit()
    name = visible_gpu(gpu)
    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)


def used_mib(gpu: int = 0) -> float:
    """Device memory in use by all processes on a GPU that this process sees, MiB, as nvidia-smi shows it."""
    return float(pynvml.nvmlDeviceGetMemoryInfo(_nvml_device(gpu), version=pynvml.nvmlMemory_v2).used) / MIB


def used_mib_of(gpus: int) -> list[float]:
    """As ``used_mib``, of the first ``gpus`` GPUs."""
    return [used_mib(gpu) for gpu in range(gpus)]


def device_bytes(uuid: str, pid: int) -> int:
    """Memory of a device that a process holds, as the driver counts it now."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return sum(process.usedGpuMemory for process in processes if process.pid == pid)


def about_gpu() -> dict[str, Any]:
    """Return the names and versions that belong into a result."""
    return {
        "gpu": pynvml.nvmlDeviceGetName(_nvml_device(0)),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "torch": torch.__version__,
    }


def touch_host_memory(nbytes: int = 8 << 30) -> None:
    """Touch host memory once: a virtual machine whose memory grows on demand is slow at the very first touch."""
    block = 512 * MIB
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # All of it is held until the last is touched.
        list(pool.map(lambda _: torch.ones(block, dtype=torch.uint8), range(nbytes // block)))
