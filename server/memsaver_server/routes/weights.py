"""Weight updates, if the engine offers them, with SGLang's requests and answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, cast

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import ConfigDict

from memsaver_server.engine import UpdatableEngine, unwritten_weights
from memsaver_server.http.errors import BadRequestError
from memsaver_server.http.requests import ERROR_RESPONSES, Responses, ServiceOf, fields_of, guard, takes
from memsaver_server.http.serializers import message_answer
from memsaver_server.http.service import Service
from memsaver_server.http.unknown_fields import NamesIgnored
from memsaver_server.schemas import Fields, MessageAnswer
from memsaver_server.threads import in_thread


class UpdateFromDiskFields(Fields):
    """SGLang's weight update from a checkpoint folder of the same shape."""

    model_config = ConfigDict(protected_namespaces=())

    model_path: str
    flush_cache: bool = True
    abort_all_requests: bool = False


class UpdateFromTensorFields(Fields):
    """SGLang's weight update from tensors: one payload per rank."""

    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


_RESPONSES: Responses = {
    **ERROR_RESPONSES,
    409: {**ERROR_RESPONSES[409], "description": "The weights are released; resume them first."},
}
router = APIRouter(route_class=NamesIgnored, tags=["weights"], dependencies=[Depends(guard)], responses=_RESPONSES)
_DiskOf = Annotated[UpdateFromDiskFields, Depends(fields_of(UpdateFromDiskFields))]
#: The body carries tensors.
_TensorsOf = Annotated[UpdateFromTensorFields, Depends(fields_of(UpdateFromTensorFields, "max_update_bytes"))]


@router.post(
    "/update_weights_from_disk",
    response_model=MessageAnswer,
    openapi_extra=takes(UpdateFromDiskFields),
)
async def update_weights_from_disk(service: ServiceOf, fields: _DiskOf) -> JSONResponse:
    """Overwrite the weights with those of a checkpoint folder that the server can read."""
    engine = cast(UpdatableEngine, service.engine)
    return await _update(
        service,
        lambda: engine.update_weights_from_disk(
            fields.model_path, flush_cache=fields.flush_cache, abort_all_requests=fields.abort_all_requests
        ),
    )


@router.post(
    "/update_weights_from_tensor",
    response_model=MessageAnswer,
    openapi_extra=takes(UpdateFromTensorFields),
)
async def update_weights_from_tensor(service: ServiceOf, fields: _TensorsOf) -> JSONResponse:
    """Overwrite some weights with those in the body."""
    engine = cast(UpdatableEngine, service.engine)
    return await _update(
        service,
        lambda: engine.update_weights_from_tensor(
            fields.serialized_named_tensors,
            load_format=fields.load_format,
            flush_cache=fields.flush_cache,
            abort_all_requests=fields.abort_all_requests,
        ),
    )


async def _update(service: Service, write: Callable[[], int]) -> JSONResponse:
    def update() -> int:
        with service.lifecycle.writing():
            return write()

    try:
        written = await in_thread(update)
    except (ValueError, OSError) as error:
        raise BadRequestError(str(error)) from None
    missing = sorted(unwritten_weights(service.engine))
    more = f" {len(missing)} that a release discarded are missing: {', '.join(missing[:8])}." if missing else ""
    return message_answer(f"{written} tensors written.{more}")
