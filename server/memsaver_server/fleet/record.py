"""What is wanted of a fleet: one small record, which any coordinator can carry on from.

What the engines are is asked of the engines. The record says what they should be, and which operations have begun.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import FiniteFloat, ValidationError

from memsaver_core.contract.errors import FleetUnknownError
from memsaver_core.contract.model import Model
from memsaver_core.contract.phases import OperationName
from memsaver_core.contract.policies import COMMON_TAGS
from memsaver_core.contract.requests import ASKED_OF_FLEET, STATES, Described, FleetRelease, FleetResume, Selector, Verb
from memsaver_core.contract.status import OccupationAnswer
from memsaver_server.operation.history import KEPT_S, MAX_KEPT
from memsaver_server.wrong_fields import wrong_fields

logger = logging.getLogger("memsaver")

Outcome = Literal["begun", "succeeded", "failed", "cancelled"]
RunningStage = Literal["preparing", "committing", "rolling_back"]
#: The operation that leaves each state.
VERBS: dict[str, Verb] = {STATES[verb]: verb for verb in ASKED_OF_FLEET}


class Wanted(Model):
    """One wish. The last one that concerns an engine and a tag counts.

    Attributes:
        tags: None means all.
        options: those of the release or resume, besides tags. Once it is carried out, ``weights_version`` is no longer
            here, but among the record's demands.
        operation_id: the fleet's operation that wished it.
        client: who asked for that.
        until_asked: released only until the next request for its model.
        order: what the record's count ``noted`` was when the operation was noted.
    """

    selector: Selector
    state: Literal["released", "resident"]
    tags: tuple[str, ...] | None = None
    options: Mapping[str, Any] = {}
    operation_id: str = ""
    client: str = ""
    until_asked: bool = False
    order: int = 0

    @classmethod
    def of(cls, asked: FleetRelease | FleetResume, operation_id: str, client: str, until_asked: bool) -> Wanted:
        """Return what the record is to say once ``asked`` is carried out."""
        return cls(
            selector=asked.selected(),
            state=STATES[asked.operation],
            tags=asked.tags or None,
            options=asked.lasting(),
            operation_id=operation_id,
            client=client,
            until_asked=until_asked,
        )

    def asked(self, sent: Mapping[str, Any] | None = None) -> FleetRelease | FleetResume:
        """Return the request that another coordinator has noted as this wish; ``sent`` has the options that it sent, if
        not those of the wish alone."""
        model = ASKED_OF_FLEET[VERBS[self.state]]
        given = {**(self.options if sent is None else sent), "tags": self.tags or ()}
        known = {name: value for name, value in given.items() if name in model.model_fields}
        return model(selector=self.selector, **known)


class Demand(Model):
    """What callers demand of the weights of engines that serve. The last one that concerns an engine counts."""

    selector: Selector
    version: str | None  # which an update must have named; None: any
    operation_id: str  # the fleet's operation that demands it


class Known(Model):
    """What the id of an operation stands for."""

    digest: str  # of its request; empty for the coordinator's own operations, which nobody can name
    verb: OperationName
    outcome: Outcome  # ``begun``: one in mode ``best_effort`` whose coordinator ended first; a repeat carries it out
    at: FiniteFloat  # seconds since the epoch
    order: int = 0  # as in ``Wanted``; unlike ``at`` it is right also after a clock was put back
    resized: Selector | None = None  # the engines whose KV cache it limits


class Prepared(Model):
    """What one engine has prepared. ``model`` and ``gpus`` are noted as the list of members may lack them."""

    url: str
    model: str = ""
    operation_id: str = ""  # of the engine's own operation; empty until it is known
    tags: tuple[str, ...] = ()  # that it moves
    kept: tuple[str, ...] = ()  # tags that had a backup before it
    gpus: tuple[str, ...] = ()  # UUIDs of those that it uses


class Running(Model):
    """How far an operation in mode ``all`` is. Once it is ``committing``, every engine is prepared. Any coordinator can
    commit or abort it by ``key``, the Idempotency-Key under which the engines prepare what they were ``sent``."""

    stage: RunningStage
    wanted: Wanted
    sent: Mapping[str, Any] | None = None  # None: written by an earlier version, which noted only the wish
    key: str = ""
    digest: str = ""  # of the request
    engines: dict[str, Prepared]


class RecordContent(Model):
    """The record. ``running`` has the operations in mode ``all`` that have not ended, by their id.

    ``ids`` has what the ids of those that have ended stand for. An id is kept for ``KEPT_S`` after the operation's end;
    beyond ``MAX_KEPT`` those that ended longest ago are dropped. One that was dropped counts as new: its request is
    carried out, and the answer says what that did. Of the wishes, too, the last ``MAX_KEPT`` are kept.
    """

    version: Literal[1] = 1
    noted: int = 0  # operations that have begun or ended so far
    wanted: tuple[Wanted, ...] = ()
    demands: tuple[Demand, ...] = ()
    running: Mapping[str, Running] = {}
    ids: Mapping[str, Known] = {}

    def known(self, operation_id: str) -> Known | None:
        """Return what the id of an operation that has ended stands for, as long as it is kept."""
        known = self.ids.get(operation_id)
        return known if known is not None and known.at > time.time() - KEPT_S else None

    def is_overtaken(self, operation_id: str, tags: Sequence[str], members: Iterable[Described]) -> bool:
        """Return whether a later operation concerns one of these members: for a resize another resize, else one that
        has left a wish about one of ``tags``; no tags: about any."""
        known = self.ids[operation_id]
        if known.resized is not None:
            resizes = [each for each in self.ids.values() if each.order > known.order]
            later = [each.resized for each in resizes if each.resized is not None]
        else:
            wishes = [wish for wish in self.wanted if wish.order > known.order]
            later = [wish.selector for wish in wishes if not tags or not wish.tags or set(tags) & set(wish.tags)]
        return any(selector.matches(member) for member in members for selector in later)

    def first(self, operation_id: str, digest: str) -> str:
        """Describe the other request that an id stands for; empty if it stands for that of ``digest``, or for none."""
        known, running = self.known(operation_id), self.running.get(operation_id)
        if known is not None and known.digest != digest:
            return f"{known.verb} {operation_id}"
        if running is not None and running.digest not in ("", digest):
            return f"{VERBS[running.wanted.state]} {operation_id}"
        return ""

    def noting(
        self, operation_id: str, known: Known, wish: Wanted | None = None, rest: Sequence[Wanted] = ()
    ) -> RecordContent:
        """Return the record in which an operation does not run any more, its id is known, and what it wants is noted:
        its ``wish``, and in ``rest`` further ones for some engines. Ids that are too old or too many, and wishes that
        the new ones replace, are left out."""
        running = {key: each for key, each in self.running.items() if key != operation_id}
        ids, wanted, noted = self.ids, self.wanted, self.noted + 1
        if known.digest:
            kept = [(key, each) for key, each in ids.items() if each.at > known.at - KEPT_S and key != operation_id]
            ids = dict([*kept, (operation_id, known.model_copy(update={"order": noted}))][-MAX_KEPT:])
        for new in (*([] if wish is None else [wish]), *rest):
            options = {name: value for name, value in new.options.items() if name != "weights_version"}
            taken = new.model_copy(update={"options": options, "order": noted})
            wanted = (*(old for old in wanted if not _covers(new, old)), taken)[-MAX_KEPT:]
        demands = self.demands if wish is None else _demands_after(wish, self.demands)
        changed = {"noted": noted, "running": running, "ids": ids, "wanted": wanted, "demands": demands}
        return self.model_copy(update=changed)


class Record(Protocol):
    """Keeps the record. One coordinator writes it at a time."""

    async def load(self) -> RecordContent:
        """Return what was saved last, or an empty record. Raises RecordError, with the reason, if it cannot be read."""

    async def save(self, content: RecordContent) -> None:
        """Replace the record. Once this returns, ``load`` gives ``content``, also after a crash. Raises RecordError,
        with the reason, if it cannot be written: the old one is still there."""


class RecordError(FleetUnknownError):
    """The record cannot be read or written; the message says why."""


class MemoryRecord:
    """Kept in this process only: a coordinator that restarts knows nothing of it."""

    def __init__(self) -> None:
        self._content = RecordContent()

    async def load(self) -> RecordContent:
        return self._content

    async def save(self, content: RecordContent) -> None:
        self._content = content


class FileRecord:
    """Kept in a JSON file, which is replaced in one step."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._last: RecordContent | None = None  # as this process has read or written it

    async def load(self) -> RecordContent:
        try:
            self._last = RecordContent.model_validate_json(await asyncio.to_thread(self._path.read_bytes))
            return self._last
        except FileNotFoundError:
            if self._last is None:
                return RecordContent()
            logger.warning("the record %s was removed, and is written again; end the coordinator first", self._path)
            await self.save(self._last)
            return self._last
        except OSError as error:
            raise RecordError(f"the record {self._path} cannot be read: {error}") from None
        except ValidationError as error:
            why = wrong_fields(error)
            raise RecordError(f"the record {self._path} cannot be read: {why}; repair or remove it") from None

    async def save(self, content: RecordContent) -> None:
        try:
            text = content.model_dump_json(indent=1).encode() + b"\n"  # with 4096 ids, json takes 10 times as long
            await asyncio.to_thread(self._replace, text)
        except (OSError, ValueError) as error:
            raise RecordError(f"the record {self._path} cannot be written: {error}") from None
        self._last = content

    def _replace(self, text: bytes) -> None:
        new = self._path.with_name(self._path.name + ".new")
        # A process that can read the keys of what is prepared can commit it.
        with open(new, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            os.fchmod(file.fileno(), 0o600)  # one that a crash left, or an earlier version
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name, too, outlives a crash
        finally:
            os.close(folder)


_ALL = Selector()


def _includes(selector: Selector, other: Selector) -> bool:
    """Return whether ``selector`` surely selects every engine that ``other`` does."""
    if selector in (_ALL, other):
        return True
    by_name = selector == Selector(names=selector.names)
    return by_name and bool(other.names) and set(other.names) <= set(selector.names)


def _covers(new: Wanted, old: Wanted) -> bool:
    """Return whether ``new`` leaves nothing of ``old``."""
    selected = _includes(new.selector, old.selector)
    return selected and (new.tags is None or (old.tags is not None and set(old.tags) <= set(new.tags)))


def wishes_for(member: Described, wanted: Iterable[Wanted], now: OccupationAnswer | None) -> dict[str | None, Wanted]:
    """Return the wish that counts for each tag of an engine that holds ``now``; under None, that for the tags that no
    wish names. The engine resumes these with the last of ``COMMON_TAGS``, so then they are wanted resident, too."""
    found: dict[str | None, Wanted] = {}
    for wish in wanted:
        if wish.selector.matches(member):
            found = {None: wish} if wish.tags is None else {**found, **dict.fromkeys(wish.tags, wish)}
    named = [wish for tag, wish in found.items() if tag is not None]
    common = COMMON_TAGS.intersection(tag.tag for tag in now.tags) if now is not None else COMMON_TAGS
    if None in found and named and common <= found.keys() and all(wish.state == "resident" for wish in named):
        found[None] = max(named, key=lambda wish: wish.order)
    return found


def tags_beside(now: OccupationAnswer, tags: Collection[str], wishes: Mapping[str | None, Wanted]) -> list[str]:
    """Return further tags that an engine is to resume with the last of ``tags``: those that no caller names, because a
    release of everything took them. It does so by itself unless the coordinator has released them by name since."""
    left = {tag.tag for tag in now.tags if tag.released_bytes}.difference(tags)
    released = {tag for tag, wish in wishes.items() if wish.state == "released"}
    return sorted(left) if None in wishes and not left & (released | COMMON_TAGS) else []


def kept_released(member: Described, wanted: Iterable[Wanted], now: OccupationAnswer | None) -> str:
    """Return why turns must not move an engine's memory: a caller has released it for good. Empty if they may."""
    wishes = wishes_for(member, wanted, now).values()
    is_kept = any(wish.state == "released" and not wish.until_asked for wish in wishes)
    return "a caller has released it, and has to resume it" if is_kept else ""


def wish_for(tag: str, wishes: Mapping[str | None, Wanted]) -> Wanted | None:
    """Return the one of ``wishes_for`` that counts for a tag."""
    return wishes.get(tag, wishes.get(None))


def _demands_after(wish: Wanted, demands: tuple[Demand, ...]) -> tuple[Demand, ...]:
    """Return the demands once ``wish`` is carried out. A wish about the weights that names no version ends those about
    its engines. One of the turns, which move memory as requests come, changes none."""
    version = wish.options.get("weights_version")
    if wish.until_asked or not (version or wish.tags is None or "weights" in wish.tags):
        return demands
    kept = tuple(old for old in demands if not _includes(wish.selector, old.selector))
    new = Demand(selector=wish.selector, version=version, operation_id=wish.operation_id)
    return (*kept, new) if version or kept else ()


def version_for(member: Described, demands: Sequence[Demand]) -> str | None:
    """Return the version that the weights of an engine must have to serve; None: any."""
    return next((each.version for each in reversed(demands) if each.selector.matches(member)), None)


_Change = Callable[[RecordContent], RecordContent]


class Keeper:
    """The only writer of a record. Its methods raise RecordError, after which the record is as before.

    The end of an operation that could not be written counts all the same, and is written as soon as that is possible:
    else what has ended would be carried out again, against later wishes.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._unwritten: list[_Change] = []
        self._lock = asyncio.Lock()

    async def load(self) -> RecordContent:
        async with self._lock:
            content = self._ended(await self._record.load())
            if self._unwritten:
                with suppress(RecordError):
                    await self._save(content)
            return content

    async def running(self, operation_id: str, running: Running) -> None:
        await self._change(lambda old: old.model_copy(update={"running": {**old.running, operation_id: running}}))

    async def begun(self, operation_id: str, known: Known, wish: Wanted | None) -> None:
        """Note what an operation that begins is to leave. Unlike an end, nothing of it counts if it is not written."""
        await self._change(lambda old: old.noting(operation_id, known, wish))

    async def ended(
        self, operation_id: str, known: Known, wish: Wanted | None, rest: Sequence[Wanted], prepared_by: str
    ) -> None:
        """Note that an operation has ended, what its id stands for, and what is wanted from now on, as
        ``RecordContent.noting``. Changes nothing if it was noted as running, ``prepared_by`` this key, and another
        coordinator has ended it since."""

        def change(content: RecordContent) -> RecordContent:
            running = content.running.get(operation_id)
            if prepared_by and (running is None or running.key != prepared_by):
                return content
            return content.noting(operation_id, known, wish, rest)

        try:
            await self._change(change)
        except RecordError:
            self._unwritten.append(change)
            raise

    async def _change(self, change: _Change) -> None:
        async with self._lock:
            before = await self._record.load()
            after = change(self._ended(before))
            if after != before:
                await self._save(after)

    def _ended(self, content: RecordContent) -> RecordContent:
        for change in self._unwritten:
            content = change(content)
        return content

    async def _save(self, content: RecordContent) -> None:
        await self._record.save(content)
        self._unwritten.clear()
