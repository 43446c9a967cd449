"""The size of the KV cache, if the engine can change it while it serves."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from memsaver_core.contract.errors import BadRequestError
from memsaver_core.contract.reports import PlanAnswer, ResizedAnswer
from memsaver_core.contract.requests import ResizeKvCache, acts_of
from memsaver_core.contract.status import KvCacheAnswer
from memsaver_server.controller import Models
from memsaver_server.http.auth import reads_only
from memsaver_server.http.requests import REFUSED, CallRoute, failures, fields_of, guard, operated
from memsaver_server.http.service import ControllerOf, ServiceOf, response_of


def router(models: Models) -> APIRouter:
    routes = APIRouter(route_class=CallRoute, tags=["KV cache"], dependencies=[Depends(guard)])
    by_size = Depends(fields_of(ResizeKvCache))
    refused = failures(only=(*REFUSED, 400 if models.several else 409))

    @routes.get("/kv_cache", response_model=KvCacheAnswer, responses=refused)
    @reads_only
    async def kv_cache(controller: ControllerOf) -> JSONResponse:
        """The size of the KV cache, what requests use of it, and the sizes that it can have now."""
        return response_of(await controller.kv_cache())

    @routes.post("/kv_cache", responses=operated(ResizedAnswer | PlanAnswer, models.failures))
    async def resize_kv_cache(request: Request, service: ServiceOf, fields: Any = by_size) -> JSONResponse:
        """Make the KV cache smaller or larger while the engine serves. Its memory goes to the driver and comes from
        there; cached prefixes on it are forgotten. A release or a resume ends a resize that still waits for requests.
        """
        if models.several:
            raise BadRequestError(acts_of(ResizeKvCache)["bytes"].fleet)
        return await service.answer(request, fields)

    return routes
