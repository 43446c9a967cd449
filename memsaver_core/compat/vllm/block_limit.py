"""Limits the KV cache blocks that vLLM's engine core hands out: the core has the block pool, its workers the memory."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import memsaver_core as ms
from memsaver_core.compat.page_limit import PageLimit
from memsaver_core.compat.patching import Function, wrap

#: The ``collective_rpc`` that the engine core answers itself, between two of its steps: ``args`` are the name of a
#: method of ``BlockLimit`` and its arguments, the answer is ``{"result": ...}`` or ``{"obstacle": why not}``.
CALL = "memsaver_kv_cache"

_OF_POOL = (
    "blocks", "free_block_queue", "free_blocks", "get_cached_block", "evict_blocks", "num_gpu_blocks",
    "reset_prefix_cache",
)  # fmt: skip


class BlockLimit(PageLimit):
    """Limits the block pool of an engine core; a page is a block."""

    def __init__(self, core: Any) -> None:
        self._scheduler = core.scheduler
        self._pool = core.scheduler.kv_cache_manager.block_pool
        self._held: dict[int, Any] = {}
        total, cache = int(self._pool.num_gpu_blocks), core.vllm_config.cache_config
        # Plus block 0, which no request gets. vLLM only has the quotient, and rounding may have changed its last bit.
        least = math.ceil(total / cache.kv_cache_max_concurrency - 1e-6) + 1
        super().__init__(total, least, max(1, round(cache.kv_cache_size_tokens / total)))
        wrap(self._pool, "free_blocks", self._free)
        wrap(self._pool, "get_cached_block", self._find)
        wrap(self._pool, "reset_prefix_cache", self._prefixes.forget)

    def in_use(self) -> tuple[int, int]:
        used = self._total - len(self._held) - self._pool.free_block_queue.num_free_blocks - 1
        of_requests = (self._blocks(name) for name in self._scheduler.requests)
        return used, max((max(blocks, default=0) for blocks in of_requests), default=0) + 1

    def limit(self, pages: int) -> None:
        self._limit = pages
        queue = self._pool.free_block_queue
        self._hold(block for block in queue.get_all_free_blocks() if block.block_id >= pages)
        back = [self._held.pop(number) for number in sorted(self._held) if number < pages]
        queue.prepend_n(back)
        self._pool.num_gpu_blocks += len(back)

    def late(self) -> list[str]:
        return [name for name in self._scheduler.requests if self._is_late(name)]

    def preempt(self) -> None:
        """Have the ``late`` requests that run wait again, first in the queue. Output in flight is dropped."""
        scheduler, now = self._scheduler, time.monotonic()
        drops = "drop_stale_output" in inspect.signature(scheduler._preempt_request).parameters
        for request in [each for each in reversed(scheduler.running) if self._is_late(each.request_id)]:
            scheduler.running.remove(request)
            if drops:
                scheduler._preempt_request(request, now, drop_stale_output=True)
            else:  # as this version's reset_prefix_cache does
                scheduler._preempt_request(request, now)
                request.async_tokens_to_discard += request.num_output_placeholders
                request.num_output_placeholders = 0
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def _is_late(self, name: str) -> bool:
        return any(number >= self._limit for number in self._blocks(name))

    def _blocks(self, name: str) -> Iterator[int]:
        return chain.from_iterable(self._scheduler.kv_cache_manager.get_block_ids(name))

    def _hold(self, blocks: Iterable[Any]) -> None:
        """Take ``blocks`` out of the queue."""
        going = {block.block_id: block for block in blocks}
        for block in going.values():
            self._pool.free_block_queue.remove(block)
        self._pool.evict_blocks(set(going))
        self._pool.num_gpu_blocks -= len(going)
        self._held.update(going)

    def _free(self, free_blocks: Function, ordered_blocks: Iterable[Any]) -> None:
        blocks = list(ordered_blocks)
        free_blocks(blocks)
        ours = (block for block in blocks if getattr(block, "pool", None) in (None, self._pool))
        self._hold(block for block in ours if block.block_id >= self._limit and block.ref_cnt == 0)

    def _find(self, get_cached_block: Function, block_hash: Any, *args: Any, **kwargs: Any) -> Any:
        """Find no prefix on a block above the limit: a new request would keep the block in use."""
        found = get_cached_block(block_hash, *args, **kwargs)
        if not found:
            self._prefixes.computed(block_hash)
        elif any(block.block_id >= self._limit for block in found):
            return None
        for block in found or ():
            self._prefixes.found(block.block_id)
        return found


def obstacle(core: Any) -> str:
    """Return why the blocks of ``core`` cannot be limited, or an empty string."""
    scheduler, config = core.scheduler, core.vllm_config
    pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    sizes = getattr(config.cache_config, "kv_cache_max_concurrency", None)
    if not sizes or not all(hasattr(pool, name) for name in _OF_POOL) or not hasattr(scheduler, "_preempt_request"):
        return "this version of vLLM, or this model, manages its cache in another way"
    if not ms.core_settings().kv_cache_piece:
        return "start vLLM with MEMSAVER_KV_CACHE_PIECE=32MiB"
    if getattr(scheduler, "connector", None) is not None:
        return "a KV connector uses its blocks, too; start vLLM without --kv-transfer-config and KV offloading"
    if getattr(config.parallel_config, "distributed_executor_backend", None) == "ray":
        return "workers of Ray take calls while they compute; start vLLM with --distributed-executor-backend mp"
    return ""


def answer(core: Any, name: str, *arguments: Any) -> dict[str, Any]:
    """Answer ``CALL``."""
    if reason := obstacle(core):
        return {"obstacle": reason}
    if not hasattr(core, "_memsaver_blocks"):
        core._memsaver_blocks = BlockLimit(core)
    return {"result": getattr(core._memsaver_blocks, name)(*arguments)}
