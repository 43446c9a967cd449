"""Reads requests, independent of method, content type and dialect."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from memsaver_server.http.auth import check_browser, check_key
from memsaver_server.http.errors import BadRequestError, BodyTooLargeError
from memsaver_server.http.service import Service
from memsaver_server.http.unknown_fields import check_names
from memsaver_server.schemas import ErrorAnswer, ReleaseFields, ResumeFields
from memsaver_server.settings import Settings
from memsaver_server.threads import in_thread

logger = logging.getLogger("memsaver")
Model = TypeVar("Model", bound=BaseModel)
#: Larger bodies are parsed in a thread, because that would delay other requests.
LARGE_BYTES = 1 << 20
#: Values that a body may have whose size is not limited to that of a memory call: parsing more holds up all requests.
MAX_VALUES = 1 << 20
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
#: Errors of a request that are named.
MAX_ERRORS = 8
#: The JSON escape of a surrogate, which may be unpaired.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Limit:
    """The size limit of a body, and what the caller of a larger one can do."""

    bytes: int
    remedy: str


def limit_of(settings: Settings, name: str = "max_body_bytes") -> Limit:
    """Return the limit in the setting ``name``."""
    return Limit(getattr(settings, name), f"MEMSAVER_{name.upper()} sets the limit")


def memory_call_limit(settings: Settings) -> Limit:
    """Return the limit of calls that carry neither prompts nor weights: an engine's tags take some hundred bytes."""
    return min(Limit(64 << 10, "a memory call needs no more"), limit_of(settings), key=lambda limit: limit.bytes)


def service_of(request: Request) -> Service:
    return cast(Service, request.app.state.memsaver)


# Dependencies are coroutines although they await nothing: FastAPI runs plain functions in threads.
async def _service(request: Request) -> Service:
    return service_of(request)


ServiceOf = Annotated[Service, Depends(_service)]


async def body_of(request: Request, limit: Limit | None = None) -> bytes:
    """Return the request's body.

    Args:
        limit: its size limit; the default is the setting ``max_body_bytes``.

    Raises:
        BodyTooLargeError: it is larger; the excess is not read.
        BadRequestError: the connection ended before the body did.
    """
    if not hasattr(request.state, "memsaver_body"):
        limit = limit or limit_of(service_of(request).settings)
        announced = request.headers.get("content-length", "0")
        body = bytearray()
        try:
            if not announced.isdecimal() or int(announced) <= limit.bytes:
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit.bytes:
                        break
        except ClientDisconnect:
            logger.debug("%s %s: the body was truncated", request.method, request.url.path)
            raise BadRequestError("the body was truncated") from None
        if len(body) > limit.bytes or (announced.isdecimal() and int(announced) > limit.bytes):
            raise BodyTooLargeError(f"the body is larger than {limit.bytes} bytes; {limit.remedy}")
        request.state.memsaver_body = bytes(body)
    return cast(bytes, request.state.memsaver_body)


async def json_of(request: Request, limit: Limit | None = None) -> dict[str, Any]:
    """Return the JSON object in the body; an absent or null body is an empty object. Ignores the content type.

    Args:
        limit: as for ``body_of``; without one, the number of values is limited, too.

    Raises:
        BadRequestError: the body is not a JSON object, or has too many values.
    """
    body = await body_of(request, limit)
    if not body.strip():
        return {}
    try:
        if limit is None:
            _check_few_values(body)
        value = _parse(body) if len(body) < LARGE_BYTES else await in_thread(_parse, body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequestError(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def _check_few_values(body: bytes) -> None:
    """Raise ValueError if ``body`` has more than MAX_VALUES values; takes a fraction of the time of parsing them."""
    if _values(body) <= MAX_VALUES:
        return
    # Text may have any number of commas and brackets.
    strings = (body.count(b'"') - body.count(b'\\"')) // 2
    if strings > MAX_VALUES or _values(_STRING.sub(b"", body)) > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES} values")


def _values(body: bytes) -> int:
    return sum(map(body.count, (b",", b"[", b"{")))


def _parse(body: bytes) -> Any:
    """Parse JSON, and check that its strings can be encoded in UTF-8 for answers, log lines and file names.

    Raises:
        ValueError: it is not JSON, or has an unpaired surrogate.
        RecursionError: it is nested too deeply.
    """
    text = body.decode(json.detect_encoding(body))
    value = json.loads(text)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"it contains the unpaired surrogate {error.object[error.start]!r}") from None
    return value


