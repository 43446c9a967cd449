"""The service from outside: all its routes, and all that a call could change."""

from __future__ import annotations

from typing import cast

from fastapi.routing import APIRoute

import memsaver_core as ms
from memsaver_server import Settings, create_app
from memsaver_server.engine.controller import EngineController
from memsaver_server.routes import routers_of

from .tensor_engine import TensorEngine

#: Open without a key on purpose: the dashboard page and its files (without data), the description, probes and metrics.
OPEN = {"/", "/dashboard/{name}", "/openapi.json", "/livez", "/health", "/readyz", "/metrics"}


def routes() -> list[tuple[str, str]]:
    """Method and path of every route of an engine that can do all, including those that the description leaves out."""
    routers = routers_of(EngineController.models, frozenset({"generate", "update"}))
    served = [cast(APIRoute, route) for router in routers for route in router.routes]
    return [("GET", "/openapi.json"), *sorted((method, route.path) for route in served for method in route.methods)]


def posts(engine: TensorEngine) -> dict[str, list[str]]:
    """Every POST path with the fields of its body."""
    described = create_app(engine, Settings()).openapi()["paths"]
    return {
        path: list(operations["post"]["requestBody"]["content"]["application/json"]["schema"].get("properties", {}))
        for path, operations in described.items()
        if "post" in operations
    }


def seen(engine: TensorEngine) -> object:
    """Everything that a call could change."""
    status = ms.status()
    return (
        *(status.state, status.tags, status.host_backup),
        *(engine.is_closed, engine.held, len(engine._prefixes), len(engine.repairs), engine.weights._version),
    )
