"""The answer of an operation of the fleet, from its parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memsaver_core.contract.reports import held_by
from memsaver_server.fleet.operation import FleetOperation
from memsaver_server.fleet.parts import Part
from memsaver_server.fleet.results import FleetResult, common, count_of

#: Engines of one kind that a message lists; the answer has all.
_LISTED = 8


def result_of(operation: FleetOperation, prepared_for_s: float, coordinator: str, why: str = "") -> FleetResult:
    """Return the answer of an operation that ``coordinator`` has ended; ``why``: a reason of its failure that no engine
    gave. By itself an engine stays prepared for ``prepared_for_s`` seconds."""
    asked, parts = operation.asked, operation.parts
    given_up = operation.how in ("aborted", "undone")
    # Engines that are not as before although the operation was given up, or whose state is unknown.
    strays = [part for part in parts if given_up and part.is_stray(asked.operation)]
    engines = [part.result(undone=given_up) for part in parts]
    holders = {part.before.coordinator for part in parts if part.before is not None} - {"", coordinator}
    return FleetResult(
        success=all(engine.success for engine in engines),
        message="".join([_message(operation, strays, prepared_for_s, why), *map(held_by, sorted(holders))]),
        coordinator=", ".join(sorted(holders)),
        operation=asked.operation,
        operation_id=operation.id,
        state=common(engine.state for engine in engines),
        released_bytes=sum(engine.released_bytes for engine in engines),
        resumed_bytes=sum(engine.resumed_bytes for engine in engines),
        mode=asked.fleet_mode,
        rolled_back=operation.how == "undone" and not strays,
        seconds=operation.elapsed_s(),
        engines=tuple(engines),
    )


def _message(operation: FleetOperation, strays: Sequence[Part], prepared_for_s: float, why: str) -> str:
    parts, done = operation.parts, f"{operation.request.operation}d"
    failed = [part for part in parts if part.failure is not None]
    each = _listed(f"{part.member.name} failed while {part.phase}: {part.failure}" for part in failed)
    reasons = "; ".join(filter(None, [why, each]))
    but = _listed(map(_stray, strays))
    if operation.how in ("done", "each"):
        all_of = count_of(parts)
        return f"{done} on {len(parts) - len(failed)} of {all_of}; {reasons}" if failed else f"{done} on {all_of}"
    if operation.how == "aborted":
        after = "All engines are as before"
        if strays:
            after = f"As before are all but {but}"
        if any(part.phase != "asking" for part in strays):  # else they were not asked to prepare
            after += f". What is prepared there ends with its lease, within {prepared_for_s:g} s"
        return f"nothing was {done}: {reasons}. {after}"
    lost = _listed(f"{' and '.join(part.lost())} of {part.member.name}" for part in parts if part.lost())
    losses = f". Content to be written again: {lost}" if lost else ""
    if strays:
        return f"{reasons}; undone, but not on {but}{losses}"
    return f"{reasons}; what was {done} was undone: all engines are as before{losses}"


def _listed(texts: Iterable[str]) -> str:
    every = list(texts)
    more = [f"and {len(every) - _LISTED} more"] if len(every) > _LISTED else []
    return "; ".join(every[:_LISTED] + more)


def _stray(part: Part) -> str:
    why = f" ({part.undo_failure})" if part.undo_failure is not None else ""
    return f"{part.member.name}, which is {part.state}{why}"
