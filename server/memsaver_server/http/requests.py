"""Reads requests, independent of method, content type and dialect."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, TypeVar, cast, get_args, get_origin

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError, create_model
from starlette.requests import ClientDisconnect

from memsaver_core.contract.errors import BadRequestError, BodyTooLargeError
from memsaver_core.contract.reports import AcceptedAnswer, ErrorAnswer
from memsaver_core.contract.requests import Fields
from memsaver_server.http.auth import check_browser, check_key
from memsaver_server.http.service import service_of
from memsaver_server.http.unknown_fields import check_names
from memsaver_server.operation.departure import CLIENT
from memsaver_server.settings import Settings
from memsaver_server.threads import in_thread
from memsaver_server.wrong_fields import wrong_fields

logger = logging.getLogger("memsaver")
RequestT = TypeVar("RequestT", bound=Fields)
#: Bodies of this size are parsed in a thread, so that parsing does not delay other requests.
LARGE_BYTES = 1 << 20
#: Values that a body may have unless a smaller size limit bounds them: parsing more would delay all requests.
MAX_VALUES = 1 << 20
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
#: Errors of a request that its answer names at most.
MAX_ERRORS = 8
#: The JSON escape of a surrogate, which may be unpaired.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
#: Size limit of calls that carry neither prompts nor weights: an engine's tags take some hundred bytes.
MEMORY_CALL_BYTES = 64 << 10


def _limit_of(settings: Settings, name: str | None) -> tuple[int, str]:
    """Return a body's size limit, and what the caller of a larger one can do; ``name`` as in ``body_of``."""
    limit: int = getattr(settings, name or "max_body_bytes")
    if name is None and limit >= MEMORY_CALL_BYTES:
        return MEMORY_CALL_BYTES, "a memory call needs no more"
    return limit, f"MEMSAVER_{(name or 'max_body_bytes').upper()} sets the limit"


async def body_of(request: Request, limit: str | None = "max_body_bytes") -> bytes:
    """Return the request's body. ``limit`` is the setting that limits its size; None: that of a memory call. Raises
    BodyTooLargeError if it is larger (the excess is not read), BadRequestError if the connection ended before it did.
    """
    if not hasattr(request.state, "memsaver_body"):
        most, remedy = _limit_of(service_of(request).settings, limit)
        announced = request.headers.get("content-length", "0")
        is_too_large = announced.isdecimal() and int(announced) > most
        body = bytearray()
        try:
            if not is_too_large:
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        break
        except ClientDisconnect:
            logger.debug("%s %s: the body was truncated", request.method, request.url.path)
            raise BadRequestError("the body was truncated") from None
        if is_too_large or len(body) > most:
            raise BodyTooLargeError(f"the body is larger than {most} bytes; {remedy}")
        request.state.memsaver_body = bytes(body)
    return cast(bytes, request.state.memsaver_body)


async def json_of(request: Request, limit: str | None = "max_body_bytes") -> dict[str, Any]:
    """Return the JSON object in the body; an absent or null body is an empty object. Ignores the content type. Raises
    BadRequestError if it is not an object or, with the default ``limit``, has more than MAX_VALUES values."""
    body = await body_of(request, limit)
    if not body.strip():
        return {}
    try:
        if limit == "max_body_bytes":
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
    # Commas and brackets inside strings do not count.
    strings = (body.count(b'"') - body.count(b'\\"')) // 2
    if strings > MAX_VALUES or _values(_STRING.sub(b"", body)) > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES} values")


def _values(body: bytes) -> int:
    return sum(map(body.count, (b",", b"[", b"{")))


def _parse(body: bytes) -> Any:
    """Parse JSON. Raises ValueError if it is none, an object has a name twice, or a string cannot be encoded in UTF-8
    for answers, log lines and file names; RecursionError if it is nested too deeply."""
    text = body.decode(json.detect_encoding(body))
    value = json.loads(text, object_pairs_hook=_once)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"it contains the unpaired surrogate {error.object[error.start]!r}") from None
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # which one counts differs from parser to parser
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)[:64]!r} more than once")
    return found


def query_of(request: Request, reads: Callable[[str], bool]) -> dict[str, Any]:
    """Return the parameters of the query whose names ``reads`` accepts; raise BadRequestError if one comes twice."""
    try:
        return _once([(name, value) for name, value in request.query_params.multi_items() if reads(name)])
    except ValueError as error:
        raise BadRequestError(f"cannot use the query: {error}") from None


def fields_of(model: type[RequestT], limit: str | None = None) -> Callable[..., Awaitable[RequestT]]:
    """Return the dependency that reads ``model`` from query and body, with a ``limit`` as for ``body_of``. The body
    takes precedence; null is absent."""
    names = {name: field for key, field in model.model_fields.items() for name in (key, field.alias) if name}
    known = names.keys()
    lists = {name for name, field in names.items() if get_origin(field.annotation) is tuple}
    flags = {name for name, field in names.items() if bool in (field.annotation, *get_args(field.annotation))}

    async def read(request: Request) -> RequestT:
        query = dict(request.query_params) | query_of(request, lambda name: name in known and name not in lists)
        query |= {name: request.query_params.getlist(name) for name in lists & request.query_params.keys()}
        body = await json_of(request, limit)
        for name in flags & body.keys():  # pydantic takes 1, "yes" and "on" for true
            if not isinstance(body[name], bool | None):
                raise BadRequestError(f"cannot use the request: {name}: Input should be true or false")
        given = {key: value for key, value in {**query, **body}.items() if value is not None}
        request.state.memsaver_ignored = check_names(given, known)
        try:
            return model.model_validate({name: value for name, value in given.items() if name in known})
        except ValidationError as error:
            raise BadRequestError(f"cannot use the request: {wrong(error)}") from None

    read.__dict__["model"] = model
    return read


