"""Whether somebody else's engine can be tested on this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch

import memsaver_core as ms


def missing(name: str, module: str, plugins: str) -> str:
    """What the tests of the engine ``name`` need and this machine lacks, or an empty string.

    Args:
        module: what the engine is imported as.
        plugins: the group of entry points by which it finds memsaver.
    """
    if not torch.cuda.is_available() or ms.driver_name() != "cuda":
        return "needs an NVIDIA GPU and the CUDA driver"
    if importlib.util.find_spec(module) is None:
        return f"{name} is not installed"
    names = [entry.name for entry in importlib.metadata.entry_points(group=plugins)]
    return "" if "memsaver" in names else f"memsaver is not installed, so that {name} does not find its plugin"
