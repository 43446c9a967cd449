"""What memsaver changes in SGLang's processes: by its plugin entry point (``register``), or by hand (``attach``)."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from memsaver_core import MemsaverError, communicators
from memsaver_core.lending import lent_tags
from memsaver_core.rendezvous import FOLDER
from memsaver_server.integrations.adapter.plugin import Plugin
from memsaver_server.integrations.sglang import buffers, loader

ADAPTER = "sglang.srt.utils.torch_memory_saver_adapter"
_plugin = Plugin("MEMSAVER_SGLANG", "memsaver_server.integrations.sglang.engine:SglangEngine", ADAPTER)
attach, follow = _plugin.attach, _plugin.follow


def register() -> None:
    """The entry point. Carry out the memory calls of each engine of this process whose memory is in memsaver's regions,
    and serve it at ``MEMSAVER_SGLANG`` if that is set."""
    if not _plugin.starts():
        return
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    around = {
        "sglang.srt.managers.scheduler.Scheduler.run_event_loop": _serve,
        CONFIGURE: _configure,
        f"{WINDOWS}.__init__": _put_windows_into_regions,
        f"{loader.LOADER}.device_loading_context": _loading_context,
        f"{manager}.__init__": _initialize_manager,
        **{f"{manager}.{call}": partial(_raising, call) for call in CALLS},
        **loader.register(),
        **buffers.hooks(),
    }
    if os.environ.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "").lower() in ("1", "true"):  # a release includes graphs
        around[f"{BACKEND}.__init__"] = _tag_prefill_graphs
    for target, hook in around.items():
        hooks.HookRegistry.register(target, hook, hooks.HookType.AROUND)


def _serve(run_event_loop: Callable[..., None], scheduler: Any) -> None:
    with _plugin.served(scheduler, scheduler.memory_saver_adapter.enabled):
        run_event_loop(scheduler)


# In the process that starts the ranks: settings with which the memory of their communicators can be released.

#: SGLang's function that sets the environment of all ranks before they start, NCCL_CUMEM_ENABLE to 0 unless it is set.
CONFIGURE = "sglang.srt.entrypoints.engine._set_envs_and_config"
#: NCCL_CUMEM_ENABLE=1 is NCCL's default. With NCCL_GRAPH_REGISTER=0 graphs with NCCL calls replay after a resume.
SETTINGS = {"NCCL_CUMEM_ENABLE": "1", "NCCL_GRAPH_REGISTER": "0"}
#: Names the folder in which the first of several replicas awaits the ranks of all; nobody else can guess it.
REPLICAS = "MEMSAVER_SGLANG_REPLICAS"


def _configure(original: Callable[..., None], server_args: Any, *arguments: Any, **named: Any) -> None:
    """Set each of ``SETTINGS`` that is not set, if there are several ranks, and their memory can be released; give the
    replicas that start now a folder."""
    os.environ[REPLICAS] = f"{tempfile.gettempdir()}/{FOLDER}{secrets.token_hex(16)}"
    ranks = server_args.tp_size * server_args.pp_size
    if ranks > 1 and server_args.enable_memory_saver and communicators.can_suspend():
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
    original(server_args, *arguments, **named)


# In the scheduler's process: the KV cache of models of which some layers have sliding windows.

WINDOWS = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"


def _put_windows_into_regions(original: Callable[..., None], pool: Any, *arguments: Any, **named: Any) -> None:
    """SGLang up to 0.5.21 makes the parts of this cache without ``enable_memory_saver``."""
    parameters = inspect.signature(original).parameters
    options = importlib.import_module(loader.LOADER).get_server_args()
    if "enable_memory_saver" not in parameters and options.enable_memory_saver:
        part = named.get("token_to_kv_pool_class", parameters["token_to_kv_pool_class"].default)
        named["token_to_kv_pool_class"] = lambda **known: part(**{**known, "enable_memory_saver": True})
    original(pool, *arguments, **named)


# In the scheduler's process: an update of weights that are released.


def _loading_context(
    original: Callable[..., AbstractContextManager[Any]], module: Any, device: Any
) -> AbstractContextManager[Any]:
    """SGLang moves weights to the device to compute others from them. From weights that are written while they are
    released it computes none, so they stay in host memory."""
    return nullcontext(module) if "weights" in lent_tags else original(module, device)


# In the scheduler's process: the memory of prefill graphs, under the tag of the other graphs.

TAG = "cuda_graph"
BACKEND = "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend"


def _tag_prefill_graphs(
    original: Callable[..., None], backend: Any, *arguments: Any, enable_memory_saver: bool = False, **named: Any
) -> None:
    """Let ``BreakableCudaGraphBackend`` start even if the memory of graphs is released, which it refuses by itself. A
    prefill is a sequence of graphs, each captured without torch_memory_saver's ``cuda_graph``. All take their memory
    from the pool whose id the backend has: here that of the graphs that are captured with ``cuda_graph``."""
    original(backend, *arguments, enable_memory_saver=False, **named)
    if enable_memory_saver:
        from memsaver_core.compat.torch_memory_saver.entrypoint import graph_pool

        pools = importlib.import_module("sglang.srt.model_executor.runner_utils.pool")
        pool = graph_pool(pools.get_or_create_global_graph_memory_pool(backend._device_module), TAG)
        backend._memsaver_pool = pool  # it must live as long as the graphs
        backend._pool = pool.id


# In the process of SGLang's HTTP server, or of its ``Engine``: a release or a resume that failed in the scheduler is
# reported as a failure. An update of weights waits for the requests in flight, as each holds a lock until it is
# answered. Here it does not wait for those that memsaver holds back: they may themselves wait for that update.

CALLS = ("release_memory_occupation", "resume_memory_occupation")
#: The name of a request for the scheduler's state, which ``SglangEngine`` answers.
QUESTION = "memsaver"
#: How often an update that waits asks what it waits for, seconds.
ASK_S = 1.0


class SchedulerCallError(MemsaverError, kind="scheduler_call"):
    """The call failed in the scheduler, with ``answer``: the status, with which the server answers, and the message."""

    def __init__(self, answer: str) -> None:
        status, _, message = answer.partition(" ")
        self.status_code = int(status)
        super().__init__(message)


async def _raising(
    call: str, _original: Callable[..., Awaitable[None]], manager: Any, obj: Any, request: Any = None
) -> None:
    """A hook around ``TokenizerManager``'s method ``call``, which by itself ignores the scheduler's answer."""
    manager.auto_create_handle_loop()
    for output in await getattr(manager, f"{call}_communicator")(obj):
        if output.rid:
            raise SchedulerCallError(output.rid)


def _initialize_manager(original: Callable[..., None], manager: Any, *arguments: Any, **named: Any) -> None:
    original(manager, *arguments, **named)
    if manager.server_args.enable_memory_saver:
        lock = manager.model_update_lock
        lock.acquire_writer = partial(_acquire_writer, manager, lock, lock.acquire_writer)


async def _acquire_writer(manager: Any, lock: Any, acquire: Callable[[], Awaitable[None]]) -> None:
    """Return once no request is in flight, except those that wait in the scheduler for their memory or its content.
    Then ``release_writer`` may be called."""
    acquiring = asyncio.ensure_future(acquire())
    timeout_s = 0.0
    try:
        while not (await asyncio.wait([acquiring], timeout=timeout_s))[0]:
            if await _all_are_held(manager):
                acquiring.cancel()
                return
            timeout_s = ASK_S
    except BaseException:
        if not acquiring.cancel():
            await lock.release_writer()
        raise


async def _all_are_held(manager: Any) -> bool:
    messages = importlib.import_module("sglang.srt.managers.io_struct")
    outputs = await manager.get_internal_state_communicator(messages.GetInternalStateReq(rid=QUESTION))
    replicas = [output.internal_state for output in outputs]
    return all(each.get("still") for each in replicas) and any(each.get("closed") for each in replicas)
