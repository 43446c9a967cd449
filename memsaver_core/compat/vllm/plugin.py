"""The entry point that vLLM calls in each of its processes."""

from __future__ import annotations

import logging

from memsaver_core.compat.vllm import worker
from memsaver_core.compat.vllm.import_hooks import when_imported

logger = logging.getLogger(__name__)

#: What is changed where, whenever vLLM comes to import it. What a version of vLLM does not have is never imported.
CHANGES = (
    ("vllm.device_allocator.cumem", worker.change_allocator),
    ("vllm.device_allocator.sleep_mode_backend", worker.change_backends),
    ("vllm.platforms.interface", worker.change_platforms),
    ("vllm.v1.worker.gpu_model_runner", worker.change_runner),
    ("vllm.v1.worker.gpu.model_runner", worker.change_runner),
    ("vllm.v1.worker.gpu.attn_utils", worker.change_attention),
    ("vllm.v1.worker.workspace", worker.change_workspaces),
    ("vllm.v1.sample.ops.topk_topp_triton", worker.change_sampling),
    ("vllm.v1.attention.backends.flashinfer", worker.change_flashinfer),
    ("vllm.distributed.parallel_state", worker.change_captures),
    ("vllm.v1.worker.gpu_worker", worker.change_worker),
)

_registered = False


def register() -> None:
    """Make vLLM able to sleep by memsaver. Whether an engine does is decided when its workers are made.

    Imports nothing of vLLM, and costs nothing where ``MEMSAVER_VLLM=0``. A second call does nothing.
    """
    global _registered
    if _registered or worker.asked_for() is False:
        return
    _registered = True
    for module, change in CHANGES:
        when_imported(module, change)
