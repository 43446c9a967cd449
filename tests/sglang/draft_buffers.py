"""The buffers that SGLang's own backend allocates for the graphs of a draft model are in a region, and kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonMultiStepDraftBackend

import memsaver_core as ms
from memsaver_core import process
from memsaver_server.integrations.sglang import buffers


class Step:
    """The attention of one step."""

    max_kv_splits = 8

    def init_cuda_graph_state(self, *_arguments: Any, **_named: Any) -> None: ...


def check(device: str) -> None:
    """In a process that has used no memory of its own yet."""
    backend: Any = TritonMultiStepDraftBackend.__new__(TritonMultiStepDraftBackend)
    vars(backend).update(
        speculative_num_steps=3, topk=1, max_context_len=4096, device=device, attn_backends=[Step(), Step()]
    )
    backend.window_rail = False
    hooks = {name.rpartition(".")[2]: hook for name, hook in buffers.hooks().items()}

    def initialize(scheduler: Any) -> None:
        hooks["init_all_attention_backends"](lambda _scheduler: None, scheduler)
        backend.init_cuda_graph_state(2, 8)

    hooks["init_model_worker"](initialize, SimpleNamespace(server_args=SimpleNamespace(enable_memory_saver=True)))
    made = {name: each for name, each in vars(backend).items() if isinstance(each, torch.Tensor)}
    before = {name: each.clone() for name, each in made.items()}
    assert "cuda_graph_kv_indices" in made
    assert [name for name, each in made.items() if not process.saver().owns(each.data_ptr())] == []
    ms.release()
    ms.resume()
    assert all(torch.equal(made[name], before[name]) for name in made)
