"""The memory behind the blocks of a vLLM worker's KV cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core.compat.patching import Function
from memsaver_core.compat.vllm.allocator import KV_CACHE
from memsaver_core.contract.errors import UnsupportedError

#: The attribute of a model runner that holds how many of its blocks have memory; without it, all have.
_BACKED = "_memsaver_backed_blocks"


@torch.inference_mode()
def resize(runner: Any, blocks: int) -> None:
    """Back only the first ``blocks`` blocks of the model runner's KV cache with memory. No other is in use. Do nothing
    if it has this size, so that a resize that was refused can be undone.

    Raises:
        UnsupportedError: other memory of this worker is released, or where a block is in the cache cannot be seen.
        OutOfDeviceMemoryError, MemsaverError: as ``memsaver_core.resize``. After each of these the cache is as before.
    """
    total = runner.kv_cache_config.num_blocks
    if blocks == getattr(runner, _BACKED, total):
        return
    if released := [tag.tag for tag in ms.status().tags if tag.released_bytes and tag.tag != KV_CACHE]:  # the tables
        raise UnsupportedError(f"{', '.join(released)} is released; resume it first: the KV cache was not resized")
    # A layer of a state-space model has a list of tensors.
    views = [each for one in runner.kv_caches for each in (one if isinstance(one, (list, tuple)) else [one])]
    unused = [part for view in views for part in behind(view, blocks, total)]
    for table, blocks_per_block in _block_tables(runner):
        # Kernels may look at what an entry behind a request's end leads to.
        table.masked_fill_(table >= blocks * blocks_per_block, 0)
    setattr(runner, _BACKED, None)  # until it is known again
    ms.resize(KV_CACHE, unused=unused)
    setattr(runner, _BACKED, blocks)


def behind(view: torch.Tensor, blocks: int, total: int) -> Iterator[torch.Tensor]:
    """Yield, as bytes, what is behind block ``blocks`` of the ``total`` ones of a layer's cache. Its dimensions may be
    in any order in memory: keys and values apart, or blocks of all layers together. Raises UnsupportedError."""
    dimensions = [dimension for dimension, size in enumerate(view.shape) if size % total == 0]
    if view.dim() < 2 or len(dimensions) != 1:
        raise UnsupportedError(f"which dimension of a KV cache of shape {tuple(view.shape)} counts its {total} blocks?")
    [dimension] = dimensions
    per_block = view.shape[dimension] // total  # attention kernels may have smaller blocks
    tail = view.narrow(dimension, blocks * per_block, (total - blocks) * per_block)
    if tail.numel() == 0:
        return
    stride = tail.stride(dimension)
    sizes = list(zip(tail.shape, tail.stride(), strict=True))
    length = 1 + sum((size - 1) * step for size, step in sizes if step <= stride)
    apart = [range(0, size * step, step) for size, step in sizes if step > stride and size > 1]
    whole = torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())
    for offsets in itertools.product(*apart):
        begin = tail.storage_offset() + sum(offsets)
        yield whole[begin * view.itemsize : (begin + length) * view.itemsize]


def without_cache(init_fp8_kv_scales: Function, runner: Any) -> Any:
    """``GPUModelRunner.init_fp8_kv_scales``, which also writes zeros to the whole cache after a wake-up. A part of it
    may have no memory; the rest is zero already."""
    caches, runner.kv_caches = runner.kv_caches, []
    try:
        return init_fp8_kv_scales(runner)
    finally:
        runner.kv_caches = caches


def _block_tables(runner: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the tensors with the blocks of each request, with how many of theirs are one of the cache's."""
    if (tables := getattr(runner, "block_tables", None)) is None:
        for table in runner.input_batch.block_table.block_tables:
            for tensor in (table.block_table.cpu, table.block_table.gpu):
                yield tensor, getattr(table, "blocks_per_kv_block", 1)
        return
    sizes = getattr(tables, "blocks_per_kv_block", itertools.repeat(1))
    for table, copy, size in zip(tables.block_tables, tables.input_block_tables, sizes, strict=False):
        yield table.gpu, size
        yield copy, size
