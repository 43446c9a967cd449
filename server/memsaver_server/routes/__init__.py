"""The HTTP endpoints: one module per dialect and per concern, each once for an engine and for a fleet.

Every module here has ``router(models)``, which returns its routes.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from fastapi import APIRouter

from memsaver_server.controller import Controller

#: The capability of a controller that a module needs, by its name. An engine's process does not load those of a fleet.
_NEEDS = {"generate": "generate", "weights": "update", "aibrix": "models", "ray_serve": "models", "proxy": "models"}


def routers_of(controller: Controller[Any]) -> list[APIRouter]:
    """Return the routers of what ``controller`` can do."""
    names = [module.name for module in iter_modules(__path__)]
    names.sort(key=lambda name: (name == "proxy", name))  # it takes every path below /v1 that no other has
    able = [name for name in names if _NEEDS.get(name, "") in {"", *controller.capabilities}]
    return [import_module(f"{__name__}.{name}").router(controller.models) for name in able]
