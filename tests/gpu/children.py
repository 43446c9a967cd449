"""A second GPU, co-tenants, and what other processes hold, for tests on a GPU."""

from __future__ import annotations

import pynvml
import pytest
import torch

from memsaver_core.communicators import nccl
from tests.programs import Child

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def nvlink_connects_two() -> bool:
    """Whether NVLink connects the first two GPUs, as NVML counts them."""
    pynvml.nvmlInit()
    one, other = map(pynvml.nvmlDeviceGetHandleByIndex, (0, 1))
    status = pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return bool(status == pynvml.NVML_P2P_STATUS_OK)


#: torch 2.11 brings NCCL 2.28.9, with which ranks cannot be hibernated.
with_new_nccl = pytest.mark.skipif(
    (library := nccl.loaded()) is not None and library.version < nccl.SUSPENDS, reason="needs NCCL 2.29.7 or later"
)

#: For `tests.e2e.serving.serving`, which serves on the host driver unless told otherwise.
ON_CUDA = {"MEMSAVER_DRIVER": "cuda"}

MIB = 1 << 20

TENANT = """
import sys, torch
device = int(sys.argv[1])
held = []
for line in sys.stdin:
    order, *amount = line.split()
    if order == "leave":
        free, _ = torch.cuda.mem_get_info(device)
        held.append(torch.empty(free - int(amount[0]), dtype=torch.uint8, device=device))
    else:
        held.clear()
        torch.cuda.empty_cache()
    print(torch.cuda.mem_get_info(device)[0], flush=True)
"""


class CoTenant(Child):
    """A process that takes plain device memory, as any CUDA program does, and frees it on demand."""

    def __init__(self, device: int = 0) -> None:
        super().__init__("-c", TENANT, str(device))
        self.let_go()  # creates its CUDA context

    def leave(self, nbytes: int) -> int:
        """Take all free memory but ``nbytes``. Returns the bytes that are free now."""
        return int(self.ask(f"leave {nbytes}"))

    def let_go(self) -> int:
        """Free everything. Returns the bytes that are free now."""
        return int(self.ask("let go"))


def process_mib(pid: int, device: int = 0) -> float:
    """What a device counts for a process, MiB; 0 if it is not listed."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return sum((process.usedGpuMemory or 0) / MIB for process in processes if process.pid == pid)
