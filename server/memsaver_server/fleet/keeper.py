"""Changes the record, one change after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from memsaver_server.fleet.record import Record, RecordContent, Running, Wanted


class Keeper:
    """The only writer of a record. Its methods raise RecordError, after which the record is as before."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._lock = asyncio.Lock()

    async def load(self) -> RecordContent:
        async with self._lock:
            return await self._record.load()

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

        await self._change(change)

    async def _change(self, change: Callable[[RecordContent], RecordContent]) -> None:
        async with self._lock:
            before = await self._record.load()
            after = change(before)
            if after != before:
                await self._record.save(after)
