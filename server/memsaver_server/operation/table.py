"""The states of an operation: what moves it from one to another, and who may cause that.

``docs/generate.py`` makes the tables and pictures in docs/architecture.md from the tables here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memsaver_core.contract.errors import LeaseEndedError, MemsaverError, TooLateToCancelError
from memsaver_core.contract.reports import OperationStatus


@dataclass(frozen=True)
class Row:
    """What an event does to an operation in one of some states.

    Attributes:
        states: their names, with spaces between them.
        by: who may cause it: the ``worker`` that carries the operation out, a ``caller`` that names it, a ``repeat`` (a
            call that asks for the same), or the ``clock``.
        to: the next state; an error with which the event is refused; None: the state stays.
        when: the circumstances, for people.
    """

    states: str
    event: str
    by: str
    to: str | type[MemsaverError] | None
    when: str = ""


class Table:
    """The states of one kind of operation, the first one first, each with the status that callers see."""

    def __init__(self, statuses: Mapping[str, OperationStatus], *rows: Row) -> None:
        self.statuses = statuses
        self.rows = rows
        self.first = next(iter(statuses))
        self._next = {(state, row.event): row.to or state for row in rows for state in row.states.split()}
        states = {name for key, to in self._next.items() for name in (key[0], to) if isinstance(name, str)}
        assert states == set(statuses), "the rows name other states than the statuses"
        assert len(self._next) == sum(len(row.states.split()) for row in rows), "two rows have the same state and event"

    def allows(self, state: str, event: str) -> bool:
        """Whether the event moves an operation in this state, or leaves it there."""
        return isinstance(self._next.get((state, event)), str)

    def next(self, state: str, event: str) -> str | type[MemsaverError]:
        """Return the next state, or the error with which the event is refused; raise AssertionError if it cannot happen
        in this state."""
        if (to := self._next.get((state, event))) is None:
            raise AssertionError(f"{event!r} cannot happen to an operation that is {state}")
        return to


#: An operation of one engine.
ENGINE = Table(
    {
        "queued": "queued",
        "draining": "running",
        "waiting": "running",
        "prepared": "prepared",
        "moving": "running",
        "finishing": "running",
        "undoing": "running",
        "succeeded": "succeeded",
        "failed": "failed",
        "cancelled": "cancelled",
    },
    Row("queued", "drain", "worker", "draining", "its turn, a release or a resize"),
    Row("queued", "wait", "worker", "waiting", "its turn, a resume"),
    Row("queued", "cancel", "caller", "cancelled", "at once"),
    Row("draining", "overtake", "repeat", None, "a stronger drain of the same tags: drains anew, for the longer time"),
    Row("draining", "prepare", "worker", "prepared", "drained, memory lock taken, tokens noted, all checked"),
    Row("waiting", "prepare", "worker", "prepared", "memory lock taken, the device's memory reserved"),
    Row("draining waiting", "move", "worker", "moving", "drained, memory lock taken; without `prepare`, or committed"),
    Row(
        "draining waiting prepared",
        "cancel",
        "caller",
        "undoing",
        "nothing was moved; or by the service's end; a resize also by a release or a resume",
    ),
    Row("draining waiting prepared", "error", "worker", "undoing", "nothing was moved; also if a deadline has passed"),
    Row("prepared", "commit", "caller", "moving", "before the lease ends"),
    Row("prepared", "lease_end", "clock", "undoing", "no commit came in time"),
    Row("undoing", "cancelled", "worker", "cancelled", "all is as before"),
    Row("undoing", "failed", "worker", "failed", "all is as before"),
    Row("moving waiting", "shortage", "worker", "waiting", "a resume or resize lacks memory: waits, or takes less"),
    Row("moving", "moved", "worker", "finishing", "repair, verify, reopen follow"),
    Row("moving", "failed", "worker", "failed", "undone by the core, unless a rank or the context is lost"),
    Row("finishing", "done", "worker", "succeeded"),
    Row("finishing", "failed", "worker", "failed", "repair or verify: memory is resident, admission closed"),
    Row("queued draining waiting prepared moving finishing", "join", "repeat", None, "answered by the same operation"),
    Row("queued draining waiting prepared", "renew", "repeat", None, "as join, if to be prepared; extends its lease"),
    Row("queued moving finishing", "overtake", "repeat", None, "a stronger drain of the same tags"),
    Row("undoing cancelled", "cancel", "caller", None, "a repeated cancel"),
    Row("moving finishing succeeded failed", "cancel", "caller", TooLateToCancelError),
    Row(
        "queued draining waiting moving finishing undoing succeeded failed cancelled",
        "commit",
        "caller",
        LeaseEndedError,
        "unless it was committed before",
    ),
)