def wrong(error: ValidationError) -> str:
    """Return what is wrong with the fields of a request; names ``MAX_ERRORS`` at most."""
    return wrong_fields(error, MAX_ERRORS, _sentence)


def _sentence(error: Mapping[str, Any]) -> str:
    """Return what is wrong with a field, in the words of JSON."""
    said = error["msg"].removeprefix("Value error, ").replace("a valid tuple", "a valid list")
    return ": ".join(filter(None, (".".join(map(str, error["loc"])), said)))


def joined(dialect: type[Fields], contract: type[Fields]) -> type[Fields]:
    """Return the model of a body that has the fields of a dialect beside those of the contract."""
    if not contract.model_fields:
        return dialect
    name = f"{dialect.__name__}Of{contract.__name__}"
    return create_model(name, __base__=(dialect, contract), __doc__=dialect.__doc__)


def plain(fields: Fields, model: type[RequestT], **changes: Any) -> RequestT:
    """Return the ``model`` of the contract with those of its fields that were given, and ``changes``; raise
    BadRequestError if these contradict each other."""
    given = {name: getattr(fields, name) for name in fields.model_fields_set if name in model.model_fields}
    try:
        return model(**{**given, **changes})
    except ValidationError as error:
        raise BadRequestError(f"cannot use the request: {wrong(error)}") from None


async def guard(request: Request) -> None:
    """Require the key, and refuse requests of other sites' pages. Routes marked ``reads_only`` accept either key."""
    check_browser(request, service_of(request).settings)
    check_key(request, service_of(request).settings)
    CLIENT.set(request.receive)


async def guard_probes(request: Request) -> None:
    """Require the key for probes and metrics only with the setting ``protect_probes``."""
    if service_of(request).settings.protect_probes:
        check_key(request, service_of(request).settings, reads=True)


class CallRoute(APIRoute):
    """A route whose fields are read by ``fields_of``: OpenAPI's description has them, and a JSON answer names those
    that were ``ignored``, if there are any."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        for read in (each.call for each in self.dependant.dependencies):
            if (model := getattr(read, "model", None)) is not None:
                self.openapi_extra = _in_body(model) if "POST" in (self.methods or ()) else _in_query(model)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def named(request: Request) -> Response:
            response = await handle(request)
            ignored = getattr(request.state, "memsaver_ignored", None)
            if not ignored or not isinstance(response, JSONResponse):
                return response
            headers = {name: value for name, value in response.headers.items() if name != "content-length"}
            return JSONResponse({**json.loads(bytes(response.body)), "ignored": ignored}, response.status_code, headers)

        return named


def _in_body(model: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"required": False, "content": {"application/json": {"schema": _schema(model)}}}}


def _in_query(model: type[BaseModel]) -> dict[str, Any]:
    """Return the description of ``model`` in the query, without its fields that are objects."""
    properties = _schema(model).get("properties", {}).items()
    plain = [(name, schema) for name, schema in properties if schema.get("type") != "object"]
    of_each = {"in": "query", "required": False}
    return {"parameters": [{"name": name, **of_each, "schema": schema} for name, schema in plain]} if plain else {}


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of ``model`` without references, which would lead nowhere in the OpenAPI description."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def whole(part: Any) -> Any:
        if isinstance(part, list):
            return [whole(each) for each in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            part = {**definitions[part["$ref"].rpartition("/")[2]], **part}
            del part["$ref"]
        return {name: whole(each) for name, each in part.items()}

    return cast(dict[str, Any], whole(schema))


Responses = dict[int | str, dict[str, Any]]

_DESCRIPTIONS = {
    400: "The request is invalid; nothing was changed.",
    401: "The key is missing or wrong.",
    403: "The key may only read, or a browser sent the request for another site.",
    408: "The body was sent too slowly.",
    409: "A conflicting operation is in progress.",
    413: "The body is too large.",
    422: "The Idempotency-Key belongs to another request.",
    500: "The driver, a backup or the engine failed; the message says which.",
    503: "Device memory is short or released. Retry after Retry-After.",
    504: "Requests in flight or a phase took too long.",
    507: "Host memory is too small for the backup; the memory is as before.",
}


def failures(also: Mapping[int, str] | None = None, *, only: Collection[int] = ()) -> Responses:
    """Return OpenAPI's descriptions of the error responses ``only``, by default of all those of a route that changes or
    waits for something; ``also`` adds descriptions, or replaces them."""
    texts = {**({status: _DESCRIPTIONS[status] for status in only} if only else _DESCRIPTIONS), **(also or {})}
    return {status: {"model": ErrorAnswer, "description": text} for status, text in texts.items()}


def operated(done: Any, failed: Mapping[int, str]) -> Responses:
    """Return the descriptions of the responses to a release or a resume: ``done`` is the model of the answer to one
    that has ended, is prepared or is a dry run, ``failed`` describes errors that not every route has."""
    accepted = {"model": AcceptedAnswer, "description": "The operation continues in the background."}
    return {200: {"model": done}, 202: accepted, **failures(failed)}


#: The error responses of routes that only read.
REFUSED = (401, 403)
