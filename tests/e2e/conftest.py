"""One engine for all tests that only talk to it; each test finds it resident and open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memsaver_server.client import Client

from .serving import Server, serving


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    yield shared_server
    with Client(shared_server.url) as client:
        client.resume(wait=True)


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client
