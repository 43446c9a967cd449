"""How fuzz targets decode their inputs: requests as the server's parser yields them, and arbitrary bodies."""

from __future__ import annotations

import json
import mmap
from collections.abc import Coroutine, Sequence
from typing import Any

import atheris
import h11
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request

from memsaver_core.contract import errors
from memsaver_server.controller import Answer
from memsaver_server.http.service import response_of

KEY = "the key"
REFUSALS = (errors.BadRequestError, errors.BodyTooLargeError, errors.ForbiddenError, errors.UnauthorizedError)

#: libFuzzer ends the process without running Python code, so these lie in memory shared with the parent.
COUNTED = ("inputs", "understood", "refused")
counters = memoryview(mmap.mmap(-1, 8 * len(COUNTED))).cast("Q")

NUMBERS = [0, 1, -1, 3, 0.5, 99.5, 1e-6, 1e-320, 1 << 63, 1e308]
WORDS = ["weights", "kv_cache", "host", "zero", "abort", "keep", "retract", "true", "1", "NaN", "\ud800", "\x00", ""]


def count(what: str) -> None:
    counters[COUNTED.index(what)] += 1


def answered(error: Exception) -> None:
    """Check that the answer can be sent, and that its status blames the caller."""
    assert 400 <= response_of(Answer.failure(error)).status_code < 500


def at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that waits for nothing but its own input."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for something")


def parts_of(data: bytes, lines: int) -> list[bytes]:
    """The first lines of an input, its headers, and its body, which is everything after an empty line."""
    *first, rest = data.split(b"\n", lines)
    first += [b""] * (lines - len(first))
    head, _, body = rest.partition(b"\n\n") if not rest.startswith(b"\n") else (b"", b"", rest[1:])
    return [*first, head, body]


def headers_on_the_wire(query: bytes, head: bytes) -> list[tuple[bytes, bytes]] | None:
    """The headers as the server's parser yields them; None if it refuses them itself."""
    wire = h11.Connection(h11.SERVER)
    wire.receive_data(b"POST /?" + query + b" HTTP/1.0\r\n" + head.replace(b"\n", b"\r\n") + b"\r\n\r\n")
    try:
        event = wire.next_event()
    except h11.RemoteProtocolError:
        return None
    return list(event.headers) if isinstance(event, h11.Request) else None


def request_of(
    app: FastAPI,
    headers: Sequence[tuple[bytes, bytes]],
    body: bytes,
    *,
    method: str = "POST",
    path: str = "/release_memory",
    query: bytes = b"",
) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query,
        "headers": headers,
        "app": app,
        "server": ("127.0.0.1", 30000),
        "client": ("127.0.0.1", 40000),
        "scheme": "http",
    }
    return Request(scope, receive)


@atheris.instrument_func  # so that other bodies count as new coverage
def body_for(names: Sequence[str], data: bytes) -> bytes:
    """JSON with some of these fields and values of every type, because random bytes are rarely JSON."""
    provider = atheris.FuzzedDataProvider(data)
    given = {}
    for _ in range(provider.ConsumeIntInRange(0, 4)):
        given[provider.PickValueInList([*names, "other"])] = value_from(provider, 3)
    return json.dumps(given).encode()


def names_of(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


@atheris.instrument_func
def value_from(provider: atheris.FuzzedDataProvider, depth: int) -> Any:
    match provider.ConsumeIntInRange(0, 10 if depth else 8):
        case 0:
            return None
        case 1:
            return provider.ConsumeBool()
        case 2:
            return provider.ConsumeInt(12)
        case 3:
            return provider.ConsumeFloat()  # infinities and NaN too
        case 4:
            return provider.ConsumeUnicode(provider.ConsumeIntInRange(0, 300))
        case 5 | 6:
            return provider.PickValueInList(WORDS)
        case 7 | 8:
            return provider.PickValueInList(NUMBERS)
        case 9:
            return [value_from(provider, depth - 1) for _ in range(provider.ConsumeIntInRange(0, 3))]
        case _:
            return {
                str(provider.PickValueInList(WORDS)): value_from(provider, depth - 1)
                for _ in range(provider.ConsumeIntInRange(0, 3))
            }
