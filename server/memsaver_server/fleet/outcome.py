"""The answer of an operation of the fleet, from its parts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from memsaver_server.fleet.parts import Part
from memsaver_server.fleet.request import FleetRequest
from memsaver_server.fleet.results import FleetResult

#: Engines of one kind that a message lists; the answer has all.
_LISTED = 8
#: How an operation ended: ``each`` in mode ``best_effort``; in mode ``all`` as ``Together.outcome`` says.
How = Literal["done", "aborted", "undone", "each"]


@dataclass(frozen=True)
class Outcome:
    """An operation that has ended.

    Attributes:
        why: a reason of its failure that no engine gave, or an empty string.
    """

    request: FleetRequest
    parts: Sequence[Part]
    how: How
    lease_s: float
    why: str = ""

    def result(self, began: float) -> FleetResult:
        """Return the answer; ``began`` is when it began, on the monotonic clock."""
        engines = [part.result(undone=self._given_up) for part in self.parts]
        return FleetResult(
            success=all(engine.success for engine in engines),
            message=self._message(),
            operation=self.request.operation,
            operation_id=self.request.operation_id,
            mode=self.request.mode,
            rolled_back=self.how == "undone" and not self._strays,
            seconds=time.monotonic() - began,
            engines=engines,
        )

    @property
    def _given_up(self) -> bool:
        return self.how in ("aborted", "undone")

    @property
    def _strays(self) -> list[Part]:
        """The engines that are not as before although the operation was given up, or do not say."""
        return [part for part in self.parts if part.is_stray(self.request.operation)] if self._given_up else []

    def _message(self) -> str:
        done = f"{self.request.operation}d"
        failed = [part for part in self.parts if part.failure is not None]
        reasons = "; ".join(filter(None, [self.why, _listed(map(_reason, failed))]))
        if not self._given_up:
            good, all_of = len(self.parts) - len(failed), f"{len(self.parts)} engine{'s'[: len(self.parts) != 1]}"
            return f"{done} on {good} of {all_of}; {reasons}" if failed else f"{done} on {all_of}"
        if self.how == "aborted":
            return f"nothing was {done}: {reasons}. {self._after_abort()}"
        if not self._strays:
            return f"{reasons}; what was {done} was undone: all engines are as before{self._losses()}"
        return f"{reasons}; undone, but not on {_listed(map(_stray, self._strays))}{self._losses()}"

    def _after_abort(self) -> str:
        if not self._strays:
            return "All engines are as before"
        names = _listed(map(_stray, self._strays))
        return f"As before are all but {names}. What is prepared there ends with its lease, within {self.lease_s:g} s"

    def _losses(self) -> str:
        losses = [f"{' and '.join(part.lost())} of {part.member.name}" for part in self.parts if part.lost()]
        return f". Content to be written again: {_listed(losses)}" if losses else ""


def _listed(texts: Iterable[str]) -> str:
    """Return the first texts, and how many more there are."""
    every = list(texts)
    more = [f"and {len(every) - _LISTED} more"] if len(every) > _LISTED else []
    return "; ".join(every[:_LISTED] + more)


def _reason(part: Part) -> str:
    return f"{part.member.name} failed while {part.phase}: {part.failure}"


def _stray(part: Part) -> str:
    why = f" ({part.undo_failure})" if part.undo_failure is not None else ""
    return f"{part.member.name}, which is {part.state}{why}"
