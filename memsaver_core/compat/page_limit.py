"""Limits the pages of its KV cache that an engine hands out: what vLLM's blocks and SGLang's pages have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sized
from typing import Any

from memsaver_core.compat.patching import Function

#: How many computed prefixes are remembered; the oldest are forgotten.
KNOWN = 1 << 16


class Recomputed:
    """Counts the requests that compute what an earlier request computed, too: the cache has evicted it since."""

    def __init__(self) -> None:
        self.count = 0
        self._known: dict[Hashable, None] = {}

    def note(self, prefix: Hashable) -> None:
        """Note that a request computes the last tokens of ``prefix``, as it has not found them in the cache."""
        if prefix in self._known:
            del self._known[prefix]
            self.count += 1
        elif len(self._known) == KNOWN:
            del self._known[next(iter(self._known))]
        self._known[prefix] = None

    def forget(self, reset: Function, *args: Any, **kwargs: Any) -> Any:
        """Call ``reset``, which empties the cache on purpose: what is computed after it does not count."""
        self._known.clear()
        return reset(*args, **kwargs)


class PageLimit(ABC):
    """Has an engine hand out only pages below a limit. A free page at or above it is held: the engine's allocator does
    not have it, it caches no prefix, and the engine counts as that much smaller. A page in use is held once it is free.
    The first ``kept`` pages have memory. A derived class has the other methods that ``LimitedPages.ask_pages`` names:
    ``late`` and ``preempt``."""

    _held: Sized

    def __init__(self, total: int, least: int, page_tokens: int) -> None:
        """Limit ``total`` pages of ``page_tokens`` tokens each, of which the longest request needs ``least``."""
        self._total = self._limit = self._kept = total
        self._least = min(total, least)
        self._page_tokens = page_tokens
        self._recomputed = Recomputed()

    @abstractmethod
    def in_use(self) -> tuple[int, int]:
        """Return how many pages requests use, and how many, from page 0, contain all of these."""

    def read(self) -> dict[str, int]:
        used, needed = self.in_use()
        return {
            "total": self._total,
            "kept": self._kept,
            "used": used,
            "least": self._least,
            "needed": needed,
            "page_tokens": self._page_tokens,
            "recomputed": self._recomputed.count,
        }

    @abstractmethod
    def limit(self, pages: int) -> None: ...

    def keep(self, pages: int) -> None:
        self._kept = pages
        self.limit(pages)

    def waiting(self) -> int:
        return self._total - self._limit - len(self._held)
