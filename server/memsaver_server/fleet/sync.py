"""The synchronous twin of ``AsyncFleet``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from memsaver_server.fleet.fleet import AsyncFleet
from memsaver_server.fleet.members import Membership
from memsaver_server.fleet.results import EngineResult, FleetEvent, FleetProgress, FleetResult, FleetStatus, Mode
from memsaver_server.fleet.selectors import Selector
from memsaver_server.schemas import DrainMode


class Fleet:
    """As ``AsyncFleet``, blocking. Safe to use from several threads: its event loop runs in a thread of its own."""

    def __init__(self, membership: Membership, **options: Any) -> None:
        self._fleet = AsyncFleet(membership, **options)

    def release(
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
        """See ``AsyncFleet.release``."""
        raise NotImplementedError

    def resume(
        self,
        selector: Selector | None = None,
        *,
        tags: Sequence[str] | None = None,
        mode: Mode = "all",
        timeout_s: float = 60.0,
        operation_id: str | None = None,
        **options: Any,
    ) -> FleetResult:
        """See ``AsyncFleet.resume``."""
        raise NotImplementedError

    def status(self, selector: Selector | None = None) -> FleetStatus:
        """See ``AsyncFleet.status``."""
        raise NotImplementedError

    @property
    def progress(self) -> FleetProgress | None:
        """See ``AsyncFleet.progress``."""
        return self._fleet.progress

    def watch(self, interval_s: float = 1.0) -> Iterator[FleetEvent]:
        """See ``AsyncFleet.watch``."""
        raise NotImplementedError

    def recover(self) -> FleetResult | None:
        """See ``AsyncFleet.recover``."""
        raise NotImplementedError

    def reconcile(self) -> list[EngineResult]:
        """See ``AsyncFleet.reconcile``."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections and end the thread. Engines keep their state."""

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
