"""What memsaver changes in tokenspeed's processes: by the entry point ``tokenspeed.plugins`` (``register``), or by hand
(``attach``)."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from memsaver_core.adopting import adopt_shared
from memsaver_core.compat.patching import wrap
from memsaver_server.integrations.adapter.plugin import Plugin

#: The tag of the attention workspaces, which tokenspeed creates outside of its regions.
TAG = "workspace"
BACKENDS = "tokenspeed.runtime.layers.attention.backends"
REGISTRY = "tokenspeed.runtime.layers.attention.registry"
#: The global variable of each, by its module in ``BACKENDS``, whose first backend creates it for the process.
WORKSPACES = {"paged.flashmla": "_global_workspace_buffer", "paged.trtllm_mla": "_trtllm_workspace_buffer"}
#: The module with the block of each device of which other backends take views.
POOLS = "tokenspeed.runtime.execution.workspace"

ADAPTER = "tokenspeed.runtime.utils.torch_memory_saver_adapter"
_plugin = Plugin("MEMSAVER_TOKENSPEED", "memsaver_server.integrations.tokenspeed.engine:TokenspeedEngine", ADAPTER)
attach, follow = _plugin.attach, _plugin.follow


@functools.cache
def register() -> None:
    """The entry point. Carry out the memory calls of each engine of this process whose memory is in memsaver's regions,
    and serve it at ``MEMSAVER_TOKENSPEED`` if that is set."""
    if not _plugin.starts():
        return
    wrap(importlib.import_module(REGISTRY), "create_attn_components", _with_tagged_workspaces)
    wrap(importlib.import_module("tokenspeed.runtime.engine.event_loop").EventLoop, "event_loop", _serve)


def _serve(run: Callable[[Any], None], loop: Any) -> None:
    with _plugin.served(loop, loop.server_args.enable_memory_saver):
        run(loop)


def _with_tagged_workspaces(create: Callable[..., Any], server_args: Any, *arguments: Any, **named: Any) -> Any:
    """Move workspaces under ``TAG`` after ``create_attn_components``, when no graph has captured their addresses yet.
    They come back as zeros, which TensorRT-LLM's kernels expect of their semaphores; no kernel needs another's."""
    components = create(server_args, *arguments, **named)
    held = [getattr(sys.modules.get(f"{BACKENDS}.{module}"), name, None) for module, name in WORKSPACES.items()]
    held += [pool._block for pool in getattr(sys.modules.get(POOLS), "_pools", {}).values()]
    workspaces = [each for each in held if isinstance(each, torch.Tensor)]
    if server_args.enable_memory_saver and workspaces:
        adopt_shared((each, TAG, None) for each in workspaces)  # backends keep views
        torch.cuda.empty_cache()  # the memory that they were in
    return components
