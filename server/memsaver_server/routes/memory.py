"""What the process holds on its devices now, and whether its content is whole."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import Field

from memsaver_server.http.auth import reads_only
from memsaver_server.http.requests import (
    ERROR_RESPONSES,
    REFUSED_RESPONSES,
    ServiceOf,
    fields_of,
    guard,
    takes,
)
from memsaver_server.http.serializers import message_answer, occupation_answer
from memsaver_server.http.unknown_fields import NamesIgnored
from memsaver_server.schemas import Fields, MessageAnswer, OccupationAnswer, Tags


class ContentWrittenFields(Fields):
    """The tags whose content was written again after a release had discarded it."""

    tags: Tags | None = Field(default=None, description="Absent or empty means all whose content is lost.")


router = APIRouter(route_class=NamesIgnored, tags=["memory occupation"], dependencies=[Depends(guard)])


@router.get("/memory_occupation", response_model=OccupationAnswer, responses=REFUSED_RESPONSES)
@reads_only
async def memory_occupation(service: ServiceOf) -> JSONResponse:
    """States, tags, devices and backups. Waits for no operation; an unresponsive device is shown as last read."""
    sample = await service.monitor.fresh()
    return JSONResponse(occupation_answer(service.lifecycle, service.engine, sample))


@router.post(
    "/content_written",
    response_model=MessageAnswer,
    responses=ERROR_RESPONSES,
    openapi_extra=takes(ContentWrittenFields),
)
async def content_written(
    service: ServiceOf, fields: Annotated[ContentWrittenFields, Depends(fields_of(ContentWrittenFields))]
) -> JSONResponse:
    """Say that content which a release had discarded was written, in a way that the service cannot see."""
    closed_reason = service.lifecycle.content_written(fields.tags or [])
    return message_answer(f"Content counts as written{f'; {closed_reason}' if closed_reason else ''}.")
