"""What a rank does with SGLang's ``Scheduler``."""

from __future__ import annotations

from typing import Any

from memsaver_core.hibernation.preconditions import register_check
from memsaver_server.engine import DrainTimeoutError
from memsaver_server.integrations.scheduler_loop.work import Work
from memsaver_server.integrations.sglang import names

_HIERARCHICAL_CACHE = (
    "SGLang's hierarchical cache is in use, with which a hibernated server has hung as it woke up; start it without "
    "--enable-hierarchical-cache"
)


class SchedulerWork(Work):
    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._aside: tuple[list[Any], bool] | None = None  # requests that waited, and whether the engine was paused
        if (updater := getattr(scheduler, "weight_updater", None)) is not None:
            updater.flush_cache = self._flush_after_update
        if getattr(scheduler.server_args, "enable_hierarchical_cache", False):
            register_check(lambda: [_HIERARCHICAL_CACHE])

    def is_still(self) -> bool:
        """Whether no request runs, no paused one holds a part of the cache, and none of it is being copied."""
        scheduler = self._scheduler
        idle = scheduler.is_fully_idle() or (
            scheduler._engine_paused
            and scheduler.running_batch.is_empty()
            and scheduler.last_batch is None
            and scheduler.chunked_req is None
        )
        return bool(idle) and not self._looks_at_copies()

    def has_nothing_to_do(self) -> bool:
        """Cheap while requests run."""
        scheduler = self._scheduler
        idle = scheduler._engine_paused or (scheduler.running_batch.is_empty() and scheduler.is_fully_idle())
        return bool(idle) and not self._looks_at_copies()

    def _looks_at_copies(self) -> bool:
        """Whether the event loop asks the device for copies of the hierarchical cache, which it does unless paused."""
        return not self._scheduler._engine_paused and names.copies_cache(self._scheduler)

    def in_flight(self) -> list[str]:
        scheduler = self._scheduler
        running = sorted(request.rid for request in names.running(scheduler))
        return [*running, *(request.rid for request in list(scheduler.waiting_queue) if request.rid not in running)]

    def flush(self) -> None:
        """Forget every cached prefix.

        Raises:
            DrainTimeoutError: requests are running, under which SGLang does not flush.
        """
        scheduler = self._scheduler
        if scheduler.is_fully_idle():
            scheduler.flush_cache(empty_cache=False)
            return
        if not self.is_still():
            raise DrainTimeoutError(0, self.in_flight())
        # flush_cache() refuses while requests wait. Those that wait here were retracted and hold nothing of the cache.
        scheduler.tree_cache.reset()
        names.clear_pools(scheduler)
        if draft_worker := getattr(scheduler, "draft_worker", None):
            draft_worker.clear_cache_pool()

    def _flush_after_update(self, empty_cache: bool = True) -> bool:
        """Stands in for SGLang's flush after it has written weights, of which a failure ends the process."""
        if self._scheduler.is_fully_idle() or not self.is_still():
            return bool(self._scheduler.flush_cache(empty_cache=empty_cache))
        self.flush()
        return True

    def set_aside(self) -> None:
        """Make room for the verification prompt: no request waits, no prefix is cached."""
        scheduler = self._scheduler
        self.flush()
        self._aside = (list(scheduler.waiting_queue), scheduler._engine_paused)
        scheduler.waiting_queue[:] = []
        scheduler._engine_paused = False

    def bring_back(self) -> None:
        """Undo ``set_aside``, if that was done; forget the prompt's prefixes, unless it still runs."""
        if self._aside is None:
            return
        self._scheduler.waiting_queue[:], self._scheduler._engine_paused = self._aside
        self._aside = None
        if self.is_still():
            self.flush()

    def models(self) -> list[Any]:
        return names.models(self._scheduler)
