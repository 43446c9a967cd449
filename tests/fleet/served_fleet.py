"""A fleet that is served in this process, called through real sockets."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx

from memsaver_server import Settings
from memsaver_server.app import create_fleet_app
from memsaver_server.attachment import serve_app
from memsaver_server.fleet import AsyncFleet, Member, Record, StaticMembership
from memsaver_server.fleet.turns.options import ModelOptions, TurnOptions

#: The default of one fleet, for all of a process: making it takes longer than a test's calls.
TRUST = ssl.create_default_context()
Serve = Callable[..., httpx.Client]


@contextmanager
def served(
    members: Iterable[Member] | StaticMembership,
    models: dict[str, ModelOptions] | None = None,
    key: str | None = None,
    silence_s: float = 10.0,
    record: Record | None = None,
    name: str = "",
    verify: ssl.SSLContext = TRUST,
    **settings: Any,
) -> Iterator[httpx.Client]:
    """Serve a fleet of ``members``; yields a client of it. ``key`` is the one of the engines."""
    membership = members if isinstance(members, StaticMembership) else StaticMembership(members)
    fleet = AsyncFleet(membership, record=record, api_key=key, silence_s=silence_s, verify=verify, name=name)
    ours = Settings(**settings)
    app = partial(create_fleet_app, fleet, ours, turns=TurnOptions(models), engine_key=key)
    headers = {"Authorization": f"Bearer {ours.api_key.get_secret_value()}"} if ours.api_key else {}
    with (
        serve_app(app, ours) as attachment,
        httpx.Client(base_url=attachment.url, timeout=600, verify=False, headers=headers) as http,
    ):
        yield http
