"""What a SGLang scheduler must be for memsaver to serve it."""

from __future__ import annotations

import importlib
from typing import Any

import memsaver_core as ms
from memsaver_core.errors import ConfigurationError


def check(scheduler: Any) -> None:
    """Check that ``scheduler`` can be served.

    Raises:
        ConfigurationError: it cannot; the message says why.
    """
    ranks = scheduler.ps
    mode = getattr(scheduler.disaggregation_mode, "value", scheduler.disaggregation_mode)
    problem = ""
    if ms.enabled() and not scheduler.memory_saver_adapter.enabled:
        problem = "its memory is in no region; start it with --enable-memory-saver"
    elif ms.enabled() and not _is_ours(scheduler.memory_saver_adapter):
        problem = (
            "it uses another torch_memory_saver; install memsaver-torch-memory-saver in place of that, or call "
            "memsaver_core.compat.install() before SGLang is imported"
        )
    elif (ranks.tp_size, ranks.pp_size, ranks.dp_size) != (1, 1, 1):
        problem = (
            f"it is one of several ranks (tp {ranks.tp_size}, pp {ranks.pp_size}, dp {ranks.dp_size}), which release "
            "together by SGLang's own /release_memory_occupation; use that"
        )
    elif mode != "null":
        problem = f"it is the {mode} side of a disaggregated engine"
    elif scheduler.rust_server is not None:
        problem = "requests reach it by SGLang's Rust server; unset SGLANG_RUST_SERVER"
    if problem:
        raise ConfigurationError(f"SGLang's scheduler cannot be served: {problem}")


def _is_ours(adapter: Any) -> bool:
    """Whether SGLang's adapter imported memsaver's module under the name ``torch_memory_saver``."""
    module = importlib.import_module(type(adapter).__module__)
    return getattr(getattr(module, "torch_memory_saver", None), "__name__", "").startswith("memsaver_core.")
