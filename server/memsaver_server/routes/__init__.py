"""The HTTP endpoints: one module per dialect and per concern, without state of their own."""

from fastapi import APIRouter

from memsaver_server.engine import GeneratingEngine, UpdatableEngine
from memsaver_server.routes import dashboard, generate, memory, operations, probes, sglang, tensorrt_llm, vllm, weights

#: Each router, and the type of engine that it needs.
ROUTERS: tuple[tuple[APIRouter, type], ...] = (
    (sglang.router, object),
    (vllm.router, object),
    (tensorrt_llm.router, object),
    (memory.router, object),
    (operations.router, object),
    (probes.router, object),
    (dashboard.router, object),
    (generate.router, GeneratingEngine),
    (weights.router, UpdatableEngine),
)
