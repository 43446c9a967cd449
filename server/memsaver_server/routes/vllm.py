"""The dialect of vLLM, with fields in the query or in the body. AReaL and SkyRL call it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.requests import Request

from memsaver_server.http.auth import reads_only
from memsaver_server.http.requests import (
    ERROR_RESPONSES,
    REFUSED_RESPONSES,
    ReleaseOf,
    Responses,
    ServiceOf,
    fields_of,
    guard,
    takes,
)
from memsaver_server.http.serializers import message_answer
from memsaver_server.http.service import answer
from memsaver_server.http.unknown_fields import NamesIgnored
from memsaver_server.schemas import (
    DrainMode,
    DryRun,
    Fields,
    MessageAnswer,
    OperationAnswer,
    PlanAnswer,
    ReleaseFields,
    ResumeFields,
    Seconds,
    Tags,
)


class SleepingAnswer(BaseModel):
    is_sleeping: bool


class SleepFields(Fields):
    """vLLM's sleep. Level 0 pauses scheduling, 1 releases and keeps the weights, 2 releases and discards them; 3, an
    extension, is 1 with hibernation."""

    level: Annotated[int, Field(ge=0, le=3)] = 1
    mode: DrainMode = "abort"
    tags: Tags | None = None
    timeout_s: Seconds | None = None
    dry_run: DryRun = False
    wait: bool = False

    @property
    def restore(self) -> dict[str, Any]:
        """The ``restore`` of the release: level 2 discards the weights if they are among the tags."""
        return {"weights": "discard"} if self.level == 2 and (not self.tags or "weights" in self.tags) else {}


class WakeFields(Fields):
    """vLLM's wake-up. Only the tag ``scheduling`` undoes a sleep of level 0."""

    tags: Tags | None = None
    wait_for_memory_s: Seconds = 0.0
    dry_run: DryRun = False
    wait: bool = False


router = APIRouter(route_class=NamesIgnored, tags=["sleep mode"], dependencies=[Depends(guard)])
_RESPONSES: Responses = {200: {"model": OperationAnswer | PlanAnswer | MessageAnswer}, **ERROR_RESPONSES}
#: vLLM's tag for scheduling, which a sleep of level 0 stops.
SCHEDULING = "scheduling"


@router.post("/sleep", responses=_RESPONSES, openapi_extra=takes(SleepFields))
async def sleep(
    request: Request, service: ServiceOf, fields: Annotated[SleepFields, Depends(fields_of(SleepFields))]
) -> JSONResponse:
    """Level 0 pauses scheduling; 1 releases memory and keeps the weights on the host; 2 discards them; 3 hibernates."""
    if fields.level == 0 and fields.dry_run:
        return message_answer("Dry run: scheduling would be paused; memory stays.")
    if fields.level == 0:
        await service.pause(fields.mode, fields.timeout_s, asleep=True)
        return message_answer("Scheduling paused; memory stays.")
    release = ReleaseFields(
        tags=fields.tags,
        mode=fields.mode,
        timeout_s=fields.timeout_s,
        wait=fields.wait,
        restore=fields.restore,
        hibernate=fields.level == 3,
    )
    if fields.dry_run:
        return await service.plan(release)
    return answer(await service.release(request, release))


@router.post("/wake_up", responses=_RESPONSES, openapi_extra=takes(WakeFields))
async def wake_up(
    request: Request, service: ServiceOf, fields: Annotated[WakeFields, Depends(fields_of(WakeFields))]
) -> JSONResponse:
    """Resume memory, and scheduling when all of it is resident."""
    tags = [tag for tag in fields.tags or [] if tag != SCHEDULING]
    resume = ResumeFields(tags=tags, wait_for_memory_s=fields.wait_for_memory_s, wait=fields.wait)
    if fields.dry_run and (tags or not fields.tags):
        return await service.plan(resume)
    if fields.dry_run:
        return message_answer("Dry run: scheduling would continue.")
    if fields.tags and not tags:
        service.lifecycle.continue_generation()
        return message_answer("Scheduling continues.")
    operation = await service.resume(request, resume)
    if operation.error is None:
        service.lifecycle.continue_generation()
    return answer(operation)


@router.post("/release_kv_cache_memory", responses=_RESPONSES, openapi_extra=takes(ReleaseFields))
async def release_kv_cache_memory(request: Request, service: ServiceOf, fields: ReleaseOf) -> JSONResponse:
    """Release only the KV cache; ``/wake_up?tags=kv_cache`` brings it back."""
    release = fields.model_copy(update={"tags": ["kv_cache"], "run_async": False})
    if fields.dry_run:
        return await service.plan(release)
    return answer(await service.release(request, release))


@router.get("/is_sleeping", response_model=SleepingAnswer, responses=REFUSED_RESPONSES)
@reads_only
async def is_sleeping(service: ServiceOf) -> dict[str, bool]:
    """Whether any memory is released or scheduling is paused. Clients of SGLang and tokenspeed call it too."""
    return {"is_sleeping": service.lifecycle.is_sleeping}
