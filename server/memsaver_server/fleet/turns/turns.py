"""Turns: each request gets a ready engine of its model; models are served in the order in which they were asked for.

A model with waiting requests claims the GPUs of one of its engines. Claims are served in the order of their oldest
requests: a later claim gets none of the GPUs of an earlier one. Engines that have to make room take no new requests
from then on: those are behind the claim. So a model waits for three things at most: the requests in flight, the minimum
time awake, and the moves of earlier claims.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import field
from typing import Any

from memsaver_core.contract.errors import FleetUnknownError, MemsaverError, NotFoundError
from memsaver_server import clock
from memsaver_server.fleet.observer import Observer
from memsaver_server.fleet.results import FleetError, FleetResult, FleetStatus
from memsaver_server.fleet.turns.options import TurnOptions
from memsaver_server.fleet.turns.slot import Slot, victims

logger = logging.getLogger("memsaver")

#: How long a claim waits for engines of its model that do not answer, seconds.
READ_S = 1.0
#: Requests are refused once no engine of the model fits for so long, seconds; engines read their devices each second.
SHORT_S = 2.0
#: Time after which a release or a resume that failed is tried again, seconds.
RETRY_S = 1.0


class UnknownModelError(MemsaverError, kind="model_not_found", status=404):
    """No engine of the fleet serves the model."""

    @classmethod
    def of(cls, model: str, models: Iterable[str]) -> UnknownModelError:
        known = ", ".join(sorted(map(repr, models))) or "none"
        return cls(f"no engine of the fleet serves {model!r}; the models are {known}")


class NoTurnError(MemsaverError, kind="no_turn", status=503):
    """The model cannot serve now; the message says why. A repeat may be served after ``retry_s``."""

    retry_s: int = field(default=1, metadata={"answered": False})

    def __post_init__(self, message: str) -> None:
        super().__post_init__(message)
        self.retry_after_s = self.retry_s  # type: ignore[misc]  # of this one error


class QueueFullError(NoTurnError, kind="queue_full"):
    """Too many requests wait for the model already."""


#: Moves the memory of engines: takes the verb, their names, and options of its request.
Move = Callable[..., Awaitable[FleetResult]]


class Line:
    """The requests that wait for one model, in the order in which they came."""

    def __init__(self) -> None:
        self.looked = False  # its engines were read since the first request came, so that their free memory is known
        self.short_since: float | None = None  # since when no engine fits, on the monotonic clock; None: one does
        self.tried: set[str] = set()  # engines that could not be woken for it
        self._waiting: dict[asyncio.Future[Slot], float] = {}  # when each came, on the monotonic clock

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def since(self) -> float:
        """When the request at its head came, on the monotonic clock."""
        return next(iter(self._waiting.values()))

    def join(self) -> asyncio.Future[Slot]:
        """Add a request; its turn is the future's result. A future that is cancelled leaves the line."""
        turn: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self.looked, self.short_since, self.tried = False, None, set()
        self._waiting[turn] = clock.monotonic()
        turn.add_done_callback(lambda _: self._waiting.pop(turn, None))
        return turn

    def serve(self, slot: Slot) -> None:
        """Let all requests go to ``slot``."""
        for turn in self._emptied():
            slot.in_flight += 1
            turn.set_result(slot)

    def fail(self, error: Exception) -> None:
        for turn in self._emptied():
            turn.set_exception(error)

    def _emptied(self) -> list[asyncio.Future[Slot]]:
        waiting, self._waiting = self._waiting, {}
        return [turn for turn in waiting if not turn.done()]


