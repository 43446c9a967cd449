"""How often a KV cache had no room to keep a prefix that was asked for again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from memsaver_core.compat.patching import Function

#: Of how many prefixes it is known that they were computed; the oldest are forgotten.
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
