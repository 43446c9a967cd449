"""The answer of an operation of the fleet, from its parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from memsaver_server.fleet.parts import Part
from memsaver_server.fleet.request import FleetRequest
from memsaver_server.fleet.results import FleetResult

Outcome = Literal["done", "aborted", "undone", "each"]


def result_of(request: FleetRequest, parts: Sequence[Part], outcome: Outcome, seconds: float, why: str) -> FleetResult:
    """Return the answer. ``why`` is a reason other than an engine's failure, or empty."""
    given_up = outcome in ("aborted", "undone")
    engines = [part.result(undone=given_up) for part in parts]
    strays = [part for part in parts if outcome == "undone" and _is_stray(request, part)]
    return FleetResult(
        success=all(engine.success for engine in engines),
        message=_message(request, parts, outcome, strays, why),
        operation=request.operation,
        operation_id=request.operation_id,
        mode=request.mode,
        rolled_back=outcome == "undone" and not strays,
        seconds=seconds,
        engines=engines,
    )


def _is_stray(request: FleetRequest, part: Part) -> bool:
    """Return whether an engine whose operation was undone is not as before, or does not say."""
    return part.after is None or bool(part.moved(request.operation)) or part.after.prepared is not None


def _message(request: FleetRequest, parts: Sequence[Part], outcome: Outcome, strays: Sequence[Part], why: str) -> str:
    done = f"{request.operation}d"
    failed = [part for part in parts if part.failure is not None]
    reasons = "; ".join(filter(None, [why, *map(_reason, failed)]))
    if outcome in ("done", "each") and not failed:
        return f"{done} on {_engines(len(parts))}"
    if outcome == "each":
        return f"{done} on {len(parts) - len(failed)} of {_engines(len(parts))}; {reasons}"
    if outcome == "aborted":
        return f"nothing was {done}, all engines that answer are as before: {reasons}"
    if not strays:
        return f"{reasons}; what was {done} was undone: all engines are as before{_losses(parts)}"
    return f"{reasons}; undone, but not on {'; '.join(map(_stray, strays))}{_losses(parts)}"


def _reason(part: Part) -> str:
    return f"{part.member.name} failed while {part.phase}: {part.failure}"


def _stray(part: Part) -> str:
    why = f" ({part.undo_failure})" if part.undo_failure is not None else ""
    return f"{part.member.name}, which is {part.state}{why}"


def _losses(parts: Iterable[Part]) -> str:
    losses = [f"{' and '.join(part.lost())} of {part.member.name}" for part in parts if part.lost()]
    return f". Content to be written again: {', '.join(losses)}" if losses else ""


def _engines(count: int) -> str:
    return f"{count} engine{'' if count == 1 else 's'}"
