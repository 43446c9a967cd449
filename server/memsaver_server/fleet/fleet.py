"""The coordinator: releases and resumes the engines of a fleet, all of them or none."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Any

from memsaver_server.fleet.members import Membership
from memsaver_server.fleet.record import MemoryRecord, Record
from memsaver_server.fleet.results import EngineResult, FleetEvent, FleetProgress, FleetResult, FleetStatus, Mode
from memsaver_server.fleet.selectors import Selector
from memsaver_server.schemas import DrainMode


class AsyncFleet:
    """Coordinates the engines of a membership. Use it in one event loop, and one of it for a record.

    It keeps no truth of its own: what the engines are is asked of them, what is wanted is in the record. Operations of
    the fleet run one after another.

    Args:
        membership: lists the engines.
        record: what is wanted, and which operation has begun to commit. By default it ends with this object.
        api_key: the key of the engines that have none of their own in ``Member.api_key``.
        lease_s: how long an engine stays prepared without this coordinator, seconds.
        silence_s: an engine that does not answer for so long counts as unreachable, seconds.
        verify: as for the client.
    """

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
        self.membership = membership
        self.record: Record = record or MemoryRecord()

    async def release(
        self,
        selector: Selector | None = None,
        *,
        tags: Sequence[str] | None = None,
        mode: Mode = "all",
        hibernate: bool = False,
        drain: DrainMode = "wait",
        timeout_s: float = 60.0,
        operation_id: str | None = None,
        **options: Any,
    ) -> FleetResult:
        """Release the device memory of ``tags`` (None: of all) on the selected engines.

        Args:
            mode: ``all``: prepare on all, then commit on all; if one fails, all are as before, or the result says which
                is not. ``best_effort``: on each by itself.
            drain: what becomes of requests in flight, the field ``mode`` of an engine's release.
            timeout_s: deadline of the drain on each engine, seconds.
            operation_id: the id of this operation; a repeat with the same id does nothing twice.
            options: the others of ``schemas.ReleaseFields``, e.g. ``restore`` and ``trim``.

        Returns:
            What became of every selected engine. A failure of an engine is an answer, not an exception.

        Raises:
            FleetError: no engine is selected, or an option does not exist. Nothing was done.
            MembershipError, RecordError: the members or the record cannot be read or written. Nothing was done.
        """
        raise NotImplementedError

    async def resume(
        self,
        selector: Selector | None = None,
        *,
        tags: Sequence[str] | None = None,
        mode: Mode = "all",
        timeout_s: float = 60.0,
        operation_id: str | None = None,
        **options: Any,
    ) -> FleetResult:
        """Bring back the device memory of ``tags`` (None: of all that are released). As ``release``."""
        raise NotImplementedError

    async def status(self, selector: Selector | None = None) -> FleetStatus:
        """Return what every selected engine is now, those that do not answer included."""
        raise NotImplementedError

    @property
    def progress(self) -> FleetProgress | None:
        """The operation of the fleet that runs in this process now, or None."""
        raise NotImplementedError

    def watch(self, interval_s: float = 1.0) -> AsyncIterator[FleetEvent]:
        """Yield the events of the fleet until the iterator is closed; first ``joined`` for each member.

        Args:
            interval_s: how often the engines are asked, seconds.
        """
        raise NotImplementedError

    async def recover(self) -> FleetResult | None:
        """Carry on an operation that another coordinator had begun to commit; None if there is none.

        Every other method does it first.
        """
        raise NotImplementedError

    async def reconcile(self) -> list[EngineResult]:
        """Bring engines that are not what is wanted to it, once; return what was done, and what could not be."""
        raise NotImplementedError

    async def keep(self, interval_s: float = 5.0) -> None:
        """Reconcile for ever: at each interval, and whenever the members change."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close the connections. Engines keep their state."""

    async def __aenter__(self) -> AsyncFleet:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()
