"""The HTTP endpoints: one module per dialect and per concern, each once for an engine and for a fleet.

Every module here has ``router(models)``, which returns its routes.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from fastapi import APIRouter

from memsaver_server.controller import Models

#: The capability of a controller that a module needs, by its name. An engine's process does not load those of a fleet.
_NEEDS = {"generate": "generate", "weights": "update", "aibrix": "models", "proxy": "models"}


@cache  # making them takes 0.1 s, as FastAPI builds a validator of every field
def routers_of(models: Models, capabilities: frozenset[str]) -> tuple[APIRouter, ...]:
    """Return the routers of a controller that has these models and capabilities."""
    names = [module.name for module in iter_modules(__path__)]
    names.sort(key=lambda name: (name == "proxy", name))  # it takes every path below /v1 that no other has
    able = [name for name in names if _NEEDS.get(name, "") in {"", *capabilities}]
    return tuple(import_module(f"{__name__}.{name}").router(models) for name in able)
