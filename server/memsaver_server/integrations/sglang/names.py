"""Names of SGLang that differ between its versions, and whether a scheduler has those that memsaver needs."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from memsaver_server.integrations.scheduler_loop.checks import lacking

#: What a scheduler must have. docs/sglang.md says for which versions this was looked up.
SCHEDULER = (
    "_engine_paused", "_request_dispatcher", "chunked_req", "disaggregation_mode", "flush_cache", "gracefully_exit",
    "ipc_channels", "is_fully_idle", "last_batch", "maybe_send_health_check_signal", "memory_saver_adapter",
    "process_input_requests", "req_to_token_pool", "request_receiver", "return_health_check_ipcs", "running_batch",
    "server_args", "token_to_kv_pool_allocator", "tp_worker", "tree_cache", "waiting_queue", "world_group",
)  # fmt: skip

#: What some of these must have.
PARTS = (
    "ipc_channels.send_to_tokenizer.send_output", "req_to_token_pool.clear", "request_receiver.input_blocker",
    "request_receiver.recv_requests", "token_to_kv_pool_allocator.clear", "tp_worker.model_runner.model",
    "tree_cache.reset", "world_group.cpu_group", "world_group.rank_in_group", "world_group.ranks",
    "world_group.world_size",
)  # fmt: skip

#: The requests of ``sglang.srt.managers.io_struct``.
MESSAGES = (
    "AbortReq", "BatchTokenizedEmbeddingReqInput", "BatchTokenizedGenerateReqInput", "CheckWeightsReqInput",
    "CheckWeightsReqOutput", "ContinueGenerationReqInput", "FlushCacheReqInput", "FlushCacheReqOutput",
    "GetInternalStateReq", "GetInternalStateReqOutput", "PauseGenerationReqInput", "ReleaseMemoryOccupationReqInput",
    "ReleaseMemoryOccupationReqOutput", "ResumeMemoryOccupationReqInput", "ResumeMemoryOccupationReqOutput",
    "TokenizedEmbeddingReqInput", "TokenizedGenerateReqInput", "UpdateWeightFromDiskReqInput",
    "UpdateWeightFromDiskReqOutput", "UpdateWeightsFromDistributedReqInput", "UpdateWeightsFromDistributedReqOutput",
    "UpdateWeightsFromTensorReqInput", "UpdateWeightsFromTensorReqOutput",
)  # fmt: skip


def missing(scheduler: Any) -> list[str]:
    """Return the names that this version of SGLang lacks."""
    messages = importlib.import_module("sglang.srt.managers.io_struct")
    paths = [*SCHEDULER, *PARTS]
    if getattr(scheduler, "draft_worker", None):
        paths.append("draft_worker.clear_cache_pool")
    return [f"Scheduler.{name}" for name in lacking(scheduler, paths)] + [
        f"io_struct.{name}" for name in lacking(messages, MESSAGES)
    ]


def parallel(scheduler: Any) -> Any:
    """Return what has ``tp_rank``, ``tp_size``, ``pp_rank``, ``pp_size`` and ``dp_size``."""
    if hasattr(scheduler, "ps"):  # up to 0.5.20
        return scheduler.ps
    return importlib.import_module("sglang.srt.runtime_context").get_parallel()


def models(scheduler: Any) -> list[Any]:
    """Return the model, and the draft models of speculative decoding."""
    draft: Any = getattr(scheduler, "draft_worker", None)
    runners = [scheduler.tp_worker.model_runner]
    if hasattr(draft, "draft_model_runner"):
        runners.append(draft.draft_model_runner)
    else:
        runners += getattr(getattr(draft, "draft_worker", None), "draft_runners", None) or []
    return [runner.model for runner in runners]


def copies_cache(scheduler: Any) -> bool:
    """Return whether copies of the hierarchical cache, between device and host, are under way or not yet looked at.

    SGLang looks at their events in each iteration, with the interpreter's lock held: in a hibernated process, for ever.
    """
    controller = getattr(scheduler.tree_cache, "cache_controller", None)
    return bool(getattr(controller, "ack_write_queue", None) or getattr(controller, "ack_load_queue", None))


def running(scheduler: Any) -> Iterable[Any]:
    """Return the requests in the batches."""
    if hasattr(scheduler, "collect_inflight_reqs"):  # from 0.5.19 on
        return set(scheduler.collect_inflight_reqs())
    if parallel(scheduler).pp_size > 1:
        batches = [*scheduler.running_mbs, *scheduler.mbs]
    else:
        batches = [scheduler.running_batch, scheduler.last_batch]
    return {request for batch in batches if batch is not None for request in batch.reqs}


def clear_pools(scheduler: Any) -> None:
    """Free every page, which no request may hold."""
    scheduler.req_to_token_pool.clear()
    scheduler.token_to_kv_pool_allocator.clear()
    if hasattr(scheduler.req_to_token_pool, "reset_aux_cache_allocator"):  # from 0.5.19 on
        scheduler.req_to_token_pool.reset_aux_cache_allocator()
