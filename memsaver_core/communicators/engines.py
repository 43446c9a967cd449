"""vLLM's and SGLang's groups of ranks, by the names that both engines use for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

#: Modules that keep the groups of ranks by name, and the engines' names.
_ENGINES = {"vllm.distributed.parallel_state": "vllm", "sglang.srt.distributed.parallel_state": "sglang"}


def groups() -> Iterator[tuple[str, Any]]:
    """Return each group of ranks with its engine's name, in the order of their creation."""
    for module, engine in _ENGINES.items():
        for reference in tuple(getattr(sys.modules.get(module), "_groups", {}).values()):
            if (group := reference()) is not None:
                yield engine, group


def part(group: Any, name: str) -> Any:
    """Return what ``group`` communicates with under this name, or None. vLLM's groups keep it one object deeper."""
    found = getattr(group, name, None)
    return found if found is not None else getattr(getattr(group, "device_communicator", None), name, None)
