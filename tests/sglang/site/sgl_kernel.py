"""In the place of SGLang's kernels for CPUs, which are in no package. SGLang imports some names at its start;
without AMX it computes with torch, and calls none of them."""

import sys
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from memsaver_core.compat.patching import Function, when_imported, wrap


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
    for name in ("get_cuda_graph_seq_len_fill_value", "get_cpu_graph_seq_len_fill_value"):
        setattr(backend.TorchNativeAttnBackend, name, lambda _self: 1)


def _copy_tokens(attention: Any) -> None:
    attention.memcpy_triton = _copy


def _copy(to: torch.Tensor, source: torch.Tensor, _dim: int, start: Any, size: Any, from_start: bool) -> None:
    there = slice(int(start), int(start) + int(size))
    to[slice(int(size)) if from_start else there] = source[there if from_start else slice(int(size))]


def _gather_without_operators(state: Any) -> None:
    group = state.GroupCoordinator
    group.all_gather_into_tensor = group._all_gather_into_tensor
    group.reduce_scatter_tensor = group._reduce_scatter_tensor


# From 0.5.23 on a prefill server sends the numbers of pages from pinned memory.


def _send_from_pageable_memory(transfers: Any) -> None:
    transfers.MooncakeKVSender.supports_host_tensor_indices = False


# So does the hierarchical cache: its kernel and its events are replaced.


class _Event:
    """Of a copy that ends once SGLang has looked for ends three times."""

    looks = 0

    def __init__(self, **_named: object) -> None:
        self._recorded = -3

    def query(self) -> bool:
        _Event.looks += 1
        return _Event.looks >= self._recorded + 3

    def record(self, *_arguments: object) -> None:
        self._recorded = _Event.looks

    def wait(self, *_arguments: object) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _end: object) -> float:
        return 0.0


def _copy_pages(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _use_plain_memory(common: Any) -> None:
    common._cuda_host_register = lambda *_buffer: None


def _copy_directly(host: Any) -> None:
    host.transfer_kv_direct = _copy_pages


# torch's attention writes the pages of sliding windows, and reads those that other layers have in their place.


def _read_windows(attention: Any) -> None:
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        wrap(attention.TorchNativeAttnBackend, name, _with_windows)


def _with_windows(
    run: Function, backend: Any, query: Any, output: Any, keys: Any, values: Any, table: Any, rows: Any,
    *arguments: Any, sliding_window_size: int | None = None, **named: Any,
) -> Any:  # fmt: skip
    if sliding_window_size is not None:
        table, rows = backend.token_to_kv_pool.translate_loc_from_full_to_swa(table[rows]), torch.arange(len(rows))
    named["sliding_window_size"] = sliding_window_size
    return run(backend, query, output, keys, values, table, rows, *arguments, **named)


# Convolutions whose states are kept, of which SGLang has only kernels for GPUs.


def _convolve(x: Any, weight: Any, bias: Any, states: Any, slot: Any, begins: bool) -> Any:
    """``x`` is (channels, tokens), ``states`` (slots, channels, width - 1)."""
    before = torch.zeros_like(states[slot]) if begins else states[slot]
    whole = torch.cat((before, x.to(before.dtype)), 1)
    states[slot] = whole[:, x.shape[1] :]
    return torch.nn.functional.conv1d(whole[None].to(x.dtype), weight[:, None], bias, groups=len(weight))[0]


def _convolve_prompts(
    x: Any, weight: Any, bias: Any, *, query_start_loc: Any, cache_indices: Any, has_initial_state: Any,
    conv_states: Any, **_named: Any,
) -> Any:  # fmt: skip
    sizes = query_start_loc.diff().tolist()
    found = has_initial_state.tolist()
    parts = zip(x[:, : sum(sizes)].split(sizes, 1), cache_indices.tolist(), found, strict=False)
    return torch.cat([_convolve(part, weight, bias, conv_states, slot, not old) for part, slot, old in parts], 1)


def _convolve_tokens(x: Any, conv_state: Any, weight: Any, bias: Any, *, conv_state_indices: Any, **_named: Any) -> Any:
    parts = zip(x, conv_state_indices.tolist(), strict=True)
    return torch.stack([_convolve(part[:, None], weight, bias, conv_state, slot, False)[:, 0] for part, slot in parts])


def _convolve_without_kernels(model: Any) -> None:
    model.causal_conv1d_fn, model.causal_conv1d_update = _convolve_prompts, _convolve_tokens


torch.cpu.Event = _Event
sys.modules[f"{__name__}.mamba"] = sys.modules[__name__]
for operator in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"):
    setattr(torch.ops.sgl_kernel, operator, None)
when_imported("sglang.srt.models.lfm2", _convolve_without_kernels)
when_imported("sglang.srt.disaggregation.mooncake.conn", _send_from_pageable_memory)
when_imported("sglang.srt.mem_cache.pool_host.common", _use_plain_memory)
when_imported("sglang.srt.mem_cache.pool_host.mha", _copy_directly)
when_imported("sglang.srt.distributed.parallel_state", _gather_without_operators)
when_imported("sglang.srt.model_executor.forward_batch_info", _use_pageable_memory)
when_imported("sglang.srt.layers.attention.torch_native_backend", _pad_sequences)
when_imported("sglang.srt.layers.attention.torch_native_backend", _read_windows)
when_imported("sglang.srt.layers.dp_attention", _copy_tokens)
