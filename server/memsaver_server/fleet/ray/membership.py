"""The engines of a fleet as actors of a Ray cluster."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from memsaver_core.contract.requests import Selector
from memsaver_server.fleet.members import Member, MembershipError, checked
from memsaver_server.fleet.ray.cluster import actor_events, actor_state
from memsaver_server.fleet.ray.registry import Entry, entries, forget

logger = logging.getLogger("memsaver")

#: How long the death of an engine's actor is listed, unless an engine of its name registers before; seconds.
DEATH_LISTED_S = 3600.0
#: After the stream of Ray's events broke, seconds.
_AGAIN_S = 1.0


@dataclass(frozen=True)
class Death:
    """An engine whose actor died, unintended and for good."""

    member: Member
    cause: str


class RayMembership:
    """The engines that have called ``register``, as long as Ray knows their actors as alive or restarting.

    An actor that restarts is still a member, so that an operation which needs it fails and names it. One that is dead
    for good has left; ``deaths`` lists it. Use it in one event loop of a process connected to Ray.
    """

    def __init__(self, fleet: str = "default") -> None:
        self._fleet = fleet
        self._seen: dict[str, tuple[Entry, str]] = {}  # entry and actor state, by member, when last listed
        self._deaths: dict[str, Death] = {}
        self._happened = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def members(self) -> list[Member]:
        self._seen, deaths = await asyncio.to_thread(self._read)
        for name in deaths.keys() - self._deaths.keys():
            logger.error("engine %s has left the fleet: its actor died: %s", name, deaths[name].cause)
        self._deaths = deaths
        return checked(entry.member for entry, _ in self._seen.values())

    async def changed(self) -> None:
        """See ``Membership``. Woken by Ray's events of actors, and by ``wake``; asks nothing at intervals."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
        while True:
            self._happened.clear()
            try:
                seen, _ = await asyncio.to_thread(self._read)
            except MembershipError:
                return  # members() says why
            if seen != self._seen:
                return
            await self._happened.wait()

    def wake(self) -> None:
        """Have ``changed`` look: an engine has registered or left."""
        self._happened.set()

    def deaths(self, selector: Selector | None = None) -> list[Death]:
        """Return the deaths known since ``members`` was called last, of engines that ``selector`` selects."""
        return [death for death in self._deaths.values() if (selector or Selector()).matches(death.member)]

    def _read(self) -> tuple[dict[str, tuple[Entry, str]], dict[str, Death]]:
        living: dict[str, tuple[Entry, str]] = {}
        deaths: dict[str, Death] = {}
        try:
            for entry in entries(self._fleet):
                actor = actor_state(entry.actor)
                if not actor.is_dead:
                    living[entry.member.name] = (entry, actor.state)
                elif actor.cause and time.time() - actor.ended_at < DEATH_LISTED_S:
                    deaths[entry.member.name] = Death(entry.member, actor.cause)
                else:
                    forget(self._fleet, entry)
        except Exception as error:  # Ray's client raises many kinds
            raise MembershipError(f"the members of fleet {self._fleet!r} cannot be read from Ray: {error}") from error
        return living, deaths

    async def _follow(self) -> None:
        while True:
            try:
                async for actors in actor_events():
                    if not actors or any(entry.actor in actors for entry, _ in self._seen.values()):
                        self._happened.set()
            except Exception as error:
                logger.warning("Ray's events of actors are not received, trying again: %s", error)
                await asyncio.sleep(_AGAIN_S)
