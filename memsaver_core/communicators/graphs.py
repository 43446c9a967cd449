"""NCCL inside of CUDA graphs."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("memsaver")


def warn_of_registered_graphs() -> None:
    """Warn if NCCL registers the buffers of CUDA graphs: their replay may hang after memory was remapped."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return
    if nccl_registers_graphs(dist.get_backend_config(), os.environ.get("NCCL_GRAPH_REGISTER")):
        logger.warning(
            "NCCL is in use without NCCL_GRAPH_REGISTER=0: CUDA graphs with NCCL calls may hang on replay after a "
            "resume. Set NCCL_GRAPH_REGISTER=0 before the engine starts"
        )


def nccl_registers_graphs(backends: str, setting: str | None) -> bool:
    """Whether NCCL registers the buffers of captured graphs, its default.

    Args:
        backends: torch's backend per kind of device, as in ``cpu:gloo,cuda:nccl``.
        setting: NCCL_GRAPH_REGISTER, or None if it is not set.
    """
    return "nccl" in backends and setting != "0"
