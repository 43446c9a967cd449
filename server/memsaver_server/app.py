"""The ASGI applications of an engine and of a fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from memsaver_server.http.app import application
from memsaver_server.routes import routers_of
from memsaver_server.settings import Settings

if TYPE_CHECKING:
    from memsaver_server.engine import Engine
    from memsaver_server.fleet.fleet import AsyncFleet
    from memsaver_server.fleet.turns.options import TurnOptions


def create_app(engine: Engine, settings: Settings | None = None) -> FastAPI:
    """Return the application that serves ``engine``; ``settings`` default to those of the environment.

    Serve it as it is, or mount it in the engine's own application.
    """
    from memsaver_server.engine.controller import EngineController  # loads torch, which a coordinator does without

    settings = settings or Settings()
    controller = EngineController(engine, settings)
    about = "Give a GPU back while the inference engine that fills it stays alive."
    return application(controller, settings, routers_of(controller.models, controller.capabilities), "memsaver", about)


def create_fleet_app(
    fleet: AsyncFleet,
    settings: Settings | None = None,
    *,
    turns: TurnOptions | None = None,
    engine_key: str | None = None,
) -> FastAPI:
    """Return the application that serves ``fleet``, and closes it when it ends.

    Args:
        settings: by default those of the environment; the key is that of the callers.
        turns: how models take turns.
        engine_key: the key for requests that are passed on to engines for which no key is listed.
    """
    from memsaver_server.fleet.controller import FleetController
    from memsaver_server.fleet.turns.options import TurnOptions

    settings = settings or Settings()
    controller = FleetController(fleet, settings, turns or TurnOptions(), engine_key)
    about = "Many engines, released together or not at all, and woken by the requests for their models."
    routers = routers_of(controller.models, controller.capabilities)
    return application(controller, settings, routers, "memsaver fleet", about)
