"""Reads the answers of engines, which may be anything: a bad one fails only its own call."""

from __future__ import annotations

from typing import Any

import anyio
import httpx

from memsaver_server.client.requests import read_json

#: Size limit of an answer that the coordinator itself reads, bytes.
MAX_BYTES = 4 << 20
#: How long an answer may take from its first line to its end, if nothing else limits that, seconds.
WHOLE_S = 10.0


class UnreadableError(Exception):
    """An engine's answer cannot be read; the message says why."""


async def content_of(answer: httpx.Response, within_s: float | None = WHOLE_S) -> bytes:
    """Return the body of ``answer`` as it was sent, and close it. Raises UnreadableError if it is too large or does not
    end in time (None: no limit), httpx.TransportError if it breaks off."""
    content = bytearray()
    try:
        with anyio.fail_after(within_s):
            async for chunk in answer.aiter_raw():
                content += chunk
                if len(content) > MAX_BYTES:
                    raise UnreadableError(f"it is larger than {MAX_BYTES} bytes")
    except TimeoutError:
        raise UnreadableError(f"it began, but did not end within {within_s} s") from None
    finally:
        await answer.aclose()
    return bytes(content)


def value_of(answer: httpx.Response, content: bytes) -> Any:
    """Return the JSON in ``content``, or the beginning of a text. Raises UnreadableError if the answer says
    that it is JSON, and ``read_json`` refuses it."""
    try:
        return read_json(content)
    except ValueError as error:
        if content and "json" in answer.headers.get("content-type", ""):
            raise UnreadableError(str(error)) from None
        return content.decode(errors="replace")[:1000]
