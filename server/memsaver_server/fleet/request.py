"""What a caller asks of a fleet."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memsaver_server.fleet.record import Wanted
from memsaver_server.fleet.results import FleetError, Mode
from memsaver_server.fleet.selectors import Selector

Verb = Literal["release", "resume"]
#: Deadline of the drain on each engine, seconds.
DEFAULT_TIMEOUT_S = 60.0
#: Options that callers may add, by operation. Fields of ``schemas.ReleaseFields`` and ``schemas.ResumeFields``.
_OPTIONS = {
    "release": frozenset({"restore", "trim", "verify"}),
    "resume": frozenset({"wait_for_memory_s", "verify"}),
}
#: The state that each operation leaves.
STATES: dict[Verb, Literal["released", "resident"]] = {"release": "released", "resume": "resident"}


def opposite(operation: Verb) -> Verb:
    return "resume" if operation == "release" else "release"


@dataclass(frozen=True)
class FleetRequest:
    """One operation of the fleet.

    Attributes:
        tags: None means all.
        timeout_s: deadline of the drain on each engine, seconds.
        options: what each engine is called with, beside tags and deadline.
    """

    operation: Verb
    selector: Selector
    tags: tuple[str, ...] | None
    mode: Mode
    timeout_s: float
    options: Mapping[str, Any]
    operation_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @classmethod
    def of(
        cls,
        operation: Verb,
        selector: Selector | None,
        tags: Sequence[str] | None,
        mode: Mode,
        timeout_s: float,
        operation_id: str | None,
        options: Mapping[str, Any],
        own: Mapping[str, Any],
    ) -> FleetRequest:
        """Return the request of a call with the caller's ``options`` and the method's ``own`` ones.

        Raises:
            FleetError: an argument does not exist.
        """
        unknown = sorted(options.keys() - _OPTIONS[operation])
        if unknown:
            known = ", ".join(sorted(_OPTIONS[operation]))
            raise FleetError(f"{operation} of a fleet has no option {unknown[0]!r}; it takes {known}")
        if mode not in ("all", "best_effort"):
            raise FleetError(f"unknown mode {mode!r}; choose all or best_effort")
        names = None if not tags else tuple(dict.fromkeys([tags] if isinstance(tags, str) else tags))
        given = {key: value for key, value in {**own, **options}.items() if value not in (None, False)}
        return cls(
            operation, selector or Selector(), names, mode, timeout_s, given, operation_id or uuid.uuid4().hex[:12]
        )

    @classmethod
    def again(cls, operation_id: str, wish: Wanted) -> FleetRequest:
        """Return the request that another coordinator had noted as ``wish``."""
        verb: Verb = "release" if wish.state == "released" else "resume"
        return cls(verb, wish.selector, wish.tags, "all", DEFAULT_TIMEOUT_S, wish.options, operation_id)

    @property
    def state(self) -> Literal["released", "resident"]:
        """The state that it asks for."""
        return STATES[self.operation]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of each engine's client, beside tags."""
        deadline = {"timeout_s": self.timeout_s} if self.operation == "release" else {}
        return {**deadline, **self.options}

    @property
    def patience_s(self) -> float:
        """How long an engine may take to prepare: for its drain, or until there is memory, seconds."""
        return self.timeout_s + float(self.options.get("wait_for_memory_s", 0.0))

    def wish(self) -> Wanted:
        """Return what the record is to say once it is carried out."""
        return Wanted(
            selector=self.selector,
            state=self.state,
            tags=self.tags,
            options={key: value for key, value in self.options.items() if key != "verify"},
            operation_id=self.operation_id,
            at=time.time(),
        )
