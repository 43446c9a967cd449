"""The dialect of SGLang and tokenspeed, which slime, miles, NeMo-RL, verl and AReaL call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import Field, model_validator
from starlette.requests import Request
from typing_extensions import Self

from memsaver_core.contract.errors import BadRequestError
from memsaver_core.contract.requests import DrainMode, Fields, Seconds, Verb
from memsaver_server.controller import Models
from memsaver_server.http.requests import CallRoute, failures, fields_of, guard, joined, operated, plain
from memsaver_server.http.service import ControllerOf, ServiceOf, response_of


class Commit(Fields):
    """The fields of an operation, all optional; or ``commit`` alone."""

    commit: Annotated[str, Field(max_length=64)] | None = Field(
        default=None, description="The operation_id of a prepared operation, to be done now. Takes no other field."
    )

    @model_validator(mode="after")
    def _alone(self) -> Self:
        if self.commit is not None and len(self.model_fields_set) > 1:
            raise ValueError("a commit takes no other field: the operation has the options that it was prepared with")
        return self


class Pause(Fields):
    """The fields of a pause. ``retract`` and ``in_place`` are SGLang's names for ``keep``."""

    mode: Literal["abort", "wait", "keep", "retract", "in_place"] = "abort"
    timeout_s: Seconds | None = None


def router(models: Models) -> APIRouter:
    routes = APIRouter(route_class=CallRoute, tags=["memory occupation"], dependencies=[Depends(guard)])
    answered = operated(models.done, {404: "The operation to commit is not known.", **models.failures})
    called: dict[str, Any] = {"response_model": models.message, "responses": failures(models.failures)}
    contract: tuple[type[Fields], ...] = (models.release, models.resume)
    by_release, by_resume = (Depends(fields_of(each if models.several else joined(Commit, each))) for each in contract)
    by_pause, by_selected = Depends(fields_of(joined(Pause, models.selected))), Depends(fields_of(models.selected))

    async def operate(request: Request, service: ServiceOf, fields: Any, verb: Verb) -> JSONResponse:
        commit = getattr(fields, "commit", None)
        if commit is None:
            return await service.answer(request, plain(fields, models.asked(verb)))
        operation = service.controller.operations.find(commit)
        found = operation.request.operation
        if found != verb:
            raise BadRequestError(f"operation {commit} is a {found}; commit it by POST /{found}_memory_occupation")
        return await service.commit(request, operation)

    @routes.get("/release_memory_occupation", responses=answered)
    @routes.post("/release_memory_occupation", responses=answered)
    async def release_memory_occupation(request: Request, service: ServiceOf, fields: Any = by_release) -> JSONResponse:
        """Release the device memory of some or all tags to the driver. Answers when the device's own count shows it.

        In two phases: ``prepare`` closes admission, drains and checks, and answers with an operation that ``commit``
        does, and that ``POST /operations/{operation_id}/abort`` or the end of its lease undoes.
        """
        return await operate(request, service, fields, "release")

    @routes.get("/resume_memory_occupation", responses=answered)
    @routes.post("/resume_memory_occupation", responses=answered)
    async def resume_memory_occupation(request: Request, service: ServiceOf, fields: Any = by_resume) -> JSONResponse:
        """Bring back the memory of some or all released tags, at the same addresses.

        In two phases: ``prepare`` takes the device memory, so that the ``commit`` cannot run out of it.
        """
        return await operate(request, service, fields, "resume")

    @routes.get("/flush_cache", **called)
    @routes.post("/flush_cache", **called)
    async def flush_cache(controller: ControllerOf, fields: Any = by_selected) -> JSONResponse:
        """Forget cached prefixes, in any state of the memory."""
        return response_of(await controller.flush(fields))

    @routes.post("/pause_generation", **called)
    async def pause_generation(controller: ControllerOf, fields: Any = by_pause) -> JSONResponse:
        """Stop generating until ``/continue_generation``; requests that arrive meanwhile are held."""
        mode: DrainMode = fields.mode if fields.mode in ("abort", "wait") else "keep"
        return response_of(await controller.pause(fields, mode, fields.timeout_s))

    @routes.post("/continue_generation", **called)
    async def continue_generation(controller: ControllerOf, fields: Any = by_selected) -> JSONResponse:
        """Generate again, at once or when all memory is resident."""
        return response_of(await controller.continue_(fields))

    return routes
