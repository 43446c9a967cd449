"""What the process holds of its devices now."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from memsaver_server.http.requests import PROBLEMS, ServiceOf, guard
from memsaver_server.http.serializers import occupation_answer
from memsaver_server.schemas import OccupationAnswer

router = APIRouter(tags=["memory occupation"], dependencies=[Depends(guard)])


@router.get("/memory_occupation", response_model=OccupationAnswer, responses={401: PROBLEMS[401], 403: PROBLEMS[403]})
async def memory_occupation(service: ServiceOf) -> JSONResponse:
    """States, tags, devices and backups. Waits for no operation; a device that does not answer is as last read."""
    reading = await service.readings.fresh()
    return JSONResponse(occupation_answer(service.occupation, service.engine.name, reading))
