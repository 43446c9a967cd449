"""In the place of SGLang's kernels for CPUs, which are in no package. SGLang imports some names at its start;
without AMX it computes with torch, and calls none of them."""

from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from memsaver_core.compat.patching import when_imported


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_arguments: object, **_named: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}")

    return missing


# Data-parallel attention computes on a CPU, too, if some functions are replaced that are there for GPUs alone.


def _use_pageable_memory(info: Any) -> None:
    info.torch = SimpleNamespace(**vars(torch))
    info.torch.tensor = lambda *values, pin_memory=False, **named: torch.tensor(*values, **named)


def _pad_sequences(backend: Any) -> None:
    backend.TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda _self: 1


def _copy_tokens(attention: Any) -> None:
    attention.memcpy_triton = _copy


def _copy(to: torch.Tensor, source: torch.Tensor, _dim: int, start: Any, size: Any, from_start: bool) -> None:
    there = slice(int(start), int(start) + int(size))
    to[slice(int(size)) if from_start else there] = source[there if from_start else slice(int(size))]


def _gather_without_operators(state: Any) -> None:
    group = state.GroupCoordinator
    group.all_gather_into_tensor = group._all_gather_into_tensor
    group.reduce_scatter_tensor = group._reduce_scatter_tensor


when_imported("sglang.srt.distributed.parallel_state", _gather_without_operators)
when_imported("sglang.srt.model_executor.forward_batch_info", _use_pageable_memory)
when_imported("sglang.srt.layers.attention.torch_native_backend", _pad_sequences)
when_imported("sglang.srt.layers.dp_attention", _copy_tokens)