def fields_of(model: type[Model], limit: str | None = None) -> Callable[..., Awaitable[Model]]:
    """Return the dependency that reads ``model`` from query and body. The body takes precedence; null is absent.

    Args:
        model: the fields.
        limit: the setting that limits the body's size; None: that of a memory call.
    """
    known = {name for key, field in model.model_fields.items() for name in (key, field.alias) if name}

    async def read(request: Request) -> Model:
        query: dict[str, Any] = {key: value for key, value in request.query_params.items() if key != "tags"}
        if "tags" in request.query_params:
            query["tags"] = request.query_params.getlist("tags")
        settings = service_of(request).settings
        body = await json_of(request, limit_of(settings, limit) if limit else memory_call_limit(settings))
        given = {key: value for key, value in {**query, **body}.items() if value is not None}
        request.state.memsaver_ignored = check_names(given, known)
        try:
            return model.model_validate(given)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in errors[:MAX_ERRORS])
            more = f"; and {len(errors) - MAX_ERRORS} more" if len(errors) > MAX_ERRORS else ""
            raise BadRequestError(f"cannot use the request: {wrong}{more}") from None

    return read


ReleaseOf = Annotated[ReleaseFields, Depends(fields_of(ReleaseFields))]
ResumeOf = Annotated[ResumeFields, Depends(fields_of(ResumeFields))]


async def guard(request: Request) -> None:
    """Require the key, and refuse requests of other sites' pages. For routes marked ``reads_only`` each key will do."""
    check_browser(request, service_of(request).settings)
    check_key(request, service_of(request).settings)


async def guard_probes(request: Request) -> None:
    """Require the key for probes and metrics only with the setting ``protect_probes``."""
    if service_of(request).settings.protect_probes:
        check_key(request, service_of(request).settings, reads=True)


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that ``fields_of(model)`` reads."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": False, "content": {"application/json": {"schema": schema}}}}


def takes_in_query(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of ``model`` in the query, without its fields that are objects."""
    properties = model.model_json_schema()["properties"].items()
    plain = [(name, schema) for name, schema in properties if schema.get("type") != "object"]
    return {
        "parameters": [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in plain]
    }


Responses = dict[int | str, dict[str, Any]]

#: The error responses of routes that change or wait for something.
ERROR_RESPONSES: Responses = {
    400: {"model": ErrorAnswer, "description": "The request is invalid; nothing was changed."},
    401: {"model": ErrorAnswer, "description": "The key is missing or wrong."},
    403: {
        "model": ErrorAnswer,
        "description": "The key may only read, or a browser sent the request for another site.",
    },
    408: {"model": ErrorAnswer, "description": "The body was sent too slowly."},
    409: {"model": ErrorAnswer, "description": "A conflicting operation is in progress."},
    413: {"model": ErrorAnswer, "description": "The body is too large."},
    422: {"model": ErrorAnswer, "description": "The Idempotency-Key belongs to another request."},
    500: {"model": ErrorAnswer, "description": "The driver, a backup or the engine failed; the message says which."},
    503: {"model": ErrorAnswer, "description": "Device memory is short or released. Retry after Retry-After."},
    504: {"model": ErrorAnswer, "description": "Requests in flight or a phase took too long."},
    507: {"model": ErrorAnswer, "description": "Host memory is too small for the backup; nothing was unmapped."},
}
#: The error responses of routes that only read.
REFUSED_RESPONSES: Responses = {status: ERROR_RESPONSES[status] for status in (401, 403)}
