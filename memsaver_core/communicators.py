"""The NCCL communicators of this process, as far as torch knows them."""

from __future__ import annotations

import sys
from typing import Any

import torch


def nccl_groups() -> tuple[str, ...]:
    """Return the names of torch's process groups on NCCL, without groups of one process, which share no memory.

    Communicators made without torch are not seen.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not torch.distributed.is_available():
        return ()
    world = c10d._world
    return tuple(
        str(world.pg_names.get(group, "default"))
        for group in world.pg_map
        if "nccl" in str(world.pg_backend_config.get(group, "")) and group.size() > 1
    )
