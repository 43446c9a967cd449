from __future__ import annotations

from types import SimpleNamespace

import torch

from vllm.platforms import current_platform
from vllm.v1.worker.workspace import WorkspaceManager

PAGE = 1 << 16
#: Of the KV cache. In each layer a block has 3,271 numbers.
BLOCKS = 20


class GPUModelRunner:
    def __init__(self) -> None:
        self.positions = torch.arange(PAGE)
        self.workspaces = WorkspaceManager()
        self.graph_pool = current_platform.get_global_graph_pool()

    def load_model(self) -> None:
        self.model = torch.nn.Linear(512, 512, bias=False)
        self.model.register_buffer("scale", torch.full((PAGE,), 2.5))
        self.model.kept = torch.nn.Parameter(torch.full((PAGE,), 3.5), requires_grad=False)
        self.draft_scale = torch.full((PAGE,), 5.0)

    def get_model(self) -> torch.nn.Linear:
        return self.model

    def initialize_kv_cache(self, config: int) -> None:
        self.block_table = torch.arange(PAGE)
        self.kv_cache_config = SimpleNamespace(num_blocks=BLOCKS)
        self.kv_caches = self._allocate_kv_cache_tensors(config)
        rows = SimpleNamespace(cpu=torch.arange(BLOCKS), gpu=torch.arange(BLOCKS))
        self.input_batch = SimpleNamespace(
            block_table=SimpleNamespace(block_tables=[SimpleNamespace(block_table=rows, blocks_per_kv_block=1)])
        )

    def _allocate_kv_cache_tensors(self, config: int) -> list[torch.Tensor]:
        return [torch.full((BLOCKS, 3271), 7) for _ in range(config)]

    def init_fp8_kv_scales(self) -> None:
        for cache in self.kv_caches:
            cache.zero_()

    def post_kv_cache_wake_up(self) -> None:
        self.init_fp8_kv_scales()
        self.woken = getattr(self, "woken", 0) + 1
