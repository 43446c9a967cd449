"""Locks by name, so that operations on different engines run side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from memsaver_server.threads import first_of


def of_cache(name: str) -> str:
    """Return the name of the lock that a resize of this member's KV cache holds: a release and a resume do not wait for
    it, as an engine ends the resize for them."""
    return f"KV cache of {name}"


class Locks:
    """One lock for each name. Use it in one event loop."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}

    @asynccontextmanager
    async def held(self, names: Iterable[str], given_up: asyncio.Event | None = None) -> AsyncIterator[None]:
        """Hold the locks of ``names``; only some of them if ``given_up`` is set before. They are taken in one order, so
        that two callers never wait for each other."""
        async with AsyncExitStack() as stack:

            async def take() -> None:
                for name in sorted(set(names)):
                    await stack.enter_async_context(self._locks.setdefault(name, asyncio.Lock()))

            async with first_of(take(), (given_up or asyncio.Event()).wait()):
                pass
            yield

    def any_held(self, names: Iterable[str]) -> bool:
        """Return whether an operation has one of them now."""
        return any(lock.locked() for name in names if (lock := self._locks.get(name)))
