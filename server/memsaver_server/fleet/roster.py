"""The members of a fleet with their connections, and what they are known to serve."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from memsaver_core.contract.requests import Selector
from memsaver_server import clock
from memsaver_server.fleet.budget import uuids_of
from memsaver_server.fleet.connection import QUIET_S, Connection, Coordinator
from memsaver_server.fleet.locks import Locks, of_cache
from memsaver_server.fleet.members import Member, Membership, MembershipError
from memsaver_server.fleet.parts import Part

#: How long two addresses count as one engine's before they are asked again, seconds.
KNOWN_S = 60.0
#: Files that the connections to one engine take, those of an operation included, and that the rest of a process takes.
#: Without this bound a coordinator that has too few could not accept its callers' connections.
ENGINE_FILES, OTHER_FILES = 4, 64

logger = logging.getLogger("memsaver")
_Key = tuple[str, str, str | None]


class Roster:
    """The members of a fleet. Use it in one event loop. Its methods raise MembershipError."""

    def __init__(self, membership: Membership, coordinator: Coordinator) -> None:
        self.membership = membership
        self.coordinator = coordinator
        self.locks = Locks()  # of the members' names and GPUs
        self._connections: dict[_Key, Connection] = {}
        self._asks: dict[_Key, tuple[float, asyncio.Task[Part]]] = {}  # those of ``asking``, and when they began
        self._ids: dict[str, tuple[str, str, float]] = {}  # of members: address, id of the engine, until when
        self._aliases: dict[str, str] = {}  # members that were found to be another one's engine
        self._known: dict[str, Member] = {}  # as listed, with what the engine said of itself

    async def members(self) -> list[Member]:
        listed = self.one_each(await self.membership.members())
        needed = OTHER_FILES + ENGINE_FILES * len(listed)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if needed > files != resource.RLIM_INFINITY:
            raise MembershipError(
                f"{len(listed)} engines need {needed} open files, but this process may have {files}; raise its limit "
                "(ulimit -n, LimitNOFILE of systemd) and start it again"
            )
        await self._drop_all_but(listed)
        return listed

    def one_each(self, members: Iterable[Member]) -> list[Member]:
        """Return the members, each engine only once, as far as the engines' ids are known."""
        found: dict[str, Member] = {}
        for member in members:
            url, engine_id, until = self._ids.get(member.name, ("", "", 0.0))
            known = engine_id if url == member.url and clock.monotonic() < until else ""
            first = found.setdefault(known or f"address {member.name}", member)
            if first is not member and self._aliases.get(member.name) != first.name:
                self._aliases[member.name] = first.name
                logger.warning("%s and %s are addresses of one engine, which counts once", first.name, member.name)
        return list(found.values())

    async def parts(self, selector: Selector, asking: Callable[[list[Part]], None] = lambda _: None) -> list[Part]:
        """Return a part for each selected member, after asking each what it holds; ``asking`` gets all that are asked.

        A member that does not answer, and never did, is selected if it may match.
        """
        listed = await self.members()
        candidates = [Part(member, self.connection(member)) for member in listed if selector.may_match(member)]
        asking(candidates)
        asks = {asyncio.create_task(self.ask(part)): part for part in candidates}
        waits = set(asks)
        try:
            while any(self._may_be_selected(asks[ask], selector) for ask in waits):
                _, waits = await asyncio.wait(waits, timeout=QUIET_S / 4)
            await asyncio.gather(*(asks.keys() - waits))
        finally:
            for ask in asks:
                ask.cancel()
        asked = {part.member.name: part for ask, part in asks.items() if ask not in waits}
        each = [asked[member.name] for member in self.one_each(part.member for part in asked.values())]
        return [
            part
            for part in each
            if selector.matches(part.member) or (part.failure is not None and selector.may_match(part.member))
        ]

    async def unknown_names(self, selector: Selector, parts: Sequence[Part]) -> list[str]:
        """Return the names in ``selector`` that no member has; ``parts`` are those selected. Members that are known to
        have died are left out: calls go on without them."""
        missing = set(selector.names) - {part.member.name for part in parts}
        if missing:
            missing -= {member.name for member in await self.members()}
            deaths = getattr(self.membership, "deaths", list)
            missing -= {death.member.name for death in deaths()}
        return sorted(missing)

    def asking(self, member: Member, max_age_s: float = 0.0, *, anew: bool = False) -> tuple[float, asyncio.Task[Part]]:
        """Return when a member was asked, and the task that asks it. Calls that only read share a task: one that began
        at most ``max_age_s`` seconds before this call or, unless ``anew``, one of a member that is silent.
        """
        key, now = _key(member), clock.monotonic()
        at, ask = self._asks.get(key, (-math.inf, None))
        waits = ask is not None and not ask.done() and not anew and self.connection(member).silent_s
        if ask is None or (at < now - max_age_s and not waits):
            at, ask = self._asks[key] = now, asyncio.create_task(self.asked(member))
        return at, ask

    async def answers(self, members: Iterable[Member], max_age_s: float = 0.0) -> list[tuple[Member, Part | None]]:
        """Return what each member answers to ``asking``; None if it is silent."""
        asks = [(member, self.asking(member, max_age_s)[1]) for member in members]
        await self.until_answered(asks)
        return [(member, ask.result() if ask.done() and not ask.cancelled() else None) for member, ask in asks]

    async def until_answered(self, calls: Iterable[tuple[Member, asyncio.Task[Any]]]) -> None:
        """Wait until each of these calls of engines has ended, or its engine is silent."""
        pairs = list(calls)
        while waits := [call for member, call in pairs if not call.done() and not self.connection(member).silent_s]:
            await asyncio.wait(waits, timeout=QUIET_S / 4)

    def connection(self, member: Member) -> Connection:
        key = _key(member)
        if key not in self._connections:
            self._connections[key] = Connection(member, self.coordinator)
        return self._connections[key]

    async def asked(self, member: Member) -> Part:
        part = Part(member, self.connection(member))
        await self.ask(part)
        return part

    async def ask(self, part: Part) -> None:
        """Ask the engine of a part what it holds; note that, or its failure, in the part."""
        listed = part.member
        with part.failing("asking"):
            part.before = await part.connection.occupation()
        known = self._known.get(listed.name)
        model, gpus = (known.model, known.gpus) if known and known.url == listed.url else ("", ())
        if part.before is not None:
            model, gpus = part.before.model, uuids_of(part.before)
        part.member = replace(listed, model=listed.model or model, gpus=listed.gpus or gpus)
        if part.before is not None:
            self._known[listed.name] = part.member
            self._ids[listed.name] = listed.url, part.before.engine_id, clock.monotonic() + KNOWN_S

    async def close(self) -> None:
        await self._drop_all_but([])

    def _may_be_selected(self, part: Part, selector: Selector) -> bool:
        """Whether a member that is asked may be selected: not if it is silent and did not match when last seen."""
        known = self._known.get(part.member.name)
        return known is None or known.url != part.member.url or not part.connection.silent_s or selector.matches(known)

    async def _drop_all_but(self, members: Sequence[Member]) -> None:
        """Close the connections that no member has, and no operation uses."""
        keys = set(map(_key, members))
        for key in self._asks.keys() - keys:
            self._asks.pop(key)[1].cancel()
        unused = [key for key in self._connections if not self.locks.any_held((key[0], of_cache(key[0])))]
        for key in set(unused) - keys:
            if (connection := self._connections.pop(key, None)) is not None:  # else another call closes it
                await connection.close()
        for name in self._known.keys() - {member.name for member in members}:
            del self._known[name]
        self._ids = {name: each for name, each in self._ids.items() if clock.monotonic() < each[2]}


def _key(member: Member) -> _Key:
    return member.name, member.url, member.api_key
