"""The service from outside: every route that it has, and all that a call could change."""

from __future__ import annotations

import memsaver_core as ms
from memsaver_server import Settings, create_app
from memsaver_server.routes import dashboard

from .tensor_engine import TensorEngine

#: What everybody may look at without a key: the page, its files, the description, probes and metrics.
OPEN = ["/", "/dashboard/{name}", "/openapi.json", "/livez", "/health", "/readyz", "/metrics"]


def routes(engine: TensorEngine) -> list[tuple[str, str]]:
    """Each method and path that the application answers, those beside the description included."""
    described = create_app(engine, Settings()).openapi()["paths"]
    beside = [(method, route.path) for route in dashboard.router.routes for method in route.methods]
    return [
        *((method.upper(), path) for path, operations in described.items() for method in operations),
        *beside,
        ("GET", "/openapi.json"),
    ]


def posts(engine: TensorEngine) -> dict[str, list[str]]:
    """Every path that is posted to, and the fields of its body."""
    described = create_app(engine, Settings()).openapi()["paths"]
    return {
        path: list(operations["post"]["requestBody"]["content"]["application/json"]["schema"].get("properties", {}))
        for path, operations in described.items()
        if "post" in operations
    }


def seen(engine: TensorEngine) -> object:
    """What a call could change."""
    status = ms.status()
    return (
        *(status.state, status.tags, status.host_backup),
        *(engine.is_closed, engine.held, len(engine._prefixes), len(engine.repairs), engine.weights._version),
    )
