"""How an operation is carried out.

Mode ``best_effort``: each engine by itself; what cannot be done is listed.

Mode ``all``: prepared on all engines, then committed on all; else aborted, or undone, on all. A coordinator may end
at any moment. If the record does not say ``committing`` yet, nothing was moved, and the engines' leases end. If it
does, every engine is prepared, and the next coordinator commits on the rest or undoes all.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from hashlib import sha256
from typing import Any

import anyio

from memsaver_core.contract.errors import PhaseTimeoutError
from memsaver_core.contract.phases import Phase
from memsaver_core.contract.policies import keeps_all
from memsaver_core.contract.requests import OPPOSITE, STATES, Selector
from memsaver_server import clock
from memsaver_server.fleet import record
from memsaver_server.fleet.budget import groups_of
from memsaver_server.fleet.connection import Coordinator, EngineFailure
from memsaver_server.fleet.operation import FleetOperation
from memsaver_server.fleet.parts import Part
from memsaver_server.threads import first_of

logger = logging.getLogger("memsaver")


class Execution:
    """Carries out one operation, whose ``how`` says afterwards how it ended."""

    def __init__(
        self,
        operation: FleetOperation,
        keeper: record.Keeper,
        coordinator: Coordinator,
        report: Callable[[FleetOperation, str], None],
    ) -> None:
        self._operation = operation
        self._request = operation.asked
        self._key = operation.prepare_key
        self._timeout_s = operation.asked.timeout_s or 0.0
        self._parts = operation.parts
        self._keeper = keeper
        self._lease_s, self._silence_s = coordinator.prepared_for_s, coordinator.silence_s
        self._prepared = {**operation.asked.sent(), "prepare": True, "lease_s": self._lease_s}
        self._report = partial(report, operation)
        self._noted = ""  # the key under which the record has it as running
        self._wanted: Sequence[record.Wanted] = ()  # in the record, when it was last read

    async def alone(self) -> None:
        """Carry it out on each engine by itself. Nothing was done if it raises RecordError."""
        self._operation.how = "done"
        await self._name_tags()
        # Before any engine acts: a reconciler does what remains.
        await self._keeper.begun(self._operation.id, self._operation.known("begun"), self._operation.wish)
        self._report("commit")
        groups = await groups_of(self._request, [part for part in self._parts if part.failure is None])

        async def in_turn(group: Iterable[Part]) -> None:
            for part in group:
                if part.failure is None:
                    part.stage = "committing"
                    body = self._body(part, self._request.sent())
                    await part.perform(self._request.operation, body, "committing", key=self._key)

        await asyncio.gather(*map(in_turn, groups))
        await self._confirm()
        await self._end(rest=self._wishes_for_unnamed())

    async def together(self) -> None:
        """Carry it out on all engines or on none. Nothing was moved if it raises RecordError."""
        for part in self._parts:
            if part.before is not None and "prepared" not in part.before.model_fields_set:
                older = f"the service at {part.member.url} is older and cannot prepare"
                advice = "upgrade it, leave it out, or use mode best_effort"
                part.fail("asking", EngineFailure("cannot_prepare", f"{older}; {advice}"))
        if _failed(self._parts) or self._operation.given_up.is_set():
            for part in self._parts:
                part.after = part.before
            await self._end()
            return
        await self._name_tags()
        await self._note("preparing")
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._abort)
            if await self._prepare():
                await self._note("committing")
                if not self._operation.given_up.is_set():  # it may be given up meanwhile
                    undo.pop_all()
                    await self.commit()

    async def abandon(self) -> None:
        """Abort what the engines have prepared of an operation that never got further."""
        await self._look()
        await self._name_tags()
        for part in self._parts:
            # An idle engine has nothing to abort. An operation that still drains is found by the key.
            part.asked = part.after is not None and part.after.operation_id is not None
            if part.after is not None and part.after.prepared is not None:
                part.operation_id = part.after.prepared.operation_id
        await self._abort()

    async def commit(self) -> None:
        """Commit on all engines, which are prepared; undo all if one fails."""
        self._report("commit")
        await asyncio.gather(*map(self._commit_one, self._parts))
        if _failed(self._parts):
            await self.undo()
        else:
            self._operation.how = "done"
            await self._confirm()
            # If no engine is as asked any more, another coordinator has undone the operation.
            undone = all(part.failure and part.failure.kind == "changed" for part in self._parts)
            if undone:
                await self._end()
            else:
                await self._end(self._operation.wish, self._wishes_for_unnamed())

    async def undo(self) -> None:
        """Restore every engine: abort what is prepared, move back what was moved."""
        self._report("roll_back")
        self._operation.how = "undone"
        with suppress(record.RecordError):  # it still says committing: another coordinator fails, and undoes
            await self._note("rolling_back")
        with suppress(record.RecordError):
            self._wanted = (await self._keeper.load()).wanted
        await asyncio.gather(*map(self._undo_one, self._parts))
        await self._look()
        await self._end(rest=self._wishes_for_the_rest())

    # -- tags that no caller names -------------------------------------------------------------------------------------

    async def _name_tags(self) -> None:
        """If a resume is of the last tags that callers name, add those that no caller names. Raises RecordError."""
        tags = self._request.tags
        if self._request.operation != "resume" or not tags:
            return
        self._wanted = (await self._keeper.load()).wanted
        for part in self._parts:
            now = part.before or part.after
            wishes = record.wishes_for(part.member, self._wanted, now)
            if now is not None and (beside := record.tags_beside(now, tags, wishes)):
                part.named = (*tags, *beside)

    def _body(self, part: Part, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**body, "tags": list(part.named)} if part.named else body

    def _wishes_for_unnamed(self) -> list[record.Wanted]:
        """A resume of some tags may bring back others with them. Return a wish for each such engine that has these
        others stay, also when a caller releases some of the named ones."""
        wish, named = self._operation.wish, self._request.tags
        if wish is None or wish.state != "resident" or not named:
            return []
        wishes: list[record.Wanted] = []
        for part in self._parts:
            rows = part.answer.tags if part.answer is not None else ()
            if tags := tuple(row.tag for row in rows if row.resumed_bytes and row.tag not in named):
                about = {"selector": Selector(names=(part.member.name,)), "tags": tags, "options": {}}
                wishes.append(wish.model_copy(update=about))
        return wishes

    # -- prepare and abort ---------------------------------------------------------------------------------------------

    async def _prepare(self) -> bool:
        """Return whether all are prepared; stops at the first that fails."""
        self._report("prepare")
        groups = await groups_of(self._request, self._parts)
        if _failed(self._parts):
            return False

        async def prepare() -> None:
            async with anyio.create_task_group() as lanes:  # the first that fails ends the others
                for group in groups:
                    lanes.start_soon(self._prepare_in_turn, group)

        async with first_of(prepare(), self._operation.given_up.wait(), self._keep_leases()):
            pass
        return all(part.stage == "prepared" for part in self._parts) and not self._operation.given_up.is_set()

    async def _prepare_in_turn(self, group: Iterable[Part]) -> None:
        # An engine may take so long for its drain, or until there is memory.
        patience_s = self._timeout_s + self._request.patience_s(Phase.WAIT_FOR_MEMORY)
        for part in group:
            part.stage, part.asked = "preparing", True
            try:
                await self._prepare_one(part, patience_s + self._silence_s)
            except EngineFailure as failure:
                part.fail("preparing", failure)
                raise

    async def _prepare_one(self, part: Part, limit_s: float) -> None:
        began = clock.monotonic()
        body = self._body(part, self._prepared)
        answer = await part.connection.prepare(self._request.operation, body, self._key, limit_s)
        part.prepared(answer, began + answer.lease_s)  # or later: the engine counts from its answer

    async def _keep_leases(self) -> None:
        """Renew the leases of engines that wait for others. Returns at the first that cannot be renewed."""
        while not _failed(self._parts):
            await asyncio.sleep(self._lease_s / 8)
            await asyncio.gather(*map(self._renew, self._parts))

    async def _renew(self, part: Part) -> None:
        if part.stage != "prepared" or part.lease_left() > self._lease_s / 2:
            return
        with part.failing("preparing"):
            await self._prepare_one(part, self._silence_s)

    async def _abort(self) -> None:
        self._report("abort")
        await asyncio.gather(*(self._abort_one(part) for part in self._parts if part.asked))
        await self._look()
        await self._end()

    async def _abort_one(self, part: Part) -> None:
        """Undo the preparation; if the engine cannot be reached, the end of its lease does it."""
        try:
            # After a timeout of a phase the engine goes on with what it was asked.
            refused = part.failure and part.failure.answered and part.failure.kind != PhaseTimeoutError.kind
            if not part.operation_id and not refused:
                body = self._body(part, self._prepared)
                part.operation_id = await part.connection.find(self._request.operation, body, self._key)
            if part.operation_id:
                await part.connection.abort(part.operation_id, self._key)
        except EngineFailure as failure:
            if failure.kind != "conflict":  # what somebody else has prepared is not ours to undo
                part.undo_failure = failure
        if part.failure is None:
            part.stage = "undone"

    # -- commit and undo -----------------------------------------------------------------------------------------------

    async def _commit_one(self, part: Part) -> None:
        with part.failing("committing"):
            # An expired lease cannot be committed: one that is half over is renewed.
            if part.stage == "prepared" and part.lease_left() < self._lease_s / 2:
                known = part.operation_id
                await self._prepare_one(part, self._silence_s)
                if part.operation_id != known:
                    raise EngineFailure("lease_ended", f"the lease of {known} ended before its commit", answered=True)
            part.stage = "committing"
            part.done(await part.connection.commit(part.operation_id, self._key))

    async def _undo_one(self, part: Part) -> None:
        request = self._request
        moves = False  # whether it may still be moving memory
        try:
            if part.answer is None:
                moves = not await self._aborted(part)
            part.after = await part.connection.occupation()
            tags = part.tags if moves else part.moved(request.operation)
            if tags:
                body = {"tags": list(tags), **self._options_back(part, tags)}
                # Another coordinator may have begun it: an equal call joins that, another one follows it.
                asked = sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:8]
                key, limit_s = f"{part.operation_id}-undo-{asked}", self._timeout_s + self._silence_s
                await part.connection.perform(OPPOSITE[request.operation], body, key=key, limit_s=limit_s)
            if part.failure is None:
                part.stage = "undone"
        except EngineFailure as failure:
            part.undo_failure = failure
        part.ended()

    async def _aborted(self, part: Part) -> bool:
        """Return whether the engine has certainly given up its operation."""
        try:
            await part.connection.abort(part.operation_id, self._key)
        except EngineFailure as failure:
            if not failure.answered:
                raise
            return failure.kind == "not_found"  # a new process, or the operation is forgotten
        return True

    def _options_back(self, part: Part, tags: Collection[str]) -> dict[str, object]:
        """Return the options with which ``tags`` of an engine are moved back. For a release they are those of the
        wishes for it, but what was kept before is kept again. ``wait``: what is undone may not have ended."""
        request = self._request
        if request.operation == "release":
            return {"wait": True, "wait_for_memory_s": self._timeout_s}
        wishes = record.wishes_for(part.member, self._wanted, part.after)  # without any, regions' own policies count
        options: dict[str, Any] = {}
        restore: dict[str, str] = {}
        for tag in part.after.tags if part.after else ():
            wish = record.wish_for(tag.tag, wishes)
            given = wish.options if tag.tag in tags and wish is not None and wish.state == "released" else {}
            options |= given
            policy = given.get("restore", {}).get(tag.tag, "")
            if tag.tag in part.kept and tag.tag in tags and not keeps_all(policy or tag.restore):
                policy = "host"
            if policy and (keeps_all(policy) or tag.content == "lost"):
                restore[tag.tag] = policy
        if part.before is not None and part.before.hibernated:
            options["hibernate"] = True
        return {"wait": True, "timeout_s": self._timeout_s, **options, "restore": restore}

    async def _confirm(self) -> None:
        """Check that engines that are done still are: another caller may have moved their memory meanwhile, or they may
        have died."""

        async def look(part: Part) -> None:
            with part.failing("committing"):
                part.check(await part.connection.occupation(), self._request, "committing")

        await asyncio.gather(*(look(part) for part in self._parts if part.stage == "done"))

    async def _look(self) -> None:
        await asyncio.gather(*(part.look() for part in self._parts))

    def _wishes_for_the_rest(self) -> list[record.Wanted]:
        """Return wishes by which a reconciler undoes it on engines whose undo failed, or that do not answer. Tags whose
        wanted state is the former one already are left out, whatever the options of that wish."""
        verb, wish = self._request.operation, self._operation.wish
        assert wish is not None  # it is of mode ``all``
        back = wish.model_copy(update={"state": STATES[OPPOSITE[verb]], "options": {}, "until_asked": False})
        rest: list[record.Wanted] = []
        for part in (part for part in self._parts if part.is_stray(verb)):
            wishes = record.wishes_for(part.member, self._wanted, part.after or part.before)
            now = {tag: record.wish_for(tag, wishes) for tag in part.tags}
            if tags := tuple(tag for tag, wish in now.items() if wish is None or wish.state != back.state):
                rest.append(back.model_copy(update={"selector": Selector(names=(part.member.name,)), "tags": tags}))
        return rest

    # -- the record ----------------------------------------------------------------------------------------------------

    async def _note(self, stage: record.RunningStage) -> None:
        await self._keeper.running(self._operation.id, self._operation.as_running(stage))
        self._noted = self._key

    async def _end(self, wish: record.Wanted | None = None, rest: Sequence[record.Wanted] = ()) -> None:
        is_done = self._operation.how == "done" and not _failed(self._parts)
        outcome: record.Outcome = "succeeded" if is_done else "failed"
        if self._operation.how == "aborted" and self._operation.given_up.is_set():
            outcome = "cancelled"
        try:
            await self._keeper.ended(self._operation.id, self._operation.known(outcome), wish, rest, self._noted)
        except record.RecordError:
            # The engines are the truth, and the keeper writes it later.
            logger.exception("fleet operation %s has ended, but could not be recorded", self._operation.id)


def _failed(parts: Iterable[Part]) -> bool:
    return any(part.failure for part in parts)
