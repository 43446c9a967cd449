"""Stands in for vLLM's own allocator. It holds nothing, so that a test sees which allocator was used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class CuMemAllocator:
    instance: Any = None
    default_tag = "default"

    @staticmethod
    def get_instance() -> Any:
        if CuMemAllocator.instance is None:
            CuMemAllocator.instance = CuMemAllocator()
        return CuMemAllocator.instance

    def get_current_usage(self) -> int:
        return 0

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        yield

    def sleep(self, offload_tags: Any = None) -> None:
        pass

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass
