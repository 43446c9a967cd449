"""Ray Serve LLM's calls of the sleep mode, on all replicas of a model or on none.

Ray's own ingress sends them to every replica, and undoes nothing. Put the mixin in front of it::

    from ray.llm._internal.serve.core.ingress.dev_ingress import DEV_ENDPOINTS, DevIngress

    class Ingress(AtomicSleepMixin, DevIngress):
        pass

    ingress = make_fastapi_ingress(Ingress, endpoint_map={**DEV_ENDPOINTS, **AtomicSleepMixin.ENDPOINTS})
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, ClassVar

from fastapi import FastAPI, HTTPException, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from memsaver_core.contract.errors import FleetUnknownError
from memsaver_core.contract.requests import AskedOfFleet, FleetRelease, FleetResume, Selector
from memsaver_server.fleet.controller import FleetController
from memsaver_server.fleet.ray.coordinator import coordinator
from memsaver_server.fleet.results import FleetError, FleetResult
from memsaver_server.http.requests import joined, wrong
from memsaver_server.routes import vllm

_SLEEP = joined(vllm.Sleep, FleetRelease)


class ModelRequest(BaseModel):
    """The calls' body, as Ray Serve LLM defines it. ``options``: of vLLM's sleep or wake-up, e.g. ``{"level": 2}``."""

    model: str
    options: dict[str, Any] = {}


class Sleeping(BaseModel):
    """Ray Serve LLM's answer, and the state of each engine."""

    is_sleeping: bool
    engines: dict[str, str]


class AtomicSleepMixin:
    """``POST /sleep``, ``POST /wakeup`` and ``/is_sleeping`` of an ingress, through the fleet's coordinator. The
    replicas are the engines whose ``register(..., model=MODEL_ID)`` names the model. Sleep and wake-up return a
    ``FleetResult``, with status 200 if all replicas did it; 503 if not, and what was done is undone; 404 if no engine
    has the model."""

    #: The name of the fleet in which the replicas are registered.
    fleet = "default"

    ENDPOINTS: ClassVar[dict[str, Callable[[FastAPI], Callable[..., Any]]]] = {
        "sleep": lambda app: app.post("/sleep", response_model=FleetResult),
        "wakeup": lambda app: app.post("/wakeup", response_model=FleetResult),
        "is_sleeping": lambda app: app.get("/is_sleeping"),
        "is_sleeping_by_body": lambda app: app.post("/is_sleeping"),
    }

    async def sleep(self, body: ModelRequest) -> JSONResponse:
        """Release the memory of all replicas of a model, or of none. Level 2 discards the weights, 3 hibernates."""
        asked = _fields(_SLEEP, body)
        if asked.level == 0:
            raise HTTPException(400, "level 0 keeps the memory and only pauses generation: call /pause instead")
        return await self._operate(vllm.release_of(asked, FleetController.models), body.model)

    async def wakeup(self, body: ModelRequest) -> JSONResponse:
        """Bring back the memory of all replicas of a model, or of none."""
        return await self._operate(_fields(FleetResume, body), body.model)

    async def is_sleeping(self, model: str = Query(..., description="The model ID to check")) -> Sleeping:
        """Return whether any replica of the model has memory released."""
        status = await self._answer(coordinator(self.fleet).status.remote(Selector(models=(model,))))
        engines = {engine.name: engine.state for engine in status.engines}
        return Sleeping(is_sleeping=any(state in ("released", "mixed") for state in engines.values()), engines=engines)

    async def is_sleeping_by_body(self, body: ModelRequest) -> Sleeping:
        """See ``is_sleeping``; the model is in the body."""
        return await self.is_sleeping(body.model)

    async def _operate(self, asked: AskedOfFleet, model: str) -> JSONResponse:
        options = asked.model_dump(exclude_unset=True, exclude={"selector", "model"})
        call = getattr(coordinator(self.fleet), asked.operation)
        named = {**options, "operation_id": uuid.uuid4().hex}
        result: FleetResult = await self._answer(call.remote(Selector(models=(model,)), named))
        return JSONResponse(result.model_dump(mode="json"), 200 if result.success else 503)

    async def _answer(self, answer: Any) -> Any:
        """Return the coordinator's answer. An error that Ray raises is also of the type that the coordinator raised."""
        try:
            return await answer
        except FleetError as error:
            raise HTTPException(404, str(error.cause)) from None  # type: ignore[attr-defined]
        except FleetUnknownError as error:
            raise HTTPException(503, str(error.cause)) from None  # type: ignore[attr-defined]


def _fields(kind: type[Any], body: ModelRequest) -> Any:
    try:
        return kind.model_validate(body.options)
    except ValidationError as error:
        raise HTTPException(400, f"cannot use the options: {wrong(error)}") from None
