"""What the process holds on its devices now."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from memsaver_server.http.auth import reads_only
from memsaver_server.http.requests import REFUSED_RESPONSES, ServiceOf, guard
from memsaver_server.http.serializers import occupation_answer
from memsaver_server.schemas import OccupationAnswer

router = APIRouter(tags=["memory occupation"], dependencies=[Depends(guard)])


@router.get("/memory_occupation", response_model=OccupationAnswer, responses=REFUSED_RESPONSES)
@reads_only
async def memory_occupation(service: ServiceOf) -> JSONResponse:
    """States, tags, devices and backups. Waits for no operation; an unresponsive device is shown as last read."""
    sample = await service.monitor.fresh()
    return JSONResponse(occupation_answer(service.lifecycle, service.engine.name, sample))
