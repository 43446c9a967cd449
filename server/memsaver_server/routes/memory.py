"""What is held on devices now, and whether its content is whole."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from memsaver_core.contract.requests import Tagged, WeightsVersion
from memsaver_core.contract.status import COORDINATOR_HEADER
from memsaver_server.controller import Models
from memsaver_server.http.auth import has_valid_key, reads_only
from memsaver_server.http.requests import REFUSED, CallRoute, failures, fields_of, guard, joined
from memsaver_server.http.service import ControllerOf, response_of, service_of


class Written(Tagged):
    """Content that its caller has written."""

    weights_version: WeightsVersion | None = Field(default=None, description="What the weights hold from now on.")


def router(models: Models) -> APIRouter:
    routes = APIRouter(route_class=CallRoute, tags=["memory occupation"], dependencies=[Depends(guard)])
    by_written = Depends(fields_of(joined(Written, models.selected)))

    @routes.get("/memory_occupation", response_model=models.occupation, responses=failures(only=REFUSED))
    @reads_only
    async def memory_occupation(request: Request, controller: ControllerOf) -> JSONResponse:
        """States, tags, devices and backups. Waits for no operation; an unresponsive device or engine is shown as last
        read."""
        only_reads = has_valid_key(request, service_of(request).settings.read_key)  # and so holds no engine
        name = "" if only_reads else request.headers.get(COORDINATOR_HEADER, "")[:120]
        return JSONResponse(await controller.occupation(name))

    @routes.post("/content_written", response_model=models.written, responses=failures(models.failures))
    async def content_written(controller: ControllerOf, fields: Any = by_written) -> JSONResponse:
        """Report that content was written in a way that the service cannot see. Without tags: all that a release has
        discarded. With a version the weights are among it; they may be released with a backup."""
        return response_of(await controller.written(fields, fields.tags, fields.weights_version))

    return routes
