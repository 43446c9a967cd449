"""The KV cache of an engine that hands out its pages in another process, or in another thread between two steps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from memsaver_core.contract.errors import BadRequestError, DrainTimeoutError, UnsupportedError
from memsaver_core.contract.requests import CacheMode
from memsaver_server import clock
from memsaver_server.engine import DRAIN_POLL_S, CachePages, never


class LimitedPages(ABC):
    """Implements ``ResizableEngine`` by what ``ask_pages`` does. One page is never handed out."""

    _kept = 0  # as last read: each question waits for a step of the engine

    @abstractmethod
    def ask_pages(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Do what ``name`` says between two steps of the engine; return ``{"result": ...}``, or ``{"obstacle": why the
        pages of this engine cannot be limited}``. Names:

        - ``read``: the attributes of ``CachePages``, and ``least``, the pages of the smallest cache.
        - ``limit``: hand out only so many pages, the first ones. ``keep``: likewise, once only these have memory; the
          result is that of ``read``.
        - ``waiting``: how many behind the limit are in use. ``late``: the requests that use them.
        - ``preempt``: have such requests wait and be computed again.
        """

    @abstractmethod
    def back_pages(self, pages: int, before: int) -> None:
        """Back only the first ``pages`` pages with memory, on every rank, or only the first ``before`` as now."""

    def kv_cache(self) -> CachePages:
        return self._read("read")

    def limit_kv_cache(
        self, pages: int, timeout_s: float, mode: CacheMode = "wait", given_up: Callable[[], bool] = never
    ) -> None:
        """See ``ResizableEngine``. Raises BadRequestError if the longest request would not fit."""
        deadline = clock.monotonic() + timeout_s
        now = self._ask("read")
        if pages < min(now["least"], now["kept"]):
            raise BadRequestError(
                f"a KV cache of {pages} pages is too small: the longest request needs {now['least']} with the one that "
                "no request gets; the KV cache was not resized"
            )
        self._ask("limit", pages)
        try:
            if mode == "preempt":
                self._ask("preempt")
            while self._ask("waiting"):
                if given_up() or clock.monotonic() >= deadline:
                    raise DrainTimeoutError(timeout_s, self._ask("late"), "the KV cache is as before")
                time.sleep(DRAIN_POLL_S)
        except BaseException:
            self._ask("limit", now["kept"])
            raise

    def resize_kv_cache(self, pages: int) -> CachePages:
        self.back_pages(pages, self._kept)
        return self._read("keep", pages)

    def _read(self, name: str, *arguments: Any) -> CachePages:
        now = self._ask(name, *arguments)
        needed = max(now["needed"], now.pop("least"))
        return CachePages(**{**now, "needed": needed})

    def _ask(self, name: str, *arguments: Any) -> Any:
        answer = self.ask_pages(name, *arguments)
        if "obstacle" in answer:
            raise UnsupportedError(f"the KV cache of this engine cannot be resized: {answer['obstacle']}")
        if name in ("read", "keep"):
            self._kept = answer["result"]["kept"]
        return answer["result"]
