"""Which of SGLang's KV caches are not resized, by name. tests/sglang/test_kv_cache.py resizes a real server's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memsaver_server.integrations.sglang import page_limit

REASONS: dict[str, dict[str, Any]] = {
    "": {"cache": "HiRadixCache", "cache_controller": object()},
    "has no Scheduler.max_req_len, Scheduler.tree_cache.evict": {"max_req_len": None, "tree_cache": object()},
    "MEMSAVER_KV_CACHE_PIECE=32MiB": {"piece": 0},
    "those of a PureSWATokenToKVPoolAllocator": {"allocator": "PureSWATokenToKVPoolAllocator"},
    "in a HiMambaRadixCache": {"cache": "HiMambaRadixCache"},
    "in a StreamingSession": {"cache": "StreamingSession"},
    "has no UnifiedRadixCache.ongoing_load_back": {"cache": "UnifiedRadixCache", "cache_controller": object()},
    "to other stores": {"host_memory_mode": "buffer_only"},
    "without a copy in host memory": {"linker": object()},
    "--enable-session-radix-cache": {"enable_session_radix_cache": True},
    "--pp-size": {"pipeline": 2},
    "a page is on several GPUs": {"kv_shard_widening": 2},
    "a part on each": {"dcp_size": 2},
    "where a page is in a HybridLinearKVPool": {"pool": "HybridLinearKVPool"},
}


def thing(name: str, **attributes: Any) -> Any:
    return type(name, (SimpleNamespace,), {})(**attributes)


def scheduler(given: dict[str, Any]) -> Any:
    free = SimpleNamespace(max_total_num_tokens=64)
    names = ("cache_controller", "host_memory_mode", "linker", "enable_session_radix_cache")
    of_cache = {name: given[name] for name in names if name in given}
    own = SimpleNamespace(
        **dict.fromkeys(page_limit.OBSERVERS, free),
        continue_generation=None,
        pause_generation=None,
        max_req_len=63,
        max_total_num_tokens=64,
        kv_shard_widening=given.get("kv_shard_widening", 1),
        server_args=SimpleNamespace(dcp_size=given.get("dcp_size", 1)),
        req_to_token_pool=SimpleNamespace(req_to_token=None),
        token_to_kv_pool_allocator=thing(
            given.get("allocator", "TokenToKVPoolAllocator"), size=64, free_pages=None, merge_and_sort_free=None
        ),
        tree_cache=given.get("tree_cache") or thing(given.get("cache", "RadixCache"), evict=None, **of_cache),
    )
    if "max_req_len" in given:
        del own.max_req_len
    return own


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_refused_is_named(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = REASONS[reason]
    settings = SimpleNamespace(kv_cache_piece=given.get("piece", 1 << 25))
    monkeypatch.setattr(page_limit.ms, "core_settings", lambda: settings)
    pools = [thing("MLATokenToKVPool", kv_buffer=[torch.zeros(65, 1, 8)])]
    if "pool" in given:
        pools.append(thing(given["pool"]))
    obstacle = page_limit.obstacle(scheduler(given), given.get("pipeline", 1), pools)
    assert reason in obstacle
    assert bool(obstacle) is bool(reason)
