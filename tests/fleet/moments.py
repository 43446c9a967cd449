"""A record by which a test acts at a moment of an operation."""

from __future__ import annotations

from collections.abc import Callable

from memsaver_server.fleet import MemoryRecord, RecordContent


class Moments(MemoryRecord):
    """Calls what ``at`` was given once, when an operation comes to that stage."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[str, Callable[[], object]] = {}

    def at(self, stage: str, call: Callable[[], object]) -> None:
        """Have ``call`` called when the next operation comes to ``stage``: ``preparing`` is before any engine is asked
        to prepare, ``committing`` when all are prepared and none has been asked to commit."""
        self._calls[stage] = call

    async def save(self, content: RecordContent) -> None:
        await super().save(content)
        for running in content.running.values():
            if call := self._calls.pop(running.stage, None):
                call()
