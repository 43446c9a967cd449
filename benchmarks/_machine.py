"""The machine that is measured: its GPUs, what is in use of them, and its host memory."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pynvml
import torch

MIB = 1 << 20


def used_mib(gpu: int = 0) -> float:
    """Device memory in use by all processes on a GPU, MiB, as nvidia-smi shows it."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
    return float(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used) / MIB


def used_mib_of(gpus: int) -> list[float]:
    """As ``used_mib``, of the first ``gpus`` GPUs."""
    return [used_mib(gpu) for gpu in range(gpus)]


def about_gpu() -> dict[str, Any]:
    """Return the names and versions that belong into a result."""
    pynvml.nvmlInit()
    return {
        "gpu": pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "torch": torch.__version__,
    }


def touch_host_memory(nbytes: int = 8 << 30) -> None:
    """Touch host memory once: a virtual machine whose memory grows on demand is slow at the very first touch."""
    block = 512 * MIB
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # All of it is held until the last is touched.
        list(pool.map(lambda _: torch.ones(block, dtype=torch.uint8), range(nbytes // block)))
