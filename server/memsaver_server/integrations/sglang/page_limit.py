"""How many pages of its KV cache SGLang hands out, and the memory behind them, on one rank."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core.compat.page_limit import PageLimit
from memsaver_core.compat.patching import Function, wrap
from memsaver_core.resizing import KV_CACHE, behind
from memsaver_server.integrations.adapter.engine import lacking

#: The allocators that have a single list of free pages; and the prefix caches in which every page belongs to a request,
#: holds a prefix that can be forgotten, or is being copied from or to host memory.
ALLOCATORS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
PREFIXES = ("ChunkCache", "HiRadixCache", "RadixCache", "UnifiedRadixCache")
#: The allocator that has two of these; that of layers with sliding windows is not limited.
WINDOWS = "SWATokenToKVPoolAllocator"
#: The methods by which a cache takes what a request has computed; each version of SGLang has one of them.
COMPUTED = ("cache_unfinished_req", "checkpoint")
#: What a pool of pages calls the tensors of its layers.
BUFFERS = ("k_buffer", "v_buffer", "kv_buffer")
#: Attributes of a ``Scheduler``, and of these parts of it, that say how many tokens all pages hold.
SIZES = ("max_total_num_tokens", "full_tokens_per_layer")
OBSERVERS = ("invariant_checker", "kv_events_publisher", "load_inquirer", "pool_stats_observer")
#: What a ``Scheduler`` must have.
NAMES = (
    *(f"{name}.max_total_num_tokens" for name in OBSERVERS), "continue_generation", "max_req_len",
    "max_total_num_tokens", "pause_generation", "req_to_token_pool.req_to_token", "token_to_kv_pool_allocator.size",
    "token_to_kv_pool_allocator.free_pages", "token_to_kv_pool_allocator.merge_and_sort_free", "tree_cache.evict",
)  # fmt: skip
#: What a ``UnifiedRadixCache`` must have, too, if it is hierarchical.
COPIES = (
    "ongoing_load_back", "ongoing_write_through", "tree_core.collect_path_info", "tree_core.get_component_device_value",
)  # fmt: skip


class SchedulerPages(PageLimit):
    """The page limit of a ``Scheduler``. Called in its thread; what changes it, on all ranks in the same iteration."""

    def __init__(self, own: Any, running: Callable[[], Iterable[Any]], pools: Iterable[Any]) -> None:
        """``own`` is SGLang's ``Scheduler``, ``running()`` returns the requests of batches in progress, ``pools`` have
        the memory of the pages."""
        self._own = own
        self._running = running
        self._buffers = [each for pool in pools for each in buffers(pool)]
        self._allocator = allocator = pages_of(own)
        #: What says how many tokens all pages hold: an object, its attribute, and the value without a limit.
        self._sizes: list[tuple[object, str, int]] = [(allocator, "size", int(allocator.size))]
        for holder in (own, *(getattr(own, part) for part in OBSERVERS)):
            for name in SIZES:
                if tokens := getattr(holder, name, None):
                    self._sizes.append((holder, name, int(tokens)))
        self._held: torch.Tensor = allocator.free_pages[:0]
        self._stale = False  # whether the table may name pages that have no memory any more
        cache = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        self._evict_params = cache.EvictParams
        sizing = importlib.import_module("sglang.srt.mem_cache.allocation_sizing")
        page_tokens = int(allocator.page_size)
        total = int(allocator.size) // page_tokens + 1  # with the page that no request gets, as in the next
        # Besides what a request may have, SGLang admits it only if a step and a page more are free.
        longest = own.max_req_len + sizing.get_alloc_reserve_per_decode() + 2 * page_tokens
        super().__init__(total, math.ceil(longest / page_tokens) + 1, page_tokens)
        self._backed = self._total
        wrap(allocator, "clear", self._clear)
        if not getattr(own.tree_cache, "disable", True):
            for name in COMPUTED:
                wrap(own.tree_cache, name, self._note_computed)
            wrap(own.tree_cache, "reset", self._prefixes.forget)

    def in_use(self) -> tuple[int, int]:
        used = self._used()
        return len(used), int(used[-1]) + 1 if len(used) else 1

    def read(self) -> dict[str, int]:
        """See ``PageLimit``. Calls no device unless requests run: it may be hibernated."""
        return {**super().read(), "page_bytes": sum(each.nbytes for each in self._buffers) // self._total}

    def limit(self, pages: int) -> None:
        self._limit = pages
        returns = self._held < pages
        back, self._held = self._held[returns].sort().values, self._held[~returns]
        self._allocator.free_pages = torch.cat((self._allocator.free_pages, back))
        self._note_size()
        self.hold()

    def late(self) -> list[str]:
        tables = {request.rid: tokens for request, tokens in self._tables()}
        return sorted(name for name, tokens in tables.items() if (tokens >= self._limit * self._page_tokens).any())

    def preempt(self) -> None:
        """If a request uses a page behind the limit, have SGLang retract all running ones, and compute them again."""
        if self.late():
            paused = self._own._engine_paused
            messages = importlib.import_module("sglang.srt.managers.io_struct")
            self._own.pause_generation(messages.PauseGenerationReqInput(mode="retract"))
            if not paused:
                self._own.continue_generation(messages.ContinueGenerationReqInput())
            self.hold()

    def before_step(self) -> None:
        """Hold the pages that have become free: SGLang frees them in many places. Let the table name no page without
        memory: CUDA graphs read the pages of unused rows, and kernels those after the end of a request."""
        self.hold()
        if self._stale and ms.status().state == "resident":  # the table is in the cache's region
            with torch.inference_mode():
                for rows in self._own.req_to_token_pool.req_to_token.split(64):
                    rows.masked_fill_(rows >= self._backed * self._page_tokens, 0)
            self._stale = False

    def hold(self) -> None:
        """Hold the free pages behind the limit. Prefixes are forgotten, the oldest first, until only requests use such
        pages."""
        if not self.waiting():
            return
        self._hold_free()
        while cached := self.waiting() - int((self._used() >= self._limit).sum()):
            evicted = self._own.tree_cache.evict(self._evict_params(num_tokens=cached * self._page_tokens))
            if not evicted.num_tokens_evicted:
                break
            self._hold_free()

    def back(self, pages: int) -> None:
        """Back only the first ``pages`` pages with memory; no other is in use. Raises as ``memsaver_core.resize``."""
        ms.resize(KV_CACHE, unused=[part for each in self._buffers for part in behind(each, pages, self._total)])
        self._backed, self._stale = pages, True

    def _clear(self, clear: Function) -> None:
        self._held = self._held[:0]
        self._note_size()  # it makes so many pages
        clear()
        self._hold_free()

    def _note_computed(self, cache: Function, req: Any, *args: Any, **kwargs: Any) -> None:
        if not req.finished():
            self._note_prompt(req)
        cache(req, *args, **kwargs)

    def _note_prompt(self, req: Any) -> None:
        """Note where a request found a prefix, and what it has computed."""
        found = req.prefix_len if hasattr(req, "prefix_len") else len(req.prefix_indices)
        if found == getattr(req, "cached_tokens", found):  # else an earlier chunk of this request computed the prefix
            for node, count, _ in self._path(req.last_node):
                self._prefixes.found(node, count // self._page_tokens)
        end = found + self._page_tokens
        tokens = req.get_fill_ids()
        if end <= len(tokens):
            self._prefixes.computed((req.extra_key, *tokens[:end]))

    def _hold_free(self) -> None:
        self._allocator.merge_and_sort_free()
        free = self._allocator.free_pages
        goes = free >= self._limit
        self._held, self._allocator.free_pages = torch.cat((self._held, free[goes])), free[~goes]
        self._note_size()

    def _note_size(self) -> None:
        for holder, name, tokens in self._sizes:
            object.__setattr__(holder, name, tokens - len(self._held) * self._page_tokens)  # some are frozen
        if (gauges := getattr(self._own, "metrics_collector", None)) is not None:
            size = self._own.max_total_num_tokens
            for name, value in (("max_total_num_tokens", size), ("num_pages", size // self._page_tokens)):
                if (gauge := getattr(gauges, name, None)) is not None:
                    gauge.labels(**gauges.labels).set(value)

    def _used(self) -> torch.Tensor:
        """Return the pages that requests in flight use, or that are copied from or to host memory, in order."""
        tokens = [*(tokens for _, tokens in self._tables()), *self._in_transfer()]
        return torch.unique(torch.cat(tokens) // self._page_tokens) if tokens else self._held[:0]

    def _in_transfer(self) -> Iterator[torch.Tensor]:
        """Yield the places of tokens that a hierarchical cache copies, and of those before them, which it locks."""
        cache = self._own.tree_cache
        writes, loads = (getattr(cache, name, {}) for name in ("ongoing_write_through", "ongoing_load_back"))
        for each in (*writes.values(), *loads.values()):
            for *_, places in self._path(each[0] if isinstance(each, tuple) else each):
                if (tokens := places()) is not None:
                    yield tokens

    def _path(self, end: Any) -> Iterator[tuple[Hashable, int, Callable[[], torch.Tensor | None]]]:
        """Yield the nodes from one in SGLang's tree of prefixes to the root: id, number of tokens, and a function that
        returns the places of these, or None if they are in host memory alone."""
        core: Any = getattr(self._own.tree_cache, "tree_core", None)
        if hasattr(core, "collect_path_info"):
            full = importlib.import_module("sglang.srt.mem_cache.unified_cache.component_type").ComponentType.FULL
            for node in itertools.chain(*core.collect_path_info([end])):
                places = partial(core.get_component_device_value, node.node_id, full)
                yield node.node_id, node.path_end - node.path_start, places
            return
        while getattr(end, "parent", None) is not None:  # the root has none
            yield end.id, len(end.key), partial(getattr, end, "value")
            end = end.parent

    def _tables(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield the requests in flight with where each of their tokens is in the cache."""
        table = self._own.req_to_token_pool.req_to_token
        for request in {*self._running(), self._own.chunked_req} - {None}:
            # From 0.5.21 on ``kv`` has the row.
            row = getattr(request.kv, "req_pool_idx", getattr(request, "req_pool_idx", None))
            if request.kv is not None and row is not None:
                yield request, table[row, : request.kv.kv_allocated_len]


