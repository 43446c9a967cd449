"""The KV cache of an engine, made smaller and larger while it serves."""

from __future__ import annotations

import math
import threading
import time

from memsaver_core.contract.errors import BadRequestError, ConflictError
from memsaver_core.contract.reports import ResizedAnswer
from memsaver_core.contract.requests import ResizeKvCache
from memsaver_core.contract.status import KvCacheAnswer
from memsaver_server.engine import CachePages, ResizableEngine
from memsaver_server.engine.lifecycle import Lifecycle
from memsaver_server.engine.plan import readable
from memsaver_server.settings import Settings

#: The tag of the KV cache.
TAG = "kv_cache"
_AS_BEFORE = "the KV cache was not resized"


class ElasticCache:
    """Resizes the KV cache of ``engine``, one resize at a time. Every method may be called from any thread.

    First the engine gives up the pages that go, while releases and resumes go on; then the memory moves, under the lock
    that excludes them.
    """

    def __init__(
        self, engine: ResizableEngine, lifecycle: Lifecycle, settings: Settings, closing: threading.Event
    ) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self._drain_timeout_s = settings.drain_timeout_s
        self._closing = closing
        self._resizing = threading.Lock()

    def read(self) -> KvCacheAnswer:
        """Return the size of the cache, and the sizes that it can have now."""
        pages = self._engine.kv_cache()
        free = min((each.total_bytes - each.used_bytes for each in self._lifecycle.memory.read_devices()), default=0)
        sizes = {
            "bytes": pages.kept,
            "used_bytes": pages.used,
            "smallest_bytes": max(1, pages.needed),
            "largest_bytes": min(pages.total, pages.kept + free // pages.page_bytes),
            "full_bytes": pages.total,
        }
        return KvCacheAnswer(
            **{name: count * pages.page_bytes for name, count in sizes.items()},
            tokens=pages.kept * pages.page_tokens,
            page_bytes=pages.page_bytes,
            page_tokens=pages.page_tokens,
        )

    def resize(self, asked: ResizeKvCache) -> ResizedAnswer:
        """Resize the cache as asked; return its sizes then.

        Raises:
            BadRequestError: it cannot have this size.
            ConflictError: another resize runs.
            NotResidentError: the cache is released.
            DrainTimeoutError: requests used what was to go until the deadline.
            OutOfDeviceMemoryError: the device has too little free memory.
            MemoryBusyError: an operation stalls. After each of these the cache is as before.
        """
        started = time.monotonic()
        if not self._resizing.acquire(blocking=False):
            raise ConflictError(f"another resize runs; {_AS_BEFORE}")
        try:
            with self._lifecycle.resident(TAG, _AS_BEFORE):
                before = self._engine.kv_cache()
            pages = _pages(asked, before)
            self._move(asked, before.kept, pages)
        finally:
            self._resizing.release()
        sizes = [readable(count * before.page_bytes) for count in (before.kept, pages)]
        message = f"the KV cache has {sizes[1]}" + (f" instead of {sizes[0]}" if before.kept != pages else " already")
        return ResizedAnswer(**dict(self.read()), message=message, seconds=time.monotonic() - started)

    def _move(self, asked: ResizeKvCache, before: int, pages: int) -> None:
        if pages < before:
            timeout_s = self._drain_timeout_s if asked.timeout_s is None else asked.timeout_s
            self._engine.limit_kv_cache(pages, timeout_s, asked.mode, self._closing.is_set)
        try:
            with self._lifecycle.resident(TAG, _AS_BEFORE):
                self._engine.resize_kv_cache(pages)
        except BaseException:
            self._engine.limit_kv_cache(before, 0.0)
            raise


def _pages(asked: ResizeKvCache, now: CachePages) -> int:
    """Return the pages of a cache of the size that is asked for."""
    full = f"{readable(now.total * now.page_bytes)} or {now.total * now.page_tokens} tokens"
    if asked.fraction is not None:
        pages = max(1, int(asked.fraction * now.total))
    elif asked.bytes is not None:
        pages = asked.bytes // now.page_bytes
    else:
        pages = math.ceil((asked.tokens or 0) / now.page_tokens)
    if not 1 <= pages <= now.total:
        raise BadRequestError(
            f"a KV cache of {pages} pages is impossible: a page takes {readable(now.page_bytes)}, and the largest "
            f"cache, with which the engine began, {full}; {_AS_BEFORE}"
        )
    return pages
