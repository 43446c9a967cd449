"""NCCL's settings under which SGLang's ranks can give back what their communicators hold."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from memsaver_core import communicators

#: Sets the environment of all ranks before they are started. SGLang switches NCCL_CUMEM_ENABLE off unless it is set.
CONFIGURE = "sglang.srt.entrypoints.engine._set_envs_and_config"
#: NCCL_CUMEM_ENABLE is NCCL's own default. Graphs with NCCL calls replay after a resume without NCCL_GRAPH_REGISTER.
SETTINGS = {"NCCL_CUMEM_ENABLE": "1", "NCCL_GRAPH_REGISTER": "0"}


def configure(original: Callable[..., None], server_args: Any, *arguments: Any, **named: Any) -> None:
    """A hook around ``CONFIGURE``: several ranks whose memory is released get ``SETTINGS``, if they are not set."""
    ranks = server_args.tp_size * server_args.pp_size
    if ranks > 1 and server_args.enable_memory_saver and communicators.can_suspend():
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
    original(server_args, *arguments, **named)
