"""vLLM's load format ``memsaver``: weights from the shared store if it has them, else as vLLM loads them itself."""

from __future__ import annotations

import copy
import logging
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core.compat.loading import LOAD_FORMAT, tensors_of, weights_key
from memsaver_core.compat.vllm.allocator import worker_memory

logger = logging.getLogger("memsaver")


def register(module: ModuleType) -> None:
    """Add the load format to ``vllm.model_executor.model_loader``."""

    class MemsaverModelLoader(module.DefaultModelLoader):  # type: ignore[name-defined,misc]
        def __init__(self, load_config: Any) -> None:
            own = copy.copy(load_config)
            own.load_format = "auto"
            super().__init__(own)
            self._starting: Any = None  # the configuration of the engine whose model is being made

        def load_model(self, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
            self._starting = vllm_config
            try:
                return super().load_model(vllm_config, *args, **kwargs)
            finally:
                self._starting = None

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            """Fill a new model, as it is before vLLM processes its weights. Later calls write other weights in place,
            at addresses that graphs have captured."""
            load = partial(super().load_weights, model, model_config)
            vllm_config, self._starting = self._starting, None
            if vllm_config is not None and not Path(model_config.model).is_dir():
                self.download_model(model_config)
            if vllm_config is None or (key := _key(vllm_config, model_config)) is None:
                load()
            else:
                ms.load_weights(key, partial(tensors_of, model), load)

    module.register_model_loader(LOAD_FORMAT)(MemsaverModelLoader)


def _key(vllm_config: Any, model_config: Any) -> ms.WeightsKey | None:
    """Return what the weights of this worker are: replicas of an engine have the same, unless experts are divided among
    them. None, with a warning, if they cannot be shared."""
    parallel = vllm_config.parallel_config
    divided = parallel.enable_expert_parallel
    sizes = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size * divided)
    version = getattr(sys.modules["vllm"], "__version__", "")
    key = weights_key(
        model_config.model,
        model_config,
        vllm_config.load_config.download_dir,
        rank=parallel.rank + parallel.world_size * parallel.data_parallel_rank * divided,
        ranks=parallel.world_size * (parallel.data_parallel_size if divided else 1),
        program=f"vllm {version}, tensors, layers, experts in {sizes}",
    )
    if key is not None and not worker_memory.enabled:
        logger.warning("weights are not shared, because vLLM's sleep mode is not memsaver's")
        return None
    return key
