from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from vllm.device_allocator import get_mem_allocator_instance
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class Worker:
    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.model_runner: Any = None
        self._sleep_saved_buffers: dict[str, torch.Tensor] = {}
        self._sleep_rebuild_draft_metadata_buffers = False
        self._sleep_saved_parameters: dict[str, torch.Tensor] = {}
        self._backend: Any = None

    def _get_sleep_mode_backend(self) -> Any:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

        if self._backend is None:
            self._backend = SleepModeBackendFactory.create_backend(self.vllm_config.model_config)
        return self._backend

    def _maybe_get_memory_pool_context(self, tag: str) -> Any:
        if not self.vllm_config.model_config.enable_sleep_mode:
            return nullcontext()
        allocator = get_mem_allocator_instance()
        if tag == "weights":
            assert allocator.get_current_usage() == 0
        return allocator.use_memory_pool(tag=tag)

    def init_device(self) -> None:
        self.model_runner = GPUModelRunner()

    def load_model(self) -> None:
        with self._maybe_get_memory_pool_context("weights"):
            self.model_runner.load_model()

    def initialize_from_config(self, config: int) -> None:
        with self._maybe_get_memory_pool_context("kv_cache"):
            self.model_runner.initialize_kv_cache(config)

    def compile_or_warm_up_model(self) -> str:
        self.model_runner.workspaces._ensure_workspace_size(1 << 20)
        return "warm"

    def reload_weights(self, value: float, format: str = "") -> str:
        """As vLLM does it: modules are on the meta device until they are done."""
        model = self.model_runner.model
        parameter = model._parameters["weight"]
        model._parameters["weight"] = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        parameter.data.fill_(value)
        if format == "of another kernel":
            parameter = torch.nn.Parameter(parameter.clone(), requires_grad=False)
        if format == "damaged":
            raise RuntimeError("a file is damaged")
        model._parameters["weight"] = parameter
        return f"loaded {value}"

    def sleep(self, level: int = 1) -> None:
        if level == 2:
            buffers = self.model_runner.model.named_buffers()
            self._sleep_saved_buffers = {name: buffer.clone() for name, buffer in buffers}
            self._sleep_rebuild_draft_metadata_buffers = True
            self._sleep_saved_parameters = {"kept": self.model_runner.model.kept.detach().clone()}
        self._get_sleep_mode_backend().suspend(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._get_sleep_mode_backend().resume(tags)
        for name, buffer in self.model_runner.model.named_buffers():
            if name in self._sleep_saved_buffers:
                buffer.data.copy_(self._sleep_saved_buffers[name])
        self._sleep_saved_buffers = {}
        if self._sleep_rebuild_draft_metadata_buffers:
            self.model_runner.draft_scale.copy_(self.model_runner.model.scale * 2)
            self._sleep_rebuild_draft_metadata_buffers = False
        for saved in self._sleep_saved_parameters.values():
            self.model_runner.model.kept.data.copy_(saved)
        self._sleep_saved_parameters.clear()
        if tags is None or "kv_cache" in tags:
            self.model_runner.post_kv_cache_wake_up()
