"""The ASGI application of a fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from memsaver_server.app import compose
from memsaver_server.fleet.fleet import AsyncFleet
from memsaver_server.fleet.serve.routes import ROUTERS
from memsaver_server.fleet.serve.service import FleetService
from memsaver_server.fleet.turns.options import TurnOptions
from memsaver_server.settings import Settings


def create_fleet_app(
    fleet: AsyncFleet,
    settings: Settings | None = None,
    *,
    turns: TurnOptions | None = None,
    engine_key: str | None = None,
) -> FastAPI:
    """Return the application that serves ``fleet``, which it closes when it ends.

    Args:
        settings: by default those of the environment; the key is that of the callers.
        turns: how models take turns.
        engine_key: the key of the engines that have none of their own, for requests that are passed on to them.
    """
    service = FleetService(fleet, settings or Settings(), turns or TurnOptions(), engine_key)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.end()

    about = "Many engines, released together or not at all, and woken by the requests for their models."
    return compose(service, "memsaver fleet", about, ROUTERS, lifespan)
