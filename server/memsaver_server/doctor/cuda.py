"""Checks of the CUDA driver, its devices and the variables that change how torch, NCCL and CUDA use them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memsaver_server.doctor.finding import Finding, Level, Machine

_CU_VMM_SUPPORTED = 102
_CU_RDMA_WITH_VMM_SUPPORTED = 110
_CU_MODULE_LAZY_LOADING = 2

#: Both names are read by torch; the second since torch 2.9.
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def check_cuda_driver(machine: Machine) -> Iterator[Finding]:
    if machine.cuda is None:
        yield Finding("CUDA driver", Level.NOTE, "none (libcuda.so.1 not found): the host driver is used")
        return
    if machine.cuda_error:
        level = Level.BLOCKED if Path("/dev/nvidiactl").exists() else Level.NOTE
        remedy = "check nvidia-smi; in a container, that it was started with the GPU"
        yield Finding("CUDA driver", level, machine.cuda_error, remedy)
        return
    number = ctypes.c_int()
    machine.cuda.cuDriverGetVersion(ctypes.byref(number))
    found = f"{_driver_release()}CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    if number.value >= 11040:
        yield Finding("CUDA driver", Level.OK, found)
    else:
        yield Finding("CUDA driver", Level.BLOCKED, found, "update the driver: memsaver needs CUDA 11.4 or newer")


def _driver_release() -> str:
    try:
        with _nvml() as nvml:
            return f"{nvml.nvmlSystemGetDriverVersion()}, "
    except Exception:
        return ""


@contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def check_devices(machine: Machine) -> Iterator[Finding]:
    if machine.cuda is None or not machine.has_gpu:
        return
    for index in range(machine.device_count):
        device = ctypes.c_int()
        machine.cuda.cuDeviceGet(ctypes.byref(device), index)
        name = ctypes.create_string_buffer(128)
        machine.cuda.cuDeviceGetName(name, len(name), device)
        total = ctypes.c_size_t()
        machine.cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
        vmm = _attribute(machine.cuda, device, _CU_VMM_SUPPORTED)
        rdma = _attribute(machine.cuda, device, _CU_RDMA_WITH_VMM_SUPPORTED)
        found = f"{name.value.decode()}, {total.value / 2**30:.1f} GiB, virtual memory management "
        found += f"{'yes' if vmm else 'no'}, GPUDirect RDMA on it {'yes' if rdma else 'no'}"
        remedy = "" if vmm else "this device (or its vGPU profile) cannot unmap memory: hide it by CUDA_VISIBLE_DEVICES"
        yield Finding(f"device {index}", Level.OK if vmm else Level.BLOCKED, found, remedy)


def _attribute(cuda: ctypes.CDLL, device: ctypes.c_int, number: int) -> bool:
    value = ctypes.c_int()
    return cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0 and value.value == 1


def check_nvml(machine: Machine) -> Iterator[Finding]:
    if not machine.has_gpu:
        return
    try:
        with _nvml() as nvml:
            used = int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).used)
    except Exception as error:
        remedy = "reports then use the CUDA driver's count; in a container, request the 'utility' driver capability"
        yield Finding("NVML", Level.WARNING, f"does not work: {error}", remedy)
    else:
        yield Finding("NVML", Level.OK, f"device 0 has {used / 2**20:,.0f} MiB in use")


def check_expandable_segments(machine: Machine) -> Iterator[Finding]:
    on = [name for name in _ALLOCATOR_VARIABLES if _turns_expandable_segments_on(os.environ.get(name, ""))]
    if on:
        by = " and ".join(on)
        found = f"on by {by}: torch 2.11 honours regions, but older versions place tensors outside them"
        yield Finding("expandable segments", Level.WARNING, found, f"remove expandable_segments:True from {by}")
    else:
        yield Finding("expandable segments", Level.OK, f"off ({' and '.join(_ALLOCATOR_VARIABLES)})")


def _turns_expandable_segments_on(value: str) -> bool:
    settings = (part.partition(":") for part in value.split(","))
    return any(
        key.strip() == "expandable_segments" and setting.strip().lower() == "true" for key, _, setting in settings
    )


def check_nccl(machine: Machine) -> Iterator[Finding]:
    subject = "NCCL graph registration"
    value = os.environ.get("NCCL_GRAPH_REGISTER")
    if value == "0":
        yield Finding(subject, Level.OK, "off (NCCL_GRAPH_REGISTER=0)")
    elif machine.device_count > 1:
        found = f"NCCL_GRAPH_REGISTER is {value or 'unset, which means on'}: graphs that use NCCL hang on replay after "
        found += "their memory was remapped"
        yield Finding(subject, Level.WARNING, found, "set NCCL_GRAPH_REGISTER=0 before the engine starts")
    else:
        yield Finding(subject, Level.NOTE, "not set; relevant only if an engine captures NCCL in CUDA graphs")


def check_module_loading(machine: Machine) -> Iterator[Finding]:
    """Modules can be unloaded only by the library that loaded them, so the best is not to load unused ones."""
    mode = ctypes.c_int()
    if not machine.has_gpu or machine.cuda is None or not hasattr(machine.cuda, "cuModuleGetLoadingMode"):
        return
    if machine.cuda.cuModuleGetLoadingMode(ctypes.byref(mode)) != 0:
        return
    if mode.value == _CU_MODULE_LAZY_LOADING:
        yield Finding("CUDA modules", Level.OK, "loaded at first use")
    else:
        found = "all modules of a library are loaded at its first use: some hundred MiB that a release does not free"
        remedy = "unset CUDA_MODULE_LOADING, or set it to LAZY; a release that hibernates frees them as well"
        yield Finding("CUDA modules", Level.WARNING, found, remedy)
