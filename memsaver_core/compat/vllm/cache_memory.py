"""The memory behind the blocks of a vLLM worker's KV cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core.compat.patching import Function
from memsaver_core.contract.errors import UnsupportedError
from memsaver_core.resizing import KV_CACHE, behind

#: The attribute of a model runner that holds how many of its blocks have memory; without it, all have.
_BACKED = "_memsaver_backed_blocks"


@torch.inference_mode()
def resize(runner: Any, blocks: int) -> None:
    """Back only the first ``blocks`` blocks of the model runner's KV cache with memory. No other is in use. Do nothing
    if it has this size, so that a resize that was refused can be undone. Raises as ``memsaver_core.resize``, and
    UnsupportedError if other memory of this worker is released, or where a block is in the cache cannot be seen. After
    each of these the cache is as before."""
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
