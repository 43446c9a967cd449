"""vLLM's tags and their restore policies."""

from __future__ import annotations

from memsaver_core.policies import RestorePolicy, policy_for

#: What the runner allocates besides weights, KV cache and scratch: input buffers, attention metadata, adapters. It is
#: written once or step by step and read later, so it is kept. Later versions of vLLM use the same name.
RUNTIME = "runtime"
CUDA_GRAPH = "cuda_graph"
WORKSPACE = "workspace"
KV_CACHE = "kv_cache"
WEIGHTS = "weights"

#: Tags that every sleep keeps, whatever its level: vLLM cannot write their content again.
KEPT = frozenset({RUNTIME, CUDA_GRAPH})

#: The only tags that a wake-up by tags may leave asleep; all others come back with any wake-up.
DEFERRABLE = frozenset({WEIGHTS, KV_CACHE})


def policy_of(tag: str) -> RestorePolicy:
    """Return the policy of regions of ``tag``. Tags of later versions are discarded unless a sleep keeps them."""
    return policy_for(tag, RestorePolicy.HOST if tag in KEPT else None)


def policy_at_sleep(tag: str, offloaded: frozenset[str]) -> RestorePolicy:
    """Return the policy of ``tag`` in a sleep that was told to keep ``offloaded``."""
    if tag in KEPT or tag in offloaded:
        return RestorePolicy.HOST
    policy = policy_of(tag)
    return RestorePolicy.DISCARD if policy == RestorePolicy.HOST else policy
