"""An ``Engine`` over the event loops of its ranks."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memsaver_server.engine import LOCAL_MEMORY, DrainTimeoutError, Engine, Memory, never
from memsaver_server.integrations.scheduler_loop import ranks
from memsaver_server.integrations.scheduler_loop.event_loop import LeadingLoop
from memsaver_server.integrations.scheduler_loop.work import Work
from memsaver_server.settings import Settings

if TYPE_CHECKING:
    from memsaver_server.lifecycle import Lifecycle

#: The longest iteration of an idle event loop and some more, seconds.
ITERATION_S = 2.0


def _nothing() -> None:
    pass


@dataclass(eq=False)
class _Waiter:
    done: Future[None]
    then: Callable[[], None]


class LoopEngine(Engine):
    """An engine over the loop of the scheduler that receives its requests; each other rank calls ``ranks.join``.

    A scheduler is touched in its own thread alone, once per iteration of its event loop, and there the service's work
    is done on every rank, between two batches.
    """

    def __init__(self, work: Work, loop: LeadingLoop, group: ranks.Group) -> None:
        self._work = work
        self.loop = loop
        loop.after = self._note
        several = ranks.gather(group, loop) if group.world_size > 1 else None
        self.memory: Memory = several or LOCAL_MEMORY
        #: Has every rank carry out a command; raises what failed on any of them.
        self._run: Callable[..., object] = (several or loop).run
        self._waiting: list[_Waiter] = []  # of the scheduler's thread alone
        self._flush_at_repair = False
        #: What ``lifecycle`` asks for at the end of an update of weights.
        self.unwritten_weights: tuple[str, ...] = ()

    @abstractmethod
    def take_controls(self, lifecycle: Lifecycle, settings: Settings) -> None:
        """Have ``lifecycle`` carry out what the engine's own server is asked for."""

    # Of the methods of ``Engine``.

    def is_alive(self) -> bool:
        return self.loop.is_alive()

    def flush_cache(self) -> None:
        """Forget every cached prefix. Touches no memory that is released.

        In a hibernated process the scheduler's own reset would wait for the device: it is done after the wake-up.

        Raises:
            MemsaverError: pages are in use.
        """
        if self.memory.status().hibernated:
            self._flush_at_repair = True
        else:
            self._run("flush")

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> None:
        """Write buffers back into weights that came back without content, and forget the prefixes of a lost cache.

        The weights themselves are then written by the engine's own update calls.
        """
        self._run("repair", tuple(lost))
        if self._flush_at_repair:
            self._run("flush")
            self._flush_at_repair = False

    def when_still(
        self,
        timeout_s: float,
        then: Callable[[], None] = _nothing,
        *,
        begin: Callable[[], None] = _nothing,
        undo: Callable[[], None] = _nothing,
        given_up: Callable[[], bool] = never,
    ) -> None:
        """Have ``then`` called once no request is in flight, before another one enters; return after it.

        ``begin`` is called at once, and ``undo`` if it took too long; all three in the scheduler's thread.

        Raises:
            DrainTimeoutError: it took longer than ``timeout_s``, or was given up. ``then`` was not called.
        """
        begun_at = time.monotonic()
        still = _Waiter(Future(), then)

        def start() -> None:
            begin()
            self._waiting.append(still)

        def give_up() -> None:
            if still in self._waiting:
                self._waiting.remove(still)
                undo()

        begun = self.loop.submit(start)
        # Without any time left, too, one iteration is tried.
        self.loop.wait_for_future(begun, max(timeout_s, ITERATION_S), given_up)
        if begun.cancel():
            raise DrainTimeoutError(timeout_s, self._work.in_flight())
        begun.result()
        self.loop.wait_for_future(still.done, begun_at + timeout_s - time.monotonic(), given_up)
        if not still.done.done():
            # If this one began just now, the iteration that it began in may still end it.
            self.loop.wait_for_future(self.loop.submit(give_up), ITERATION_S)
            if not still.done.done():
                raise DrainTimeoutError(timeout_s, self._work.in_flight())

    # In the scheduler's thread.

    def is_still(self) -> bool:
        """Whether no request is in flight."""
        return self._work.is_still()

    def _note(self) -> None:
        """The scheduler has processed what it received."""
        if self._waiting and self.is_still():
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each.then()
                each.done.set_result(None)
