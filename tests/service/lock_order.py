"""Checks that threads take the service's locks in one order, so that no two of them wait for each other.

The order is that of ``memsaver_server.engine.lifecycle``. A lock that is out of order is not taken: the call fails, and
so does the test.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

#: The modules whose locks are checked, in the order in which a thread takes them.
ORDER = (
    "memsaver_server.engine.lifecycle",  # of the memory
    "memsaver_server.engine.admission",
    "memsaver_server.operation.queue",  # of the operations
)


class LockOrder:
    """Makes locks that note which others a thread holds when it takes them."""

    def __init__(self) -> None:
        self.broken: list[str] = []
        #: The pairs of locks that a thread has held at the same time.
        self.seen: set[tuple[int, int]] = set()
        self._held = threading.local()

    @property
    def held(self) -> list[int]:
        """The levels of the locks that this thread holds."""
        if not hasattr(self._held, "levels"):
            self._held.levels = []
        levels: list[int] = self._held.levels
        return levels

    def module(self, level: int) -> SimpleNamespace:
        """Return what stands for ``threading`` in a module whose locks are of ``level``."""
        return SimpleNamespace(
            Lock=lambda: _Checked(self, level, threading.Lock()),
            RLock=lambda: _Checked(self, level, threading.RLock()),
            Condition=lambda: threading.Condition(_Checked(self, level, threading.RLock())),  # type: ignore[arg-type]
        )


class _Checked:
    def __init__(self, order: LockOrder, level: int, lock: Any) -> None:
        self._order = order
        self._level = level
        self._lock = lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        held = self._order.held
        self._order.seen.update((other, self._level) for other in held if other != self._level)
        if held and max(held) > self._level:
            self._order.broken.append(f"the lock of {ORDER[self._level]} in that of {ORDER[max(held)]}")
            raise AssertionError(self._order.broken[-1])
        if not self._lock.acquire(blocking, timeout):
            return False
        held.append(self._level)
        return True

    def release(self) -> None:
        self._order.held.remove(self._level)
        self._lock.release()

    __enter__ = acquire

    def __exit__(self, *_error: object) -> None:
        self.release()

    # For threading.Condition.

    def _is_owned(self) -> bool:
        owned: bool = self._lock._is_owned()
        return owned

    def _release_save(self) -> tuple[int, Any]:
        count = self._order.held.count(self._level)
        for _ in range(count):
            self._order.held.remove(self._level)
        return count, self._lock._release_save()

    def _acquire_restore(self, saved: tuple[int, Any]) -> None:
        count, state = saved
        self._lock._acquire_restore(state)
        self._order.held.extend([self._level] * count)


@contextmanager
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[LockOrder]:
    """Check the locks of services that are made in the block, as long as they live."""
    order = LockOrder()
    for level, name in enumerate(ORDER):
        monkeypatch.setattr(f"{name}.threading", order.module(level))
    yield order
    assert order.broken == []
