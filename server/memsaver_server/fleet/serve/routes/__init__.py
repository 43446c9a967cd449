"""The endpoints of a fleet: one module per dialect and per concern, without state of their own."""

from fastapi import APIRouter

from memsaver_server.fleet.serve.routes import (
    aibrix,
    dashboard,
    every_engine,
    memory,
    operations,
    probes,
    proxy,
    sleep,
    tensorrt_llm,
)

#: The proxy is last: it takes every path below /v1 that no other route has.
ROUTERS: tuple[APIRouter, ...] = (
    memory.router,
    every_engine.router,
    sleep.router,
    tensorrt_llm.router,
    aibrix.router,
    operations.router,
    probes.router,
    dashboard.router,
    proxy.router,
)
