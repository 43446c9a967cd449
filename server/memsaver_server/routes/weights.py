"""Weight updates, if the engines offer them, with SGLang's requests and answers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import Field

from memsaver_core.contract.requests import Fields, WeightsVersion
from memsaver_server.controller import Models
from memsaver_server.http.requests import CallRoute, failures, fields_of, guard, joined, plain
from memsaver_server.http.service import ControllerOf, response_of


class Update(Fields):
    """What SGLang's weight updates have in common."""

    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: WeightsVersion | None = Field(default=None, description="What the weights hold from now on.")


class UpdateFromDisk(Update):
    """SGLang's weight update from a checkpoint folder of the same shape."""

    model_path: str


class UpdateFromTensor(Update):
    """SGLang's weight update from tensors: one payload per rank."""

    serialized_named_tensors: list[str]
    load_format: str | None = None


def router(models: Models) -> APIRouter:
    own = {
        409: "The weights are released, and this engine cannot write them then; resume them first.",
        507: "Host memory is short for an update of released weights; nothing was written.",
    }
    responses = failures({**own, **models.failures})
    routes = APIRouter(route_class=CallRoute, tags=["weights"], dependencies=[Depends(guard)], responses=responses)
    by_disk = Depends(fields_of(joined(UpdateFromDisk, models.selected)))
    by_tensors = Depends(fields_of(joined(UpdateFromTensor, models.selected), "max_update_bytes"))

    @routes.post("/update_weights_from_disk", response_model=models.written)
    async def update_weights_from_disk(controller: ControllerOf, fields: Any = by_disk) -> JSONResponse:
        """Overwrite the weights with those of a checkpoint folder that the engine can read."""
        return response_of(await controller.update(fields, plain(fields, UpdateFromDisk), "disk"))

    @routes.post("/update_weights_from_tensor", response_model=models.written)
    async def update_weights_from_tensor(controller: ControllerOf, fields: Any = by_tensors) -> JSONResponse:
        """Overwrite some weights with those in the body."""
        return response_of(await controller.update(fields, plain(fields, UpdateFromTensor), "tensor"))

    return routes
