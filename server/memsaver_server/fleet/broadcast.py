"""The same call to every selected engine, side by side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn
from urllib.parse import urlencode

import httpx

from memsaver_server.client.errors import error_for
from memsaver_server.controller import Answer
from memsaver_server.fleet.answers import WHOLE_S, UnreadableError, content_of, value_of
from memsaver_server.fleet.connection import key_advice
from memsaver_server.fleet.observer import GLANCE_S, Observer
from memsaver_server.fleet.results import CallRow, EngineStatus, count_of
from memsaver_server.fleet.turns.upstream import Upstreams
from memsaver_server.operation.departure import while_connected
from memsaver_server.threads import first_of, in_thread

_HEADERS = [
    (b"content-type", b"application/json"),
    (b"accept-encoding", b"identity"),
    (b"user-agent", b"memsaver-coordinator"),
]


async def call_each(
    engines: Iterable[EngineStatus],
    upstreams: Upstreams,
    observer: Observer,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    query: Mapping[str, Any] | None = None,
) -> list[CallRow]:
    """Return the row of each engine; one that ``observer`` finds silent meanwhile is waited for no longer. Raises
    ClientGoneError if the client of the current request has been gone for ``WHOLE_S``."""
    target = (f"{path}?{urlencode(query, doseq=True)}" if query else path).encode()
    content = b"" if body is None else (await in_thread(json.dumps, body)).encode()

    async def ask(url: str, key: str | None) -> tuple[httpx.Response, Any]:
        answer = await (await upstreams.to(url, key)).send(method, target, _HEADERS, content)
        return answer, value_of(answer, await content_of(answer))

    async def silence(name: str) -> NoReturn:
        while True:
            await asyncio.sleep(GLANCE_S)
            if why := observer.failure(name):
                raise httpx.TransportError(why)

    async def call(engine: EngineStatus) -> CallRow:
        name, url = engine.name, engine.url
        try:
            async with first_of(ask(url, observer.keys.get(name)), silence(name)) as (answering, silent):
                answer, body = await (answering if answering.done() else silent)
        except (httpx.TransportError, UnreadableError) as error:
            what = "gave an answer that cannot be read" if isinstance(error, UnreadableError) else "no answer"
            message = f"{what}: {str(error) or type(error).__name__}"
            return CallRow(name=name, url=url, success=False, status=0, message=message)
        said = str((body.get("message") if isinstance(body, dict) else body) or "")
        said, status = said + key_advice(answer.status_code), answer.status_code
        return CallRow(name=name, url=url, success=answer.is_success, status=status, message=said, body=body)

    calls = asyncio.gather(*map(call, engines))
    return await while_connected(calls, WHOLE_S)  # for so long the calls go on without their client


def answer_of(rows: list[CallRow], done: str, more: Mapping[str, Any] | None = None) -> Answer:
    """Return the answer that lists ``rows``; ``done`` is what a success says."""
    failed = [row for row in rows if not row.success]
    about = {"status": "failed" if failed else "ok", "engines": [row.model_dump() for row in rows], **(more or {})}
    if not failed:
        return Answer({"success": True, "message": f"{done} on {count_of(rows)}.", **about})
    reasons = "; ".join(f"{row.name}: {row.message}" for row in failed)
    status = failed[0].status if 400 <= failed[0].status < 600 else 502
    message = f"{len(failed)} of {count_of(rows)} failed: {reasons}"
    kind = error_for(failed[0].status, failed[0].body, "", None).kind
    kind = kind or ("engine_failed" if failed[0].status else "unreachable")
    answer = Answer.error(status, kind, message, 1 if status == 503 else None)
    return Answer({**answer.body, **about}, status, answer.headers)
