"""Mode ``best_effort``: each engine by itself; what cannot be done is listed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from memsaver_server.fleet.budget import groups_of
from memsaver_server.fleet.connection import EngineFailure
from memsaver_server.fleet.keeper import Keeper
from memsaver_server.fleet.parts import Part
from memsaver_server.fleet.request import FleetRequest
from memsaver_server.fleet.results import Stage


async def run_alone(
    request: FleetRequest, parts: Sequence[Part], keeper: Keeper, tell: Callable[[Stage], None]
) -> None:
    """Carry ``request`` out on each engine.

    Raises:
        RecordError: the record cannot be written. Nothing was done.
    """
    await keeper.ended(request.operation_id, request.wish())  # first: a reconciler is to do what remains
    tell("committing")
    groups = await groups_of(request, [part for part in parts if part.failure is None])
    await asyncio.gather(*(_in_turn(request, group) for group in groups))


async def _in_turn(request: FleetRequest, group: Iterable[Part]) -> None:
    for part in group:
        if part.failure is None:
            await _perform(request, part)


async def _perform(request: FleetRequest, part: Part) -> None:
    part.stage = "committing"
    try:
        answer = await part.connection.perform(
            request.operation, request.tags, request.arguments, key=request.operation_id
        )
        part.done(answer)
    except EngineFailure as failure:
        part.fail("committing", failure)
        await part.look()
    part.ended()
