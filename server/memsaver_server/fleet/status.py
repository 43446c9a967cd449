"""What a fleet is now, from what its engines said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memsaver_core.contract.requests import Described
from memsaver_core.contract.status import OccupationAnswer
from memsaver_server.fleet.members import Member
from memsaver_server.fleet.parts import state_of
from memsaver_server.fleet.record import Wanted
from memsaver_server.fleet.results import EngineStatus


def engine_status(
    member: Member, occupation: OccupationAnswer | None, error: str, wanted: Sequence[Wanted] = ()
) -> EngineStatus:
    """Return the status of one engine; ``error`` is why it does not answer, if it does not."""
    wishes = {wish.state for wish in wishes_for(member, wanted).values()}
    return EngineStatus(
        name=member.name,
        url=member.url,
        model=member.model,
        labels=dict(member.labels),
        host=member.host,
        gpus=member.gpus,
        alive=occupation is not None,
        state=state_of(occupation) if occupation is not None else "unknown",
        wanted="mixed" if len(wishes) > 1 else next(iter(wishes), ""),
        error=error,
        occupation=occupation,
    )


def common_state(engines: Iterable[EngineStatus]) -> str:
    """Return the state that all engines that answer have, or ``mixed``; empty if none answers."""
    states = {engine.state for engine in engines if engine.alive}
    return states.pop() if len(states) == 1 else "mixed" if states else ""


def wishes_for(member: Described, wanted: Sequence[Wanted]) -> dict[str | None, Wanted]:
    """Return the wish that counts for each tag of an engine; that of None counts for tags that are not named."""
    found: dict[str | None, Wanted] = {}
    for wish in wanted:
        if not wish.selector.matches(member):
            continue
        if wish.tags is None:
            found = {None: wish}
        else:
            found.update(dict.fromkeys(wish.tags, wish))
    return found
