"""The service from outside: all its routes, and all that a call could change."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import memsaver_core as ms
from memsaver_server import Settings, create_app
from memsaver_server import routes as package

from .tensor_engine import TensorEngine

#: Open without a key on purpose: the dashboard page and its files (without data), the description, probes and metrics.
OPEN = {"/", "/dashboard/{name}", "/openapi.json", "/livez", "/health", "/readyz", "/metrics"}


def routes() -> list[tuple[str, str]]:
    """Method and path of every route in the route files, including those that the description leaves out."""
    files = [import_module(f"{package.__name__}.{found.name}") for found in iter_modules(package.__path__)]
    served = [route for file in files if hasattr(file, "router") for route in file.router.routes]
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
