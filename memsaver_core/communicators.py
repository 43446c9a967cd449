"""The NCCL communicators of this process, as far as torch knows them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from memsaver_core.errors import UnsupportedError
from memsaver_core.reports import CommunicatorStatus


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


def found() -> tuple[CommunicatorStatus, ...]:
    """Return the communicators of this process: none can be suspended yet, so none is listed."""
    return ()


statuses = found


def suspend(names: Sequence[str], timeout_s: float) -> None:
    """Suspend communicators; every rank of each must call this."""
    if names:
        raise UnsupportedError(f"this process has no communicator {names[0]!r}; nothing was done")


resume = suspend
