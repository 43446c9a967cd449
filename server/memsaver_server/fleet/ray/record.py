"""The record of a fleet in the Ray cluster's own key-value store."""

from __future__ import annotations

import asyncio

from pydantic import ValidationError

from memsaver_server.fleet.ray.cluster import read_key, write_key
from memsaver_server.fleet.record import RecordContent, RecordError
from memsaver_server.wrong_fields import wrong_fields


class RayRecord:
    """Lives as long as the cluster's control service; with its fault tolerance (Redis), beyond the head node's end."""

    def __init__(self, fleet: str = "default") -> None:
        self._key = f"record/{fleet}"

    async def load(self) -> RecordContent:
        try:
            stored = await asyncio.to_thread(read_key, self._key)
            return RecordContent() if stored is None else RecordContent.model_validate_json(stored)
        except ValidationError as error:
            why = wrong_fields(error)
            raise RecordError(f"the record {self._key!r} in Ray's store is not one of this version: {why}") from None
        except Exception as error:  # Ray's client raises many kinds
            raise RecordError(f"the record cannot be read from Ray's store: {error}") from error

    async def save(self, content: RecordContent) -> None:
        try:
            await asyncio.to_thread(write_key, self._key, content.model_dump_json().encode())
        except Exception as error:
            raise RecordError(f"the record cannot be written to Ray's store: {error}") from error
