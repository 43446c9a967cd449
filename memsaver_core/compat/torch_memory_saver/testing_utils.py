"""Helpers that tests written for torch_memory_saver import."""

from __future__ import annotations

import torch

import memsaver_core as ms


def get_device() -> str:
    return ms.torch_device().type


def empty_cache() -> None:
    torch.cuda.empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Return the bytes in use on a device by all processes; prints them with ``message``."""
    used = next(device.used_bytes for device in ms.read_devices() if device.index == gpu_id)
    print(f"GPU {gpu_id} memory: {used / 1024**3:.2f} GB ({message})")
    return used
