"""Changes the record, one change after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from memsaver_server.fleet.record import Record, RecordContent, RecordError, Running, Wanted

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
        """Note how far an operation is."""
        await self._change(
            lambda content: content.model_copy(update={"running": {**content.running, operation_id: running}})
        )

    async def ended(self, operation_id: str, *wishes: Wanted) -> None:
        """Forget an operation that has ended, and note what is wanted from now on."""

        def change(content: RecordContent) -> RecordContent:
            left = {key: value for key, value in content.running.items() if key != operation_id}
            content = content.model_copy(update={"running": left})
            for wish in wishes:
                content = content.wishing(wish)
            return content

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
