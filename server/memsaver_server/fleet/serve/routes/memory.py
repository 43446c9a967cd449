"""Release, resume and status, in the dialect of SGLang: what slime, miles, NeMo-RL, verl and AReaL call."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from starlette.requests import Request

from memsaver_server.fleet.serve.answers import occupation
from memsaver_server.fleet.serve.fields import FleetReleaseFields, FleetResumeFields
from memsaver_server.fleet.serve.schemas import CallAnswer, FleetOccupationAnswer, FleetOperationAnswer
from memsaver_server.fleet.serve.service import FleetServiceOf
from memsaver_server.http.auth import reads_only
from memsaver_server.http.requests import (
    ERROR_RESPONSES,
    REFUSED_RESPONSES,
    Responses,
    fields_of,
    guard,
    takes,
    takes_in_query,
)
from memsaver_server.http.unknown_fields import NamesIgnored
from memsaver_server.schemas import AcceptedAnswer

router = APIRouter(route_class=NamesIgnored, tags=["memory occupation"], dependencies=[Depends(guard)])
RESPONSES: Responses = {
    200: {"model": FleetOperationAnswer | CallAnswer},
    202: {"model": AcceptedAnswer, "description": 'With "async": it continues in the background.'},
    **ERROR_RESPONSES,
    404: {**ERROR_RESPONSES[400], "description": "No engine of the fleet matches."},
    502: {**ERROR_RESPONSES[500], "description": "An engine does not answer."},
}
ReleaseOf = Annotated[FleetReleaseFields, Depends(fields_of(FleetReleaseFields))]
ResumeOf = Annotated[FleetResumeFields, Depends(fields_of(FleetResumeFields))]


@router.get("/release_memory_occupation", responses=RESPONSES, openapi_extra=takes_in_query(FleetReleaseFields))
@router.post("/release_memory_occupation", responses=RESPONSES, openapi_extra=takes(FleetReleaseFields))
async def release_memory_occupation(request: Request, service: FleetServiceOf, fields: ReleaseOf) -> JSONResponse:
    """Release some or all tags on every selected engine, or on none; the answer lists every engine."""
    return await service.answer(request, fields)


@router.get("/resume_memory_occupation", responses=RESPONSES, openapi_extra=takes_in_query(FleetResumeFields))
@router.post("/resume_memory_occupation", responses=RESPONSES, openapi_extra=takes(FleetResumeFields))
async def resume_memory_occupation(request: Request, service: FleetServiceOf, fields: ResumeOf) -> JSONResponse:
    """Bring back some or all released tags on every selected engine, or on none."""
    return await service.answer(request, fields)


@router.get("/memory_occupation", response_model=FleetOccupationAnswer, responses=REFUSED_RESPONSES)
@reads_only
async def memory_occupation(service: FleetServiceOf) -> dict[str, Any]:
    """What the engines hold together, and a row for each. As last seen if the members cannot be read."""
    await service.observer.glance()
    return occupation(service.observer, service.operations, service.turns.in_flight())
