"""Whether a scheduler can be served."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import memsaver_core as ms


def lacking(owner: Any, paths: Iterable[str]) -> list[str]:
    """Return those of ``paths`` (names of attributes, joined by dots) that ``owner`` does not have."""
    found = []
    for path in paths:
        try:
            attrgetter(path)(owner)
        except AttributeError:
            found.append(path)
    return found


def memory_problem(enabled: bool, adapter: str) -> str:
    """Return why an engine's memory cannot be released, or an empty string.

    Args:
        enabled: whether the engine puts it into regions of ``torch_memory_saver``.
        adapter: the engine's module that imports ``torch_memory_saver``.
    """
    if not ms.enabled():
        return ""
    if not enabled:
        return "its memory is in no region; start it with --enable-memory-saver"
    module = getattr(importlib.import_module(adapter), "torch_memory_saver", None)
    if getattr(module, "__name__", "").startswith("memsaver_core."):
        return ""
    return (
        "it uses another torch_memory_saver; install memsaver-torch-memory-saver in place of that, or call "
        "memsaver_core.compat.install() before it is imported"
    )
