"""vLLM's custom all-reduce without CUDA IPC, so that its memory and that of captured graphs can be released.

vLLM has each captured all-reduce read its input where it lies, in the memory of every rank's graphs, which the ranks
share by CUDA IPC. Here a captured all-reduce first copies its input into the buffer that the ranks share from the
start, as vLLM does outside of graphs; and what they share from the start is virtual memory.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from memsaver_core import communicators
from memsaver_core.compat.vllm.allocator import RUNTIME, vllm_allocator
from memsaver_core.compat.vllm.config import worker_config
from memsaver_core.compat.vllm.import_hooks import Function, wrap
from memsaver_core.errors import UnsupportedError
from memsaver_core.peer_buffers import PeerBuffers, PeerSockets

#: Size of an entry of ``CustomAllreduce.rank_data``, in bytes: a pointer for each of eight ranks (``RankData`` in
#: vLLM's csrc/custom_all_reduce.cuh).
ENTRY_BYTES = 64

#: Of this process, in the order in which they were made.
_buffers: list[PeerBuffers] = []


def patch_custom_all_reduce(module: ModuleType) -> None:
    """``vllm.distributed.device_communicators.custom_all_reduce``."""
    wrap(module.CustomAllreduce, "__init__", _with_filled_table)
    wrap(module.CustomAllreduce, "all_reduce", _from_shared_buffer)
    wrap(module.CustomAllreduce, "register_graph_buffers", _unless_enabled)
    wrap(module.CustomAllreduce, "create_shared_buffer", _virtual)
    wrap(module.CustomAllreduce, "free_shared_buffer", _forget)


def _with_filled_table(init: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Make every entry of the table that captured all-reduces take theirs from point to the shared buffer.

    vLLM fills the first entry when it is made, and one for each captured all-reduce after the capture.
    """
    if not worker_config.enabled:
        init(self, *args, **kwargs)
        return
    with vllm_allocator().use_memory_pool(RUNTIME):
        init(self, *args, **kwargs)
    if self.disabled:
        return
    entries = self.rank_data.view(torch.int64).view(-1, ENTRY_BYTES // 8)
    if entries[0, : self.world_size].tolist() != list(self.buffer_ptrs):
        raise UnsupportedError(
            "this version of vLLM keeps another table of its custom all-reduce's buffers; start it with "
            "--disable-custom-all-reduce, or without MEMSAVER_VLLM=1"
        )
    entries[1:] = entries[0]


def _from_shared_buffer(all_reduce: Function, self: Any, inp: Any, *, out: Any = None, registered: bool = False) -> Any:
    return all_reduce(self, inp, out=out, registered=registered and not worker_config.enabled)


def _unless_enabled(register_graph_buffers: Function, self: Any) -> None:
    if not worker_config.enabled:
        register_graph_buffers(self)


def _virtual(
    create_shared_buffer: Function, size_in_bytes: int, group: Any = None, uncached: bool | None = False
) -> list[int]:
    """Return the address of each rank's buffer."""
    if not worker_config.enabled:
        addresses: list[int] = create_shared_buffer(size_in_bytes, group, uncached)
        return addresses

    def gather(value: Any) -> list[Any]:
        values = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(values, value, group=group)
        return values

    sockets = PeerSockets(torch.distributed.get_rank(group), gather)
    buffers = PeerBuffers(size_in_bytes, torch.cuda.current_device(), sockets)
    ranks = torch.distributed.get_process_group_ranks(group)
    name = f"vllm:custom_all_reduce_{len(_buffers)}:{','.join(map(str, ranks))}"
    communicators.register_buffers(name, buffers)
    _buffers.append(buffers)
    return buffers.addresses


def _forget(free_shared_buffer: Function, pointers: list[int], group: Any = None, rank: int | None = None) -> None:
    """Do nothing for buffers that are ours: vLLM frees them when the worker ends, and so does the driver."""
    if not any(buffers.addresses == pointers for buffers in _buffers):
        free_shared_buffer(pointers, group, rank)
