"""Calls that every selected engine gets as they are: caches, pauses and weights. Their answers list every engine."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field
from starlette.requests import Request

from memsaver_server.fleet.serve.fields import SelectedFields
from memsaver_server.fleet.serve.schemas import CallAnswer
from memsaver_server.fleet.serve.service import FleetServiceOf
from memsaver_server.http.requests import ERROR_RESPONSES, Responses, body_of, fields_of, guard, limit_of, takes
from memsaver_server.http.unknown_fields import NamesIgnored
from memsaver_server.routes.weights import UpdateFromTensorFields
from memsaver_server.schemas import Seconds, Tags


class FleetPauseFields(SelectedFields):
    """A pause on all selected engines."""

    mode: Literal["abort", "wait", "keep", "retract", "in_place"] = "abort"
    timeout_s: Seconds | None = None


class FleetContentWrittenFields(SelectedFields):
    """The tags whose content was written again on all selected engines."""

    tags: Tags | None = Field(default=None, description="Absent or empty means all whose content is lost.")


class FleetUpdateFields(SelectedFields):
    """SGLang's weight update from a checkpoint folder, which every selected engine can read."""

    model_config = ConfigDict(protected_namespaces=())

    model_path: str
    flush_cache: bool = True
    abort_all_requests: bool = False


CALL_RESPONSES: Responses = {
    **ERROR_RESPONSES,
    404: {**ERROR_RESPONSES[400], "description": "No engine of the fleet matches, or one does not have the call."},
    502: {**ERROR_RESPONSES[500], "description": "An engine does not answer."},
}
router = APIRouter(
    route_class=NamesIgnored, tags=["every engine"], dependencies=[Depends(guard)], responses=CALL_RESPONSES
)
SelectedOf = Annotated[SelectedFields, Depends(fields_of(SelectedFields))]
_PauseOf = Annotated[FleetPauseFields, Depends(fields_of(FleetPauseFields))]
_WrittenOf = Annotated[FleetContentWrittenFields, Depends(fields_of(FleetContentWrittenFields))]
_UpdateOf = Annotated[FleetUpdateFields, Depends(fields_of(FleetUpdateFields))]


@router.get("/flush_cache", response_model=CallAnswer)
@router.post("/flush_cache", response_model=CallAnswer, openapi_extra=takes(SelectedFields))
async def flush_cache(service: FleetServiceOf, fields: SelectedOf) -> JSONResponse:
    """Forget cached prefixes, in any state of the memory."""
    return await service.call(fields, "Cache flushed", "POST", "/flush_cache")


@router.post("/pause_generation", response_model=CallAnswer, openapi_extra=takes(FleetPauseFields))
async def pause_generation(service: FleetServiceOf, fields: _PauseOf) -> JSONResponse:
    """Stop generating until ``/continue_generation``; requests that arrive meanwhile wait."""
    body = fields.model_dump(include={"mode", "timeout_s"}, exclude_none=True)
    return await service.call(fields, "Generation paused", "POST", "/pause_generation", body)


@router.post("/continue_generation", response_model=CallAnswer, openapi_extra=takes(SelectedFields))
async def continue_generation(service: FleetServiceOf, fields: SelectedOf) -> JSONResponse:
    """Generate again, on each engine at once or when all its memory is resident."""
    return await service.call(fields, "Generation continues", "POST", "/continue_generation", {})


@router.post("/content_written", response_model=CallAnswer, openapi_extra=takes(FleetContentWrittenFields))
async def content_written(service: FleetServiceOf, fields: _WrittenOf) -> JSONResponse:
    """Say that content which a release had discarded was written on all selected engines."""
    body = {"tags": fields.tags} if fields.tags else {}
    return await service.call(fields, "Content counts as written", "POST", "/content_written", body)


@router.post("/update_weights_from_disk", response_model=CallAnswer, openapi_extra=takes(FleetUpdateFields))
async def update_weights_from_disk(service: FleetServiceOf, fields: _UpdateOf) -> JSONResponse:
    """Overwrite the weights of all selected engines with those of a checkpoint folder that each of them can read."""
    body = fields.model_dump(include={"model_path", "flush_cache", "abort_all_requests"})
    return await service.call(fields, "Weights written", "POST", "/update_weights_from_disk", body)


@router.post("/update_weights_from_tensor", response_model=CallAnswer, openapi_extra=takes(UpdateFromTensorFields))
async def update_weights_from_tensor(request: Request, service: FleetServiceOf) -> JSONResponse:
    """Overwrite some weights of all engines with those in the body, which each gets as it is."""
    body = await body_of(request, limit_of(service.settings, "max_update_bytes"))
    return await service.call(SelectedFields(), "Weights written", "POST", "/update_weights_from_tensor", body)


@router.get("/health_generate", response_model=CallAnswer)
async def health_generate(service: FleetServiceOf) -> JSONResponse:
    """Whether every engine generates a token now."""
    return await service.call(SelectedFields(), "A token was generated", "GET", "/health_generate")