class Turns:
    """The turns of all models of a fleet. Use it in one event loop."""

    def __init__(self, options: TurnOptions, observer: Observer, move: Move) -> None:
        self.options = options
        self._observer = observer
        observer.seen = self.update
        self._move_memory = move
        self._slots: dict[str, Slot] = {}
        self._lines: defaultdict[str, Line] = defaultdict(Line)
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._last_move_s = 1.0
        self._closed = False
        self.wakes: Counter[str] = Counter()  # engines that were woken for a request so far, by model

    @property
    def models(self) -> dict[str, list[Slot]]:
        found: dict[str, list[Slot]] = {}
        for slot in self._slots.values():
            found.setdefault(slot.model, []).append(slot)
        return found

    def waiting(self) -> dict[str, int]:
        return {model: len(line) for model, line in self._lines.items()}

    def in_flight(self) -> dict[str, int]:
        return {slot.name: slot.in_flight for slot in self._slots.values()}

    async def enter(self, model: str) -> Slot:
        """Wait for an engine of ``model`` that is ready; ``leave`` gives it back. Raises UnknownModelError if no engine
        serves it, QueueFullError if too many requests wait, NoTurnError if it has no turn now, or within ``wait_s``."""
        slots = self._engines_of(model)
        options, line = self.options.of(model), self._lines[model]
        if len(line) >= options.queue_limit:
            retry = self._retry_after_s(slots)
            raise QueueFullError(f"{len(line)} requests wait for {model!r} already; repeat in {retry} s", retry)
        is_first = not line
        turn = line.join()
        self._schedule()
        if is_first and not turn.done():
            self._keep(self._look(line, slots))
        try:
            await asyncio.wait({turn}, timeout=options.wait_s)
        except asyncio.CancelledError:
            if turn.done() and not turn.exception():
                self.leave(turn.result())
            self._give_up(turn)
            raise
        if turn.done():
            return turn.result()
        self._give_up(turn)
        states = "; ".join(f"{slot.name} is {slot.state}{slot.reason and f' ({slot.reason})'}" for slot in slots)
        raise NoTurnError(
            f"no engine of {model!r} was ready within {options.wait_s:g} s: {states}", self._retry_after_s(slots)
        )

    async def _look(self, line: Line, slots: Sequence[Slot], after_s: float = 0.0) -> None:
        """Read the states of a line's engines: which one wakes, and which make room, is decided on current figures."""
        await asyncio.sleep(after_s)
        look = asyncio.ensure_future(self._observer.look([slot.name for slot in slots]))
        await asyncio.wait({look}, timeout=READ_S)
        line.looked = True
        self._schedule()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _give_up(self, turn: asyncio.Future[Slot]) -> None:
        turn.cancel()
        asyncio.get_running_loop().call_soon(self._schedule)  # once it has left the line

    def leave(self, slot: Slot) -> None:
        slot.in_flight -= 1
        slot.last_used = clock.monotonic()
        self._schedule()

    @asynccontextmanager
    async def set_aside(self, names: Iterable[str]) -> AsyncIterator[None]:
        """Send no request to these engines: a caller's operation moves them."""
        slots = [slot for name in names if (slot := self._slots.get(name))]
        for slot in slots:
            slot.moving += 1
        try:
            yield
        finally:
            for slot in slots:
                slot.moving -= 1
            self._schedule()

    def update(self, status: FleetStatus) -> None:
        for engine in status.engines:
            self._slots.setdefault(engine.name, Slot(engine.name)).update(engine, status.wanted, status.demands)
        for name in self._slots.keys() - {engine.name for engine in status.engines}:
            del self._slots[name]
        self._schedule()

    def close(self) -> None:
        """Refuse the requests that wait. Moves in progress are the coordinator's to end."""
        self._closed = True
        for line in self._lines.values():
            line.fail(NoTurnError("the coordinator shuts down; repeat the request"))

    # -- whose turn it is ----------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Give a turn to each request that can have one, and begin the moves that others need."""
        if self._closed:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for slot in self._slots.values():
            slot.yielding = False
        claimed = {gpu for slot in self._slots.values() if slot.moving for gpu in slot.gpus}
        waiting = [(line.since, model) for model, line in self._lines.items() if line]
        for _, model in sorted(waiting):
            self._serve_or_claim(model, claimed)
        if not self._observer.trouble:  # else nothing can be moved
            self._release_idle(claimed)

    def _serve_or_claim(self, model: str, claimed: set[str]) -> None:
        line, slots = self._lines[model], self.models.get(model, [])
        ready = [slot for slot in slots if slot.is_ready]
        if ready:
            line.serve(min(ready, key=lambda slot: slot.in_flight))
            return
        if any(slot.waking for slot in slots):  # one is enough
            return
        asleep = [slot for slot in slots if slot.state == "asleep" and not slot.moving]
        if not asleep:
            if all(slot.state in ("dead", "kept") and not slot.moving for slot in slots):
                states = "; ".join(f"{slot.name}: {slot.reason}" for slot in slots) or "no engine has this model now"
                why = f"no engine of {model!r} can serve now: {states}"
                line.fail(NoTurnError(why, self._retry_after_s(slots)))
            return
        if not line.looked:
            claimed.update(gpu for slot in asleep for gpu in slot.gpus)
            return
        if self._observer.trouble:
            line.fail(NoTurnError(f"no memory can be moved now: {self._observer.trouble}", self._retry_after_s(slots)))
            return
        room = {slot: victims(slot, self._slots.values()) for slot in asleep if not claimed & set(slot.gpus)}
        fits = {slot: chosen for slot, chosen in room.items() if chosen is not None}
        if not fits:
            if len(room) == len(asleep):
                self._refuse_or_look_again(line, asleep)
            for slot in asleep:
                claimed.update(slot.gpus)
            return
        line.short_since = None
        used = {one: max((each.last_used for each in chosen), default=0.0) for one, chosen in fits.items()}
        slot = min(fits, key=lambda one: (one.name in line.tried, len(fits[one]), used[one]))
        claimed.update(slot.gpus)
        self._claim(slot, fits[slot])

    def _refuse_or_look_again(self, line: Line, asleep: list[Slot]) -> None:
        """Refuse the line if no engine has fitted for ``SHORT_S``: the figures of an engine may be out of date."""
        now = clock.monotonic()
        gpus = {gpu for slot in asleep for gpu in slot.gpus}
        there = [each for each in self._slots.values() if gpus & set(each.gpus)]
        if any(each.moving or each.state == "closed" for each in there):  # it may make room later
            line.short_since = None
        elif line.short_since is None or now < line.short_since + SHORT_S:
            line.short_since = line.short_since or now
            line.looked = False
            self._keep(self._look(line, asleep, after_s=SHORT_S / 4))
        else:
            line.fail(NoTurnError(_shortage_of(asleep[0]), self._retry_after_s(asleep)))
            for slot in asleep:
                slot.extra = 0

    def _claim(self, slot: Slot, making_room: list[Slot]) -> None:
        """Wake ``slot`` once the others may make room and have no requests in flight."""
        now = clock.monotonic()
        due = max([slot.not_before, *(each.awake_since + self._awake_s(each) for each in making_room)])
        if due > now:
            self._again_in(due - now)
            return
        for each in making_room:
            each.yielding = True
        if not any(each.in_flight for each in making_room):
            self._start(slot, making_room)

    def _release_idle(self, claimed: set[str]) -> None:
        now = clock.monotonic()
        for slot in self._slots.values():
            idle_s = self.options.of(slot.model).idle_release_s
            if idle_s is None or not slot.is_ready or slot.in_flight or claimed & set(slot.gpus):
                continue
            due = max(slot.last_used + idle_s, slot.awake_since + self._awake_s(slot), slot.not_before)
            if due <= now:
                self._start(None, [slot])
            else:
                self._again_in(due - now)

    def _again_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is None or self._timer.when() > loop.time() + seconds:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(seconds, self._schedule)

    # -- moving memory -------------------------------------------------------------------------------------------------

    def _start(self, slot: Slot | None, making_room: list[Slot]) -> None:
        slots = [*making_room, *([slot] if slot else [])]
        for each in slots:
            each.moving += 1
            each.waking = each is slot
        self._keep(self._move(slot, making_room, slots))

    async def _move(self, slot: Slot | None, making_room: list[Slot], slots: list[Slot]) -> None:
        began = clock.monotonic()
        try:
            if making_room:
                released = await self._move_memory("release", [each.name for each in making_room])
                if not released.success:  # all are as before; tried again while requests wait
                    raise NoTurnError(f"no memory was freed for another engine: {released.message}")
            if slot is not None:
                await self._resume(slot, making_room)
            self._last_move_s = clock.monotonic() - began
        except Exception as error:
            for each in slots:
                each.not_before = clock.monotonic() + RETRY_S
            if isinstance(error, (NoTurnError, FleetError, NotFoundError)):  # the last: an engine has left the fleet
                logger.warning("%s", error)
            else:
                bug = None if isinstance(error, FleetUnknownError) else error
                logger.error("turns: memory could not be moved: %s", error, exc_info=bug)
                if slot is not None:
                    self._lines[slot.model].fail(NoTurnError(f"memory could not be moved: {error}"))
        finally:
            await self._observer.look([each.name for each in slots])
            for each in slots:
                each.moving -= 1
                each.waking = False
            self._schedule()

    async def _resume(self, slot: Slot, making_room: list[Slot]) -> None:
        demands = {"weights_version": slot.weights_version} if slot.weights_version else {}
        result = await self._move_memory("resume", [slot.name], **demands)
        if result.success:
            slot.woken()
            self.wakes[slot.model] += 1
            return
        error = NoTurnError(f"{slot.name} was not woken: {result.message}")
        if any(engine.kind == "out_of_device_memory" for engine in result.failed):
            slot.extra += 1  # others hold more than they report: one more makes room
        elif not self._others_left(slot):
            self._lines[slot.model].fail(error)
            if making_room:
                undone = await self._move_memory("resume", [each.name for each in making_room])
                logger.warning("the engines that made room for %s: %s", slot.name, undone.message)
        raise error

    def _others_left(self, slot: Slot) -> bool:
        """Return whether another engine of the model can be tried in place of ``slot``, which could not be woken."""
        tried = self._lines[slot.model].tried
        tried.add(slot.name)
        asleep = [each for each in self.models.get(slot.model, []) if each.state == "asleep" and not each.moving]
        return any(each.name not in tried and victims(each, self._slots.values()) is not None for each in asleep)

    # -- about engines -------------------------------------------------------------------------------------------------

    def _engines_of(self, model: str) -> list[Slot]:
        models = self.models
        if not models:
            why = self._observer.trouble or "its list of members is empty"
            raise NoTurnError(f"no engine of the fleet is known: {why}")
        if model not in models:
            raise UnknownModelError.of(model, models)
        return models[model]

    def _awake_s(self, slot: Slot) -> float:
        return self.options.of(slot.model).awake_s

    def _retry_after_s(self, slots: Iterable[Slot]) -> int:
        """Return after how many seconds a repeat may succeed: when engines there may make room, and one move later."""
        gpus = {gpu for slot in slots for gpu in slot.gpus}
        ends = [each.awake_since + self._awake_s(each) for each in self._slots.values() if gpus & set(each.gpus)]
        left = max(ends, default=0.0) - clock.monotonic()
        return max(1, math.ceil(max(0.0, left) + self._last_move_s))


def _shortage_of(slot: Slot) -> str:
    need = slot.share_of(slot.released_bytes)
    free = ", ".join(f"{size} on {gpu}" for gpu, size in slot.free.items())
    return (
        f"{slot.name} needs {need} bytes of each of its GPUs, and would not fit if all engines of the fleet there were "
        f"released; free bytes: {free}. Free memory that other processes hold there"
    )
