"""tokenspeed's attention workspaces, which it creates outside of its regions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

import memsaver_core as ms

TAG = "workspace"
BACKENDS = "tokenspeed.runtime.layers.attention.backends"

#: Where each is, by the module in ``BACKENDS`` of which the first backend creates it for the process.
NAMES = {
    "flashmla": "_global_workspace_buffer",
    "tokenspeed_mla": "_cutedsl_workspace_buffer",
    "trtllm": "_global_workspace_buffer",
    "trtllm_mla": "_trtllm_workspace_buffer",
}


def releasable(create: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``create_attn_components`` that moves workspaces under ``TAG``: no graph has captured their addresses yet.

    They come back as zeros, as TensorRT-LLM's kernels expect of their semaphores. What is in one is of one kernel.
    """

    @functools.wraps(create)
    def created(server_args: Any, *arguments: Any, **named: Any) -> Any:
        components = create(server_args, *arguments, **named)
        if server_args.enable_memory_saver and (workspaces := _existing()):
            ms.adopt(workspaces, TAG)
            torch.cuda.empty_cache()  # the memory that they were in
        return components

    return created


def _existing() -> list[torch.Tensor]:
    found = [getattr(sys.modules.get(f"{BACKENDS}.{module}"), name, None) for module, name in NAMES.items()]
    by_device = [each for held in found for each in (held.values() if isinstance(held, dict) else [held])]
    return [each for each in by_device if isinstance(each, torch.Tensor)]
