"""The async client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import cast

import httpx

from memsaver_server.client.calls import Calls
from memsaver_server.client.requests import Call, Event, EventParser, parse_json


class AsyncClient(Calls, AbstractAsyncContextManager["AsyncClient"]):
    """Client of one service. Use it in one event loop.

    Args:
        url: the service's address, ``http://host:port``, ``https://host:port`` or ``unix:///path``.
        uds: path of the service's Unix socket, instead of ``url``.
        api_key: sent as ``Authorization: Bearer``.
        timeout_s: limit of connecting, and of one attempt of a call that answers at once, in seconds.
        operation_timeout_s: limit of one attempt of a release, a resume or a generation. None: no limit.
        attempts: how often a call is sent in total, if repeating it is safe.
        verify: checks the certificate of an ``https`` address; False accepts any. The default trusts the system's
            authorities, or those of the file that SSL_CERT_FILE names.
        transport: another httpx transport, e.g. to reach an ASGI app.

    Every method raises UnreachableError if no answer came, and an AnswerError if the answer is not a success.
    """

    _client = httpx.AsyncClient
    _transport = httpx.AsyncHTTPTransport

    async def events(self, operation_id: str) -> AsyncIterator[Event]:
        """Yield the events of one operation until it has ended. Raises UnreachableError if they end before it does."""
        parser = EventParser()
        timeout = httpx.Timeout(self._target.timeout_s, read=None)
        try:
            async with self._http.stream("GET", f"/operations/{operation_id}/events", timeout=timeout) as response:
                if not response.is_success:
                    await response.aread()
                    parse_json(response)
                async for line in response.aiter_lines():
                    if event := parser.feed(line):
                        yield event
                parser.end()
        except httpx.RequestError as error:
            raise self._target.unreachable(error) from error

    async def close(self) -> None:
        await self._http.aclose()

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _request(self, call: Call) -> httpx.Response:
        return cast(httpx.Response, await self._http.request(**self._target.options(call)))

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
