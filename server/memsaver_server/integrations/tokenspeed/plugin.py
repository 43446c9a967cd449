"""What memsaver changes in tokenspeed's processes: by the entry point ``tokenspeed.plugins`` (``register``), by
``serve.py`` for versions without it, or by hand (``attach``)."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core.compat.patching import wrap
from memsaver_server.integrations.adapter.plugin import Plugin

#: The tag of the attention workspaces, which tokenspeed creates outside of its regions.
TAG = "workspace"
BACKENDS = "tokenspeed.runtime.layers.attention.backends"
#: The global variable of each, by its module in ``BACKENDS``, whose first backend creates it for the process.
WORKSPACES = {
    "flashmla": "_global_workspace_buffer",
    "tokenspeed_mla": "_cutedsl_workspace_buffer",
    "trtllm": "_global_workspace_buffer",
    "trtllm_mla": "_trtllm_workspace_buffer",
}

ADAPTER = "tokenspeed.runtime.utils.torch_memory_saver_adapter"
_plugin = Plugin("MEMSAVER_TOKENSPEED", "memsaver_server.integrations.tokenspeed.engine:TokenspeedEngine", ADAPTER)
attach, follow = _plugin.attach, _plugin.follow


@functools.cache
def register() -> None:
    """The entry point. Carry out the memory calls of each engine of this process whose memory is in memsaver's regions,
    and serve it at ``MEMSAVER_TOKENSPEED`` if that is set."""
    if not _plugin.starts():
        return
    module = importlib.import_module("tokenspeed.runtime.engine.event_loop")
    wrap(module, "create_attn_components", _with_tagged_workspaces)  # in 0.1.0
    for name in ("event_loop", "event_loop_overlap"):  # the latter up to 0.1.0
        wrap(module.EventLoop, name, _serve)


def _serve(run: Callable[[Any], None], loop: Any) -> None:
    with _plugin.served(loop, loop.server_args.enable_memory_saver):
        run(loop)


def _with_tagged_workspaces(create: Callable[..., Any], server_args: Any, *arguments: Any, **named: Any) -> Any:
    """Move workspaces under ``TAG`` after ``create_attn_components``, when no graph has captured their addresses yet.
    They come back as zeros, which TensorRT-LLM's kernels expect of their semaphores; no kernel needs another's."""
    components = create(server_args, *arguments, **named)
    held = [getattr(sys.modules.get(f"{BACKENDS}.{module}"), name, None) for module, name in WORKSPACES.items()]
    by_device = [each for one in held for each in (one.values() if isinstance(one, dict) else [one])]
    workspaces = [each for each in by_device if isinstance(each, torch.Tensor)]
    if server_args.enable_memory_saver and workspaces:
        ms.adopt(workspaces, TAG)
        torch.cuda.empty_cache()  # the memory that they were in
    return components