def pages_of(own: Any) -> Any:
    """Return the allocator of the pages that are limited."""
    allocator = own.token_to_kv_pool_allocator
    return allocator.full_attn_allocator if type(allocator).__name__ == WINDOWS else allocator


def buffers(pool: Any) -> list[torch.Tensor]:
    """Return the tensors of each layer's keys and values, without what layers with sliding windows or states have."""
    pool = getattr(pool, "full_kv_pool", pool)
    return [each for name in BUFFERS for each in getattr(pool, name, None) or ()]


def obstacle(own: Any, pipeline: int, pools: Iterable[Any]) -> str:
    """Return why the pages of SGLang's ``Scheduler`` cannot be limited, or an empty string."""
    if missing := lacking(own, NAMES, "Scheduler"):
        return f"this version of SGLang has no {', '.join(missing)}"
    if not ms.core_settings().kv_cache_piece:
        return "start SGLang with MEMSAVER_KV_CACHE_PIECE=32MiB"
    cache = own.tree_cache
    if (kind := type(pages_of(own)).__name__) not in ALLOCATORS:
        return f"its pages are those of a {kind}, of which it is not known how they are handed out"
    if (kind := type(cache).__name__) not in PREFIXES:
        return f"its prefixes are in a {kind}, which may have pages in use that no request has"
    if getattr(cache, "linker", None) or getattr(cache, "host_memory_mode", "") == "buffer_only":
        return "its prefixes are copied to other stores without a copy in host memory; start SGLang without that"
    copies = COPIES if kind == "UnifiedRadixCache" and getattr(cache, "cache_controller", None) else ()
    if missing := lacking(cache, copies, kind):
        return f"this version of SGLang has no {', '.join(missing)}; start it without a hierarchical cache"
    if getattr(cache, "enable_session_radix_cache", False):
        return "sessions hold pages between requests; start SGLang without --enable-session-radix-cache"
    if pipeline > 1:
        return "the stages of its pipeline compute several batches at once; start SGLang without --pp-size"
    if getattr(own, "kv_shard_widening", 1) > 1 or getattr(own.server_args, "dcp_size", 1) > 1:
        return "a page is on several GPUs, a part on each"
    if unknown := [type(pool).__name__ for pool in pools if not buffers(pool)]:
        return f"where a page is in a {unknown[0]} is not known"
    return ""
