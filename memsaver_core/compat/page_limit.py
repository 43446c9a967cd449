"""Limits the pages of its KV cache that an engine hands out: what vLLM's blocks and SGLang's pages have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sized
from typing import Any

from memsaver_core.compat.patching import Function

#: How many computed prefixes are remembered; the oldest are forgotten.
KNOWN = 1 << 16
#: A page counts as found again for so long, or up to twice that, seconds.
RECENT_S = 20.0


class Prefixes:
    """Counts how often requests compute what an earlier request computed, too, and the cache has evicted since; and the
    pages on which they find a prefix."""

    def __init__(self) -> None:
        self.recomputed = 0
        self.forget_all()

    def forget_all(self) -> None:
        self._computed: dict[Hashable, None] = {}
        self._found: dict[Hashable, int] = {}
        self._found_before: dict[Hashable, int] = {}
        self._since = time.monotonic()

    def computed(self, prefix: Hashable) -> None:
        """Note that a request computes the last tokens of ``prefix``, as it has not found them in the cache."""
        if prefix in self._computed:
            del self._computed[prefix]
            self.recomputed += 1
        elif len(self._computed) == KNOWN:
            del self._computed[next(iter(self._computed))]
        self._computed[prefix] = None

    def found(self, prefix: Hashable, pages: int = 1) -> None:
        """Note that a request has found ``prefix`` on so many pages."""
        self._forget_old()
        self._found_before.pop(prefix, None)
        self._found[prefix] = pages

    def reused(self) -> int:
        """Return on how many pages prefixes were found lately."""
        self._forget_old()
        return sum(self._found.values()) + sum(self._found_before.values())

    def _forget_old(self) -> None:
        if time.monotonic() - self._since > RECENT_S:
            self._found, self._found_before, self._since = {}, self._found, time.monotonic()

    def forget(self, reset: Function, *args: Any, **kwargs: Any) -> Any:
        """Call ``reset``, which empties the cache on purpose: what is computed after it does not count."""
        self.forget_all()
        return reset(*args, **kwargs)


class PageLimit(ABC):
    """Has an engine hand out only the first pages of its cache, up to a limit. The free ones behind that are held: they
    are taken out of the engine's allocator, cache no prefix, and do not count as the engine's. A page in use is held
    once it is free. The first ``kept`` pages have memory. Derived classes have ``late`` and ``preempt`` of
    ``LimitedPages``, too."""

    _held: Sized

    def __init__(self, total: int, least: int, page_tokens: int) -> None:
        """Limit ``total`` pages of ``page_tokens`` tokens each, of which the longest request needs ``least``."""
        self._total = self._limit = self._kept = total
        self._least = min(total, least)
        self._page_tokens = page_tokens
        self._prefixes = Prefixes()

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
            "recomputed": self._prefixes.recomputed,
            "reused": min(self._kept, self._prefixes.reused()),
        }

    @abstractmethod
    def limit(self, pages: int) -> None: ...

    def keep(self, pages: int) -> dict[str, int]:
        self._kept = pages
        self.limit(pages)
        return self.read()

    def waiting(self) -> int:
        return self._total - self._limit - len(self._held)
