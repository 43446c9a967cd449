"""The same call to every selected engine, side by side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlencode

import httpx
from fastapi.responses import JSONResponse

from memsaver_server.fleet.results import EngineStatus
from memsaver_server.fleet.serve.observer import Observer
from memsaver_server.fleet.turns.upstream import Upstreams
from memsaver_server.http.errors import ErrorResponse

_HEADERS = [(b"content-type", b"application/json"), (b"accept-encoding", b"identity")]


class Broadcast:
    """Calls engines, and tells what each of them answered."""

    def __init__(self, observer: Observer, upstreams: Upstreams) -> None:
        self._observer = observer
        self._upstreams = upstreams

    async def call(
        self,
        engines: Iterable[EngineStatus],
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None,
        query: Mapping[str, Any],
    ) -> list[dict[str, Any]]:
        """Return the row of each engine, in the form of ``schemas.CallRow``."""
        target = f"{path}?{urlencode(query, doseq=True)}" if query else path
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return list(await asyncio.gather(*(self._call(engine, method, target.encode(), content) for engine in engines)))

    async def _call(self, engine: EngineStatus, method: str, target: bytes, content: bytes) -> dict[str, Any]:
        upstream = self._upstreams.to(engine.url, self._observer.keys.get(engine.name))
        row = {"name": engine.name, "url": engine.url}
        try:
            answer = await upstream.send(method, target, _HEADERS, content)
            try:
                text = await answer.aread()
            finally:
                await answer.aclose()
        except httpx.TransportError as error:
            message = f"no answer: {str(error) or type(error).__name__}"
            return {**row, "success": False, "status": 0, "message": message, "body": None}
        return {**row, "success": answer.is_success, "status": answer.status_code, **_content(text)}


def response_of(rows: list[dict[str, Any]], done: str, more: Mapping[str, Any] | None = None) -> JSONResponse:
    """Return the response that lists ``rows``; ``done`` is what a success says."""
    failed = [row for row in rows if not row["success"]]
    about = {"status": "failed" if failed else "ok", "engines": rows, **(more or {})}
    if not failed:
        return JSONResponse({"success": True, "message": f"{done} on {_engines(len(rows))}.", **about})
    reasons = "; ".join(f"{row['name']}: {row['message']}" for row in failed)
    status = failed[0]["status"] if failed[0]["status"] >= 400 else 502
    message = f"{len(failed)} of {_engines(len(rows))} failed: {reasons}"
    body = failed[0]["body"] if isinstance(failed[0]["body"], dict) else {}
    error = body.get("error") if isinstance(body.get("error"), dict) else {}
    kind = str(error.get("type") or "engine_failed") if error else "engine_failed"
    headers = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse({**ErrorResponse(status, kind, message).body(), **about}, status, headers)


def _content(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:
        body = text.decode(errors="replace")[:1000]
    message = body.get("message") if isinstance(body, dict) else body
    return {"message": str(message or ""), "body": body}


def _engines(count: int) -> str:
    return f"{count} engine{'' if count == 1 else 's'}"
