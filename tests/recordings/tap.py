"""What callers send: every request that a server gets, as it came."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Headers that httpx adds by itself.
_LEFT_OUT = {"host", "accept", "accept-encoding", "connection", "content-length"}


class Tap:
    """An application's middleware that appends each request to ``seen``: ``[line, headers, body]``."""

    def __init__(self, app: ASGIApp, seen: list[Any]) -> None:
        self._app = app
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        query = scope["query_string"].decode()
        line = f"{scope['method']} {scope['path']}{f'?{query}' if query else ''}"
        headers = {name.decode(): value.decode() for name, value in scope["headers"] if name.decode() not in _LEFT_OUT}
        request = [line, headers]
        self._seen.append(request)
        body = b""

        async def receive_noted() -> Message:
            nonlocal body
            message = await receive()
            body += message.get("body", b"")
            if body and not message.get("more_body"):
                request[2:] = [_content(body)]
            return message

        await self._app(scope, receive_noted, send)


def _content(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
