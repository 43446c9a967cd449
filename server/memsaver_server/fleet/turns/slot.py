"""One engine as the turns see it, and which engines make room for another on the GPUs that they share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from memsaver_core.contract.status import discarded
from memsaver_server import clock
from memsaver_server.fleet.record import Demand, Wanted, kept_released, version_for
from memsaver_server.fleet.results import EngineStatus, has_failed

#: ``awake``: it accepts requests; ``asleep``: released, a request may wake it; ``kept``: released by a caller, who will
#: resume it, or with content that is lost, or weights of another version than a caller demanded; ``closed``: it accepts
#: none for another reason, e.g. paused, or while an update writes its weights; ``dead``: no answer, or failed.
SlotState = Literal["awake", "asleep", "kept", "closed", "dead"]


class Slot:
    """An engine, its state as last seen, and the requests that the proxy has sent to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = ""
        self.model = ""
        self.gpus: tuple[str, ...] = ()
        self.state: SlotState = "dead"
        self.reason = "it has not been asked yet"
        self.resident_bytes = 0
        self.released_bytes = 0
        self.weights_version: str | None = None  # the one that a resume for a request demands
        self.free: dict[str, int] = {}  # bytes of each GPU, by UUID
        self.in_flight = 0
        self.moving = 0  # how many operations move its memory, or are about to; it takes no request meanwhile
        self.waking = False  # one of these operations wakes it for requests
        self.yielding = False  # it makes room: it takes no new request, and is released once those in flight have ended
        self.extra = 0  # at least so many engines make room for it, whatever its size; grows if memory is short
        self.not_before = 0.0  # when to try again after a failure, on the monotonic clock
        self.awake_since = self.last_used = clock.monotonic()

    @property
    def is_ready(self) -> bool:
        """Whether a request may be sent to it now."""
        return self.state == "awake" and not self.moving and not self.yielding

    @property
    def can_make_room(self) -> bool:
        """Whether its release is of use: it serves, or all its memory is resident although it serves nothing."""
        return not self.moving and (self.state == "awake" or (self.state == "kept" and not self.released_bytes))

    def woken(self) -> None:
        self.state, self.extra, self.not_before = "awake", 0, 0.0
        self.awake_since = self.last_used = clock.monotonic()

    def update(self, status: EngineStatus, wanted: Sequence[Wanted], demands: Sequence[Demand]) -> None:
        self.url, self.model, self.gpus = status.url, status.model, status.gpus
        self.weights_version = version_for(status, demands)
        self.resident_bytes, self.released_bytes = status.resident_bytes, status.released_bytes
        devices = status.occupation.devices if status.occupation is not None else ()
        self.free = {device.uuid: device.free_bytes for device in devices}
        was = self.state
        self.state, self.reason = _state_of(status, wanted)
        if self.state == "awake" != was:
            self.awake_since = self.last_used = clock.monotonic()

    def share_of(self, size: int) -> int:
        """Return the part of ``size`` bytes of its memory that is on one of its GPUs: ranks hold equal parts."""
        return size // max(1, len(self.gpus))


def victims(slot: Slot, slots: Collection[Slot]) -> list[Slot] | None:
    """Return the engines whose whole release makes room for ``slot``; None if even the release of all would not.

    Those without requests in flight come first, of those the one that has been idle longest.
    """
    others = [one for one in slots if one is not slot and one.can_make_room and set(one.gpus) & set(slot.gpus)]
    others.sort(key=lambda one: (one.in_flight > 0, one.last_used))
    short = {gpu: missing for gpu in slot.gpus if (missing := _missing(slot, gpu, slots)) > 0}
    chosen: list[Slot] = []
    for one in others:
        if not short and len(chosen) >= slot.extra:
            break
        if slot.extra > len(chosen) or short.keys() & set(one.gpus):
            chosen.append(one)
            freed = one.share_of(one.resident_bytes)
            short = {gpu: size - freed * (gpu in one.gpus) for gpu, size in short.items()}
            short = {gpu: size for gpu, size in short.items() if size > 0}
    return chosen if not short and len(chosen) >= slot.extra else None


def _missing(slot: Slot, gpu: str, slots: Iterable[Slot]) -> int:
    # What counts for its resume is its own reading of free memory; without one, take the least of all engines'.
    free = slot.free.get(gpu, min((each.free[gpu] for each in slots if gpu in each.free), default=None))
    return slot.share_of(slot.released_bytes) - free if free is not None else 0


def _state_of(status: EngineStatus, wanted: Sequence[Wanted]) -> tuple[SlotState, str]:
    now = status.occupation
    if now is None:
        return "dead", status.error or "it does not answer"
    if now.state == "failed":
        return "dead", has_failed(now)
    if reason := kept_released(status, wanted, now):  # also if it is awake, as one that has just started is
        return "kept", reason
    if status.error:
        return "closed" if now.updating else "kept", status.error
    if now.operation_id is not None:
        return "closed", f"operation {now.operation_id} is in progress"
    if now.lost and not now.updating:  # it would serve nothing if it was resumed
        return "kept", discarded(now.lost)
    if now.admission.open:
        return "awake", ""
    if not (now.hibernated or status.released_bytes):
        return "closed", now.admission.reason
    if now.updating:  # its resume would wait for that, with the memory unused
        return "closed", "an update writes its weights"
    return "asleep", now.admission.reason
