"""vLLM's tags, and what a wake-up owes to each."""

from __future__ import annotations

from memsaver_core.policies import RestorePolicy

#: What the runner allocates beside weights, KV cache and scratch: input buffers, attention metadata, adapters. It is
#: written once or step by step and read later, so it is kept. The name is that of later versions of vLLM.
RUNTIME = "runtime"
CUDA_GRAPH = "cuda_graph"
WORKSPACE = "workspace"
KV_CACHE = "kv_cache"
WEIGHTS = "weights"

#: Tags whose content every sleep keeps, whatever its level: nobody could write it again.
KEPT = frozenset({RUNTIME, CUDA_GRAPH})

#: The only tags that a wake-up by tags may leave asleep; every other one comes back with any wake-up.
DEFERRABLE = frozenset({WEIGHTS, KV_CACHE})

_POLICIES = {
    WEIGHTS: RestorePolicy.HOST,
    RUNTIME: RestorePolicy.HOST,
    CUDA_GRAPH: RestorePolicy.HOST,
    KV_CACHE: RestorePolicy.ZERO,
    WORKSPACE: RestorePolicy.ZERO,
}


def policy_of(tag: str) -> str:
    """What regions of ``tag`` are made with. A tag that vLLM thinks of later is discarded unless a sleep keeps it."""
    return _POLICIES.get(tag, RestorePolicy.DISCARD).value


def policy_at_sleep(tag: str, offloaded: frozenset[str]) -> str:
    """What a wake-up owes to ``tag`` after a sleep that was told to keep ``offloaded``."""
    if tag in KEPT or tag in offloaded:
        return RestorePolicy.HOST.value
    policy = policy_of(tag)
    return RestorePolicy.DISCARD.value if policy == RestorePolicy.HOST.value else policy
