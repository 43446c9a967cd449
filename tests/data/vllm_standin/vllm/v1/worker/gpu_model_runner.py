from __future__ import annotations

import torch

from vllm.platforms import current_platform
from vllm.v1.worker.workspace import WorkspaceManager

PAGE = 1 << 16


class GPUModelRunner:
    def __init__(self) -> None:
        self.positions = torch.arange(PAGE)
        self.workspaces = WorkspaceManager()
        self.graph_pool = current_platform.get_global_graph_pool()

    def load_model(self) -> None:
        self.model = torch.nn.Linear(512, 512, bias=False)
        self.model.register_buffer("scale", torch.full((PAGE,), 2.5))
        self.draft_scale = torch.full((PAGE,), 5.0)

    def initialize_kv_cache(self, config: int) -> None:
        self.block_table = torch.arange(PAGE)
        self.kv_caches = self._allocate_kv_cache_tensors(config)

    def _allocate_kv_cache_tensors(self, config: int) -> list[torch.Tensor]:
        return [torch.full((PAGE,), 7) for _ in range(config)]

    def post_kv_cache_wake_up(self) -> None:
        self.woken = getattr(self, "woken", 0) + 1
