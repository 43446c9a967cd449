"""The entry point that vLLM calls in each of its processes."""

from __future__ import annotations

import functools

from memsaver_core.compat.vllm import patches
from memsaver_core.compat.vllm.config import switch
from memsaver_core.compat.vllm.import_hooks import when_imported

#: The patch of each module, applied when vLLM imports it. A module that a version of vLLM lacks is never imported.
PATCHES = (
    ("vllm.device_allocator.cumem", patches.patch_allocator),
    ("vllm.device_allocator.sleep_mode_backend", patches.patch_backends),
    ("vllm.platforms.interface", patches.patch_platforms),
    ("vllm.v1.worker.gpu_model_runner", patches.patch_runner),
    ("vllm.v1.worker.gpu.model_runner", patches.patch_runner),
    ("vllm.v1.worker.gpu.attn_utils", patches.patch_attention),
    ("vllm.v1.worker.workspace", patches.patch_workspaces),
    ("vllm.v1.sample.ops.topk_topp_triton", patches.patch_sampling),
    ("vllm.v1.attention.backends.flashinfer", patches.patch_flashinfer),
    ("vllm.distributed.parallel_state", patches.patch_captures),
    ("vllm.v1.worker.gpu_worker", patches.patch_worker),
)


@functools.cache
def register() -> None:
    """Make memsaver available to vLLM's sleep mode. Whether an engine uses it is decided when its workers are made.

    Imports nothing of vLLM, and does nothing if ``MEMSAVER_VLLM=0``. A second call does nothing.
    """
    if switch() is False:
        return
    for module, patch in PATCHES:
        when_imported(module, patch)
