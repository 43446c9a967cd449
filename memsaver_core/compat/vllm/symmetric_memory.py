"""vLLM's all-reduce by symmetric memory, whose buffer every rank maps from every other one."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from memsaver_core.compat.vllm.config import worker_config
from memsaver_core.compat.vllm.import_hooks import Function, wrap


def patch_symmetric_memory(module: ModuleType) -> None:
    """``vllm.distributed.device_communicators.symm_mem``."""
    wrap(module.SymmMemCommunicator, "__init__", _without_unused_buffer)


def _without_unused_buffer(init: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Free the buffer if vLLM finds after its allocation that it cannot use it, as without NVLink multicast."""
    init(self, *args, **kwargs)
    if worker_config.enabled and self.disabled:
        vars(self).pop("buffer", None)
