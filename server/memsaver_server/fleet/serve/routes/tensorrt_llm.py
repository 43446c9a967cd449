"""The dialect of TensorRT-LLM's tooling: release, resume and status, with signed requests if a key is set."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.requests import Request

from memsaver_server.fleet.serve.answers import operation_response
from memsaver_server.fleet.serve.fields import FleetReleaseFields, FleetResumeFields
from memsaver_server.fleet.serve.routes.memory import RESPONSES, ReleaseOf, ResumeOf
from memsaver_server.fleet.serve.service import FleetService, FleetServiceOf
from memsaver_server.http.auth import reads_only
from memsaver_server.http.requests import REFUSED_RESPONSES, takes
from memsaver_server.http.unknown_fields import NamesIgnored
from memsaver_server.routes.tensorrt_llm import STATES, WEIGHT_TAGS, guard_signed


class ParkedEngine(BaseModel):
    name: str
    url: str
    state: str
    parked_tags: list[str]


class FleetMemoryStatusAnswer(BaseModel):
    """The state of all engines in TensorRT-LLM's words, or ``mixed``, and the tags released on any of them."""

    state: str
    parked_tags: list[str]
    engines: list[ParkedEngine]


router = APIRouter(route_class=NamesIgnored, tags=["runtime memory"], dependencies=[Depends(guard_signed)])


@router.post("/release_memory", responses=RESPONSES, openapi_extra=takes(FleetReleaseFields))
async def release_memory(request: Request, service: FleetServiceOf, fields: ReleaseOf) -> JSONResponse:
    """Release memory, as ``/release_memory_occupation`` does."""
    return await _operate(request, service, fields)


@router.post("/resume_memory", responses=RESPONSES, openapi_extra=takes(FleetResumeFields))
async def resume_memory(request: Request, service: FleetServiceOf, fields: ResumeOf) -> JSONResponse:
    """Resume memory, as ``/resume_memory_occupation`` does."""
    return await _operate(request, service, fields)


@router.get("/memory_status", response_model=FleetMemoryStatusAnswer, responses=REFUSED_RESPONSES)
@reads_only
async def memory_status(service: FleetServiceOf) -> dict[str, Any]:
    """The state of the memory and the released tags."""
    await service.observer.glance()
    rows = []
    for engine in service.observer.status.engines:
        parked = [tag.tag for tag in engine.occupation.tags if tag.released_bytes] if engine.occupation else []
        state = STATES.get(engine.state, engine.state)
        rows.append({"name": engine.name, "url": engine.url, "state": state, "parked_tags": sorted(parked)})
    states = {row["state"] for row in rows}
    tags = sorted({tag for row in rows for tag in row["parked_tags"]})
    return {"state": states.pop() if len(states) == 1 else "mixed", "parked_tags": tags, "engines": rows}


async def _operate(
    request: Request, service: FleetService, fields: FleetReleaseFields | FleetResumeFields
) -> JSONResponse:
    known = {tag.tag for each in service.observer.status.engines if each.occupation for tag in each.occupation.tags}
    tags = fields.tags and ["weights" if tag in WEIGHT_TAGS and tag not in known else tag for tag in fields.tags]
    ours = fields.model_copy(update={"tags": tags, "run_async": False})
    if ours.dry_run:
        return await service.plan(ours)
    plain = operation_response(await service.operate(request, ours))
    if plain.status_code != 200:
        return plain
    return JSONResponse({"status": "success", **json.loads(bytes(plain.body))})
