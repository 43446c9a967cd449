"""Finds device memory that ranks share and no suspend gives back: vLLM's, SGLang's, and NCCL's on NVLink."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from memsaver_core import nvml
from memsaver_core.communicators.discovery import engine_groups, part
from memsaver_core.shared_buffers import is_imported

#: Members of groups that may share memory: name, attribute that is set if so, what it is, and how to do without it.
_OF_GROUPS = (
    ("symm_mem_comm", "buffer", "torch symmetric memory", "set VLLM_ALLREDUCE_USE_SYMM_MEM=0"),
    ("torch_symm_mem_comm", "buffer", "torch symmetric memory", "leave out --enable-torch-symm-mem"),
    ("pymscclpp_comm", "comm", "MSCCL++", "leave out --enable-mscclpp"),
)

#: Modules whose pool NCCL registers as symmetric memory.
_NCCL_POOLS = (
    ("vllm.distributed.device_communicators.pynccl_allocator", "set VLLM_USE_NCCL_SYMM_MEM=0"),
    ("sglang.srt.distributed.device_communicators.pynccl_allocator", "leave out --enable-symm-mem"),
)

#: vLLM's module whose workspaces FlashInfer shares between ranks, and their names in it.
_FLASHINFER = "vllm.distributed.device_communicators.flashinfer_all_reduce"
_FLASHINFER_WORKSPACES = ("_fi_ar_workspace", "_fi_ar_quant_workspace")

#: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of cuda.h.
_MULTICAST_SUPPORTED = 132


def shared_memory() -> list[str]:
    """Return what shares memory now, each with what to change at the next start. Any of it prevents a hibernation."""
    try:
        return [*_of_groups(), *_of_experts(), *_of_libraries()]
    except Exception as error:  # a version with other names: better no hibernation than one that cannot be undone
        return [f"what ranks share is unknown ({type(error).__name__}: {error}); report this with the engine's version"]


def fabric_obstacle(name: str, device: int, uuid: str) -> str:
    """Return why a process with the communicator ``name`` cannot be hibernated and what to do, or an empty string.
    ``device`` is torch's index of its device, ``uuid`` the driver's identifier. NCCL does not report which memory it
    uses, so this checks its settings and the device for multicast (NVLS) and memory of other hosts (MNNVL)."""
    found = []
    if os.environ.get("NCCL_NVLS_ENABLE") != "0" and _multicast_supported(device):
        found.append(("NVLink multicast memory (NVLS)", "NCCL_NVLS_ENABLE"))
    if os.environ.get("NCCL_MNNVL_ENABLE") != "0" and nvml.in_multi_node_fabric(uuid):
        found.append(("NVLink memory of other hosts (MNNVL)", "NCCL_MNNVL_ENABLE"))
    if not found:
        return ""
    memory = " and ".join(each for each, _ in found)
    settings = " ".join(f"{variable}=0" for _, variable in found)
    return (
        f"NCCL communicator {name} may use {memory}, which stays when it is suspended and cannot be checkpointed; set "
        f"{settings} before the engine starts"
    )


def _of_groups() -> Iterator[str]:
    for engine, group in engine_groups():
        where = f"of {engine}'s group {group.unique_name}"
        custom = part(group, "ca_comm")
        # Only vLLM's, and SGLang's older one, have addresses; SGLang's newer one is on torch symmetric memory.
        buffers = getattr(custom, "buffer_ptrs", ())
        if custom is not None and not custom.disabled and not any(map(is_imported, buffers)):
            yield f"the custom all-reduce {where} shares memory between ranks; start with --disable-custom-all-reduce"
        for name, held, what, advice in _OF_GROUPS:
            # Even one that has disabled itself still holds memory, if it had shared that before.
            if (memory := getattr(part(group, name), held, None)) is not None:
                size = f" ({memory.nbytes} bytes)" if hasattr(memory, "nbytes") else ""
                yield f"{what}{size} {where} is in use; {advice}"


def _of_experts() -> Iterator[str]:
    for engine, group in engine_groups():
        # vLLM's default, which exchanges tokens by NCCL alone, is AgRsAll2AllManager.
        manager = type(part(group, "all2all_manager")).__name__
        if manager not in ("NoneType", "AgRsAll2AllManager"):
            yield (
                f"{manager} of {engine}'s group {group.unique_name} shares memory between ranks; start with "
                "--all2all-backend allgather_reducescatter"
            )
    experts: Any = sys.modules.get("sglang.srt.layers.moe.utils")
    if experts is not None and not (backend := experts.get_moe_a2a_backend()).is_none():
        yield f"SGLang's experts share memory between ranks ({backend.value}); leave out --moe-a2a-backend"


def _of_libraries() -> Iterator[str]:
    for module, advice in _NCCL_POOLS:
        if getattr(sys.modules.get(module), "_mem_pool", None) is not None:
            yield f"NCCL symmetric memory is in use; {advice}"
    flashinfer = sys.modules.get(_FLASHINFER)
    if any(getattr(flashinfer, each, None) is not None for each in _FLASHINFER_WORKSPACES):
        yield (
            "FlashInfer's all-reduce workspaces are shared between ranks; set VLLM_ALLREDUCE_USE_FLASHINFER=0 and the "
            "compilation setting pass_config.fuse_allreduce_rms=false"
        )
    context: Any = sys.modules.get("sglang.srt.runtime_context")
    buffers = context.get_resources().buffers if context is not None else {}
    fused = [each for name, each in buffers.items() if name.startswith("flashinfer_fusion_")]
    if any(getattr(each, "workspace", None) is not None for each in fused):
        yield (
            "FlashInfer's all-reduce workspaces are shared between ranks; start with "
            "--enforce-disable-flashinfer-allreduce-fusion"
        )
    symmetric: Any = sys.modules.get("torch.distributed._symmetric_memory")
    workspaces = getattr(symmetric, "_group_name_to_workspace_tensor", {})
    if held := {name: workspace.nbytes for name, workspace in workspaces.items() if workspace is not None}:
        yield (
            f"torch symmetric memory has workspaces (groups {', '.join(held)}; {sum(held.values())} bytes); switch off "
            "what uses them, in vLLM the compilation setting pass_config.fuse_gemm_comms"
        )


@lru_cache
def _multicast_supported(device: int) -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    handle, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(handle), device) != 0:  # torch and the driver number devices alike
        return False
    return driver.cuDeviceGetAttribute(ctypes.byref(value), _MULTICAST_SUPPORTED, handle) == 0 and value.value != 0
