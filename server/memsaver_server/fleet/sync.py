"""The synchronous twin of ``AsyncFleet``."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from memsaver_server.fleet.fleet import AsyncFleet
from memsaver_server.fleet.members import Membership
from memsaver_server.fleet.record import Record
from memsaver_server.fleet.request import DEFAULT_TIMEOUT_S
from memsaver_server.fleet.results import EngineResult, FleetEvent, FleetProgress, FleetResult, FleetStatus, Mode
from memsaver_server.fleet.selectors import Selector
from memsaver_server.schemas import DrainMode

_T = TypeVar("_T")


class Fleet:
    """As ``AsyncFleet``, blocking. Safe to use from several threads: its event loop runs in a thread of its own."""

    def __init__(
        self,
        membership: Membership,
        *,
        record: Record | None = None,
        api_key: str | None = None,
        lease_s: float = 30.0,
        silence_s: float = 10.0,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="memsaver-fleet", daemon=True)
        self._thread.start()
        self._fleet = self._call(
            _made(membership, record=record, api_key=api_key, lease_s=lease_s, silence_s=silence_s, verify=verify)
        )

    def release(
        self,
        selector: Selector | None = None,
        *,
        tags: Sequence[str] | None = None,
        mode: Mode = "all",
        hibernate: bool = False,
        drain: DrainMode = "wait",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        operation_id: str | None = None,
        **options: Any,
    ) -> FleetResult:
        """See ``AsyncFleet.release``."""
        return self._call(
            self._fleet.release(
                selector,
                tags=tags,
                mode=mode,
                hibernate=hibernate,
                drain=drain,
                timeout_s=timeout_s,
                operation_id=operation_id,
                **options,
            )
        )

    def resume(
        self,
        selector: Selector | None = None,
        *,
        tags: Sequence[str] | None = None,
        mode: Mode = "all",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        operation_id: str | None = None,
        **options: Any,
    ) -> FleetResult:
        """See ``AsyncFleet.resume``."""
        return self._call(
            self._fleet.resume(
                selector, tags=tags, mode=mode, timeout_s=timeout_s, operation_id=operation_id, **options
            )
        )

    def cancel(self, operation_id: str) -> FleetResult:
        """See ``AsyncFleet.cancel``."""
        return self._call(self._fleet.cancel(operation_id))

    def status(self, selector: Selector | None = None) -> FleetStatus:
        """See ``AsyncFleet.status``."""
        return self._call(self._fleet.status(selector))

    @property
    def progress(self) -> FleetProgress | None:
        """See ``AsyncFleet.progress``."""
        return self._call(self._progress())

    def operations(self) -> list[FleetProgress | FleetResult]:
        """See ``AsyncFleet.operations``."""
        return self._call(self._operations())

    def watch(self, interval_s: float = 1.0) -> Iterator[FleetEvent]:
        """See ``AsyncFleet.watch``."""
        events = _Events(self._fleet.watch(interval_s))
        try:
            while True:
                yield self._call(events.next())
        except StopAsyncIteration:
            return
        finally:
            self._call(events.close())

    def recover(self) -> list[FleetResult]:
        """See ``AsyncFleet.recover``."""
        return self._call(self._fleet.recover())

    def reconcile(self) -> list[EngineResult]:
        """See ``AsyncFleet.reconcile``."""
        return self._call(self._fleet.reconcile())

    def close(self) -> None:
        """Wait for operations in progress, close the connections and end the thread. Engines keep their state."""
        if self._loop.is_closed():
            return
        self._call(self._fleet.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    async def _operations(self) -> list[FleetProgress | FleetResult]:
        return self._fleet.operations()

    async def _progress(self) -> FleetProgress | None:
        return self._fleet.progress

    def _call(self, call: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


async def _made(membership: Membership, **options: Any) -> AsyncFleet:
    return AsyncFleet(membership, **options)


class _Events:
    """Events that are read one at a time, in the event loop."""

    def __init__(self, events: Any) -> None:
        self._events = events
        self._reading: asyncio.Future[FleetEvent] | None = None

    async def next(self) -> FleetEvent:
        self._reading = asyncio.ensure_future(anext(self._events))
        return await self._reading

    async def close(self) -> None:
        """End them; also while ``next`` waits, whose caller was interrupted."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        await self._events.aclose()
