"""The coordinator of a fleet as a named, detached actor, and how other processes of the cluster call it."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayTaskError

from memsaver_core.contract.requests import Selector
from memsaver_server.fleet.fleet import AsyncFleet
from memsaver_server.fleet.ray.cluster import NAMESPACE
from memsaver_server.fleet.ray.membership import RayMembership
from memsaver_server.fleet.ray.record import RayRecord
from memsaver_server.fleet.ray.registry import coordinator_name
from memsaver_server.fleet.record import RecordContent
from memsaver_server.fleet.results import (
    EngineResult,
    EngineStatus,
    FleetEvent,
    FleetProgress,
    FleetResult,
    FleetStatus,
)


class Coordinator:
    """The actor. Its methods are those of ``AsyncFleet``; Ray calls them again if it restarts meanwhile.

    A repeat carries the same operation_id, so that nothing is done twice. While it runs, engines that come late or
    come back are brought to what is wanted.
    """

    # Ray awaits it: the tasks that it starts need the actor's loop.
    async def __init__(self, fleet: str, options: Mapping[str, Any]) -> None:  # type: ignore[misc]
        self._membership = RayMembership(fleet)
        given = {"api_key": os.environ.get("MEMSAVER_API_KEY"), "name": fleet, **options}
        self._fleet = AsyncFleet(self._membership, record=RayRecord(fleet), **given)
        self._keeping = asyncio.create_task(self._fleet.keep())

    async def release(self, selector: Selector | None, options: Mapping[str, Any]) -> FleetResult:
        return self._with_deaths(await self._fleet.release(selector, **options), selector)

    async def resume(self, selector: Selector | None, options: Mapping[str, Any]) -> FleetResult:
        return self._with_deaths(await self._fleet.resume(selector, **options), selector)

    async def status(self, selector: Selector | None) -> FleetStatus:
        status = await self._fleet.status(selector)
        deaths = self._membership.deaths(selector)
        dead = [EngineStatus.of(each.member, None, f"its actor died: {each.cause}", RecordContent()) for each in deaths]
        return status.model_copy(update={"engines": [*status.engines, *dead]})

    async def cancel(self, operation_id: str) -> FleetResult:
        return await self._fleet.cancel(operation_id)

    async def reconcile(self) -> list[EngineResult]:
        return await self._fleet.reconcile()

    async def progress(self) -> FleetProgress | None:
        return self._fleet.progress

    async def watch(self, interval_s: float) -> AsyncIterator[FleetEvent]:
        async for event in self._fleet.watch(interval_s):
            yield event

    async def members_changed(self) -> None:
        self._membership.wake()

    async def where(self) -> tuple[str, int]:
        """Return the id of the node that it is on, and of its process."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def _with_deaths(self, result: FleetResult, selector: Selector | None) -> FleetResult:
        """Return the result, with those engines named that cannot be asked any more."""
        dead = [f"{death.member.name} ({death.cause})" for death in self._membership.deaths(selector)]
        if not dead:
            return result
        return result.model_copy(update={"message": f"{result.message}; not in the fleet any more: {', '.join(dead)}"})


def coordinator(fleet: str = "default", actor_options: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Return the handle of the fleet's coordinator, which is started if there is none.

    Args:
        fleet: the name of the fleet.
        actor_options: Ray's, for a coordinator that is started; for example
            ``{"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=True)}`` or ``{"resources": ...}``.
        options: of ``AsyncFleet``, for a coordinator that is started. ``api_key`` is by default ``MEMSAVER_API_KEY`` in
            the environment of the coordinator's process; one given here is kept by Ray in clear.
    """
    settings = {
        "name": coordinator_name(fleet),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_task_retries": -1,
        "num_cpus": 0,
        **(actor_options or {}),
    }
    return ray.remote(Coordinator).options(**settings).remote(fleet, options)


class RayFleet:
    """A fleet of Ray actors, called from any process of the cluster. As ``Fleet``, through the coordinator's actor.

    A caller may use ``actor`` to await the answers: ``await fleet.actor.release.remote(selector, {"tags": [...]})``.

    Args:
        fleet, actor_options, options: see ``coordinator``.
    """

    def __init__(
        self, fleet: str = "default", *, actor_options: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self.actor = coordinator(fleet, actor_options, **options)

    def release(self, selector: Selector | None = None, **options: Any) -> FleetResult:
        """See ``Fleet.release``. If the coordinator dies meanwhile, the next one carries on and answers."""
        return self._operate(self.actor.release, selector, options)

    def resume(self, selector: Selector | None = None, **options: Any) -> FleetResult:
        """See ``Fleet.resume``. If the coordinator dies meanwhile, the next one carries on and answers."""
        return self._operate(self.actor.resume, selector, options)

    def status(self, selector: Selector | None = None) -> FleetStatus:
        """See ``Fleet.status``. Engines whose actors have died for good are listed for an hour."""
        return cast(FleetStatus, _get(self.actor.status.remote(selector)))

    def cancel(self, operation_id: str) -> FleetResult:
        """See ``Fleet.cancel``."""
        return cast(FleetResult, _get(self.actor.cancel.remote(operation_id)))

    def reconcile(self) -> list[EngineResult]:
        """See ``Fleet.reconcile``. The coordinator does it all the time."""
        return cast(list[EngineResult], _get(self.actor.reconcile.remote()))

    @property
    def progress(self) -> FleetProgress | None:
        """See ``Fleet.progress``."""
        return cast(FleetProgress | None, _get(self.actor.progress.remote()))

    def watch(self, interval_s: float = 1.0) -> Iterator[FleetEvent]:
        """See ``Fleet.watch``. After a restart of the coordinator it begins again with ``joined``."""
        while True:
            events = self.actor.watch.remote(interval_s)
            try:
                with suppress(RayActorError):
                    for event in events:
                        yield ray.get(event)
            finally:
                ray.cancel(events)

    def stop(self) -> None:
        """End the coordinator for good. Engines keep their state, and the record is kept."""
        ray.kill(self.actor)

    def _operate(self, method: Any, selector: Selector | None, options: Mapping[str, Any]) -> FleetResult:
        asked = {**options, "operation_id": options.get("operation_id") or uuid.uuid4().hex}
        return cast(FleetResult, _get(method.remote(selector, asked)))


def _get(answer: Any) -> Any:
    """Return the answer; raise what the coordinator raised, as ``Fleet`` does."""
    try:
        return ray.get(answer)
    except RayTaskError as error:
        raise error.cause from None
