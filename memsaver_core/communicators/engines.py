"""What vLLM's and SGLang's groups of ranks hold on the device, by the names that both engines use for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from memsaver_core.shared_buffers import is_imported

#: Modules that keep the groups of ranks by name, and the engines' names.
_ENGINES = {"vllm.distributed.parallel_state": "vllm", "sglang.srt.distributed.parallel_state": "sglang"}

#: vLLM's module whose workspaces FlashInfer shares between ranks, and their names in it.
_FLASHINFER = "vllm.distributed.device_communicators.flashinfer_all_reduce"
_FLASHINFER_WORKSPACES = ("_fi_ar_workspace", "_fi_ar_quant_workspace")


def groups() -> Iterator[tuple[str, Any]]:
    """Return each group of ranks with its engine's name, in the order of their creation."""
    for module, engine in _ENGINES.items():
        for reference in tuple(getattr(sys.modules.get(module), "_groups", {}).values()):
            if (group := reference()) is not None:
                yield engine, group


def part(group: Any, name: str) -> Any:
    """Return what ``group`` communicates with under this name, or None. vLLM's groups keep it one object deeper."""
    found = getattr(group, name, None)
    return found if found is not None else getattr(getattr(group, "device_communicator", None), name, None)


def shared_memory() -> list[str]:
    """Return what ranks share of device memory, NCCL aside, that prevents a hibernation; each with what to change."""
    told = []
    for engine, group in groups():
        where = f"of {engine}'s group {group.unique_name}"
        custom = part(group, "ca_comm")
        if custom is not None and not custom.disabled and not any(map(is_imported, custom.buffer_ptrs)):
            told.append(
                f"the custom all-reduce {where} shares memory by CUDA IPC; start with --disable-custom-all-reduce"
            )
        # Even one that disabled itself holds the buffer, if it came so far as to share it.
        if hasattr(part(group, "symm_mem_comm"), "buffer"):
            told.append(f"torch symmetric memory {where} is in use; set VLLM_ALLREDUCE_USE_SYMM_MEM=0 before the start")
        if hasattr(part(group, "torch_symm_mem_comm"), "buffer"):
            told.append(f"torch symmetric memory {where} is in use; start without --enable-torch-symm-mem")
    flashinfer = sys.modules.get(_FLASHINFER)
    if any(getattr(flashinfer, each, None) is not None for each in _FLASHINFER_WORKSPACES):
        told.append(
            "FlashInfer's all-reduce workspaces are shared between ranks; set VLLM_ALLREDUCE_USE_FLASHINFER=0 and the "
            "compilation setting pass_config.fuse_allreduce_rms=false"
        )
    symmetric: Any = sys.modules.get("torch.distributed._symmetric_memory")
    workspaces = getattr(symmetric, "_group_name_to_workspace_tensor", {})
    if named := [name for name, workspace in workspaces.items() if workspace is not None]:
        told.append(
            f"torch symmetric memory has workspaces (groups {', '.join(named)}); switch off what uses them, in vLLM "
            "the compilation setting pass_config.fuse_gemm_comms"
        )
    return told
